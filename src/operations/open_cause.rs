//! Why an order is still open, out of what `order_story.rs` has read, and what to do about that.
//!
//! Pure.

use std::fmt;
use std::time::Duration;

use order_timeout_core::message::write_rfc3339;
use order_timeout_core::order::Timestamp;

use super::order_story::{AlarmRow, ClaimRow, ParkedRow};
use super::orders_table::OrderRow;
use super::pause_closing::HOW_TO_RESUME;
use super::unresolved;
use crate::postgres::closing_pauses::Pause;
use crate::postgres::lock_holders::LockHolder;

/// How long after its deadline an order may be open without a particular cause: the sweep's grace, a pass and a batch.
const USUALLY_CLOSED_WITHIN: Duration = Duration::from_secs(2);

/// What the reason that an order is open depends on. `None` is unknown.
pub(super) struct Facts<'a> {
    pub now: Timestamp,
    pub row: &'a OrderRow,
    pub is_locked: Option<bool>,
    /// Those that may keep it from being closed.
    pub holders: Option<&'a [LockHolder]>,
    pub live_workers: Option<usize>,
    pub alarms: Option<&'a [AlarmRow]>,
    pub parked: Option<&'a [ParkedRow]>,
    /// When it was closed, if its history says so.
    pub closed_in_history: Option<&'a str>,
    /// The pauses that last and apply to its kind.
    pub pauses: Option<&'a [Pause]>,
    pub claim: Option<&'a ClaimRow>,
}

/// In a table of the shop's own, only open orders are found.
pub(super) fn is_open(row: &OrderRow) -> bool {
    row.status.as_deref().is_none_or(|status| ["unpaid", "closing"].contains(&status))
}

pub(super) fn is_overdue(row: &OrderRow, now: Timestamp) -> bool {
    row.deadline.is_some_and(|deadline| deadline <= now && deadline.can_be_due())
}

/// Why an order is open. As text it is one sentence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OpenCause {
    /// The shop decides whether it was paid.
    Closing,
    /// A payment provider is asked about it.
    Claimed {
        /// How far that is.
        claim: Box<ClaimRow>,
        /// The pause that keeps it from being closed meanwhile.
        pause: Option<Pause>,
    },
    /// It never times out.
    NoDeadline,
    /// Its deadline is none that an order can have, such as `-infinity` where an unset time is written so.
    NeverDue(Timestamp),
    /// Its deadline has not passed.
    NotDue {
        /// Until the deadline.
        remaining: Duration,
        /// Whether its alarm has not been sent yet.
        alarm_waits: bool,
        /// The pause that would keep it from being closed then.
        pause: Option<Pause>,
    },
    /// It is overdue.
    Overdue {
        /// Since the deadline.
        by: Duration,
        /// The first cause that holds.
        cause: OverdueCause,
    },
}

/// Why an overdue order is not closed yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OverdueCause {
    /// No worker runs.
    NoWorker,
    /// Nothing is closed.
    Paused(Pause),
    /// Another transaction holds a lock that the close needs.
    Locked(Vec<LockHolder>),
    /// Its alarm was given up.
    Parked {
        /// The word of the reason.
        reason: String,
        /// One sentence.
        detail: String,
    },
    /// Its history has a close already, and admits no second one.
    ClosedInHistory {
        /// RFC 3339.
        at: String,
    },
    /// Its deadline has only just passed.
    Recent,
    /// Nothing in the database tells.
    NotVisible,
}

impl fmt::Display for OpenCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closing => {
                f.write_str("its status is closing, and no worker has claimed it: the shop decides whether it was paid")
            }
            Self::Claimed { claim, pause } => fmt_claim(claim, pause.as_ref(), f),
            Self::NoDeadline => f.write_str("it has no deadline, so it never times out"),
            Self::NeverDue(deadline) => {
                let deadline = write_rfc3339(*deadline);
                write!(f, "its deadline {deadline} is outside the years 1 to 9999, so it never times out")
            }
            Self::NotDue { remaining, alarm_waits, pause } => {
                write!(f, "its deadline is in {}", rounded(*remaining))?;
                if *alarm_waits {
                    f.write_str(
                        "; an alarm for it waits in alarm_outbox, and the sweep closes it if that is not sent in time",
                    )?;
                }
                match pause {
                    Some(pause) => write!(f, "; it is not closed then while {}", pause.sentence()),
                    None => Ok(()),
                }
            }
            Self::Overdue { by, cause } => write!(f, "it is overdue by {}: {cause}", rounded(*by)),
        }
    }
}

