//! Why an order is still open, out of what `order_story.rs` has read, and what to do about that.
//!
//! Pure.

use std::time::Duration;

use order_timeout_core::message::write_rfc3339;
use order_timeout_core::order::Timestamp;
use serde::Serialize;

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

impl Facts<'_> {
    fn pause(&self) -> Option<&Pause> {
        self.pauses?.first()
    }
}

/// In a table of the shop's own, only open orders are found.
pub(super) fn is_open(row: &OrderRow) -> bool {
    row.status.as_deref().is_none_or(|status| ["unpaid", "closing"].contains(&status))
}

pub(super) fn is_overdue(row: &OrderRow, now: Timestamp) -> bool {
    row.deadline.is_some_and(|deadline| deadline <= now && deadline.can_be_due())
}

/// Why an order is open.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, utoipa::ToSchema)]
pub struct Open {
    /// One sentence.
    pub because: String,
    /// One sentence.
    pub what_to_do: String,
}

impl Open {
    fn new(because: impl Into<String>, what_to_do: impl Into<String>) -> Self {
        Self { because: because.into(), what_to_do: what_to_do.into() }
    }

    /// A pause, which would keep it from being closed then, is the more urgent of two.
    fn paused(self, pause: Option<&Pause>, when: &str) -> Self {
        match pause {
            Some(pause) => {
                Self::new(format!("{}; it is not closed{when} while {}", self.because, pause.sentence()), resume())
            }
            None => self,
        }
    }
}

/// Why the order is open; `None` if it is not.
pub(super) fn why_open(facts: &Facts<'_>) -> Option<Open> {
    let Facts { now, row, .. } = *facts;
    if !is_open(row) {
        return None;
    }
    // Without a status of its own for it, a claimed order is open until its provider has answered.
    let claim = facts.claim.filter(|_| row.status.as_deref() == Some("closing") || is_overdue(row, now));
    if row.status.as_deref() == Some("closing") || claim.is_some() {
        return Some(match claim {
            None => Open::new(
                "its status is closing, and no worker has claimed it: the shop decides whether it was paid",
                "let the shop finish its check: it sets the status to paid, closed or unpaid",
            ),
            // An unresolved order waits for a person, not for a worker.
            Some(claim) if claim.unresolved_at.is_none() && facts.live_workers == Some(0) && is_overdue(row, now) => {
                overdue(facts, row.deadline?)
            }
            Some(claim) => claimed(claim, facts.pause()),
        });
    }
    const NONE_TO_WAIT_FOR: &str = "nothing; `order-timeout deadline ID --in 30m` gives it one";
    Some(match row.deadline {
        None => Open::new("it has no deadline, so it never times out", NONE_TO_WAIT_FOR),
        Some(deadline) if !deadline.can_be_due() => Open::new(
            format!("its deadline {} is outside the years 1 to 9999, so it never times out", write_rfc3339(deadline)),
            NONE_TO_WAIT_FOR,
        ),
        Some(deadline) if deadline > now => {
            let mut because = format!("its deadline is in {}", rounded(deadline.since(now)));
            if facts.alarms.is_some_and(|alarms| alarms.iter().any(|alarm| alarm.sent_at.is_none())) {
                because +=
                    "; an alarm for it waits in alarm_outbox, and the sweep closes it if that is not sent in time";
            }
            let open =
                Open::new(because, "nothing: it is closed at its deadline; `order-timeout deadline ID` moves that");
            open.paused(facts.pause(), " then")
        }
        Some(deadline) => overdue(facts, deadline),
    })
}

