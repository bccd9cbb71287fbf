//! The safety net's bookkeeping: when to look for overdue orders, from where, and which to skip for a while.
//!
//! Pure. A pass walks the deadline index page by page to its end, so that orders which cannot be closed never hide
//! those behind them; such an order is backed off for a time that grows, in memory.

use std::collections::HashMap;
use std::time::Duration;

use super::Policy;
use super::order_backoff::{MAX_BACKOFF, overdue_backoff};
use crate::order::{Deadline, OrderId, Overdue, SweepPage, SweepPlace, SweepReach, SweptPage, Timestamp};

/// How many passes in a row may end early. Every eighth goes to the end, so that a burst never hides other orders for
/// long.
const MAX_PASSES_CUT_SHORT: u32 = 7;

/// How many orders that needed no close are remembered. If a statement finds more of them again, the others are looked
/// at in each pass.
const MAX_SETTLED: usize = 100_000;

/// If at most one in so many found orders is to be tried, a whole pass may take a tenth of the time: the pause after it
/// is this many times as long as the pass took.
const FEW_IS_ONE_IN: usize = 10;
const PASS_PAUSE_FACTOR: u32 = 9;
const MAX_PASS_PAUSE: Duration = Duration::from_secs(4);

/// The state of the sweep.
#[derive(Debug)]
pub(super) struct Sweep {
    next_at: Option<Timestamp>,
    pass_began: Timestamp,
    asking: bool,
    after: Option<SweepPlace>,
    /// Whether this pass began behind the orders that the last whole pass found and skipped.
    is_short: bool,
    /// How many orders this whole pass has found so far, and how many of them are to be tried.
    found: usize,
    to_try: usize,
    /// Where a short pass begins, and until when passes are short.
    short_pass: Option<(SweepPlace, Timestamp)>,
    /// Where a whole pass resumes after it was paused for a short one.
    paused: Option<SweepPlace>,
    /// When a pass that reaches the newest overdue orders last began or ended.
    newest_looked_at: Timestamp,
    cut_short: u32,
    failures: u32,
    backed_off: HashMap<OrderId, BackedOff>,
    /// Orders that another session had locked when they were tried, and when each was last seen overdue.
    busy: HashMap<OrderId, Timestamp>,
    /// Orders that needed no close when they were tried.
    settled: HashMap<OrderId, Settled>,
    /// When all backoffs were last ended early.
    backoffs_ended_at: Option<Timestamp>,
    /// The deadline of the first order of the last pass.
    oldest: Option<Deadline>,
}

/// How the last try of an overdue order ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LastTry {
    /// It was not tried, or the try is forgotten.
    None,
    Busy,
    Failed,
}

/// An order that could not be closed.
#[derive(Debug, Clone, Copy)]
struct BackedOff {
    until: Timestamp,
    failures: u32,
    /// When it was last seen overdue. An order that is not seen for a whole pass is forgotten.
    seen: Timestamp,
}

/// An order that was overdue and needed no close. It is forgotten when it is not seen for a whole pass, which is usual.
#[derive(Debug, Clone, Copy)]
struct Settled {
    deadline: Deadline,
    until: Timestamp,
    times: u32,
    tried: Timestamp,
    seen: Timestamp,
}

impl Sweep {
    pub fn new() -> Self {
        let never = Timestamp::from_unix_micros(0);
        Self {
            next_at: None,
            pass_began: never,
            asking: false,
            after: None,
            is_short: false,
            found: 0,
            to_try: 0,
            short_pass: None,
            paused: None,
            newest_looked_at: never,
            cut_short: 0,
            failures: 0,
            backed_off: HashMap::new(),
            busy: HashMap::new(),
            settled: HashMap::new(),
            backoffs_ended_at: None,
            oldest: None,
        }
    }

    /// When the next page is wanted; `None` while one is being fetched.
    pub fn ready_at(&self) -> Option<Timestamp> {
        self.next_at.filter(|_| !self.asking)
    }

    /// Whether a page is wanted now.
    pub fn is_due(&self, now: Timestamp) -> bool {
        self.ready_at().is_some_and(|at| at <= now)
    }

    /// The page that is wanted now, if any.
    pub fn page(&mut self, policy: &Policy, reach: SweepReach, now: Timestamp) -> Option<SweepPage> {
        let Some(next_at) = self.next_at else {
            // The first pass gives the alarms that waited for this worker some time to be delivered.
            self.next_at = Some(now + policy.sweep_every);
            return None;
        };
        if self.asking || now < next_at {
            return None;
        }
        if self.after.is_none() {
            self.begin_pass(now);
        }
        self.asking = true;
        Some(SweepPage { reach, after: self.after.clone(), limit: policy.sweep_page })
    }

