//! One order's story in time, out of data that is kept anyway: what happened when, according to which table, why it is
//! still open, and what to do about that.
//!
//! Reads only, apart from a row lock that is given back at once (`order_story.rs`). Tells nothing that is not recorded:
//! what no table keeps is listed with the reason.

use std::time::Duration;

use order_timeout_core::kind::Kind;
use order_timeout_core::message::{read_rfc3339, write_rfc3339};
use order_timeout_core::order::{OrderId, Timestamp};
use serde::Serialize;
use sqlx::Row;
use sqlx::postgres::PgRow;

use super::open_cause::{rounded, rounds_in_words};
use super::order_story::{self, AlarmRow, ClaimRow, EventRow, HistoryRow, OrderStory, ParkedRow, scan, time};
use super::orders_table::due::Money;
use super::orders_table::{OrdersTable, RowDates};
use super::{NotKnown, known};
use crate::postgres::closing_pauses::{self, EndedPause, Pause};
use crate::postgres::{Database, DatabaseError, one_line};

/// Pauses that are read at most.
const MOST_PAUSES: i64 = 100;

/// An order's story. `None` is unknown, and `not_known` says why.
#[derive(Debug, Clone, Serialize, utoipa::ToSchema)]
pub struct Explanation {
    /// What the tables keep of it.
    #[serde(flatten)]
    pub story: OrderStory,
    /// The order in one sentence.
    pub summary: String,
    /// What happened, and what is going to, in the order of time.
    pub moments: Vec<Moment>,
}

/// Something that happened to the order, or that is going to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, utoipa::ToSchema)]
pub struct Moment {
    /// RFC 3339.
    pub at: String,
    /// The table that says so.
    pub source: Source,
    /// One sentence without its subject, which is the order.
    pub what: String,
}

/// A table that keeps a part of an order's story.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// Its row.
    Orders,
    /// Its history.
    OrderEvents,
    /// Its attempts to pay.
    PaymentAttempts,
    /// Money that was received for it.
    ReceivedPayments,
    /// Its alarms.
    AlarmOutbox,
    /// What a payment provider was asked about it, while it is being closed.
    CloseAttempts,
    /// Pauses in which it was not closed.
    ClosingPauses,
    /// Alarms of it that could not be handled.
    ParkedAlarms,
    /// What operators did to those.
    OperatorActions,
    /// What is announced about it.
    EventOutbox,
}

impl Source {
    /// The table's name.
    #[must_use]
    pub const fn table(self) -> &'static str {
        match self {
            Self::Orders => "orders",
            Self::OrderEvents => "order_events",
            Self::PaymentAttempts => "payment_attempts",
            Self::ReceivedPayments => "received_payments",
            Self::AlarmOutbox => "alarm_outbox",
            Self::CloseAttempts => "close_attempts",
            Self::ClosingPauses => "closing_pauses",
            Self::ParkedAlarms => "parked_alarms",
            Self::OperatorActions => "operator_actions",
            Self::EventOutbox => "event_outbox",
        }
    }
}

/// Tells the story of an order of this kind.
///
/// # Errors
/// [`DatabaseError`], if the database's time cannot be read. Anything else that cannot be read is listed in `not_known`.
pub async fn explain(
    database: &Database,
    orders: &OrdersTable,
    kind: &Kind,
    order_id: &OrderId,
) -> Result<Explanation, DatabaseError> {
    let story = order_story::read(database, orders, kind, order_id).await;
    let mut story = story.map_err(|error| DatabaseError(one_line(&error)))?;
    let dates = known("dates", orders.dates(order_id).await, &mut story.not_known).flatten();
    let attempts = known("payment attempts", attempts(database, kind, order_id).await, &mut story.not_known);
    let payments = known("received payments", payments(database, kind, order_id).await, &mut story.not_known);
    let actions = known("operators' actions", actions(database, kind, order_id).await, &mut story.not_known);
    let held_by = match deadline_of(&story) {
        Some(deadline) => known("pauses", pauses(database, kind, deadline).await, &mut story.not_known),
        None => None,
    };
    story.not_known.extend(not_recorded());
    let mut moments = moments(&story, dates.as_ref());
    moments.extend(pause_moments(&story, dates.as_ref(), &held_by.unwrap_or_default()));
    moments.extend(attempts.into_iter().flatten());
    moments.extend(payments.into_iter().flatten());
    moments.extend(actions.into_iter().flatten());
    sort(&mut moments);
    let summary = summary(&story, dates.as_ref());
    Ok(Explanation { story, summary, moments })
}

