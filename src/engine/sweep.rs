//! The safety net's bookkeeping: when to look for overdue orders, from where, and whom to leave alone.
//!
//! Pure. A pass walks the deadline index page by page to its end, so that orders which cannot be closed never hide
//! those behind them; such an order is left alone for a while that grows, in memory.

use std::collections::HashMap;
use std::time::Duration;

use super::Policy;
use crate::order::{Deadline, OrderId, Overdue, SweepPage, SweepPlace, SweptPage, Timestamp};

/// How long an order is left alone after its first failure; it doubles up to [`LONGEST_REST`] where the order is to blame.
/// A moment, for the first may have been a deadlock.
const FIRST_REST: Duration = Duration::from_millis(250);
pub(super) const LONGEST_REST: Duration = Duration::from_secs(300);
/// The same for one that alone meets a timeout: it may be its own trigger, and may be a disk that is full for a while.
pub(super) const LONGEST_BLAMELESS_REST: Duration = Duration::from_secs(8);

/// How many passes in a row may end early. Every eighth goes to the end, so that no crowd hides anybody for long.
const PASSES_CUT_SHORT: u32 = 7;

/// So many orders are remembered that needed no close. A statement that finds more of them again than that has the others
/// looked at in each pass.
const MOST_SETTLED: usize = 100_000;

/// Of so many that a pass finds, one at most is to be tried: then such a pass may take a tenth of the time, and rests for so
/// many times as long as it took.
const FEW_OF: usize = 10;
const REST_OF_A_PASS: u32 = 9;
const LONGEST_REST_OF_A_PASS: Duration = Duration::from_secs(4);

/// The state of the sweep.
#[derive(Debug)]
pub(super) struct Sweep {
    next_at: Option<Timestamp>,
    pass_began: Timestamp,
    asking: bool,
    after: Option<SweepPlace>,
    /// Whether this pass began behind those that the last whole one left alone.
    is_short: bool,
    /// How many orders this whole pass has found so far, and how many of them are to be tried.
    found: usize,
    to_try: usize,
    /// Where a short pass begins, and until when passes are short.
    behind: Option<(SweepPlace, Timestamp)>,
    /// Where a whole pass goes on that gave way to a short one.
    paused: Option<SweepPlace>,
    /// When a pass that reaches the newest overdue orders last began or ended.
    looked_behind_at: Timestamp,
    cut_short: u32,
    failures: u32,
    backed_off: HashMap<OrderId, BackedOff>,
    /// Whom somebody else had when they were tried, and when each was last seen overdue.
    busy: HashMap<OrderId, Timestamp>,
    /// Orders that needed no close when they were tried.
    settled: HashMap<OrderId, Settled>,
    /// When nobody was left alone any longer.
    looked_again_at: Option<Timestamp>,
    /// The deadline of the first order of the last pass.
    oldest: Option<Deadline>,
}

/// What became of an overdue order when it was last tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LastTry {
    /// It was not tried, as far as is known.
    None,
    Busy,
    Failed,
}

/// An order that could not be closed.
#[derive(Debug, Clone, Copy)]
struct BackedOff {
    until: Timestamp,
    failures: u32,
    /// When it was last seen overdue. One that is not seen for a whole pass is forgotten.
    seen: Timestamp,
}

