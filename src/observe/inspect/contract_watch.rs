//! Checks that the two statements of the orders contract agree: the close's outcomes for orders that the sweep found,
//! orders that are found again although the close has settled them, unsorted pages, and results outside the contract.
//! Also that the close statement closes no order before the deadline that it returns.
//!
//! Pure: queries, results and times are arguments. Sees the sweep's pages and batches, and of other batches only
//! early closes and results outside the contract. Keeps a sample: it must name one order, not all of them.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use order_timeout_core::clock::DatabaseClock;
use order_timeout_core::engine::{Batch, BatchResult};
use order_timeout_core::order::{
    CloseOutcome, CloseResult, ClosedBy, Deadline, OddAnswer, OrderId, Outcome, SweepPage, SweepPlace, SweptPage,
};

/// The most swept orders that are kept.
const SAMPLE_SIZE: usize = 1_000;
/// The number of pages that must contain an order again: a single one may be a row that was changed meanwhile.
const FOUND_AGAIN: u32 = 2;
/// How long a violation is reported even after a valid result: other orders may have valid results.
const REPORTED_FOR: Duration = Duration::from_secs(8);
/// How long a violation is reported without recurring, even if there was no result at all.
const NOT_REPORTED_AFTER: Duration = Duration::from_secs(300);

/// How much earlier than its deadline an order must be closed to be a violation: less may be the error of the worker's
/// estimate of the database's time.
const EARLY_BY: Duration = Duration::from_secs(1);
/// The violation of closing before the deadline.
const EARLY: &str = "early";

/// The observed violations of the contract.
#[derive(Debug)]
pub struct ContractWatch {
    close: String,
    overdue: String,
    closes: HashMap<OrderId, SampledClose>,
    /// Of the closes since the clock was read, the one with the latest deadline.
    latest_close: Option<Close>,
    /// The page that was requested last, and when.
    after: Option<SweepPlace>,
    asked: Instant,
    /// When the last pass over all pages began.
    pass_began: Instant,
    /// By kind.
    violations: BTreeMap<&'static str, Violation>,
}

/// An order that was closed, and its deadline by then.
#[derive(Debug)]
struct Close {
    order_id: OrderId,
    deadline: Deadline,
    at: Instant,
}

/// The close's outcome for an order that the sweep had found.
#[derive(Debug)]
struct SampledClose {
    outcome: Outcome,
    deadline: Deadline,
    at: Instant,
    seen: Instant,
    found_again: u32,
}

/// A violation of the contract.
#[derive(Debug)]
struct Violation {
    why: String,
    last: Instant,
    /// Whether a valid result of the same kind followed.
    was_valid_since: bool,
}

impl Violation {
    fn holds(&self, now: Instant) -> bool {
        let lasted = now.saturating_duration_since(self.last);
        lasted < REPORTED_FOR || (!self.was_valid_since && lasted < NOT_REPORTED_AFTER)
    }
}

impl ContractWatch {
    /// `close` and `overdue`: the names of the statements, by their settings and files.
    #[must_use]
    pub fn new(close: String, overdue: String, now: Instant) -> Self {
        let (closes, violations) = (HashMap::new(), BTreeMap::new());
        Self { close, overdue, closes, latest_close: None, after: None, asked: now, pass_began: now, violations }
    }

    /// The sweep requests a page.
    pub fn page_asked(&mut self, page: &SweepPage, now: Instant) {
        self.after.clone_from(&page.after);
        self.asked = now;
        if page.after.is_none() {
            // An order that a whole pass did not find is no longer overdue.
            let began = std::mem::replace(&mut self.pass_began, now);
            self.closes.retain(|_, close| close.seen >= began);
        }
    }

    /// The sweep has received the page.
    pub fn page_found(&mut self, page: &SweptPage, now: Instant) {
        if let Some(why) = self.why_unsorted(page) {
            self.note("unsorted", why, now);
        } else if page.orders.windows(2).any(|pair| pair[0].deadline < pair[1].deadline) {
            self.note_valid("unsorted");
        }
        if self.closes.is_empty() {
            return;
        }
        for overdue in &page.orders {
            let Some(close) = self.closes.get_mut(&overdue.order_id) else { continue };
            if close.deadline != overdue.deadline {
                // Its row has changed since.
                self.closes.remove(&overdue.order_id);
            } else if close.at < self.asked {
                close.found_again += 1;
                close.seen = now;
            }
        }
    }