/// What no table keeps, although an operator may expect it here.
fn not_recorded() -> [NotKnown; 2] {
    let entry = |what, why: &str| NotKnown { what, why: why.to_owned() };
    [
        entry(
            "alarms from publishers",
            "an alarm that a publisher sends to the broker itself leaves no row; only those in alarm_outbox do",
        ),
        entry(
            "deliveries",
            "a delivery leaves no row until its order is closed or its alarm is parked; the metric order_timeout_alarm_earliness_seconds has them in sum",
        ),
    ]
}

/// Times that cannot be compared as text are sorted as times; equal ones by their cause.
fn sort(moments: &mut [Moment]) {
    moments.sort_by_key(|moment| (read_rfc3339(&moment.at), moment.source));
}

fn summary(story: &OrderStory, dates: Option<&RowDates>) -> String {
    let Some(row) = &story.row else {
        return match story.exists {
            Some(false) => "there is no such order".to_owned(),
            _ => "its row is not known".to_owned(),
        };
    };
    let status = row.status.as_deref().unwrap_or("open and overdue");
    let closed = dates.and_then(|dates| Some((dates.closed_at?, dates.closed_by.as_deref()?)));
    let why = story.history.iter().flatten().find(|entry| entry.event == "closed").and_then(|entry| entry.why.as_ref());
    let because = why.map_or_else(String::new, |why| format!(", because {why}"));
    match (closed, &row.deadline) {
        (Some((at, by)), Some(deadline)) => format!("it is {status}: {}{because}", closed_in_words(at, by, deadline)),
        (_, Some(deadline)) => format!("it is {status}; its deadline is {deadline}"),
        (_, None) => format!("it is {status}; it has no deadline"),
    }
}

/// "by its alarm, 3 ms after its deadline"
fn closed_in_words(at: Timestamp, by: &str, deadline: &str) -> String {
    let path = match by {
        "alarm" => "by its alarm",
        "look_ahead" => "by reading ahead, without an alarm",
        "sweep" => "by the sweep",
        "manual" => "by hand",
        "released" => "released",
        other => other,
    };
    match read_rfc3339(deadline) {
        Some(deadline) if at < deadline => format!("{path}, {} before its deadline", in_words(deadline.since(at))),
        Some(deadline) => format!("{path}, {} after its deadline", in_words(at.since(deadline))),
        None => path.to_owned(),
    }
}

/// Milliseconds up to what a close on time can take, and a retry or two; then seconds and more.
fn in_words(lateness: Duration) -> String {
    match lateness.as_secs() {
        0..10 => format!("{} ms", lateness.as_millis()),
        _ => rounded(lateness).to_string(),
    }
}

fn moments(story: &OrderStory, dates: Option<&RowDates>) -> Vec<Moment> {
    let mut moments = Vec::new();
    if let Some(dates) = dates {
        moments.extend(row_moments(dates, story));
    }
    if let Some(deadline) = story.row.as_ref().and_then(|row| row.deadline.clone()) {
        moments.push(Moment { at: deadline, source: Source::Orders, what: "its deadline".into() });
    }
    moments.extend(story.history.iter().flatten().map(|entry| history_moment(entry, story)));
    moments.extend(story.alarms.iter().flatten().flat_map(alarm_moments));
    moments.extend(story.events.iter().flatten().flat_map(event_moments));
    moments.extend(story.claim.iter().flat_map(claim_moments));
    moments.extend(story.parked.iter().flatten().map(parked_moment));
    moments
}

fn row_moments(dates: &RowDates, story: &OrderStory) -> Vec<Moment> {
    let history = story.history.iter().flatten();
    let recorded: Vec<&str> = history.map(|entry| entry.event.as_str()).collect();
    let mut moments = Vec::new();
    // The history says the same with more words.
    let mut add = |event: &str, at: Option<Timestamp>, what: &str| {
        if let Some(at) = at.filter(|_| !recorded.contains(&event)) {
            moments.push(Moment { at: write_rfc3339(at), source: Source::Orders, what: what.to_owned() });
        }
    };
    add("created", Some(dates.created_at), "created");
    add("paid", dates.paid_at, "paid");
    add("closed", dates.closed_at, "closed");
    moments
}

fn history_moment(entry: &HistoryRow, story: &OrderStory) -> Moment {
    let HistoryRow { at, event, by, reason, who, why, answers, .. } = entry;
    let mut what = match (event.as_str(), by.as_deref(), story.row.as_ref().and_then(|row| row.deadline.as_deref())) {
        ("closed", Some(by), Some(deadline)) => match read_rfc3339(at) {
            Some(at) => format!("closed {}", closed_in_words(at, by, deadline)),
            None => "closed".to_owned(),
        },
        ("extended", ..) => "given another deadline".to_owned(),
        (event, Some(by), _) => format!("{event} by {by}"),
        (event, None, _) => event.to_owned(),
    };
    for (name, value) in [("reason", reason), ("answers", answers), ("who", who), ("why", why)] {
        if let Some(value) = value {
            what += &format!("; {name}: {value}");
        }
    }
    Moment { at: at.clone(), source: Source::OrderEvents, what }
}

