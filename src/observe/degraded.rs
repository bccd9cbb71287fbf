//! What is wrong while orders are still closed: one sentence for each cause, and when to log a warning about it.
//!
//! Stores what the checks report; runs none of them, reads no clock and does no I/O. A cause is not an outage: the
//! worker stays ready (`health.rs`).

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use order_timeout_core::kind::Kind;

/// How often, at most, a warning about the same cause is repeated while it lasts.
pub const REPEAT_WARNING_EVERY: Duration = Duration::from_secs(300);

macro_rules! causes {
    ($($(#[$doc:meta])* $name:ident = $word:literal,)*) => {
        /// Why a worker is degraded. The word is the metric's label, and appears in `/readyz` and in the log.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Cause {
            $($(#[$doc])* $name,)*
        }

        impl Cause {
            /// The words of all causes.
            pub const WORDS: [&str; [$($word),*].len()] = [$($word),*];

            /// The word in metrics and on the pages.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$name => $word,)*
                }
            }
        }
    };
}

causes! {
    /// Tables, columns, indexes or constraints that a guarantee depends on are missing.
    Schema = "schema",
    /// The worker's role lacks a right, or row security hides rows from it.
    DatabaseRights = "database_rights",
    /// The database accepts no writes.
    ReadOnly = "read_only",
    /// The query for overdue orders reads the whole table.
    SlowOverdueQuery = "slow_overdue_query",
    /// The close and the overdue statement contradict each other, or return something outside the contract.
    OrdersContract = "orders_contract",
    /// A deadline in the message and one in the row differ by whole quarter hours.
    TimeZone = "time_zone",
    /// An outbox cannot be read or written.
    OutboxUnreadable = "outbox_unreadable",
    /// The broker confirms nothing that is published from an outbox.
    RelayStalled = "relay_stalled",
    /// Exchanges, queues or bindings are missing or have other arguments.
    Topology = "topology",
    /// The sweep closes orders although a consumer session is open: their alarms did not arrive.
    AlarmsNotArriving = "alarms_not_arriving",
    /// A queue of the wheel confirms nothing; alarms wait in others.
    SlotNotConfirming = "slot_not_confirming",
    /// The broker returns alarms more often than the wheel needs.
    AlarmsCirculate = "alarms_circulate",
    /// One of our exchanges has an alternate exchange, which takes unroutable alarms.
    AlternateExchange = "alternate_exchange",
    /// A message that the client library cannot read was found in a queue.
    UnreadableMessage = "unreadable_message",
    /// A queue bound to the events' exchange refuses events.
    EventsRefused = "events_refused",
    /// Workers on this database run with settings that contradict one another.
    WorkersDisagree = "workers_disagree",
    /// A kind of this worker could not start; its start is tried again while the others run.
    KindNotStarted = "kind_not_started",
    /// No live worker serves a kind that the settings name.
    KindNotServed = "kind_not_served",
    /// Reminders cannot be announced.
    Reminders = "reminders",
    /// A payment provider is not asked, because its last calls failed, too many wait, or no live worker has it.
    ProviderAway = "provider_away",
}

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
    why: String,
    warned: Instant,
}

impl Degraded {
    /// Reports the result of a check: why the cause holds, or that it does not.
    pub fn note(&mut self, cause: Cause, kind: Option<&Kind>, why: Option<&str>, now: Instant) -> Change {
        let of = (cause, kind.cloned());
        let Some(why) = why else {
            return if self.causes.remove(&of).is_some() { Change::Cleared } else { Change::Nothing };
        };
        let entry = self.causes.entry(of);
        let is_new = matches!(entry, std::collections::btree_map::Entry::Vacant(_));
        let entry = entry.or_insert_with(|| Entry { why: String::new(), warned: now });
        if entry.why != why {
            entry.why = why.to_owned();
        }
        let is_due = is_new || now.saturating_duration_since(entry.warned) >= REPEAT_WARNING_EVERY;
        if is_due {
            entry.warned = now;
        }
        if is_due { Change::Warn } else { Change::Nothing }
    }

    /// Whether this cause holds, for whichever kind.
    #[must_use]
    pub fn holds(&self, cause: Cause) -> bool {
        self.causes.keys().any(|(known, _)| *known == cause)
    }

    /// One line for each cause that is about this kind.
    #[must_use]
    pub fn lines_of(&self, kind: &Kind) -> Vec<String> {
        let causes = self.causes.iter().filter(|((_, of), _)| of.as_ref() == Some(kind));
        causes.map(|((cause, _), entry)| format!("degraded: {}: {}", cause.as_str(), entry.why)).collect()
    }

    /// One line for each cause and kind, as `/readyz` shows it. `only`: the kind of a worker that has no other, which is not
    /// named.
    #[must_use]
    pub fn lines(&self, only: Option<&Kind>) -> Vec<String> {
        let line = |((cause, kind), entry): (&(Cause, Option<Kind>), &Entry)| {
            let kind = kind.as_ref().filter(|kind| only != Some(kind));
            let kind = kind.map_or_else(String::new, |kind| format!("kind {kind}: "));
            format!("degraded: {}: {kind}{}", cause.as_str(), entry.why)
        };
        self.causes.iter().map(line).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warns_once_then_every_five_minutes() {
        let (mut degraded, began) = (Degraded::default(), Instant::now());
        assert_eq!(degraded.note(Cause::Schema, None, Some("no index"), began), Change::Warn);
        assert_eq!(
            degraded.note(Cause::Schema, None, Some("no table"), began + Duration::from_secs(299)),
            Change::Nothing
        );
        assert_eq!(degraded.lines(None), ["degraded: schema: no table"]);
        assert_eq!(degraded.note(Cause::Schema, None, Some("no table"), began + REPEAT_WARNING_EVERY), Change::Warn);
    }

    #[test]
    fn cause_holds_while_any_kind_has_it() {
        let (mut degraded, now, kind) = (Degraded::default(), Instant::now(), Kind::new("acceptance").unwrap());
        degraded.note(Cause::OrdersContract, Some(&Kind::ORDER), Some("no order"), now);
        degraded.note(Cause::OrdersContract, Some(&kind), Some("two rows"), now);
        degraded.note(Cause::OrdersContract, Some(&Kind::ORDER), None, now);
        assert!(degraded.holds(Cause::OrdersContract));
        assert_eq!(degraded.lines(None), ["degraded: orders_contract: kind acceptance: two rows"]);
        assert_eq!(degraded.note(Cause::OrdersContract, Some(&kind), None, now), Change::Cleared);
        assert!(!degraded.holds(Cause::OrdersContract));
    }

    #[test]
    fn fixed_cause_clears_once() {
        let (mut degraded, now) = (Degraded::default(), Instant::now());
        assert_eq!(degraded.note(Cause::ReadOnly, None, None, now), Change::Nothing);
        degraded.note(Cause::ReadOnly, None, Some("a standby"), now);
        assert_eq!(degraded.note(Cause::ReadOnly, None, None, now), Change::Cleared);
        assert!(degraded.lines(None).is_empty());
        assert_eq!(degraded.note(Cause::ReadOnly, None, Some("a standby"), now), Change::Warn);
    }
}
