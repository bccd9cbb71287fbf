//! Whether orders are closed on time right now: what is overdue, what waits in the outboxes, what is parked, and which
//! workers run. For a page that is refreshed every few seconds, so it counts nothing that grows with the table.
//!
//! Reads only. What cannot be known is left out, and listed with the reason.

mod parts;

use std::borrow::Borrow;

use order_timeout_core::kind::Kind;
use order_timeout_core::message::write_rfc3339;
use order_timeout_core::problem::{Cause, Problem};
use serde::Serialize;

pub use parts::{Outbox, Overdue, ParkedForReason, RegisteredWorker, SEEN_WITHIN};
pub(super) use parts::{outbox, workers};
use parts::{overdue_at, parked_by_reason};

use super::late_payments::{OpenLateMoney, open_by_currency};
use super::orders_table::{OrdersTable, Unknown};
use super::pause_closing::lasting;
use super::recent_closes::{RecentClose, recent_closes};
use super::unresolved::{self, UnresolvedForReason, WaitingAtProvider};
use super::{NotKnown, known};
use crate::postgres::closing_pauses::Pause;
use crate::postgres::{self, Database, DatabaseError, one_line};

/// Orders that have been overdue for no longer are about to be closed: the sweep's usual grace, a pass and a batch.
pub const USUALLY_CLOSED_WITHIN_S: f64 = 2.0;

/// The state of the moment. `None` is unknown, and `not_known` says why.
#[derive(Debug, Clone, Default, PartialEq, Serialize, utoipa::ToSchema)]
pub struct Status {
    /// The database's time, RFC 3339.
    pub at: String,
    /// What is overdue of each kind.
    pub kinds: Vec<OverdueOfKind>,
    /// Why closing is paused, for whichever kind.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub paused: Option<Vec<Pause>>,
    /// Alarms on their way to the broker.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub alarm_outbox: Option<Outbox>,
    /// Events on their way to the broker.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub event_outbox: Option<Outbox>,
    /// Parked alarms.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parked: Option<Vec<ParkedForReason>>,
    /// Payments that paid for nothing and are not settled, by currency.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub late_money: Option<Vec<OpenLateMoney>>,
    /// Orders that are due and that payment providers are asked about, by provider.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub at_providers: Option<Vec<WaitingAtProvider>>,
    /// Orders that a payment provider's answers could not decide, by reason.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unresolved: Option<Vec<UnresolvedForReason>>,
    /// The orders that were closed last, by whichever worker.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recently_closed: Option<Vec<RecentClose>>,
    /// Registered workers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workers: Option<Vec<RegisteredWorker>>,
    /// What could not be found out, and why.
    pub not_known: Vec<NotKnown>,
}

/// What is overdue of one kind.
#[derive(Debug, Clone, PartialEq, Serialize, utoipa::ToSchema)]
pub struct OverdueOfKind {
    /// Its name.
    #[schema(value_type = String)]
    pub kind: Kind,
    /// Open orders whose deadline has passed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub overdue: Option<Overdue>,
    /// Why that is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub not_known: Option<String>,
}

/// Reads the state of the moment. `orders` is the orders table of each kind, or why it cannot be used.
///
/// # Errors
/// [`DatabaseError`], if the database's time cannot be read. Anything else that cannot be read is said to be unknown.
pub async fn status(
    database: &Database,
    orders: &[(Kind, Result<impl Borrow<OrdersTable>, Unknown>)],
) -> Result<Status, DatabaseError> {
    let now = database.run(postgres::now).await.map_err(|error| DatabaseError(one_line(&error)))?;
    let mut not_known = Vec::new();
    let mut kinds = Vec::with_capacity(orders.len());
    for (kind, table) in orders {
        let found = match table {
            Ok(table) => table.borrow().overdue().await,
            Err(why) => Err(why.clone()),
        };
        let (overdue, not_known) = match found {
            Ok(found) => (Some(overdue_at(now, &found)), None),
            Err(why) => (None, Some(why)),
        };
        kinds.push(OverdueOfKind { kind: kind.clone(), overdue, not_known });
    }
    let paused = known("paused", lasting(database, None).await, &mut not_known);
    let alarm_outbox = known("alarm outbox", outbox(database, "alarm_outbox", now).await, &mut not_known);
    let event_outbox = known("event outbox", outbox(database, "event_outbox", now).await, &mut not_known);
    let parked = known("parked", parked_by_reason(database, now).await, &mut not_known);
    let late_money = open_by_currency(database).await.map_err(|error| one_line(&error));
    let late_money = known("late money", late_money, &mut not_known);
    let at_providers = unresolved::waiting(database).await.map_err(|error| one_line(&error));
    let at_providers = known("at providers", at_providers, &mut not_known);
    let unresolved = unresolved::count_by_reason(database).await.map_err(|error| one_line(&error));
    let unresolved = known("unresolved", unresolved, &mut not_known);
    let recently_closed = recent_closes(database).await.map_err(|error| one_line(&error));
    let recently_closed = known("recently closed", recently_closed, &mut not_known);
    let workers = known("workers", workers(database).await, &mut not_known);
    Ok(Status {
        at: write_rfc3339(now),
        kinds,
        paused,
        alarm_outbox,
        event_outbox,
        parked,
        late_money,
        at_providers,
        unresolved,
        recently_closed,
        workers,
        not_known,
    })
}

