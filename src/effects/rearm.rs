//! Step 2, rearm: publishes alarms to where they wait, by the database's clock. The only publisher of alarms into wheel
//! slots; `slots.rs` declares those that are missing.
//!
//! Reports which alarms the broker has confirmed, because the old message is acknowledged only after that, and which
//! not.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use order_timeout_amqp::envelope::{self, Delay, Route};
use order_timeout_amqp::publisher::{ConfirmedPublisher, Outgoing, PublishError};
use order_timeout_amqp::topology::Names;
use order_timeout_core::alarm::{Rearm, Receipt, Wanted};
use order_timeout_core::clock::DatabaseClock;
use order_timeout_core::delay::wheel::Wheel;
use order_timeout_core::delay::{Placement, Strategy};
use order_timeout_core::order::{Deadline, Timestamp};
use order_timeout_core::with_causes;
use tracing::{debug, warn};

use super::slots::SlotDeclarer;
use crate::config::Settings;
use crate::observe::logging::LogThrottle;

/// Publishes alarms into the wheel, or into the delayed exchange if that is the strategy.
#[derive(Debug, Clone)]
pub struct Rearmer {
    names: Names,
    router: Router,
    confirmed: ConfirmedPublisher,
    slots: SlotDeclarer,
    fault_throttle: Arc<Mutex<LogThrottle>>,
}

/// Chooses where an alarm waits. Pure.
#[derive(Debug, Clone)]
struct Router {
    delays: Delays,
    lead: Duration,
    longest_retry: Duration,
}

/// The results of the rearms.
#[derive(Debug, Default)]
pub struct Written {
    /// Written, with the broker's confirm.
    pub confirmed: Vec<Receipt>,
    /// Refused individually: their queue is missing, or accepts nothing.
    pub refused: Vec<Rearm>,
    /// The broker is unavailable, or does not answer.
    pub failed: Vec<Rearm>,
}

#[derive(Debug, Clone)]
enum Delays {
    Wheel(Wheel),
    DelayedExchange,
}

impl Rearmer {
    /// # Panics
    /// If the rings of `settings` do not mesh, which `Settings::validate` refuses.
    #[must_use]
    pub fn new(settings: &Settings, confirmed: ConfirmedPublisher, slots: SlotDeclarer) -> Self {
        let (names, router) = (settings.names(), Router::new(settings));
        Self { names, router, confirmed, slots, fault_throttle: Arc::default() }
    }

    /// Publishes all of them.
    pub async fn write(&self, rearms: Vec<Rearm>, clock: DatabaseClock) -> Written {
        let (rearms, mut written) = self.declare_slots_for(rearms, clock.now()).await;
        if let Some(fault) = self.publish(rearms, clock, &mut written).await {
            self.log_failures(written.failed.len() + written.refused.len(), &fault);
        }
        written
    }

    /// Returns why the first that was not confirmed was not.
    async fn publish(&self, rearms: Vec<Rearm>, clock: DatabaseClock, written: &mut Written) -> Option<PublishError> {
        // One by one, because each TTL counts from when it is sent: the alarms of a slot expire together, however long
        // publishing takes.
        // By index: with a closure that takes a reference, callers could not spawn this future.
        let messages = (0..rearms.len()).map(|number| {
            let placement = self.place(&rearms[number], clock.now());
            self.message(&rearms[number], &placement, clock.now())
        });
        let results = self.confirmed.publish_all(messages).await;
        let mut first_fault = None;
        for (rearm, result) in rearms.into_iter().zip(results) {
            match result {
                Ok(()) => written.confirmed.push(rearm.receipt),
                Err(fault) => {
                    if matches!(fault, PublishError::Unroutable(_) | PublishError::NoExchange(_)) {
                        self.slots.forget();
                    }
                    if fault.is_broker_wide() { &mut written.failed } else { &mut written.refused }.push(rearm);
                    first_fault.get_or_insert(fault);
                }
            }
        }
        first_fault
    }

    /// Returns the alarms that can be sent, and those whose slot is missing and cannot be declared. By the time an alarm is
    /// sent, another slot may be the right one; the alarm is then returned, and tried again.
    async fn declare_slots_for(&self, rearms: Vec<Rearm>, now: Timestamp) -> (Vec<Rearm>, Written) {
        let place = |rearm: &Rearm| self.place(rearm, now);
        let Err(fault) = self.slots.require(rearms.iter().map(place)).await else {
            return (rearms, Written::default());
        };
        let is_broker_wide = fault.is_broker_wide();
        let fault = with_causes(&fault);
        if self.fault_throttle.lock().expect("no holder panics").is_due() {
            warn!(%fault, "slots of the wheel could not be declared; alarms for them stay unacknowledged and are retried");
        } else {
            debug!(%fault, "slots of the wheel could not be declared");
        }
        let (with_slot, without) = rearms.into_iter().partition(|rearm| !self.slots.is_unknown(&place(rearm)));
        let (refused, failed) = if is_broker_wide { (Vec::new(), without) } else { (without, Vec::new()) };
        (with_slot, Written { refused, failed, ..Written::default() })
    }