    /// Begins a pass at the front, or behind the orders that a whole pass has just skipped.
    fn begin_pass(&mut self, now: Timestamp) {
        (self.pass_began, self.newest_looked_at) = (now, now);
        (self.found, self.to_try) = (0, 0);
        self.paused = None;
        let place = self.short_pass.as_ref().filter(|(_, until)| *until > now).map(|(place, _)| place.clone());
        self.is_short = place.is_some();
        self.after = place;
    }

    /// Pauses a long whole pass for a short one: orders that fall due meanwhile do not wait for its end.
    fn pause_for_short_pass(&mut self, policy: &Policy, now: Timestamp) {
        if let Some((place, _)) = &self.short_pass
            && !self.is_short
            && now.since(self.newest_looked_at) >= policy.sweep_every
        {
            self.paused = self.after.replace(place.clone());
            self.is_short = true;
        }
    }

    /// Resumes a paused whole pass. Returns whether there was one.
    fn resume_paused(&mut self, now: Timestamp) -> bool {
        self.after = self.paused.take();
        self.is_short &= self.after.is_none();
        self.newest_looked_at = now;
        self.after.is_some()
    }

    /// Takes in a page. Returns its orders that are not backed off.
    pub fn take_page(&mut self, page: SweptPage, policy: &Policy, now: Timestamp) -> Vec<Overdue> {
        self.asking = false;
        self.failures = 0;
        if self.after.is_none() {
            self.oldest = page.orders.first().map(|first| first.deadline).filter(|deadline| *deadline <= now);
        }
        let before = self.after.take();
        let last = page.next.clone().or_else(|| page.orders.last().map(place_of)).or_else(|| before.clone());
        // A statement that does not continue where it was told to would never end.
        self.after = page.next.filter(|next| before.is_none_or(|before| is_behind(next, &before)));
        let is_last = self.after.is_none();
        let found = page.orders.len();
        let wanted: Vec<Overdue> = page.orders.into_iter().filter(|overdue| self.wants(overdue, now)).collect();
        if !self.is_short {
            self.found += found;
            self.to_try += wanted.len();
        }
        if !is_last {
            self.pause_for_short_pass(policy, now);
        } else if !self.resume_paused(now) {
            self.end_pass(policy, now);
            self.cut_short = 0;
            if !self.is_short {
                self.end_whole_pass(last, policy, now);
            }
        }
        wanted
    }

    fn end_whole_pass(&mut self, last: Option<SweepPlace>, policy: &Policy, now: Timestamp) {
        let began = self.pass_began;
        self.backed_off.retain(|_, backed_off| backed_off.seen >= began);
        self.busy.retain(|_, seen| *seen >= began);
        self.settled.retain(|_, settled| settled.seen >= began);
        let pause = (now.since(began) * PASS_PAUSE_FACTOR).min(MAX_PASS_PAUSE);
        // Orders that fall due meanwhile are behind its last row, and are looked for as often as before.
        let finds_few = self.to_try * FEW_IS_ONE_IN <= self.found;
        // Even if the next one begins at once, it is paused for the orders behind.
        let until = if finds_few { now + pause } else { now };
        // An order that is created meanwhile may be due before those that were read ahead; and what another worker was to
        // close is taken over when its grace is over.
        let after_grace = SweepPlace { deadline: now - policy.sweep_grace, id: String::new() };
        let last = last.map(|last| if last.deadline > now { after_grace } else { last });
        self.short_pass = last.filter(|_| pause > policy.sweep_every).map(|last| (last, until));
    }

    /// Records that this order is still overdue. Returns whether it is to be tried.
    fn wants(&mut self, overdue: &Overdue, now: Timestamp) -> bool {
        let order_id = &overdue.order_id;
        if let Some(seen) = self.busy.get_mut(order_id) {
            *seen = now;
        }
        if let Some(settled) = self.settled.get_mut(order_id) {
            settled.seen = now;
            // A new deadline makes it a new case.
            if settled.until > now && settled.deadline == overdue.deadline {
                return false;
            }
        }
        let Some(backed_off) = self.backed_off.get_mut(order_id) else { return true };
        backed_off.seen = now;
        backed_off.until <= now
    }

    /// Ends the pass after this page; what is behind it can wait.
    pub fn cut_short(&mut self, policy: &Policy, now: Timestamp) {
        if self.after.is_some() && self.cut_short < MAX_PASSES_CUT_SHORT {
            self.cut_short += 1;
            self.end_pass(policy, now);
        }
    }

    /// The next pass begins at the front, when it is due.
    fn end_pass(&mut self, policy: &Policy, now: Timestamp) {
        self.after = None;
        self.next_at = Some((self.pass_began + policy.sweep_every).max(now));
    }

