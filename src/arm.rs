//! Step 2, ARM: writes alarms where they wait, by the database's clock: the only writer of wheel slots.
//!
//! Reports what the broker has confirmed, for the old message is acknowledged only after that, and what it has not.

use std::time::Duration;

use tracing::warn;

use crate::alarm::{ArmJob, Receipt, Wanted};
use crate::clock::DatabaseClock;
use crate::config::{Settings, Strategy};
use crate::confirm::{ConfirmedPublisher, Outgoing};
use crate::envelope::{self, Entry, Stamp, Wait};
use crate::order::Moment;
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

    /// Writes all jobs. Returns the receipts of those that are confirmed, and the jobs that are not.
    pub async fn write(&self, jobs: Vec<ArmJob>, clock: DatabaseClock) -> (Vec<Receipt>, Vec<ArmJob>) {
        let messages = jobs.iter().map(|job| self.message(job, clock.now())).collect();
        let answers = self.confirmed.publish_all(messages).await;
        let (mut confirmed, mut failed) = (Vec::with_capacity(jobs.len()), Vec::new());
        let mut first_fault = None;
        for (job, answer) in jobs.into_iter().zip(answers) {
            match answer {
                Ok(()) => confirmed.push(job.receipt),
                Err(fault) => {
                    first_fault.get_or_insert(fault);
                    failed.push(job);
                }
            }
        }
        if let Some(fault) = first_fault {
            warn!(alarms = failed.len(), %fault, "alarms could not be written into the wheel; they stay unacknowledged and are tried again");
        }
        (confirmed, failed)
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
