//! Step 2, ARM: writes alarms where they wait, by the database's clock: the only writer of wheel slots.
//!
//! Tries until the broker confirms, for the old message is acknowledged only after that.

use std::time::Duration;

use tracing::warn;

use crate::alarm::Receipt;
use crate::clock::DatabaseClock;
use crate::config::{Settings, Strategy};
use crate::confirm::{ConfirmedPublisher, Outgoing};
use crate::desk::{ArmJob, Wanted};
use crate::envelope::{self, Entry, Stamp, Wait};
use crate::order::Moment;
use crate::patience::Pauses;
use crate::topology::Names;
use crate::wheel::{Place, Wheel};

/// Writes alarms into the wheel, or into the delayed exchange where that is the strategy.
#[derive(Debug, Clone)]
pub struct Armer {
    names: Names,
    delays: Delays,
    lead: Duration,
    confirmed: ConfirmedPublisher,
}

#[derive(Debug, Clone)]
enum Delays {
    Wheel(Wheel),
    DelayedExchange,
}

impl Armer {
    /// # Panics
    /// If the rings of `settings` do not mesh, which `Settings::validate` refuses.
    #[must_use]
    pub fn new(settings: &Settings, confirmed: ConfirmedPublisher) -> Self {
        let delays = match settings.delay.strategy {
            Strategy::DeadLetter => Delays::Wheel(settings.wheel().expect("validated settings have rings that mesh")),
            Strategy::DelayedExchange => Delays::DelayedExchange,
        };
        Self { names: Names::new(&settings.namespace), delays, lead: settings.delay.lead, confirmed }
    }

    /// Writes all jobs and returns their receipts when every one is confirmed, however long that takes. Cancel safe:
    /// what was not reported is still unacknowledged at the broker.
    pub async fn write(&self, mut jobs: Vec<ArmJob>, clock: DatabaseClock) -> Vec<Receipt> {
        let receipts = jobs.iter().map(|job| job.receipt).collect();
        let mut pauses = Pauses::new();
        loop {
            // Computed anew for each try: the time it took to fail is not waited for again.
            let messages = jobs.iter().map(|job| self.message(job, clock.now())).collect();
            let answers = self.confirmed.publish_all(messages).await;
            let mut first_fault = None;
            let mut answers = answers.into_iter();
            jobs.retain(|_| match answers.next().expect("one answer for each message") {
                Ok(()) => false,
                Err(fault) => {
                    first_fault.get_or_insert(fault);
                    true
                }
            });
            let Some(fault) = first_fault else { return receipts };
            warn!(alarms = jobs.len(), %fault, "alarms could not be written into the wheel; they stay unacknowledged and are tried again");
            tokio::time::sleep(pauses.next_pause()).await;
        }
    }

    fn message(&self, job: &ArmJob, now: Moment) -> Outgoing {
        let alarm = &job.alarm;
        let stamp =
            Stamp { attempt: alarm.attempt, born: alarm.born.unwrap_or(now), traceparent: alarm.traceparent.clone() };
        envelope::address(&alarm.due, self.entry(job, now), stamp)
    }

    fn entry(&self, job: &ArmJob, now: Moment) -> Entry {
        let wheel = match &self.delays {
            Delays::Wheel(wheel) => wheel,
            Delays::DelayedExchange => {
                let wake_at = match job.wanted {
                    Wanted::BeforeDeadline => job.alarm.deadline() - self.lead,
                    Wanted::NotBefore(moment) => moment,
                };
                return Entry::delayed(&self.names, wake_at.since(now));
            }
        };
        let place = match job.wanted {
            Wanted::BeforeDeadline => wheel.place(job.alarm.deadline(), now),
            Wanted::NotBefore(moment) => wheel.place_retry(moment, now),
        };
        match place {
            Place::Due => Entry::due(&self.names),
            Place::Slot { ring, slot, ttl } => Entry {
                exchange: self.names.wheel(),
                routing_key: Names::slot_key(&wheel.rings()[ring].name, slot),
                wait: Wait::Ttl(ttl),
            },
        }
    }
}