fn fmt_claim(claim: &ClaimRow, pause: Option<&Pause>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let ClaimRow { step, rounds, next_attempt_at, unresolved_reason, unresolved_at, .. } = claim;
    let (provider, answers) = (claim.provider(), claim.answers());
    if let (Some("no_provider"), Some(since)) = (unresolved_reason.as_deref(), unresolved_at) {
        return write!(
            f,
            "it is unresolved since {since}: no live worker has its payment provider {provider} in its settings"
        );
    }
    if let (Some(reason), Some(since)) = (unresolved_reason, unresolved_at) {
        return write!(
            f,
            "it is unresolved since {since}: what {provider} answered could not decide it ({reason}: {answers})"
        );
    }
    match step.as_str() {
        "in_progress" => write!(f, "a customer is paying at {provider}, which is asked again at {next_attempt_at}")?,
        "no_answer" => {
            let rounds = rounds_in_words(*rounds);
            write!(f, "{provider} gave no answer in {rounds}, and is asked again at {next_attempt_at}: {answers}")?;
        }
        _ => write!(f, "{provider} is asked whether it was paid")?,
    }
    match pause {
        Some(pause) => write!(f, "; it is not closed while {}", pause.sentence()),
        None => Ok(()),
    }
}

/// A number of rounds with its noun.
pub(super) fn rounds_in_words(rounds: i32) -> String {
    if rounds == 1 { "1 round".to_owned() } else { format!("{rounds} rounds") }
}

impl fmt::Display for OverdueCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoWorker => f.write_str("no worker is running; start one"),
            Self::Paused(pause) => f.write_str(&pause.sentence()),
            Self::Locked(holders) if holders.is_empty() => {
                f.write_str("another transaction held a lock on its row a moment ago; it is closed when that ends")
            }
            Self::Locked(holders) => {
                let what = if holders[0].holds_row { "its row" } else { "a table that its close changes" };
                write!(f, "{} holds a lock on {what}; it is closed when that ends", named(holders))
            }
            Self::Parked { reason, detail } => write!(f, "its alarm was parked as {reason}, because {detail}"),
            Self::ClosedInHistory { at } => write!(f, "order_events says that it was closed at {at}, which its row does not, and admits no second close"),
            Self::Recent => f.write_str("it is closed within a second or two"),
            Self::NotVisible => f.write_str(
                "no cause is visible in the database; `order-timeout close ID` tries to close it and says what is wrong, and the workers' logs name orders that cannot be closed",
            ),
        }
    }
}

/// Why the order is open; `None` if it is not.
pub(super) fn why_open(facts: &Facts<'_>) -> Option<OpenCause> {
    let Facts { now, row, .. } = *facts;
    if !is_open(row) {
        return None;
    }
    let pause = facts.pauses.and_then(<[Pause]>::first).cloned();
    let overdue_by = row.deadline.filter(|_| is_overdue(row, now)).map(|deadline| now.since(deadline));
    if row.status.as_deref() == Some("closing") {
        return Some(match (facts.claim, overdue_by) {
            (None, _) => OpenCause::Closing,
            // An unresolved order waits for a person, not for a worker.
            (Some(claim), Some(by)) if claim.unresolved_at.is_none() && facts.live_workers == Some(0) => {
                OpenCause::Overdue { by, cause: OverdueCause::NoWorker }
            }
            (Some(claim), _) => OpenCause::Claimed { claim: Box::new(claim.clone()), pause },
        });
    }
    Some(match row.deadline {
        None => OpenCause::NoDeadline,
        Some(deadline) if !deadline.can_be_due() => OpenCause::NeverDue(deadline),
        Some(deadline) if deadline > now => {
            let alarm_waits = facts.alarms.is_some_and(|alarms| alarms.iter().any(|alarm| alarm.sent_at.is_none()));
            OpenCause::NotDue { remaining: deadline.since(now), alarm_waits, pause }
        }
        Some(deadline) => OpenCause::Overdue { by: now.since(deadline), cause: why_overdue(facts, deadline) },
    })
}

