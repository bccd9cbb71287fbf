//! Re-arming on its own: the properties of the alarms that are written into the wheel.

use std::time::{Duration, Instant};

use lapin::options::BasicGetOptions;
use order_timeout::effects::rearm::Rearmer;
use order_timeout::effects::slots::SlotDeclarer;
use order_timeout_amqp::publisher::{ConfirmedPublisher, WINDOW};
use order_timeout_core::alarm::{Rearm, Receipt, Wanted};
use order_timeout_core::clock::{ClockSample, DatabaseClock};
use order_timeout_core::delay::wheel::WheelPlacement;
use order_timeout_core::message::Alarm;
use order_timeout_core::order::{Deadline, OrderId, Timestamp};
use uuid::Uuid;

use crate::support::away::with_broker_behind;
use crate::support::proxy::{Direction, Proxy};
use crate::support::with_env;

const ANSWER_DELAY: Duration = Duration::from_millis(500);

fn job(deadline: Deadline) -> Rearm {
    let alarm = Alarm { order_id: OrderId::new(Uuid::now_v7().to_string()).unwrap(), deadline };
    Rearm { alarm: alarm.into(), receipt: Receipt { session: 1, channel: 0, tag: 1 }, wanted: Wanted::BeforeDeadline }
}

#[test]
fn alarm_delay_counts_from_sending() {
    with_env(
        |_| {},
        async |env| {
            let network = Proxy::before(&env.settings.amqp.url).await;
            let confirmed = ConfirmedPublisher::connect_lazily(&with_broker_behind(&env, &network).amqp, "rearmer");
            let rearmer = Rearmer::new(&env.settings, confirmed.clone(), SlotDeclarer::new(&env.settings, confirmed));
            let (asked, database) = (Instant::now(), Timestamp::now_by_local_clock());
            let clock = DatabaseClock::new(ClockSample { asked, answered: asked, database });
            // The first alarm opens the connection.
            let first = rearmer.write(vec![job(database + Duration::from_secs(40))], clock).await;
            assert_eq!(first.confirmed.len(), 1);
            let now = clock.now();
            // Of nine windows, four are in flight at once on two channels, so the last one is built after three answers.
            let (crowd, last) = (now + Duration::from_secs(40), now + Duration::from_secs(50));
            let jobs: Vec<Rearm> = std::iter::repeat_n(crowd, 9 * WINDOW - 1).chain([last]).map(job).collect();
            network.delay(Direction::ToClient, ANSWER_DELAY);
            let written = rearmer.write(jobs, clock).await;
            assert_eq!(
                written.confirmed.len(),
                9 * WINDOW,
                "{} refused, {} failed",
                written.refused.len(),
                written.failed.len()
            );

            let wheel = env.settings.delay.wheel().unwrap();
            let WheelPlacement::Slot { ring, slot, ttl } = wheel.place(last, now) else {
                panic!("the alarm waits in no slot")
            };
            let slot = env.settings.slots().find(&wheel.rings()[ring].name, slot).expect("a slot of the wheel");
            let get = env.channel.basic_get(slot.queue.name.as_str().into(), BasicGetOptions { no_ack: true });
            let got = get.await.unwrap().expect("the last alarm").delivery;
            let waits =
                got.properties.expiration().as_ref().expect("a TTL").as_str().parse().map(Duration::from_millis);
            // The alarm leaves together with its slot, so a TTL that is shorter than the slot's shows how late it was
            // sent.
            let sent_after = ttl.saturating_sub(waits.unwrap());
            assert!(sent_after >= 3 * ANSWER_DELAY, "its TTL is that of an alarm sent after {sent_after:?}");
        },
    );
}