fn claimed(claim: &ClaimRow, pause: Option<&Pause>) -> Open {
    let ClaimRow { step, rounds, next_attempt_at, unresolved_reason, unresolved_at, .. } = claim;
    let (provider, answers) = (claim.provider(), claim.answers());
    if let (Some(reason), Some(since)) = (unresolved_reason, unresolved_at) {
        let why = match reason.as_str() {
            "no_provider" => format!("no live worker has its payment provider {provider} in its settings"),
            reason => format!("what {provider} answered could not decide it ({reason}: {answers})"),
        };
        return Open::new(format!("it is unresolved since {since}: {why}"), unresolved::what_to_do(reason));
    }
    const WAIT: &str =
        "wait until its payment provider was asked; `order-timeout doctor` looks for the cause if that does not end";
    let open = match step.as_str() {
        "in_progress" => Open::new(
            format!("a payment is in progress at {provider}, which is asked again at {next_attempt_at}"),
            WAIT,
        ),
        "no_answer" => Open::new(
            format!(
                "{provider} gave no answer in {}, and is asked again at {next_attempt_at}: {answers}",
                rounds_in_words(*rounds)
            ),
            "check that the payment provider answers, and the settings in providers; it is asked again by itself, and after closing.max_rounds rounds the order waits for a person",
        ),
        _ => Open::new(format!("{provider} is asked whether it was paid"), WAIT),
    };
    open.paused(pause, "")
}

fn overdue(facts: &Facts<'_>, deadline: Timestamp) -> Open {
    let by = facts.now.since(deadline);
    let Open { because, what_to_do } = why_overdue(facts, by);
    Open { because: format!("it is overdue by {}: {because}", rounded(by)), what_to_do }
}

/// The first cause that holds.
fn why_overdue(facts: &Facts<'_>, by: Duration) -> Open {
    if facts.live_workers == Some(0) {
        return Open::new("no worker is running; start one", "start a worker: `order-timeout worker`");
    }
    if let Some(pause) = facts.pause() {
        return Open::new(pause.sentence(), resume());
    }
    let locked = |holders: &[LockHolder]| {
        const ENDS: &str = "it is closed when that ends";
        let Some(first) = holders.first() else {
            let because = format!("another transaction held a lock on its row a moment ago; {ENDS}");
            return Open::new(because, "wait a second and ask again");
        };
        let what = if first.holds_row { "its row" } else { "a table that its close changes" };
        let because = format!("{} holds a lock on {what}; {ENDS}", named(holders));
        Open::new(because, how_to_end(holders).unwrap_or_default())
    };
    let holders = facts.holders.unwrap_or_default();
    if facts.is_locked == Some(true) {
        return locked(holders);
    }
    if let Some(at) = facts.closed_in_history {
        return Open::new(
            format!("order_events says that it was closed at {at}, which its row does not, and admits no second close"),
            "find out who wrote that row; if the order was not closed, DELETE FROM order_events WHERE event = 'closed' AND order_id = 'ID'; then it is closed",
        );
    }
    if let Some(ParkedRow { reason, detail, .. }) = facts.parked.and_then(<[ParkedRow]>::last) {
        return Open::new(
            format!("its alarm was parked as {reason}, because {detail}"),
            "remove the cause that it was parked for; the sweep then closes the order, and `order-timeout parked drop` removes the parked alarm",
        );
    }
    if by <= USUALLY_CLOSED_WITHIN {
        return Open::new("it is closed within a second or two", "wait a second and ask again");
    }
    if !holders.is_empty() {
        return locked(holders);
    }
    let agree = match facts.row.status {
        None => "; check that your close statement and your overdue statement agree",
        Some(_) => "",
    };
    Open::new(
        "no cause is visible in the database; `order-timeout close ID` tries to close it and says what is wrong, and the workers' logs name orders that cannot be closed",
        format!("`order-timeout close ID` tries to close it and says what is wrong{agree}"),
    )
}