fn why_overdue(facts: &Facts<'_>, deadline: Timestamp) -> OverdueCause {
    if facts.live_workers == Some(0) {
        return OverdueCause::NoWorker;
    }
    if let Some(pause) = facts.pauses.and_then(<[Pause]>::first) {
        return OverdueCause::Paused(pause.clone());
    }
    let holders = facts.holders.unwrap_or_default();
    if facts.is_locked == Some(true) {
        return OverdueCause::Locked(holders.to_vec());
    }
    if let Some(at) = facts.closed_in_history {
        return OverdueCause::ClosedInHistory { at: at.to_owned() };
    }
    if let Some(parked) = facts.parked.and_then(<[ParkedRow]>::last) {
        return OverdueCause::Parked { reason: parked.reason.clone(), detail: parked.detail.clone() };
    }
    match facts.now.since(deadline) <= USUALLY_CLOSED_WITHIN {
        true => OverdueCause::Recent,
        false if !holders.is_empty() => OverdueCause::Locked(holders.to_vec()),
        false => OverdueCause::NotVisible,
    }
}

/// All of them, in words.
pub(super) fn named(holders: &[LockHolder]) -> String {
    holders.iter().map(LockHolder::to_string).collect::<Vec<_>>().join(", or ")
}

/// How to end the first of them.
pub(super) fn how_to_end(holders: &[LockHolder]) -> Option<String> {
    let end = holders.first()?.end();
    Some(format!("end that transaction if its program does not: {end}"))
}

/// Whole seconds, or milliseconds below one.
pub(super) fn rounded(duration: Duration) -> humantime::FormattedDuration {
    let seconds = duration.as_secs();
    humantime::format_duration(if seconds == 0 {
        Duration::from_millis(u64::from(duration.subsec_millis()))
    } else {
        Duration::from_secs(seconds)
    })
}

fn resume() -> String {
    format!("{HOW_TO_RESUME}: what is due is closed then")
}

