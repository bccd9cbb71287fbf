//! Whether the outboxes can be read and are emptied, judged from each poll.
//!
//! Pure: readings and times are arguments; no I/O.

use std::time::{Duration, Instant};

use order_timeout_core::with_causes;

use crate::outbox::relay::{Backlog, RelayError};

/// How long an outbox may be unreadable before it is reported: a lock or a deadlock is over sooner.
const UNREADABLE_FOR: Duration = Duration::from_secs(2);
/// How long rows may wait in an outbox while none is sent. Events wait for half of that when closers are busy.
const STALLED_FOR: Duration = Duration::from_secs(8);

/// The state of one outbox.
#[derive(Debug)]
pub struct RelayWatch {
    table: &'static str,
    /// Whether rows that the broker refuses are reported elsewhere, as refused events are.
    without_refused: bool,
    /// Since when it cannot be read or written, and why.
    unreadable: Option<(Instant, String)>,
    /// Since when rows wait while none is sent.
    waiting_since: Option<Instant>,
    read: Instant,
    /// Why this worker, as the relay, sent nothing in the last round.
    refusal: Option<String>,
}

impl RelayWatch {
    /// Watches this outbox from `now` on. `without_refused`: whether rows that the broker refuses are reported elsewhere.
    #[must_use]
    pub fn new(table: &'static str, without_refused: bool, now: Instant) -> Self {
        Self { table, without_refused, unreadable: None, waiting_since: None, read: now, refusal: None }
    }

    /// The result of a poll of the outbox. If the whole database failed, it says nothing about the outbox.
    pub fn note_backlog(&mut self, backlog: &Result<Backlog, RelayError>, now: Instant) {
        let backlog = match backlog {
            Ok(backlog) => backlog,
            Err(fault) => return self.note_unreadable(fault, now),
        };
        self.unreadable = None;
        let since_last_poll = now.saturating_duration_since(self.read);
        self.read = now;
        let age = if self.without_refused { backlog.new_age } else { backlog.age };
        let one_was_sent = backlog.last_sent.is_some_and(|ago| ago <= since_last_poll);
        if age.is_zero() || one_was_sent {
            self.waiting_since = (!age.is_zero()).then_some(now);
        } else if self.waiting_since.is_none() {
            // Not by the row's age alone: a long transaction commits rows that are already old.
            self.waiting_since = Some(now.checked_sub(age.min(since_last_poll)).unwrap_or(now));
        }
    }

    fn note_unreadable(&mut self, fault: &RelayError, now: Instant) {
        if fault.is_of_the_whole_database() {
            return;
        }
        self.waiting_since = None;
        let since = self.unreadable.take().map_or(now, |(since, _)| since);
        self.unreadable = Some((since, fault.cause()));
    }

    /// The result of a round, if this worker is the relay.
    pub fn note_refusal(&mut self, refused: Option<&RelayError>) {
        self.refusal = refused.map(|fault| with_causes(fault));
    }

    /// Why the outbox cannot be read, if that lasts.
    #[must_use]
    pub fn why_unreadable(&self, now: Instant) -> Option<String> {
        let (since, why) = self.unreadable.as_ref()?;
        let table = self.table;
        (now.saturating_duration_since(*since) >= UNREADABLE_FOR).then(|| {
            format!("{table} cannot be read, so its rows are not sent: {why}; GRANT SELECT, UPDATE, DELETE ON {table} to the worker's role, or remove what locks the table")
        })
    }

    /// Why none of its rows is sent, if that lasts. `is_ours`: whether this worker is the relay.
    #[must_use]
    pub fn why_stalled(&self, is_ours: bool, now: Instant) -> Option<String> {
        let waited = now.saturating_duration_since(self.waiting_since?);
        if waited < STALLED_FOR {
            return None;
        }
        let why = match (&self.refusal, is_ours) {
            (Some(why), true) => why.as_str(),
            (None, true) => "this worker is the relay and gets no answer",
            (_, false) => {
                "another worker is the relay, or none is: read /readyz of the worker with order_timeout_relaying = 1"
            }
        };
        let (table, waited_s) = (self.table, waited.as_secs() / 10 * 10);
        let at_least = waited_s.max(STALLED_FOR.as_secs());
        Some(format!("rows of {table} have waited for more than {at_least} s and none was sent: {why}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn backlog(age_s: u64, last_sent_s: Option<u64>) -> Result<Backlog, RelayError> {
        let age = age_s as u32 * SECOND;
        Ok(Backlog { age, new_age: age, last_sent: last_sent_s.map(Duration::from_secs) })
    }

    /// The report after one poll a second with these results.
    fn after(polls: impl Iterator<Item = Result<Backlog, RelayError>>) -> Option<String> {
        let mut now = Instant::now();
        let mut watch = RelayWatch::new("event_outbox", true, now);
        for backlog in polls {
            now += SECOND;
            watch.note_backlog(&backlog, now);
        }
        watch.why_stalled(false, now)
    }

    #[test]
    fn outbox_that_sends_nothing_is_stalled() {
        assert_eq!(after((1..7).map(|age_s| backlog(age_s, None))), None);
        let said = after((1..20).map(|age_s| backlog(age_s, Some(age_s + 100)))).unwrap();
        assert!(said.contains("event_outbox") && said.contains("10 s"), "{said}");
    }

    #[test]
    fn old_head_with_progress_is_not_stalled() {
        assert_eq!(after((1..100).map(|age_s| backlog(age_s, Some(0)))), None);
    }

    #[test]
    fn row_committed_late_is_not_stalled() {
        assert_eq!(after((0..10).map(|poll| backlog(if poll < 9 { 0 } else { 600 }, None))), None);
    }

    #[test]
    fn emptied_outbox_is_not_stalled() {
        assert_eq!(after((1..20).map(|age_s| backlog(age_s, None)).chain([backlog(0, Some(0))])), None);
    }
}