impl OverdueOfKind {
    /// Whether its oldest overdue order should have been closed by now.
    #[must_use]
    pub fn is_late(&self) -> bool {
        let oldest_s = self.overdue.as_ref().and_then(|overdue| overdue.oldest_s);
        oldest_s.is_some_and(|oldest_s| oldest_s > USUALLY_CLOSED_WITHIN_S)
    }
}

impl Status {
    /// The pauses that last, as far as that is known.
    #[must_use]
    pub fn pauses(&self) -> &[Pause] {
        self.paused.as_deref().unwrap_or_default()
    }

    /// Whether closing of this kind is paused.
    #[must_use]
    pub fn is_paused(&self, kind: &Kind) -> bool {
        self.pauses().iter().any(|pause| pause.kind.as_deref().is_none_or(|paused| paused == kind.as_str()))
    }

    /// How many orders wait because a payment provider gave no answer, and the seconds since the oldest of them fell due.
    #[must_use]
    pub fn without_answer(&self) -> (u64, f64) {
        let all = self.at_providers.iter().flatten();
        all.fold((0, 0.0), |(orders, oldest_s), at| (orders + at.without_answer, at.oldest_s.max(oldest_s)))
    }

    /// What waits for a person, as far as that is known.
    #[must_use]
    pub fn waiting(&self) -> Waiting {
        let late_money = self.late_money.iter().flatten().map(|open| open.payments).sum();
        let unresolved = self.unresolved.iter().flatten().map(|of| of.orders).sum();
        let parked = self.parked.iter().flatten().map(|of| of.alarms).sum();
        Waiting { parked, late_money, unresolved, pauses: self.pauses().len() as u64 }
    }

    /// What is overdue of all kinds together; `None` if it is not known of any.
    #[must_use]
    pub fn overdue(&self) -> Option<Overdue> {
        let known = self.kinds.iter().filter_map(|of| of.overdue.as_ref());
        known.cloned().reduce(|one, other| {
            // The greater age is the older order's.
            let (oldest, oldest_s) = match one.oldest_s >= other.oldest_s {
                true => (one.oldest, one.oldest_s),
                false => (other.oldest, other.oldest_s),
            };
            let is_at_least = one.is_at_least || other.is_at_least;
            Overdue { orders: one.orders + other.orders, is_at_least, oldest, oldest_s }
        })
    }
}

/// How much waits for a person.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Waiting {
    /// Parked alarms.
    pub parked: u64,
    /// Payments that paid for nothing and are not settled.
    pub late_money: u64,
    /// Orders that a payment provider's answers could not decide.
    pub unresolved: u64,
    /// Pauses of closing that last.
    pub pauses: u64,
}

/// Whether orders are closed on time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// They are.
    OnTime,
    /// They are, and something is wrong, or alarms or orders wait for a person. Or they are not because a payment provider
    /// does not answer.
    Degraded(Vec<Problem>),
    /// Closing is paused, of one kind or of all: each pause, and what is wrong besides.
    Paused(Vec<Problem>),
    /// They are not: each reason that is known.
    Late(Vec<Problem>),
    /// That cannot be known: why.
    Unknown(String),
}