fn alarm_moments(alarm: &AlarmRow) -> Vec<Moment> {
    let AlarmRow { deadline, created_at, sent_at, refusals } = alarm;
    let waits = if sent_at.is_some() { "" } else { "; it has not been sent yet" };
    let written = format!("an alarm for {deadline} was written{}{waits}", refused(*refusals));
    outbox_moments(Source::AlarmOutbox, created_at, written, sent_at.as_deref(), || {
        format!("the alarm for {deadline} was handed to the broker, or its deadline had passed")
    })
}

fn event_moments(event: &EventRow) -> Vec<Moment> {
    let EventRow { r#type, why, created_at, sent_at, refusals, .. } = event;
    let waits = if sent_at.is_some() { "" } else { "; it has not been announced yet" };
    let why = why.as_ref().map_or_else(String::new, |why| format!("; why: {why}"));
    let written = format!("the event {type} was written{}{waits}{why}", refused(*refusals), type = r#type);
    outbox_moments(
        Source::EventOutbox,
        created_at,
        written,
        sent_at.as_deref(),
        || format!("the event {type} was announced", type = r#type),
    )
}

fn outbox_moments(
    source: Source,
    created_at: &str,
    written: String,
    sent_at: Option<&str>,
    sent: impl FnOnce() -> String,
) -> Vec<Moment> {
    let mut moments = vec![Moment { at: created_at.to_owned(), source, what: written }];
    moments.extend(sent_at.map(|at| Moment { at: at.to_owned(), source, what: sent() }));
    moments
}

fn refused(refusals: i32) -> String {
    if refusals > 0 { format!(", and refused by the broker {refusals} times") } else { String::new() }
}

fn claim_moments(claim: &ClaimRow) -> Vec<Moment> {
    let ClaimRow { claimed_by, claimed_at, rounds, next_attempt_at, unresolved_reason, unresolved_at, .. } = claim;
    let (provider, answers) = (claim.provider(), claim.answers());
    let mut claimed = format!("claimed to be closed ({claimed_by}): {provider} is asked first");
    for (name, value) in [("who", &claim.who), ("why", &claim.why)] {
        if let Some(value) = value {
            claimed += &format!("; {name}: {value}");
        }
    }
    let moment = |at: &str, what| Moment { at: at.to_owned(), source: Source::CloseAttempts, what };
    let mut moments = vec![moment(claimed_at, claimed)];
    let rounds = rounds_in_words(*rounds);
    match (unresolved_at, unresolved_reason) {
        (Some(at), Some(reason)) => {
            moments.push(moment(at, format!("unresolved as {reason}, after {rounds} without an answer: {answers}")));
        }
        _ if claim.rounds > 0 || claim.step == "in_progress" => {
            let next = format!("{provider} is asked again, after {rounds} without an answer: {answers}");
            moments.push(moment(next_attempt_at, next));
        }
        _ => {}
    }
    moments
}

fn deadline_of(story: &OrderStory) -> Option<Timestamp> {
    read_rfc3339(story.row.as_ref()?.deadline.as_ref()?)
}

/// The pauses of this kind that ended after the deadline, the newest first.
async fn pauses(database: &Database, kind: &Kind, deadline: Timestamp) -> Result<Vec<EndedPause>, String> {
    let read = database
        .run(async |connection| closing_pauses::ended(connection, Some(kind), Some(deadline), MOST_PAUSES).await);
    read.await.map_err(|error| one_line(&error))
}

/// Those that lasted while the order was open and overdue, and those that last while it is open.
fn pause_moments(story: &OrderStory, dates: Option<&RowDates>, ended: &[EndedPause]) -> Vec<Moment> {
    let end = match (story.open.is_some(), dates) {
        (true, _) => read_rfc3339(&story.at),
        (false, Some(dates)) => dates.closed_at.or(dates.paid_at),
        (false, None) => None,
    };
    let moment = |at: &str, what| Moment { at: at.to_owned(), source: Source::ClosingPauses, what };
    let began = |pause: &Pause| {
        let Pause { cause, reason, paused_by, paused_at, .. } = pause;
        moment(paused_at, format!("closing was paused ({}) by {paused_by}: {reason}", cause.as_str()))
    };
    let mut moments = Vec::new();
    for EndedPause { pause, resumed_by, resume_reason, resumed_at } in ended {
        if end.is_some_and(|end| read_rfc3339(&pause.paused_at).is_some_and(|paused_at| paused_at < end)) {
            let why = resume_reason.as_ref().map_or_else(String::new, |why| format!(": {why}"));
            moments.push(began(pause));
            moments.push(moment(resumed_at, format!("closing was resumed by {resumed_by}{why}")));
        }
    }
    if story.open.is_some() {
        moments.extend(story.paused.iter().flatten().map(began));
    }
    moments
}

fn parked_moment(parked: &ParkedRow) -> Moment {
    let ParkedRow { reason, detail, parked_at, attempts, .. } = parked;
    let what = format!("its alarm was parked as {reason} after {attempts} attempts: {detail}");
    Moment { at: parked_at.clone(), source: Source::ParkedAlarms, what }
}

async fn attempts(database: &Database, kind: &Kind, order_id: &OrderId) -> Result<Vec<Moment>, String> {
    let select = "SELECT provider, reference, amount_minor, currency, state, created_at FROM payment_attempts
                  WHERE order_id = $1 AND kind = $3 ORDER BY created_at DESC LIMIT $2";
    scan(database, select, Some(kind), order_id, attempt).await
}

async fn payments(database: &Database, kind: &Kind, order_id: &OrderId) -> Result<Vec<Moment>, String> {
    let select =
        "SELECT provider, reference, amount_minor, currency, outcome, reason, received_at FROM received_payments
                  WHERE order_id = $1 AND kind = $3 ORDER BY received_at DESC LIMIT $2";
    scan(database, select, Some(kind), order_id, payment).await
}

fn payment(row: &PgRow) -> Result<Moment, sqlx::Error> {
    let text = |column: &str| row.try_get::<String, _>(column);
    let amount = Money { currency: text("currency")?, amount_minor: row.try_get("amount_minor")? };
    let reason: Option<String> = row.try_get("reason")?;
    let reason = reason.map_or_else(String::new, |reason| format!(" ({reason})"));
    let what = format!(
        "{amount} were received from {}, reference {}: {}{reason}",
        text("provider")?,
        text("reference")?,
        text("outcome")?
    );
    Ok(Moment { at: time(row, "received_at")?, source: Source::ReceivedPayments, what })
}

fn attempt(row: &PgRow) -> Result<Moment, sqlx::Error> {
    let text = |column: &str| row.try_get::<String, _>(column);
    let amount = Money { currency: text("currency")?, amount_minor: row.try_get("amount_minor")? };
    let what = format!(
        "an attempt to pay {amount} with {} began, reference {}; it is {}",
        text("provider")?,
        text("reference")?,
        text("state")?
    );
    Ok(Moment { at: time(row, "created_at")?, source: Source::PaymentAttempts, what })
}

async fn actions(database: &Database, kind: &Kind, order_id: &OrderId) -> Result<Vec<Moment>, String> {
    let select = "SELECT at, who, why, action FROM operator_actions
                  WHERE alarms @> jsonb_build_array(jsonb_build_object('kind', $3::text, 'order_id', $1::text))
                  ORDER BY at DESC LIMIT $2";
    scan(database, select, Some(kind), order_id, action).await
}

fn action(row: &PgRow) -> Result<Moment, sqlx::Error> {
    let (who, why, action): (String, Option<String>, String) =
        (row.try_get("who")?, row.try_get("why")?, row.try_get("action")?);
    let done = match action.as_str() {
        "deadline_moved" => "given another deadline",
        "parked_retried" => "its parked alarm was sent back",
        _ => "its parked alarm was dropped",
    };
    let why = why.map_or_else(String::new, |why| format!("; why: {why}"));
    Ok(Moment { at: time(row, "at")?, source: Source::OperatorActions, what: format!("{done}; who: {who}{why}") })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moment(at: &str, source: Source) -> Moment {
        Moment { at: at.into(), source, what: String::new() }
    }

    #[test]
    fn moments_are_sorted_as_times() {
        // As text, the shorter fraction would come last.
        let mut moments = [
            moment("2026-11-20T10:30:00.001Z", Source::EventOutbox),
            moment("2026-11-20T10:30:00.000500Z", Source::AlarmOutbox),
            moment("2026-11-20T10:30:00.001Z", Source::Orders),
        ];
        sort(&mut moments);
        let sources: Vec<Source> = moments.iter().map(|moment| moment.source).collect();
        assert_eq!(sources, [Source::AlarmOutbox, Source::Orders, Source::EventOutbox]);
    }

    #[test]
    fn closes_say_path_and_lateness() {
        let deadline = "2026-11-20T10:30:00.000Z";
        let at = read_rfc3339("2026-11-20T10:30:00.007Z").unwrap();
        assert_eq!(closed_in_words(at, "alarm", deadline), "by its alarm, 7 ms after its deadline");
        assert_eq!(closed_in_words(at, "reaper", deadline), "reaper, 7 ms after its deadline");
        let late = at + Duration::from_millis(270_468);
        assert_eq!(closed_in_words(late, "sweep", deadline), "by the sweep, 4m 30s after its deadline");
    }
}
