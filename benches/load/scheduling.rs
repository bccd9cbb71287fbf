//! Schedules the alarms of a run: as a shop does with the publisher, or, with trace contexts, as one that traces.
//!
//! Chooses no delay: the lanes do.

use order_timeout_amqp::envelope::{self, Route};
use order_timeout_amqp::publisher::ConfirmedPublisher;
use order_timeout_amqp::topology::Names;
use order_timeout_client::Publisher;
use order_timeout_core::alarm::DeliveredAlarm;
use order_timeout_core::delay::DelaySettings;
use order_timeout_core::kind::Kind;
use order_timeout_core::message::Alarm;
use order_timeout_core::order::Timestamp;
use uuid::Uuid;

use crate::bench_env::{BenchEnv, OrderDeadline};

/// One trace of so many is sampled, as shops with many requests do; the context of the others says that they are not.
const SAMPLED_ONE_IN: u128 = 100;

/// What publishes alarms.
pub enum Scheduler {
    Publisher(Publisher),
    /// The publisher of AMQP takes no trace context from a shop, so the header is written here.
    Traced {
        confirmed: ConfirmedPublisher,
        delay: DelaySettings,
        names: Names,
    },
}

impl Scheduler {
    pub async fn connect(env: &BenchEnv<'_>, is_traced: bool) -> anyhow::Result<Self> {
        if !is_traced {
            return Ok(Self::Publisher(env.publisher().await?));
        }
        Ok(Self::Traced {
            confirmed: ConfirmedPublisher::connect(&env.settings.amqp, "load").await?,
            delay: env.settings.delay.clone(),
            names: env.settings.names(),
        })
    }

    pub async fn schedule_all(&self, alarms: Vec<OrderDeadline>) -> anyhow::Result<()> {
        match self {
            Self::Publisher(publisher) => Ok(publisher.schedule_all(alarms).await?),
            Self::Traced { confirmed, delay, names } => {
                let messages = alarms.into_iter().map(|(order_id, deadline)| {
                    let now = Timestamp::now_by_local_clock();
                    let placement = delay.place(&order_id, deadline, now);
                    let route = Route::to(&placement, &Kind::ORDER, names);
                    let alarm = Alarm::new(order_id, deadline).into();
                    envelope::address(DeliveredAlarm { traceparent: Some(trace_context()), ..alarm }, route, now)
                });
                confirmed.publish_all(messages).await.into_iter().try_for_each(|sent| sent.map_err(Into::into))
            }
        }
    }
}

fn trace_context() -> String {
    let trace = Uuid::now_v7().as_u128();
    let (span, is_sampled) = (fastrand::u64(1..), trace.is_multiple_of(SAMPLED_ONE_IN));
    format!("00-{trace:032x}-{span:016x}-{:02x}", u8::from(is_sampled))
}
