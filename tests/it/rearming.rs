//! Re-arming on its own: the properties of the alarms that are written into the wheel.

use std::time::{Duration, Instant};

use lapin::BasicProperties;
use lapin::options::BasicGetOptions;
use lapin::types::{AMQPValue, FieldTable};
use order_timeout::effects::rearm::Rearmer;
use order_timeout::effects::slots::SlotDeclarer;
use order_timeout_amqp::publisher::{ConfirmedPublisher, WINDOW};
use order_timeout_amqp::topology::DUE_KEY;
use order_timeout_core::alarm::{Rearm, Receipt, Wanted};
use order_timeout_core::clock::{ClockSample, DatabaseClock};
use order_timeout_core::delay::Placement;
use order_timeout_core::message::Alarm;
use order_timeout_core::order::{Deadline, OrderId, Timestamp};
use order_timeout_testkit::away::with_broker_behind;
use order_timeout_testkit::proxy::{Direction, Proxy};
use order_timeout_testkit::{TestEnv, wait_for};
use uuid::Uuid;

const ANSWER_DELAY: Duration = Duration::from_millis(500);

fn job(deadline: Deadline) -> Rearm {
    let alarm = Alarm::new(OrderId::new(Uuid::now_v7().to_string()).unwrap(), deadline);
    Rearm { alarm: alarm.into(), receipt: Receipt { session: 1, channel: 0, tag: 1 }, wanted: Wanted::BeforeDeadline }
}

#[test]
fn alarm_delay_counts_from_sending() {
    TestEnv::builder().run(async |env| {
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
        let Placement::Slot { ring, slot, ttl } = wheel.place(last, now) else { panic!("the alarm waits in no slot") };
        let slot = env.settings.slots().find(&ring, slot).expect("a slot of the wheel");
        let get = env.channel().basic_get(slot.queue.name.as_str().into(), BasicGetOptions { no_ack: true });
        let got = get.await.unwrap().expect("the last alarm").delivery;
        let waits = got.properties.expiration().as_ref().expect("a TTL").as_str().parse().map(Duration::from_millis);
        // The alarm leaves together with its slot, so a TTL that is shorter than the slot's shows how late it was
        // sent.
        let sent_after = ttl.saturating_sub(waits.unwrap());
        assert!(sent_after >= 3 * ANSWER_DELAY, "its TTL is that of an alarm sent after {sent_after:?}");
    });
}

/// Quorum queues of RabbitMQ's next version hide a message with this header until the time that it names.
fn with_delivery_time() -> BasicProperties {
    let mut headers = FieldTable::default();
    headers.insert(DELIVERY_TIME.into(), AMQPValue::LongLongInt(253_402_300_799_999));
    BasicProperties::default().with_delivery_mode(2).with_headers(headers)
}

const DELIVERY_TIME: &str = "x-opt-delivery-time";

/// The slot with a message in it.
async fn filled_slot(env: &TestEnv) -> Option<String> {
    env.depths("wheel.").await.into_iter().find_map(|(slot, depth)| (depth > 0).then_some(slot))
}

#[test]
fn rearmed_alarm_has_no_delivery_time() {
    TestEnv::builder().run(async |env| {
        let order = env.order(Duration::from_secs(40)).await;
        env.publish_raw(&env.names().schedule(), "", &order.body(), with_delivery_time()).await;
        let worker = env.worker().await;
        wait_for("the alarm in its slot", async || filled_slot(&env).await.is_some()).await;
        let slot = filled_slot(&env).await.unwrap();
        let get = BasicGetOptions { no_ack: true };
        let got = env.channel().basic_get(slot.into(), get).await.unwrap().expect("the alarm").delivery;
        assert_eq!(Alarm::read(&got.data, None).unwrap().order_id, order.order_id());
        let headers = got.properties.headers().clone().expect("the attempt");
        assert!(!headers.inner().contains_key(DELIVERY_TIME), "{headers:?}");
        worker.stop().await;
    });
}

#[test]
fn alarm_with_delivery_time_closes_order() {
    TestEnv::builder().run(async |env| {
        let worker = env.worker().await;
        let order = env.order(Duration::from_secs(1)).await;
        env.publish_raw(&env.names().due(), DUE_KEY, &order.body(), with_delivery_time()).await;
        wait_for("the close", async || env.closed().await == 1).await;
        env.assert_closed_by_alarms().await;
        worker.stop().await;
    });
}
