//! Look-ahead: when the sweep also reads the orders that fall due next, so that they are closed on time without an alarm,
//! and which of them this worker leaves to others.
//!
//! Pure, like the whole engine. Reads nothing itself: it only says how far the sweep's next page reaches.

use std::time::Duration;

use super::Policy;
use crate::order::{OrderId, Overdue, SweepReach, Timestamp};

/// How long after a session is open again orders are still read ahead: their alarms may wait behind those of orders that
/// were closed meanwhile.
const CATCH_UP: Duration = Duration::from_secs(30);

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

    fn has(self, order_id: &OrderId) -> bool {
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
    /// Whether a page was read without a session since one was last opened.
    read_without_session: bool,
    /// Until when orders are still read ahead after a session is open again.
    catches_up_until: Option<Timestamp>,
}

impl LookAhead {
    pub fn new() -> Self {
        Self { share: Share::ALL, read_without_session: false, catches_up_until: None }
    }

    pub fn set_share(&mut self, share: Share) {
        self.share = share;
    }

    pub fn session_opened(&mut self, now: Timestamp) {
        if std::mem::take(&mut self.read_without_session) {
            self.catches_up_until = Some(now + CATCH_UP);
        }
    }

    /// A pause must not become longer by the time that the clock was set back.
    pub fn clock_was_set_back(&mut self, now: Timestamp) {
        self.catches_up_until = self.catches_up_until.map(|until| until.min(now + CATCH_UP));
    }

    /// How far the next page reaches. `has_room`: whether more orders may be held.
    pub fn reach(&self, policy: &Policy, is_consuming: bool, has_room: bool, now: Timestamp) -> SweepReach {
        match self.is_active(policy, is_consuming, now) {
            true if has_room => SweepReach::Ahead(policy.look_ahead),
            true => SweepReach::Overdue(Duration::ZERO),
            false => SweepReach::Overdue(policy.sweep_grace),
        }
    }

    /// A page is read.
    pub fn page_asked(&mut self, is_consuming: bool) {
        self.read_without_session |= !is_consuming;
    }

    pub fn is_active(&self, policy: &Policy, is_consuming: bool, now: Timestamp) -> bool {
        policy.has_no_alarms || !is_consuming || self.catches_up_until.is_some_and(|until| now < until)
    }

    /// Whether another worker has read this order ahead and will close it. Once it is overdue by the grace, that worker
    /// may have ended.
    pub fn leaves_to_others(&self, order: &Overdue, policy: &Policy, now: Timestamp) -> bool {
        !self.share.has(&order.order_id) && now < order.deadline + policy.sweep_grace
    }
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