/// A number of rounds with its noun.
pub(super) fn rounds_in_words(rounds: i32) -> String {
    if rounds == 1 { "1 round".to_owned() } else { format!("{rounds} rounds") }
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
pub(crate) fn rounded(duration: Duration) -> humantime::FormattedDuration {
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
        let why = |row: &OrderRow| why_open(&facts(row)).unwrap().because;
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
        let parked = [parked()];
        let why = |change: &dyn Fn(&mut Facts<'_>)| {
            let mut facts = Facts { parked: Some(&parked), ..facts(&row) };
            change(&mut facts);
            why_open(&facts).unwrap().because
        };
        assert!(why(&|facts| facts.live_workers = Some(0)).contains("start one"));
        assert!(why(&|facts| facts.is_locked = Some(true)).contains("held a lock"));
        assert!(why(&|facts| facts.closed_in_history = Some("then")).contains("order_events says"));
        let holders = [idle(), prepared()];
        let named = why_open(&Facts { holders: Some(&holders), ..facts(&row) }).unwrap().because;
        assert!(named.contains("pid 4711 (reports of role shop, idle in transaction) since 2026-"), "{named}");
        assert!(named.contains("or the prepared transaction \"it's\" since a time"), "{named}");
        assert!(why(&|_| {}).contains("parked as close_failed, because a trigger refuses it"));
        assert!(why(&|facts| facts.parked = None).contains("no cause is visible"));
        let unknown = |facts: &mut Facts<'_>| (facts.live_workers, facts.is_locked, facts.parked) = (None, None, None);
        assert!(why(&unknown).contains("no cause is visible"));
    }

    #[test]
    fn each_open_cause_says_what_to_do() {
        let (unpaid, closing, never) = (row("unpaid", Some(50)), row("closing", Some(50)), row("unpaid", None));
        let parked = [parked()];
        let (idle, prepared) = ([idle()], [prepared()]);
        for (facts, words) in [
            (facts(&closing), "the shop"),
            (facts(&never), "deadline ID --in"),
            (Facts { live_workers: Some(0), ..facts(&unpaid) }, "order-timeout worker"),
            (Facts { holders: Some(&idle), ..facts(&unpaid) }, "SELECT pg_terminate_backend(4711)"),
            (Facts { holders: Some(&prepared), ..facts(&unpaid) }, "ROLLBACK PREPARED 'it''s'"),
            (Facts { closed_in_history: Some("then"), ..facts(&unpaid) }, "DELETE FROM order_events"),
            (Facts { parked: Some(&parked), ..facts(&unpaid) }, "parked drop"),
            (facts(&unpaid), "close ID"),
        ] {
            let open = why_open(&facts).unwrap();
            assert!(open.what_to_do.contains(words), "{open:?}");
        }
    }

    fn parked() -> ParkedRow {
        ParkedRow {
            id: Uuid::nil(),
            reason: "close_failed".into(),
            detail: "a trigger refuses it".into(),
            deadline: None,
            parked_at: String::new(),
            attempts: 1,
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
        assert!(silent.because.starts_with("card gave no answer in 2 rounds, and is asked again at"), "{silent:?}");
        assert!(silent.what_to_do.contains("check that the payment provider answers"));
        let paused = why(&claim("claimed"), &[pause()]);
        assert!(paused.because.contains("not closed while closing is paused since"), "{paused:?}");
        assert!(paused.what_to_do.contains("order-timeout resume"));
        let (unresolved_reason, unresolved_at) = (Some("refunded".into()), Some("2026-11-20T10:32:00Z".into()));
        let waits = ClaimRow { unresolved_reason, unresolved_at, ..claim("unresolved") };
        let waits = why(&waits, &[pause()]);
        assert!(waits.because.contains("could not decide it (refunded: card pi_1 ask"), "{waits:?}");
        assert!(waits.what_to_do.contains("whether the customer still wants"));
        let without_worker = Facts { claim: Some(&claim("claimed")), live_workers: Some(0), ..facts(&row) };
        assert!(why_open(&without_worker).unwrap().because.contains("no worker is running"));
    }

    #[test]
    fn pause_is_a_reason_to_be_open() {
        let (due, early) = (row("unpaid", Some(50)), row("unpaid", Some(160)));
        for (row, words) in [(&due, "overdue by 50s: closing is paused"), (&early, "not closed then while closing is")]
        {
            let cause = why_open(&Facts { pauses: Some(&[pause()]), ..facts(row) }).unwrap();
            assert!(cause.because.contains(words), "{cause:?}");
            assert!(cause.what_to_do.contains("order-timeout resume"));
        }
    }
}