    /// The database did not answer: the pass begins again after a pause. A short one, because the sweep may be the only
    /// way to find overdue orders, and what fell due meanwhile is to be closed within a second of the database's
    /// return.
    pub fn page_failed(&mut self, policy: &Policy, now: Timestamp) {
        self.asking = false;
        self.after = None;
        let pause = policy.doubling(self.failures).clamp(policy.sweep_every, 2 * policy.sweep_every);
        self.next_at = Some(now + pause.mul_f64(policy.pause_share));
        self.failures = self.failures.saturating_add(1);
    }

    /// This order could not be closed: backs it off, for `longest` at most. A failure whose backoff is capped by
    /// `longest` does not lengthen later backoffs with a higher cap.
    pub fn back_off(&mut self, order_id: OrderId, longest: Duration, now: Timestamp) {
        let failures = self.backed_off.get(&order_id).map_or(0, |backed_off| backed_off.failures);
        let pause = overdue_backoff(failures);
        let failures = if pause < longest { failures + 1 } else { failures };
        self.backed_off.insert(order_id, BackedOff { until: now + pause.min(longest), failures, seen: now });
    }

    /// Another session has locked this order or its article. That may be a worker that cannot close it either.
    pub fn note_busy(&mut self, order_id: OrderId, now: Timestamp) {
        self.busy.insert(order_id, now);
    }

    /// This order needs no close. The first two times its row may have changed meanwhile; found overdue ever again with
    /// this deadline, it is backed off for a time that grows up to `longest`.
    pub fn note_settled(&mut self, order_id: OrderId, deadline: Deadline, longest: Duration, now: Timestamp) {
        self.backed_off.remove(&order_id);
        self.busy.remove(&order_id);
        if self.settled.len() >= MAX_SETTLED && !self.settled.contains_key(&order_id) {
            return;
        }
        let known = self.settled.get(&order_id).filter(|settled| settled.deadline == deadline);
        let times = known.map_or(0, |settled| settled.times) + 1;
        let pause = match known {
            None => Duration::ZERO,
            // Longer than it took to come back: a great many of them take time, and other orders wait.
            Some(known) => {
                let doubling = overdue_backoff(times - 2);
                doubling.max(2 * now.since(known.tried)).min(longest)
            }
        };
        self.settled.insert(order_id, Settled { deadline, until: now + pause, times, tried: now, seen: now });
    }

    /// Ends all backoffs. Not more often than each order would be tried anyway: that some orders are closed does not
    /// mean that all can be.
    pub fn end_backoffs_early(&mut self, now: Timestamp) {
        if self.backoffs_ended_at.is_none_or(|at| now.since(at) >= MAX_BACKOFF) {
            self.backoffs_ended_at = Some(now);
            self.end_backoffs(now);
        }
    }

    fn end_backoffs(&mut self, now: Timestamp) {
        for backed_off in self.backed_off.values_mut() {
            backed_off.until = now.min(backed_off.until);
        }
    }

    /// A failure counts until the order is closed, whichever session has locked it since.
    pub fn last_try(&self, order_id: &OrderId) -> LastTry {
        if self.is_backed_off(order_id) {
            LastTry::Failed
        } else if self.busy.contains_key(order_id) {
            LastTry::Busy
        } else {
            LastTry::None
        }
    }

    /// Whether this order could not be closed when it was last tried.
    pub fn is_backed_off(&self, order_id: &OrderId) -> bool {
        self.backed_off.contains_key(order_id)
    }

    /// The next page is wanted now, and all backoffs end.
    pub fn clock_was_set_back(&mut self, now: Timestamp) {
        self.next_at = self.next_at.map(|at| now.min(at));
        self.pass_began = now.min(self.pass_began);
        self.backoffs_ended_at = None;
        self.end_backoffs(now);
        for backed_off in self.backed_off.values_mut() {
            backed_off.seen = now.min(backed_off.seen);
        }
        for seen in self.busy.values_mut() {
            *seen = now.min(*seen);
        }
        for settled in self.settled.values_mut() {
            settled.until = now.min(settled.until);
            settled.seen = now.min(settled.seen);
            settled.tried = now.min(settled.tried);
        }
        self.short_pass = None;
    }

    /// The deadline of the oldest overdue order; `None` if the last pass found none.
    pub fn oldest(&self) -> Option<Deadline> {
        self.oldest
    }

    /// How many orders are overdue and could not be closed.
    pub fn backed_off(&self) -> usize {
        self.backed_off.len()
    }
}

fn place_of(overdue: &Overdue) -> SweepPlace {
    SweepPlace { deadline: overdue.deadline, id: overdue.order_id.as_str().to_owned() }
}

/// As far as can be told here: only the database knows how ids are sorted.
fn is_behind(place: &SweepPlace, other: &SweepPlace) -> bool {
    place.deadline > other.deadline || (place.deadline == other.deadline && place.id != other.id)
}