/// What to do about it. `status` is that of the order, if its table tells. One sentence without its end.
pub(super) fn what_to_do(cause: &OpenCause, status: Option<&str>) -> String {
    let words = match cause {
        OpenCause::Closing => "let the shop finish its check: it sets the status to paid, closed or unpaid",
        OpenCause::NoDeadline | OpenCause::NeverDue(_) => "nothing; `order-timeout deadline ID --in 30m` gives it one",
        OpenCause::Claimed { claim, .. } if claim.unresolved_reason.is_some() => {
            unresolved::what_to_do(claim.unresolved_reason.as_deref().unwrap_or_default())
        }
        OpenCause::NotDue { pause: Some(_), .. } | OpenCause::Claimed { pause: Some(_), .. } => return resume(),
        OpenCause::Claimed { claim, .. } if claim.step == "no_answer" => {
            "check that the payment provider answers, and the settings in providers; it is asked again by itself, and after closing.max_rounds rounds the order waits for a person"
        }
        OpenCause::Claimed { .. } => {
            "wait until its payment provider was asked; `order-timeout doctor` looks for the cause if that does not end"
        }
        OpenCause::NotDue { .. } => "nothing: it is closed at its deadline; `order-timeout deadline ID` moves that",
        OpenCause::Overdue { cause, .. } => match cause {
            OverdueCause::NoWorker => "start a worker: `order-timeout worker`",
            OverdueCause::Paused(_) => return resume(),
            OverdueCause::Locked(holders) => {
                return how_to_end(holders).unwrap_or_else(|| "wait a second and ask again".to_owned());
            }
            OverdueCause::Parked { .. } => {
                "remove the cause that it was parked for; the sweep then closes the order, and `order-timeout parked drop` removes the parked alarm"
            }
            OverdueCause::ClosedInHistory { .. } => {
                "find out who wrote that row; if the order was not closed, DELETE FROM order_events WHERE event = 'closed' AND order_id = 'ID'; then it is closed"
            }
            OverdueCause::Recent => "wait a second and ask again",
            OverdueCause::NotVisible if status.is_none() => {
                "`order-timeout close ID` tries to close it and says what is wrong; check that your close statement and your overdue statement agree"
            }
            OverdueCause::NotVisible => "`order-timeout close ID` tries to close it and says what is wrong",
        },
    };
    words.to_owned()
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;
    use crate::postgres::closing_pauses::PauseCause;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_unix_micros(seconds * 1_000_000)
    }

    fn row(status: &str, deadline: Option<i64>) -> OrderRow {
        OrderRow { status: Some(status.to_owned()), deadline: deadline.map(at) }
    }

    fn facts(row: &OrderRow) -> Facts<'_> {
        Facts {
            now: at(100),
            row,
            is_locked: Some(false),
            holders: None,
            live_workers: Some(1),
            alarms: Some(&[]),
            parked: Some(&[]),
            closed_in_history: None,
            pauses: None,
            claim: None,
        }
    }

    #[test]
    fn only_open_orders_have_a_reason() {
        for status in ["paid", "closed", "cancelled"] {
            assert_eq!(why_open(&facts(&row(status, Some(50)))), None);
        }
        let why = |row: &OrderRow| why_open(&facts(row)).unwrap().to_string();
        assert!(why(&row("closing", Some(50))).contains("the shop decides"));
        assert!(why(&row("unpaid", None)).contains("never times out"));
        assert_eq!(why(&row("unpaid", Some(160))), "its deadline is in 1m");
        let unset = OrderRow { status: None, deadline: Some(Timestamp::from_unix_micros(i64::MIN)) };
        assert!(why(&unset).contains("-infinity is outside the years 1 to 9999"));
        assert!(why(&OrderRow { status: None, deadline: Some(at(50)) }).contains("overdue by 50s"));
    }

    #[test]
    fn reason_names_first_cause_that_holds() {
        let row = row("unpaid", Some(50));
        let parked = [ParkedRow {
            id: Uuid::nil(),
            reason: "close_failed".into(),
            detail: "a trigger refuses it".into(),
            deadline: None,
            parked_at: String::new(),
            attempts: 1,
        }];
        let why = |change: &dyn Fn(&mut Facts<'_>)| {
            let mut facts = Facts { parked: Some(&parked), ..facts(&row) };
            change(&mut facts);
            why_open(&facts).unwrap().to_string()
        };
        assert!(why(&|facts| facts.live_workers = Some(0)).contains("start one"));
        assert!(why(&|facts| facts.is_locked = Some(true)).contains("held a lock"));
        assert!(why(&|facts| facts.closed_in_history = Some("then")).contains("order_events says"));
        let holders = [idle(), prepared()];
        let named = why_open(&Facts { holders: Some(&holders), ..facts(&row) }).unwrap().to_string();
        assert!(named.contains("pid 4711 (reports of role shop, idle in transaction) since 2026-"), "{named}");
        assert!(named.contains("or the prepared transaction \"it's\" since a time"), "{named}");
        assert!(why(&|_| {}).contains("parked as close_failed, because a trigger refuses it"));
        assert!(why(&|facts| facts.parked = None).contains("no cause is visible"));
        let unknown = |facts: &mut Facts<'_>| (facts.live_workers, facts.is_locked, facts.parked) = (None, None, None);
        assert!(why(&unknown).contains("no cause is visible"));
    }

    #[test]
    fn each_open_cause_says_what_to_do() {
        let overdue = |cause| OpenCause::Overdue { by: std::time::Duration::from_secs(60), cause };
        let parked = OverdueCause::Parked { reason: "close_failed".into(), detail: "a trigger refuses it".into() };
        for (cause, words) in [
            (OpenCause::Closing, "the shop"),
            (OpenCause::NoDeadline, "deadline ID --in"),
            (overdue(OverdueCause::NoWorker), "order-timeout worker"),
            (overdue(OverdueCause::Locked(vec![idle()])), "SELECT pg_terminate_backend(4711)"),
            (overdue(OverdueCause::Locked(vec![prepared()])), "ROLLBACK PREPARED 'it''s'"),
            (overdue(OverdueCause::ClosedInHistory { at: String::new() }), "DELETE FROM order_events"),
            (overdue(parked), "parked drop"),
            (overdue(OverdueCause::NotVisible), "close ID"),
        ] {
            assert!(what_to_do(&cause, Some("unpaid")).contains(words), "{cause:?}");
        }
    }

    fn idle() -> LockHolder {
        LockHolder {
            pid: Some(4711),
            of: "reports of role shop".into(),
            state: Some("idle in transaction".into()),
            since: Some("2026-11-20T10:30:00Z".into()),
            holds_row: true,
        }
    }

    fn prepared() -> LockHolder {
        LockHolder { pid: None, of: "it's".into(), state: None, since: None, holds_row: false }
    }

    fn claim(step: &str) -> ClaimRow {
        ClaimRow {
            claimed_by: "sweep".into(),
            claimed_at: "2026-11-20T10:30:00Z".into(),
            queue: "card".into(),
            step: step.into(),
            rounds: 2,
            next_attempt_at: "2026-11-20T10:31:00Z".into(),
            last_answers: Some("card pi_1 ask: unknown (no answer in time)".into()),
            unresolved_reason: None,
            unresolved_at: None,
            who: None,
            why: None,
        }
    }

    fn pause() -> Pause {
        Pause {
            kind: None,
            cause: PauseCause::Operator,
            reason: "no callbacks".into(),
            paused_by: "night shift".into(),
            paused_at: "2026-11-20T10:30:00Z".into(),
        }
    }

    #[test]
    fn claimed_order_says_what_provider_did() {
        let row = row("closing", Some(50));
        let why = |claim: &ClaimRow, pauses: &[Pause]| {
            why_open(&Facts { claim: Some(claim), pauses: Some(pauses), ..facts(&row) }).unwrap()
        };
        let silent = why(&claim("no_answer"), &[]);
        assert!(silent.to_string().starts_with("card gave no answer in 2 rounds, and is asked again at"), "{silent}");
        assert!(what_to_do(&silent, Some("closing")).contains("check that the payment provider answers"));
        let paused = why(&claim("claimed"), &[pause()]);
        assert!(paused.to_string().contains("not closed while closing is paused since"), "{paused}");
        assert!(what_to_do(&paused, Some("closing")).contains("order-timeout resume"));
        let (unresolved_reason, unresolved_at) = (Some("refunded".into()), Some("2026-11-20T10:32:00Z".into()));
        let waits = ClaimRow { unresolved_reason, unresolved_at, ..claim("unresolved") };
        let waits = why(&waits, &[pause()]);
        assert!(waits.to_string().contains("could not decide it (refunded: card pi_1 ask"), "{waits}");
        assert!(what_to_do(&waits, Some("closing")).contains("whether the customer still wants"));
        let without_worker = Facts { claim: Some(&claim("claimed")), live_workers: Some(0), ..facts(&row) };
        assert!(why_open(&without_worker).unwrap().to_string().contains("no worker is running"));
    }

    #[test]
    fn pause_is_a_reason_to_be_open() {
        let (due, early) = (row("unpaid", Some(50)), row("unpaid", Some(160)));
        for (row, words) in [(&due, "overdue by 50s: closing is paused"), (&early, "not closed then while closing is")]
        {
            let cause = why_open(&Facts { pauses: Some(&[pause()]), ..facts(row) }).unwrap();
            assert!(cause.to_string().contains(words), "{cause}");
            assert!(what_to_do(&cause, Some("unpaid")).contains("order-timeout resume"));
        }
    }
}
