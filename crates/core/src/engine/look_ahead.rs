//! Look-ahead: when the sweep also reads the orders that fall due next, so that they are closed on time without an alarm,
//! and which of them this worker leaves to others.
//!
//! Pure, like the whole engine. Reads nothing itself: it only says how far the sweep's next page reaches.

use std::time::Duration;

use super::Policy;
use crate::order::{Deadline, OrderId, Overdue, SweepReach, Timestamp};

/// How long after the last order that was closed without its alarm, and after a session is open again, orders are still read
/// ahead: the alarms of the next ones may wait behind a flood, or behind those of orders that were closed meanwhile.
const CATCH_UP: Duration = Duration::from_secs(30);

/// How long after its return a broker may deliver late what waited meanwhile.
const COMING_BACK: Duration = Duration::from_secs(8);

/// How long an alarm that came in time shows that those of this worker's share may be with other workers.
const IN_TIME_LATELY: Duration = Duration::from_secs(10);

/// Which orders this worker reads ahead, among the live workers of the deployment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    index: u32,
    workers: u32,
}

impl Share {
    /// Of a worker that knows of no other.
    pub const ALL: Self = Self { index: 0, workers: 1 };

    /// The share of the worker with this index, counted from 0, of so many; all orders if it is not among them.
    #[must_use]
    pub const fn new(index: u32, workers: u32) -> Self {
        if index < workers { Self { index, workers } } else { Self::ALL }
    }

    pub(super) fn has(self, order_id: &OrderId) -> bool {
        hash(order_id.as_str()) % self.workers == self.index
    }
}

/// FNV-1a, 32 bits (draft-eastlake-fnv): all workers must agree, whatever version and machine they run on.
fn hash(text: &str) -> u32 {
    text.bytes().fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

/// Whether alarms can be expected, and which orders belong to this worker.
#[derive(Debug)]
pub(super) struct LookAhead {
    share: Share,
    /// When an order was last closed without its alarm, many alarms were last missing, or a page was last read without a session.
    without_alarm: Option<Timestamp>,
    /// When an order was last closed by an alarm that had come before the deadline.
    in_time: Option<Timestamp>,
    /// Since when a session is open.
    session_since: Option<Timestamp>,
    /// How many orders were closed without their alarms, and how many by them, of those whose alarms had to arrive in time.
    missed: u64,
    by_alarm: u64,
}

impl LookAhead {
    pub fn new() -> Self {
        Self { share: Share::ALL, without_alarm: None, in_time: None, session_since: None, missed: 0, by_alarm: 0 }
    }

    pub fn set_share(&mut self, share: Share) {
        self.share = share;
    }

    pub fn session_opened(&mut self, now: Timestamp) {
        self.session_since = Some(now);
    }

    pub fn session_ended(&mut self) {
        self.session_since = None;
    }

    /// An alarm has closed its order in time.
    pub fn note_in_time(&mut self, deadline: Deadline, now: Timestamp) {
        self.in_time = Some(now);
        self.by_alarm += u64::from(self.is_expected(deadline));
    }

    /// An order was closed that was read ahead, and whose alarm has not come to this worker.
    pub fn note_read_ahead(&mut self, deadline: Deadline, now: Timestamp) {
        let others_have_alarms = self.share != Share::ALL && is_within(self.in_time, IN_TIME_LATELY, now);
        if !others_have_alarms {
            self.note_without_alarm(deadline, now);
        }
    }

    /// An order was closed whose alarm has come to no worker in time.
    pub fn note_without_alarm(&mut self, deadline: Deadline, now: Timestamp) {
        self.without_alarm = Some(now);
        self.missed += u64::from(self.is_expected(deadline));
    }

    /// So many alarms are missing shortly before their deadlines that they do not arrive in time.
    pub fn note_missing(&mut self, now: Timestamp) {
        self.without_alarm = Some(now);
    }

    /// Whether an alarm of this deadline must be with a worker of this session before it. Those that were delivered before the
    /// session may be with another worker, as long as alarms are held.
    pub fn must_be_here(&self, deadline: Deadline, policy: &Policy) -> bool {
        self.session_since.is_some_and(|since| deadline >= since + policy.hold_max)
    }

    fn is_expected(&self, deadline: Deadline) -> bool {
        self.session_since.is_some_and(|since| deadline >= since + COMING_BACK)
    }

    /// How many workers share the orders.
    pub fn workers(&self) -> usize {
        self.share.workers as usize
    }

    /// How many orders were closed without their alarms, and how many by them in time, of those that had to be.
    pub fn counts(&self) -> (u64, u64) {
        (self.missed, self.by_alarm)
    }

    /// A pause must not become longer by the time that the clock was set back.
    pub fn clock_was_set_back(&mut self, now: Timestamp) {
        for moment in [&mut self.without_alarm, &mut self.in_time, &mut self.session_since] {
            *moment = moment.map(|moment| moment.min(now));
        }
    }

    /// Alarms come by the broker's clock, which was not set: orders are read without them for a while, and none that was due
    /// before is expected to have one.
    pub fn clock_was_set_ahead(&mut self, now: Timestamp) {
        self.without_alarm = Some(now);
        self.session_since = self.session_since.map(|_| now);
    }

    /// How far the next page reaches. `has_room`: whether more orders may be held.
    pub fn reach(&self, policy: &Policy, is_consuming: bool, has_room: bool, now: Timestamp) -> SweepReach {
        match self.is_active(policy, is_consuming, now) {
            true if has_room => SweepReach::Ahead(policy.look_ahead),
            true => SweepReach::Overdue(Duration::ZERO),
            false => SweepReach::Overdue(policy.sweep_grace),
        }
    }

    /// A page is read. While no session is open no alarm comes, whether or not an order falls due.
    pub fn page_asked(&mut self, is_consuming: bool, now: Timestamp) {
        if !is_consuming {
            self.without_alarm = Some(now);
        }
    }

    pub fn is_active(&self, policy: &Policy, is_consuming: bool, now: Timestamp) -> bool {
        policy.has_no_alarms || !is_consuming || is_within(self.without_alarm, CATCH_UP, now)
    }

    /// Whether another worker has read this order ahead and will close it. Once it is overdue by the grace, that worker
    /// may have ended.
    pub fn leaves_to_others(&self, order: &Overdue, policy: &Policy, now: Timestamp) -> bool {
        !self.share.has(&order.order_id) && now < order.deadline + policy.sweep_grace
    }
}

fn is_within(moment: Option<Timestamp>, time: Duration, now: Timestamp) -> bool {
    moment.is_some_and(|moment| now < moment + time)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_order_belongs_to_one_worker() {
        for workers in 1..6 {
            let mut orders_of = vec![0_u32; workers as usize];
            for n in 0..1_000 {
                let id = OrderId::new(format!("order-{n}")).unwrap();
                let owners: Vec<u32> = (0..workers).filter(|index| Share::new(*index, workers).has(&id)).collect();
                assert_eq!(owners.len(), 1, "{id:?}");
                orders_of[owners[0] as usize] += 1;
            }
            assert!(orders_of.iter().all(|orders| *orders * workers > 700), "{orders_of:?}");
        }
        assert_eq!(Share::new(3, 3), Share::ALL);
    }

    /// Test vectors of draft-eastlake-fnv, appendix C.
    #[test]
    fn hash_is_fnv_1a() {
        assert_eq!((hash(""), hash("a"), hash("foobar")), (0x811c_9dc5, 0xe40c_292c, 0xbf9c_f968));
    }
}
