//! Step 2 by itself: what stands on the alarms that are written into the wheel.

use std::time::{Duration, Instant};

use lapin::options::BasicGetOptions;
use order_timeout::alarm::{DeliveredAlarm, Rearm, Receipt, Returns, Wanted};
use order_timeout::clock::{ClockSample, DatabaseClock};
use order_timeout::confirm::{ConfirmedPublisher, WINDOW};
use order_timeout::message::Alarm;
use order_timeout::order::{Deadline, OrderId, Timestamp};
use order_timeout::rearm::Rearmer;
use order_timeout::topology::{Names, Topology};
use order_timeout::wheel::Place;
use uuid::Uuid;

use crate::support::away::behind;
use crate::support::proxy::{Direction, Proxy};
use crate::support::with_env;

const ANSWERS_LATER: Duration = Duration::from_millis(500);

fn job(deadline: Deadline) -> Rearm {
    let alarm = Alarm { order_id: OrderId::new(Uuid::now_v7().to_string()).unwrap(), deadline };
    let alarm =
        DeliveredAlarm { alarm, attempt: 0, first_published_at: None, traceparent: None, returns: Returns::default() };
    Rearm { alarm, receipt: Receipt { session: 1, channel: 0, tag: 1 }, wanted: Wanted::BeforeDeadline }
}

#[test]
fn an_alarm_waits_from_when_it_is_sent_however_many_are_written_before_it() {
    with_env(
        |_| {},
        async |env| {
            let network = Proxy::before(&env.settings.amqp.url).await;
            let confirmed = ConfirmedPublisher::connect_lazily(&behind(&env, &network).amqp, "rearmer");
            let rearmer = Rearmer::new(&env.settings, confirmed);
            let (asked, database) = (Instant::now(), Timestamp::now_by_local_clock());
            let clock = DatabaseClock::new(ClockSample { asked, answered: asked, database });
            // Connects.
            let first = rearmer.write(vec![job(database + Duration::from_secs(40))], clock).await;
            assert_eq!(first.confirmed.len(), 1);
            let now = clock.now();
            // Of nine windows, four are on their way at once, on two channels, so the last is made after three answers.
            let (crowd, last) = (now + Duration::from_secs(40), now + Duration::from_secs(50));
            let jobs: Vec<Rearm> = std::iter::repeat_n(crowd, 9 * WINDOW - 1).chain([last]).map(job).collect();
            network.delay(Direction::ToClient, ANSWERS_LATER);
            let written = rearmer.write(jobs, clock).await;
            assert_eq!(
                written.confirmed.len(),
                9 * WINDOW,
                "{} refused, {} failed",
                written.refused.len(),
                written.failed.len()
            );

            let wheel = env.settings.wheel().unwrap();
            let Place::Slot { ring, slot, ttl } = wheel.place(last, now) else { panic!("it waits in no slot") };
            let key = Names::slot_key(&wheel.rings()[ring].name, slot);
            let bindings = Topology::new(&env.settings).bindings;
            let slot = bindings.iter().find(|binding| binding.routing_key == key).expect("a slot's binding");
            let get = env.channel.basic_get(slot.destination.name().into(), BasicGetOptions { no_ack: true });
            let got = get.await.unwrap().expect("the last alarm").delivery;
            let waits =
                got.properties.expiration().as_ref().expect("a TTL").as_str().parse().map(Duration::from_millis);
            // It leaves when its slot does, so whatever it waits for less has passed before it was sent.
            let sent_after = ttl.saturating_sub(waits.unwrap());
            assert!(sent_after >= 3 * ANSWERS_LATER, "as if it had been sent after {sent_after:?}");
        },
    );
}