/// Judges the state of the moment. `problems` are those of a worker's `/readyz`, without pauses.
#[must_use]
pub fn verdict(status: Result<&Status, &str>, problems: &[Problem]) -> Verdict {
    let status = match status {
        Ok(status) => status,
        Err(why) => return Verdict::Unknown(why.to_owned()),
    };
    let pauses = status.pauses().iter().map(|pause| Problem::described(Cause::ClosingPaused, pause.sentence()));
    let mut reasons: Vec<Problem> = pauses.collect();
    reasons.extend_from_slice(problems);
    // What is overdue because its closing is paused is no news.
    if status.kinds.iter().any(|of| of.is_late() && !status.is_paused(&of.kind)) {
        if status.workers.as_ref().is_some_and(|workers| !workers.iter().any(|worker| worker.is_live)) {
            reasons.push(Problem::described(Cause::NoWorker, "no worker is registered as running"));
        }
        return Verdict::Late(reasons);
    }
    if !status.pauses().is_empty() {
        return Verdict::Paused(reasons);
    }
    let unknown = |of: &OverdueOfKind| of.not_known.as_ref().map(|why| format!("kind {}: {why}", of.kind));
    if let Some(why) = status.kinds.iter().find_map(unknown) {
        return Verdict::Unknown(why);
    }
    let Waiting { parked, unresolved, .. } = status.waiting();
    let is_known = status.not_known.is_empty();
    if is_known && problems.is_empty() && status.without_answer().0 == 0 && parked == 0 && unresolved == 0 {
        Verdict::OnTime
    } else {
        Verdict::Degraded(problems.to_vec())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::postgres::closing_pauses::PauseCause;

    fn of_kind(kind: &str, oldest_s: Option<f64>) -> OverdueOfKind {
        let overdue = Overdue { orders: 3, is_at_least: false, oldest: None, oldest_s };
        OverdueOfKind { kind: Kind::new(kind).unwrap(), overdue: Some(overdue), not_known: None }
    }

    fn status(oldest_s: Option<f64>) -> Status {
        Status {
            kinds: vec![of_kind("order", oldest_s)],
            paused: Some(Vec::new()),
            workers: Some(Vec::new()),
            ..Status::default()
        }
    }

    #[test]
    fn verdict_follows_oldest_overdue_order() {
        let problem = || vec![Problem::described(Cause::Broker, "no consumer session is open")];
        assert_eq!(verdict(Ok(&status(None)), &[]), Verdict::OnTime);
        assert_eq!(verdict(Ok(&status(Some(0.4))), &[]), Verdict::OnTime);
        assert_eq!(verdict(Ok(&status(Some(0.4))), &problem()), Verdict::Degraded(problem()));
        let Verdict::Late(reasons) = verdict(Ok(&status(Some(60.0))), &problem()) else { panic!() };
        assert_eq!(reasons.len(), 2, "{reasons:?}");
        assert_eq!(verdict(Err("no answer"), &problem()), Verdict::Unknown("no answer".into()));
        let at = WaitingAtProvider { provider: "card".into(), orders: 3, without_answer: 2, oldest_s: 9.0 };
        let waiting = Status { at_providers: Some(vec![at]), ..status(None) };
        assert_eq!(verdict(Ok(&waiting), &[]), Verdict::Degraded(Vec::new()));
        let of_reason = ParkedForReason { reason: "close_failed".into(), alarms: 8, oldest_s: 9.0 };
        let parked = Status { parked: Some(vec![of_reason]), ..status(None) };
        assert_eq!(verdict(Ok(&parked), &[]), Verdict::Degraded(Vec::new()));
        let of_reason = UnresolvedForReason { reason: "refunded".into(), orders: 1, oldest_s: 9.0 };
        let unresolved = Status { unresolved: Some(vec![of_reason]), ..status(None) };
        assert_eq!(verdict(Ok(&unresolved), &[]), Verdict::Degraded(Vec::new()));
    }

    #[test]
    fn verdict_tells_pause_from_lateness() {
        let pause = |kind: Option<&str>| Pause {
            kind: kind.map(str::to_owned),
            cause: PauseCause::Brake,
            reason: "no callbacks".into(),
            paused_by: "the worker on a".into(),
            paused_at: "2026-11-20T10:30:00Z".into(),
        };
        let mut paused = Status { paused: Some(vec![pause(Some("order"))]), ..status(Some(60.0)) };
        let Verdict::Paused(reasons) = verdict(Ok(&paused), &[]) else { panic!() };
        assert_eq!(reasons[0].what, pause(Some("order")).sentence());
        paused.kinds.push(of_kind("acceptance", Some(60.0)));
        assert!(matches!(verdict(Ok(&paused), &[]), Verdict::Late(_)), "another kind is not paused, and late");
        paused.paused = Some(vec![pause(None)]);
        assert!(matches!(verdict(Ok(&paused), &[]), Verdict::Paused(_)));
        paused.paused = None;
        assert!(matches!(verdict(Ok(&paused), &[]), Verdict::Late(_)), "whether it is paused is not known");
    }

    #[test]
    fn verdict_is_about_every_kind() {
        let mut several = status(None);
        several.kinds.push(of_kind("acceptance", Some(60.0)));
        assert!(matches!(verdict(Ok(&several), &[]), Verdict::Late(_)));
        let all = several.overdue().unwrap();
        assert_eq!((all.orders, all.oldest_s), (6, Some(60.0)));
        let missing = OverdueOfKind { overdue: None, not_known: Some("no table".into()), ..of_kind("review", None) };
        several.kinds.push(missing.clone());
        assert!(matches!(verdict(Ok(&several), &[]), Verdict::Late(_)), "one late kind is known");
        several.kinds = vec![of_kind("order", None), missing];
        assert_eq!(verdict(Ok(&several), &[]), Verdict::Unknown("kind review: no table".into()));
    }
}