/// An order that was overdue and needed no close. Not seen for a whole pass, as is usual, it is forgotten.
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
            behind: None,
            paused: None,
            looked_behind_at: never,
            cut_short: 0,
            failures: 0,
            backed_off: HashMap::new(),
            busy: HashMap::new(),
            settled: HashMap::new(),
            looked_again_at: None,
            oldest: None,
        }
    }

    /// When the next page is wanted; `None` while one is being fetched.
    pub fn ready_at(&self) -> Option<Timestamp> {
        self.next_at.filter(|_| !self.asking)
    }

    /// The page that is wanted now, if one is. `broker_is_here`: without the broker no alarm can come, so there is
    /// nothing to wait for.
    pub fn page(&mut self, policy: &Policy, broker_is_here: bool, now: Timestamp) -> Option<SweepPage> {
        let Some(next_at) = self.next_at else {
            // The first pass gives the alarms that waited for this worker a moment to be delivered.
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
        let grace = if broker_is_here { policy.sweep_grace } else { Duration::ZERO };
        Some(SweepPage { grace, after: self.after.clone(), limit: policy.sweep_page })
    }

    /// At the front, or behind those that a whole pass has just left alone.
    fn begin_pass(&mut self, now: Timestamp) {
        (self.pass_began, self.looked_behind_at) = (now, now);
        (self.found, self.to_try) = (0, 0);
        self.paused = None;
        let place = self.behind.as_ref().filter(|(_, until)| *until > now).map(|(place, _)| place.clone());
        self.is_short = place.is_some();
        self.after = place;
    }

    /// A long whole pass pauses for a short one: orders that fall due meanwhile do not wait for its end.
    fn give_way(&mut self, policy: &Policy, now: Timestamp) {
        if let Some((place, _)) = &self.behind
            && !self.is_short
            && now.since(self.looked_behind_at) >= policy.sweep_every
        {
            self.paused = self.after.replace(place.clone());
            self.is_short = true;
        }
    }

    /// And goes on where it was. Returns whether there was one.
    fn go_on_where_it_was(&mut self, now: Timestamp) -> bool {
        self.after = self.paused.take();
        self.is_short &= self.after.is_none();
        self.looked_behind_at = now;
        self.after.is_some()
    }

    /// Takes note of a page. Returns those of it that are not being left alone.
    pub fn found(&mut self, page: SweptPage, policy: &Policy, now: Timestamp) -> Vec<Overdue> {
        self.asking = false;
        self.failures = 0;
        if self.after.is_none() {
            self.oldest = page.orders.first().map(|overdue| overdue.deadline);
        }
        let before = self.after.take();
        let last = page.next.clone().or_else(|| page.orders.last().map(place_of)).or_else(|| before.clone());
        // A statement that does not go on where it was told to would never come to an end.
        self.after = page.next.filter(|next| before.is_none_or(|before| is_behind(next, &before)));
        let is_last = self.after.is_none();
        let found = page.orders.len();
        let wanted: Vec<Overdue> = page.orders.into_iter().filter(|overdue| self.wants(overdue, now)).collect();
        if !self.is_short {
            self.found += found;
            self.to_try += wanted.len();
        }
        if !is_last {
            self.give_way(policy, now);
        } else if !self.go_on_where_it_was(now) {
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
        let rest = (now.since(began) * REST_OF_A_PASS).min(LONGEST_REST_OF_A_PASS);
        // Orders that fall due meanwhile are behind its last row, and are looked for as often as before.
        let finds_few = self.to_try * FEW_OF <= self.found;
        // Even where the next one begins at once it gives way to those behind.
        let until = if finds_few { now + rest } else { now };
        self.behind = last.filter(|_| rest > policy.sweep_every).map(|last| (last, until));
    }

    /// Takes note that this order is overdue still. Returns whether it is not being left alone.
    fn wants(&mut self, overdue: &Overdue, now: Timestamp) -> bool {
        let order_id = &overdue.order_id;
        if let Some(seen) = self.busy.get_mut(order_id) {
            *seen = now;
        }
        if let Some(settled) = self.settled.get_mut(order_id) {
            settled.seen = now;
            // With another deadline it is another matter.
            if settled.until > now && settled.deadline == overdue.deadline {
                return false;
            }
        }
        let Some(backed_off) = self.backed_off.get_mut(order_id) else { return true };
        backed_off.seen = now;
        backed_off.until <= now
    }

    /// What lies behind this page can wait.
    pub fn cut_short(&mut self, policy: &Policy, now: Timestamp) {
        if self.after.is_some() && self.cut_short < PASSES_CUT_SHORT {
            self.cut_short += 1;
            self.end_pass(policy, now);
        }
    }

    /// The next begins at the front, when it is due.
    fn end_pass(&mut self, policy: &Policy, now: Timestamp) {
        self.after = None;
        self.next_at = Some((self.pass_began + policy.sweep_every).max(now));
    }

    /// The database did not answer: the pass begins anew after a pause. A short one, for the sweep may be all there is,
    /// and what fell due meanwhile is to be closed within a second of the database's return.
    pub fn not_found(&mut self, policy: &Policy, now: Timestamp) {
        self.asking = false;
        self.after = None;
        let pause = policy.doubling(self.failures).clamp(policy.sweep_every, 2 * policy.sweep_every);
        self.next_at = Some(now + pause.mul_f64(policy.pause_share));
        self.failures = self.failures.saturating_add(1);
    }

    /// This order could not be closed: leave it alone for a while, for `longest` at most. A failure that may not make it
    /// rest for longer does not count for those that may.
    pub fn leave_alone(&mut self, order_id: OrderId, longest: Duration, now: Timestamp) {
        let failures = self.backed_off.get(&order_id).map_or(0, |backed_off| backed_off.failures);
        let rest = FIRST_REST * 2_u32.saturating_pow(failures.min(11));
        let failures = if rest < longest { failures + 1 } else { failures };
        self.backed_off.insert(order_id, BackedOff { until: now + rest.min(longest), failures, seen: now });
    }

    /// Somebody else has this order, or its article. That one may be a worker that cannot close it either.
    pub fn note_busy(&mut self, order_id: OrderId, now: Timestamp) {
        self.busy.insert(order_id, now);
    }

    /// This order needs no close. The first two times it may be a row that was changed meanwhile; found overdue ever again,
    /// with this deadline, it is left alone for a while that grows up to `longest`.
    pub fn settle(&mut self, order_id: OrderId, deadline: Deadline, longest: Duration, now: Timestamp) {
        self.backed_off.remove(&order_id);
        self.busy.remove(&order_id);
        if self.settled.len() >= MOST_SETTLED && !self.settled.contains_key(&order_id) {
            return;
        }
        let known = self.settled.get(&order_id).filter(|settled| settled.deadline == deadline);
        let times = known.map_or(0, |settled| settled.times) + 1;
        let rest = match known {
            None => Duration::ZERO,
            // Longer than it took to come back: of a great many that takes its time, and there are the others.
            Some(known) => {
                let doubling = FIRST_REST * 2_u32.saturating_pow((times - 2).min(11));
                doubling.max(2 * now.since(known.tried)).min(longest)
            }
        };
        self.settled.insert(order_id, Settled { deadline, until: now + rest, times, tried: now, seen: now });
    }

    /// Nobody is left alone any longer. Not more often than each would be tried anyhow: that some are closed need not mean
    /// that all can be.
    pub fn look_again_at_all(&mut self, now: Timestamp) {
        if self.looked_again_at.is_none_or(|at| now.since(at) >= LONGEST_REST) {
            self.looked_again_at = Some(now);
            self.leave_nobody_alone(now);
        }
    }

    fn leave_nobody_alone(&mut self, now: Timestamp) {
        for backed_off in self.backed_off.values_mut() {
            backed_off.until = now.min(backed_off.until);
        }
    }

    /// A failure stands until the order is closed, whoever has had it since.
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

    /// The next page is wanted now, and nobody is left alone any longer.
    pub fn clock_was_set_back(&mut self, now: Timestamp) {
        self.next_at = self.next_at.map(|at| now.min(at));
        self.pass_began = now.min(self.pass_began);
        self.looked_again_at = None;
        self.leave_nobody_alone(now);
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
        self.behind = None;
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

/// As far as can be told: how ids are sorted the database knows.
fn is_behind(place: &SweepPlace, other: &SweepPlace) -> bool {
    place.deadline > other.deadline || (place.deadline == other.deadline && place.id != other.id)
}