    fn log_failures(&self, alarms: usize, fault: &PublishError) {
        let fault = with_causes(fault);
        if self.fault_throttle.lock().expect("no holder panics").is_due() {
            warn!(alarms, %fault, "alarms could not be written into the wheel; they stay unacknowledged and are retried");
        } else {
            debug!(alarms, %fault, "alarms could not be written into the wheel");
        }
    }

    fn place(&self, rearm: &Rearm, now: Timestamp) -> Placement {
        self.router.place(rearm.alarm.deadline(), rearm.wanted, now)
    }

    fn message(&self, rearm: &Rearm, placement: &Placement, now: Timestamp) -> Outgoing {
        let mut alarm = rearm.alarm.clone();
        let route = Route::to(placement, &alarm.alarm.kind, &self.names);
        alarm.returns.due_at = match route.delay {
            Delay::None => None,
            Delay::Ttl(ttl) => Some(now + ttl),
            Delay::XDelayMs(delay_ms) => Some(now + Duration::from_millis(delay_ms)),
        };
        let sender_declares_queue = matches!(placement, Placement::Slot { .. });
        Outgoing { sender_declares_queue, ..envelope::address(alarm, route, now) }
    }
}

impl Router {
    fn new(settings: &Settings) -> Self {
        let delays = match settings.delay.strategy {
            Strategy::DeadLetter => {
                Delays::Wheel(settings.delay.wheel().expect("validated settings have rings that mesh"))
            }
            // Without a broker nothing is rearmed.
            Strategy::DelayedExchange | Strategy::Database => Delays::DelayedExchange,
        };
        Self { delays, lead: settings.delay.lead, longest_retry: settings.retry.longest_wait() }
    }

    fn place(&self, deadline: Deadline, wanted: Wanted, now: Timestamp) -> Placement {
        // A retry's time was computed a while ago. If the clock was set back since, the retry must not wait longer than any
        // retry does, nor longer than the wheel can hold it.
        let wanted = match wanted {
            Wanted::NotBefore(moment) => Wanted::NotBefore(moment.min(now + self.longest_retry)),
            Wanted::BeforeDeadline | Wanted::AtOnce => wanted,
        };
        match (&self.delays, wanted) {
            (_, Wanted::AtOnce) => Placement::Due,
            (Delays::Wheel(wheel), Wanted::BeforeDeadline) => wheel.place(deadline, now),
            (Delays::Wheel(wheel), Wanted::NotBefore(moment)) => wheel.place_retry(moment, now),
            // An early alarm is held.
            (Delays::DelayedExchange, Wanted::BeforeDeadline) => {
                Placement::DelayedExchange((deadline - self.lead).since(now))
            }
            // The header has whole milliseconds; the rest is cut off.
            (Delays::DelayedExchange, Wanted::NotBefore(moment)) => {
                Placement::DelayedExchange(moment.since(now) + Duration::from_micros(999))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use order_timeout_core::kind::Kind;

    use super::*;

    const NOW: Timestamp = Timestamp::from_unix_micros(1_000_000_000_500);

    fn delay_of(setting: &str, wanted: Wanted) -> Delay {
        let settings = Settings::load_with_environment(None, Default::default(), &[setting.to_owned()]).unwrap();
        let placement = Router::new(&settings).place(NOW - Duration::from_secs(1), wanted, NOW);
        Route::to(&placement, &Kind::ORDER, &settings.names()).delay
    }

    #[test]
    fn retry_never_returns_early() {
        let moment = NOW + Duration::from_micros(2_000_001);
        let Delay::Ttl(ttl) = delay_of("delay.lead=5s", Wanted::NotBefore(moment)) else {
            panic!("it waits in no slot")
        };
        assert!((moment..moment + Duration::from_secs(5)).contains(&(NOW + ttl)), "{ttl:?}");
        let delayed = delay_of("delay.strategy=delayed-exchange", Wanted::NotBefore(moment));
        assert_eq!(delayed, Delay::XDelayMs(2_001));
    }

    #[test]
    fn clock_set_back_prolongs_no_retry() {
        let an_hour_ahead = Wanted::NotBefore(NOW + Duration::from_secs(3_600));
        let Delay::Ttl(ttl) = delay_of("delay.lead=5s", an_hour_ahead) else { panic!("it waits in no slot") };
        assert!((Duration::from_secs(32)..Duration::from_secs(37)).contains(&ttl), "{ttl:?}");
        assert_eq!(delay_of("delay.strategy=delayed-exchange", an_hour_ahead), Delay::XDelayMs(32_000));
        assert_eq!(delay_of("delay.lead=5s", Wanted::NotBefore(NOW)), Delay::None);
    }
}