    fn why_unsorted(&self, page: &SweptPage) -> Option<String> {
        let overdue = &self.overdue;
        if let Some(pair) = page.orders.windows(2).find(|pair| pair[0].deadline > pair[1].deadline) {
            let (first, second) = (&pair[0].order_id, &pair[1].order_id);
            return Some(format!(
                "{overdue} returns order {first} before order {second}, which has an earlier deadline, so the sweep may never reach the others: ORDER BY the deadline, then the id, both ascending"
            ));
        }
        let (after, first) = (self.after.as_ref()?, page.orders.first()?);
        let goes_back = first.deadline < after.deadline
            || page.orders.iter().any(|one| one.deadline == after.deadline && one.order_id.as_str() == after.id);
        goes_back.then(|| {
            format!(
                "{overdue} returns order {} on the page that begins after order {}: return rows with (deadline, id) > ($2, $3) only",
                first.order_id, after.id
            )
        })
    }

    /// A batch has its result.
    pub fn answered(&mut self, batch: &Batch, result: &BatchResult, now: Instant) {
        let Ok(findings) = result else { return };
        self.note_closes(findings, now);
        if !self.violations.is_empty() && findings.values().any(Result::is_ok) {
            for kind in OddAnswer::KINDS {
                self.note_valid(kind);
            }
        }
        if batch.by != ClosedBy::Sweep {
            return;
        }
        for item in &batch.items {
            let (order_id, deadline) = (item.alarm.order_id(), item.alarm.deadline());
            let outcome = match findings.get(order_id) {
                Some(Ok(found)) => found.outcome,
                Some(Err(_)) => continue,
                None => Outcome::Unknown,
            };
            if outcome == Outcome::Busy || (self.closes.len() >= SAMPLE_SIZE && !self.closes.contains_key(order_id)) {
                continue;
            }
            let known = self.closes.get(order_id).filter(|known| known.outcome == outcome);
            let found_again = known.map_or(0, |known| known.found_again);
            let close = SampledClose { outcome, deadline, at: now, seen: now, found_again };
            self.closes.insert(order_id.clone(), close);
        }
    }

    /// Keeps the close with the latest deadline. An alarm carries the deadline of when it was scheduled; if that was moved
    /// since, only the close can tell.
    fn note_closes(&mut self, findings: &HashMap<OrderId, CloseResult>, now: Instant) {
        for (order_id, finding) in findings {
            match finding {
                Ok(CloseOutcome { outcome: Outcome::Closed, deadline: Some(deadline) })
                    if self.latest_close.as_ref().is_none_or(|latest| latest.deadline < *deadline) =>
                {
                    self.latest_close = Some(Close { order_id: order_id.clone(), deadline: *deadline, at: now });
                }
                // It compares deadlines, as a close after the deadline does not show.
                Ok(CloseOutcome { outcome: Outcome::NotDue, .. }) => self.note_valid(EARLY),
                _ => {}
            }
        }
    }

    /// The database's clock was read. Closes are judged only then, because the clock may have been set since the previous
    /// reading.
    pub fn clock_read(&mut self, clock: &DatabaseClock, now: Instant) {
        let Some(Close { order_id, deadline, at }) = self.latest_close.take() else { return };
        let closed_at = clock.at_instant(at);
        if deadline > closed_at + EARLY_BY {
            let why = format!(
                "{} closed order {order_id} {} s before its deadline: let it compare the deadline that the order has by then, not the alarm's, with the database's clock, and return not_due",
                self.close,
                deadline.since(closed_at).as_secs(),
            );
            self.note(EARLY, why, now);
        }
    }

    /// The close statement has returned a result outside the contract.
    pub fn odd_answer(&mut self, odd: &OddAnswer, now: Instant) {
        let why = format!("{} {}", self.close, odd);
        self.note(odd.kind(), why, now);
    }

    fn note(&mut self, kind: &'static str, why: String, now: Instant) {
        self.violations.insert(kind, Violation { why, last: now, was_valid_since: false });
    }

    fn note_valid(&mut self, kind: &'static str) {
        if let Some(violation) = self.violations.get_mut(kind) {
            violation.was_valid_since = true;
        }
    }

    /// The current violations, one sentence for each kind.
    #[must_use]
    pub fn why(&self, now: Instant) -> Option<String> {
        let violations = self.violations.values().filter(|violation| violation.holds(now));
        let violations = violations.map(|violation| violation.why.clone());
        let mut by_outcome: BTreeMap<&str, (Outcome, &OrderId, usize)> = BTreeMap::new();
        for (order_id, close) in self.closes.iter().filter(|(_, close)| close.found_again >= FOUND_AGAIN) {
            let entry = by_outcome.entry(close.outcome.as_str()).or_insert((close.outcome, order_id, 0));
            // Always the same order, so that the sentence does not change.
            entry.1 = order_id.min(entry.1);
            entry.2 += 1;
        }
        let contradictions =
            by_outcome.into_values().map(|(outcome, order_id, _)| self.contradiction(outcome, order_id));
        let sentences: Vec<String> = violations.chain(contradictions).collect();
        (!sentences.is_empty()).then(|| sentences.join("; "))
    }

