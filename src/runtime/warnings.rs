//! The event loop's log lines about the database and about orders: collected, and logged at most once a minute each.
//!
//! Only logs: metrics and health are the recorder's.

use order_timeout_core::engine::{Batch, Engine, Snapshot, Unavailable};
use order_timeout_core::order::{CloseError, ClosedBy, OrderId};
use tracing::{info, warn};

use crate::observe::logging::LogThrottle;

#[derive(Debug, Default)]
pub(super) struct Warnings {
    closes_nothing: bool,
    not_swept: Warning<String>,
    /// How many orders were closed without their alarms since this was last logged.
    without_alarm: Warning<u64>,
    /// An overdue order that the sweep could not close, and why.
    stuck: Warning<Option<(OrderId, String)>>,
}

/// The subject of a warning, collected since it was last logged.
#[derive(Debug, Default)]
struct Warning<T> {
    about: T,
    throttle: LogThrottle,
}

impl<T: Default + PartialEq> Warning<T> {
    /// What to log now, if there is anything and it was not logged just before.
    fn take_due(&mut self) -> Option<T> {
        let is_due = self.about != T::default() && self.throttle.is_due();
        is_due.then(|| std::mem::take(&mut self.about))
    }
}

impl Warnings {
    /// Logs at once when the database begins to close nothing, and when it closes again.
    pub fn note_availability(&mut self, snapshot: &Snapshot<'_>) {
        let closes_nothing = matches!(snapshot.unavailable, Some(Unavailable::ClosesNothing(_)));
        match snapshot.unavailable {
            Some(Unavailable::ClosesNothing(why)) if !self.closes_nothing => {
                warn!(why, "the database closes nothing; retrying");
            }
            _ if self.closes_nothing && !closes_nothing => info!("the database closes orders again"),
            _ => {}
        }
        self.closes_nothing = closes_nothing;
    }

    /// The query for overdue orders failed.
    pub fn note_not_swept(&mut self, why: &str) {
        why.clone_into(&mut self.not_swept.about);
        if let Some(why) = self.not_swept.take_due() {
            warn!(why, "the query for overdue orders failed; retrying");
        }
    }

    /// So many orders were closed whose alarms had not arrived.
    pub fn note_without_alarm(&mut self, orders: u64) {
        self.without_alarm.about += orders;
        self.log_without_alarm();
    }

    /// A batch failed. Only an order that was alone in it has caused the error.
    pub fn note_failed_batch(&mut self, batch: &Batch, fault: &CloseError) {
        match (fault, batch.by, &batch.items[..]) {
            (CloseError::Unavailable(_), ..) => {}
            (fault, ClosedBy::Sweep, [item]) => {
                self.stuck.about = Some((item.alarm.order_id().clone(), fault.to_string()));
            }
            _ => {}
        }
    }

    /// Logs what was collected, even if nothing else happens.
    pub fn log_due(&mut self, engine: &Engine, snapshot: &Snapshot<'_>) {
        self.log_without_alarm();
        self.log_stuck(engine, snapshot);
    }

    fn log_without_alarm(&mut self) {
        if let Some(orders) = self.without_alarm.take_due() {
            warn!(
                orders,
                "orders were closed whose alarms had not arrived in time; until alarms do, orders are read from the database shortly before they are due; is every order scheduled, is the broker keeping up, or does a publisher flood it?"
            );
        }
    }

    /// Without an alarm, nothing is parked for orders that the sweep cannot close.
    fn log_stuck(&mut self, engine: &Engine, snapshot: &Snapshot<'_>) {
        // Most orders that fail once are closed a moment later.
        self.stuck.about.take_if(|(order_id, _)| !engine.is_backed_off(order_id));
        if let Some((order_id, why)) = self.stuck.take_due().flatten() {
            let orders = snapshot.backed_off;
            warn!(orders, %order_id, %why, "overdue orders cannot be closed, this one among them; retrying at most five minutes apart");
        }
    }
}
