//! What is wrong while orders are still closed: the problems of each cause, and when to log a warning about it.
//!
//! Stores what the checks report; runs none of them, reads no clock and does no I/O. A cause is not an outage: the
//! worker stays ready (`health.rs`).

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use order_timeout_core::kind::Kind;
pub use order_timeout_core::problem::{Cause, Problem};

/// How often, at most, a warning about the same cause is repeated while it lasts.
pub const REPEAT_WARNING_EVERY: Duration = Duration::from_secs(300);

/// The words of the causes that a worker reports, which are the metric's labels.
pub const WORDS: [&str; 18] = {
    use Cause as C;
    [
        C::Schema.as_str(),
        C::DatabaseRights.as_str(),
        C::ReadOnly.as_str(),
        C::SlowOverdueQuery.as_str(),
        C::OrdersContract.as_str(),
        C::TimeZone.as_str(),
        C::OutboxUnreadable.as_str(),
        C::RelayStalled.as_str(),
        C::Topology.as_str(),
        C::AlarmsNotArriving.as_str(),
        C::AlarmsCirculate.as_str(),
        C::UnreadableMessage.as_str(),
        C::EventsRefused.as_str(),
        C::WorkersDisagree.as_str(),
        C::KindNotStarted.as_str(),
        C::KindNotServed.as_str(),
        C::Reminders.as_str(),
        C::ProviderAway.as_str(),
    ]
};

/// What a report changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// Log a warning: the cause is new, or the last warning is old enough.
    Warn,
    /// The cause is gone.
    Cleared,
    /// Nothing to log.
    Nothing,
}

/// The causes that hold now, each for the whole worker or for one kind.
#[derive(Debug, Default)]
pub struct Degraded {
    causes: BTreeMap<(Cause, Option<Kind>), Entry>,
}

#[derive(Debug)]
struct Entry {
    problems: Vec<Problem>,
    warned: Instant,
}

impl Degraded {
    /// Reports the result of a check: the problems of this cause, or none.
    pub fn note(&mut self, cause: Cause, kind: Option<&Kind>, problems: Vec<Problem>, now: Instant) -> Change {
        let of = (cause, kind.cloned());
        if problems.is_empty() {
            return if self.causes.remove(&of).is_some() { Change::Cleared } else { Change::Nothing };
        }
        match self.causes.get_mut(&of) {
            Some(entry) => {
                entry.problems = problems;
                if now.saturating_duration_since(entry.warned) < REPEAT_WARNING_EVERY {
                    return Change::Nothing;
                }
                entry.warned = now;
            }
            None => drop(self.causes.insert(of, Entry { problems, warned: now })),
        }
        Change::Warn
    }

    /// Whether this cause holds, for whichever kind.
    #[must_use]
    pub fn holds(&self, cause: Cause) -> bool {
        self.causes.keys().any(|(known, _)| *known == cause)
    }

    /// Of all causes, each with the kind that it is about.
    pub fn problems(&self) -> impl Iterator<Item = Problem> {
        let of = |((_, kind), entry): (&(Cause, Option<Kind>), &Entry)| {
            let kind = kind.clone();
            entry.problems.clone().into_iter().map(move |problem| problem.of_kind(kind.as_ref()))
        };
        self.causes.iter().flat_map(of)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(cause: Cause, what: &str) -> Vec<Problem> {
        vec![Problem::described(cause, what)]
    }

    fn said(degraded: &Degraded) -> Vec<String> {
        degraded.problems().map(|problem| problem.what).collect()
    }

    #[test]
    fn warns_once_then_every_five_minutes() {
        let (mut degraded, began) = (Degraded::default(), Instant::now());
        let mut note = |what: &str, after_s: u64| {
            let at = began + Duration::from_secs(after_s);
            (degraded.note(Cause::Schema, None, one(Cause::Schema, what), at), said(&degraded))
        };
        assert_eq!(note("no index", 0), (Change::Warn, vec!["no index".to_owned()]));
        assert_eq!(note("no table", 299), (Change::Nothing, vec!["no table".to_owned()]));
        assert_eq!(note("no table", 300).0, Change::Warn);
    }

    #[test]
    fn cause_holds_while_any_kind_has_it() {
        let (mut degraded, now, kind) = (Degraded::default(), Instant::now(), Kind::new("acceptance").unwrap());
        let cause = Cause::OrdersContract;
        degraded.note(cause, Some(&Kind::ORDER), one(cause, "no order"), now);
        degraded.note(cause, Some(&kind), one(cause, "two rows"), now);
        degraded.note(cause, Some(&Kind::ORDER), Vec::new(), now);
        assert!(degraded.holds(cause));
        assert_eq!(degraded.problems().collect::<Vec<_>>(), [one(cause, "two rows").remove(0).of_kind(Some(&kind))]);
        assert_eq!(degraded.note(cause, Some(&kind), Vec::new(), now), Change::Cleared);
        assert!(!degraded.holds(cause));
    }

    #[test]
    fn fixed_cause_clears_once() {
        let (mut degraded, now) = (Degraded::default(), Instant::now());
        assert_eq!(degraded.note(Cause::ReadOnly, None, Vec::new(), now), Change::Nothing);
        degraded.note(Cause::ReadOnly, None, one(Cause::ReadOnly, "a standby"), now);
        assert_eq!(degraded.note(Cause::ReadOnly, None, Vec::new(), now), Change::Cleared);
        assert!(said(&degraded).is_empty());
        assert_eq!(degraded.note(Cause::ReadOnly, None, one(Cause::ReadOnly, "a standby"), now), Change::Warn);
    }
}