    fn contradiction(&self, outcome: Outcome, order_id: &OrderId) -> String {
        let (close, overdue, word) = (&self.close, &self.overdue, outcome.as_str());
        match outcome {
            Outcome::Closed => format!(
                "{close} returns {word} for order {order_id}, but {overdue} finds it overdue again: the order is still open; correct the UPDATE, or the condition on the status"
            ),
            Outcome::Malformed => format!(
                "{close} returns {word} for order {order_id}, which {overdue} finds in the table, so it is never closed: let the check of the id's form accept every id that the table can contain"
            ),
            Outcome::Unknown => format!(
                "{overdue} finds order {order_id}, but {close} returns no row for it, so it is never closed: let both read the same table, and check row security"
            ),
            Outcome::NotDue => format!(
                "{overdue} finds order {order_id} overdue, but {close} returns {word}, so it is never closed: let both compare the same deadline with the same clock, and check that no trigger suppresses the UPDATE"
            ),
            Outcome::Paid | Outcome::AlreadyClosed | Outcome::Claimed | Outcome::Closing | Outcome::Busy => format!(
                "{overdue} finds order {order_id} overdue again and again, but {close} returns {word}: let it return only orders that are to be closed, by their status"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use order_timeout_core::alarm::DeliveredAlarm;
    use order_timeout_core::clock::ClockSample;
    use order_timeout_core::engine::{LockMode, Origin, WorkItem};
    use order_timeout_core::message::Alarm;
    use order_timeout_core::order::{Overdue, SweepReach, Timestamp};

    use super::*;

    const TICK: Duration = Duration::from_millis(250);
    const NOW: Timestamp = Timestamp::from_unix_micros(1_000_000_000);

    struct Run {
        watch: ContractWatch,
        now: Instant,
    }

    fn run() -> Run {
        let now = Instant::now();
        Run { watch: ContractWatch::new("close.sql".into(), "overdue.sql".into(), now), now }
    }

    fn overdue(id: &str, deadline: i64) -> Overdue {
        Overdue { order_id: OrderId::new(id).unwrap(), deadline: Timestamp::from_unix_micros(deadline) }
    }

    impl Run {
        fn page(&mut self, after: Option<SweepPlace>, orders: &[(&str, i64)]) {
            self.watch.page_asked(&SweepPage { reach: SweepReach::Overdue(TICK), after, limit: 9 }, self.now);
            self.now += TICK;
            let orders = orders.iter().map(|(id, deadline)| overdue(id, *deadline)).collect();
            self.watch.page_found(&SweptPage { orders, next: None }, self.now);
        }

        fn close(&mut self, id: &str, deadline: i64, outcome: Outcome) {
            let alarm = Alarm::new(OrderId::new(id).unwrap(), Timestamp::from_unix_micros(deadline));
            let alarm = DeliveredAlarm::from(alarm);
            let order_id = alarm.order_id().clone();
            let item = WorkItem {
                alarm,
                origin: Origin::Swept,
                pauses: 0,
                disagreements: 0,
                paused_since: None,
                has_token: false,
            };
            let batch = Batch { by: ClosedBy::Sweep, items: vec![item], lock_mode: LockMode::NoWait };
            let found =
                (outcome != Outcome::Unknown).then_some((order_id, Ok(CloseOutcome { outcome, deadline: None })));
            self.watch.answered(&batch, &Ok(found.into_iter().collect()), self.now);
            self.now += TICK;
        }

        /// An alarm's order has this outcome, and this deadline in its row.
        fn wake(&mut self, id: &str, outcome: Outcome, in_the_row: Timestamp) {
            let batch = Batch { by: ClosedBy::Alarm, items: Vec::new(), lock_mode: LockMode::NoWait };
            let found = CloseOutcome { outcome, deadline: Some(in_the_row) };
            self.watch.answered(&batch, &Ok([(OrderId::new(id).unwrap(), Ok(found))].into()), self.now);
        }

        /// The database's clock has this time.
        fn read_clock(&mut self, database: Timestamp) {
            let sample = ClockSample { asked: self.now, answered: self.now, database };
            self.watch.clock_read(&DatabaseClock::new(sample), self.now);
        }

        fn why(&self) -> Option<String> {
            self.watch.why(self.now)
        }
    }

    #[test]
    fn order_found_after_close_is_reported() {
        for (outcome, word) in [
            (Outcome::Closed, "still open"),
            (Outcome::Paid, "returns paid"),
            (Outcome::Closing, "returns closing"),
            (Outcome::AlreadyClosed, "returns already_closed"),
            (Outcome::NotDue, "same clock"),
            (Outcome::Malformed, "form"),
            (Outcome::Unknown, "row security"),
        ] {
            let mut run = run();
            run.page(None, &[("17", 1)]);
            run.close("17", 1, outcome);
            run.page(None, &[("17", 1)]);
            assert_eq!(run.why(), None, "once may be a row that was changed meanwhile");
            run.page(None, &[("17", 1)]);
            let why = run.why().unwrap();
            assert!(why.contains("order 17") && why.contains(word) && why.contains("close.sql"), "{why}");
            for _ in 0..3 {
                run.page(None, &[]);
            }
            assert_eq!(run.why(), None, "it is no longer found");
        }
    }

    #[test]
    fn page_requested_before_close_proves_nothing() {
        let mut run = run();
        run.watch.page_asked(&SweepPage { reach: SweepReach::Overdue(TICK), after: None, limit: 9 }, run.now);
        run.close("17", 1, Outcome::Closed);
        for _ in 0..3 {
            let orders = vec![overdue("17", 1)];
            run.watch.page_found(&SweptPage { orders, next: None }, run.now);
        }
        assert_eq!(run.why(), None);
    }

    #[test]
    fn reopened_order_with_new_deadline_is_fine() {
        let mut run = run();
        run.close("17", 1, Outcome::Closed);
        for _ in 0..3 {
            run.page(None, &[("17", 2)]);
        }
        assert_eq!(run.why(), None);
    }

    #[test]
    fn unsorted_page_is_reported_until_sorted() {
        let mut run = run();
        run.page(None, &[("1", 1), ("3", 3), ("2", 2)]);
        let why = run.why().unwrap();
        assert!(why.contains("order 3 before order 2") && why.contains("ORDER BY"), "{why}");
        run.now += REPORTED_FOR;
        run.page(None, &[("1", 1)]);
        assert!(run.why().is_some(), "one row proves nothing");
        run.page(None, &[("1", 1), ("2", 2)]);
        assert_eq!(run.why(), None);
    }

    #[test]
    fn page_that_starts_over_is_reported() {
        let mut run = run();
        let after = Some(SweepPlace { deadline: Timestamp::from_unix_micros(5), id: "5".into() });
        run.page(after.clone(), &[("5", 5), ("6", 6)]);
        assert!(run.why().unwrap().contains("($2, $3)"));
        let mut run = self::run();
        run.page(after, &[("6", 5), ("7", 6)]);
        assert_eq!(run.why(), None);
    }

    #[test]
    fn close_before_deadline_is_reported() {
        let mut run = run();
        run.wake("17", Outcome::Closed, NOW);
        run.wake("17", Outcome::Closed, NOW + EARLY_BY);
        run.read_clock(NOW);
        assert_eq!(run.why(), None, "the worker's clock may be off by as much");
        run.wake("18", Outcome::Closed, NOW + Duration::from_secs(3_600));
        run.wake("19", Outcome::Closed, NOW);
        assert_eq!(run.why(), None, "the database's clock may have been set");
        run.read_clock(NOW);
        let why = run.why().unwrap();
        assert!(why.contains("closed order 18 3600 s before") && why.contains("not_due"), "{why}");
        run.now += REPORTED_FOR;
        run.wake("20", Outcome::Closed, NOW);
        run.read_clock(NOW);
        assert!(run.why().is_some(), "a close after the deadline proves nothing");
        run.wake("21", Outcome::NotDue, NOW + TICK);
        assert_eq!(run.why(), None);
    }

    #[test]
    fn clock_that_was_set_is_no_violation() {
        let mut run = run();
        let deadline = NOW + Duration::from_secs(3_600);
        run.wake("17", Outcome::Closed, deadline);
        run.read_clock(deadline);
        assert_eq!(run.why(), None);
    }

    #[test]
    fn odd_result_lasts_until_valid_ones() {
        let mut run = run();
        let odd = OddAnswer::Word { order_id: OrderId::new("17").unwrap(), word: Some("expired".into()) };
        run.watch.odd_answer(&odd, run.now);
        let why = run.why().unwrap();
        assert!(why.starts_with("close.sql") && why.contains("\"expired\"") && why.contains("order 17"), "{why}");
        run.now += REPORTED_FOR;
        assert!(run.why().is_some(), "no result since");
        run.watch.odd_answer(&odd, run.now);
        run.close("18", 1, Outcome::Closed);
        assert!(run.why().is_some(), "other orders may have valid results");
        run.now += REPORTED_FOR;
        assert_eq!(run.why(), None);
    }
}
