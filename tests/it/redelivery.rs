//! The broker's delivery counts and death headers do no harm: an alarm that was returned many times is not discarded,
//! and a rearmed alarm carries no headers of the previous one.

use std::time::Duration;

use lapin::message::BasicGetMessage;
use lapin::options::{BasicGetOptions, BasicRejectOptions, QueueDeclareOptions, QueueDeleteOptions};
use lapin::types::AMQPValue;
use lapin::{BasicProperties, Channel};
use order_timeout_amqp::connect;
use order_timeout_amqp::topology::DUE_KEY;
use order_timeout_testkit::away::expiring_queue_arguments;
use order_timeout_testkit::figures::{Figures, serve_http, wait_for_figure};
use order_timeout_testkit::{TestEnv, wait_for};

const SECOND: Duration = Duration::from_secs(1);
/// RabbitMQ 4 drops a message after this many returns, unless its queue says otherwise.
const USUAL_DELIVERY_LIMIT: usize = 20;

/// The only message of a queue; it may still be in flight to it.
async fn take(env: &TestEnv, channel: &Channel, queue: &str) -> BasicGetMessage {
    wait_for("the message in its queue", async || env.depth(queue).await == 1).await;
    channel.basic_get(queue.into(), BasicGetOptions { no_ack: false }).await.unwrap().expect("it has no other consumer")
}

/// Behaves like a worker that crashes over the message.
async fn take_and_crash(env: &TestEnv, queue: &str) {
    let connection = connect::connect(&env.settings.amqp, "crashing").await.unwrap();
    let channel = connection.create_channel().await.unwrap();
    take(env, &channel, queue).await;
    connection.close(200, "crashed".into()).await.unwrap();
}

/// A queue beside ours, with these arguments, and this message in it.
async fn declare_with_a_message(env: &TestEnv, arguments: &[(&str, AMQPValue)], body: &[u8]) -> String {
    let queue = format!("{}.beside", env.names().timeout());
    let mut table = expiring_queue_arguments();
    for (key, value) in arguments {
        table.insert((*key).into(), value.clone());
    }
    let options = QueueDeclareOptions { durable: true, ..Default::default() };
    env.channel().queue_declare(queue.as_str().into(), options, table).await.unwrap();
    env.publish_raw("", &queue, body, BasicProperties::default()).await;
    queue
}

async fn delete(env: &TestEnv, queue: &str) {
    env.channel().queue_delete(queue.into(), QueueDeleteOptions::default()).await.unwrap();
}

#[test]
fn often_redelivered_alarm_still_closes_order() {
    TestEnv::builder().settings(|settings| settings.worker.hold_max = 60 * SECOND).run(async |env| {
        let order = env.order(15 * SECOND).await;
        env.deliver([&order]).await;
        let limit = AMQPValue::LongInt(i32::try_from(USUAL_DELIVERY_LIMIT).unwrap());
        let beside = declare_with_a_message(&env, &[("x-delivery-limit", limit)], b"given up").await;
        for _ in 0..=USUAL_DELIVERY_LIMIT {
            take_and_crash(&env, &env.names().timeout()).await;
            take_and_crash(&env, &beside).await;
        }
        assert_eq!(env.take_out(&beside).await.len(), 0, "the crashes are counted");
        let worker = env.worker().await;
        wait_for("the close", async || env.status(&order).await == "closed").await;
        assert_eq!(env.count("SELECT count(*) FROM orders WHERE closed_by = 'alarm'").await, 1);
        worker.stop().await;
        delete(&env, &beside).await;
        env.assert_drained().await;
        assert_eq!(env.parked().await, []);
    });
}

/// Closing an order of this article takes three seconds, during which a closer is busy.
async fn close_slowly(env: &TestEnv, article: &'static str) {
    env.stock(article, 10).await;
    let trigger = format!(
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
             PERFORM pg_sleep(3) FROM order_items WHERE order_id = NEW.id AND article_id = '{article}';
             RETURN NEW; END $$;
         CREATE TRIGGER slow BEFORE UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION slow()"
    );
    sqlx::raw_sql(sqlx::AssertSqlSafe(trigger)).execute(&env.pool).await.unwrap();
}

#[test]
fn lost_queue_redelivers_no_closed_alarm() {
    TestEnv::builder().settings(serve_http).run(async |env| {
        close_slowly(&env, "slow").await;
        let worker = env.worker().await;
        // Delivered first and due later, so that one frame acknowledges all of them: a closed channel may drop the last
        // of several single acknowledgements.
        let orders = env.orders(100, 5 * SECOND / 2).await;
        env.deliver(&orders).await;
        let slow = env.orders_of("slow", 1, SECOND).await;
        env.deliver(&slow).await;
        // Their acknowledgements wait for the closer that is still busy.
        wait_for_figure(&worker, "orders_closed_total{by=\"alarm\"}", |closed| closed >= 100.0).await;
        delete(&env, &env.names().schedule()).await;
        wait_for_figure(&worker, "sessions_opened_total", |opened| opened >= 2.0).await;
        // Behind everything that is redelivered.
        let last = env.orders(1, SECOND).await;
        env.deliver(&last).await;
        wait_for("every order's close", async || env.closed().await == 102).await;
        let again = Figures::of(&worker).await.get("close_results_total{outcome=\"already_closed\"}");
        assert!(again <= 1.0, "{again} of them were delivered again; only the slow one may be");
        worker.stop().await;
        env.assert_nothing_left_undone().await;
    });
}

/// The names of the headers that record dead-lettering.
fn deaths(message: &BasicGetMessage) -> Vec<String> {
    let headers = message.delivery.properties.headers().clone().unwrap_or_default();
    headers.inner().keys().map(ToString::to_string).filter(|name| name.contains("-death")).collect()
}

/// The wheel's slot that holds an alarm.
async fn occupied_slot(env: &TestEnv) -> Option<String> {
    env.depths("wheel.").await.into_iter().find_map(|(slot, depth)| (depth == 1).then_some(slot))
}

#[test]
fn rearmed_alarm_has_no_death_headers() {
    TestEnv::builder().run(async |env| {
        // From a queue with a TTL, like a lane, but much too early, like the alarm of an extended order.
        let order = env.order(9 * SECOND).await;
        let dead_letter = [
            ("x-message-ttl", AMQPValue::LongInt(1)),
            ("x-dead-letter-exchange", AMQPValue::LongString(env.names().due().into())),
            ("x-dead-letter-routing-key", AMQPValue::LongString(DUE_KEY.into())),
        ];
        let beside = declare_with_a_message(&env, &dead_letter, &order.body()).await;
        let early = take(&env, env.channel(), &env.names().timeout()).await;
        assert!(deaths(&early).contains(&"x-death".to_owned()), "{:?}", early.delivery.properties);
        early.delivery.acker.reject(BasicRejectOptions { requeue: true }).await.unwrap();

        let worker = env.worker().await;
        wait_for("the alarm in a slot", async || occupied_slot(&env).await.is_some()).await;
        let slot = occupied_slot(&env).await.unwrap();
        let armed = take(&env, env.channel(), &slot).await;
        assert_eq!(deaths(&armed), Vec::<String>::new());
        assert_eq!(armed.delivery.data, order.body(), "the same alarm");
        armed.delivery.acker.reject(BasicRejectOptions { requeue: true }).await.unwrap();
        wait_for("the close", async || env.status(&order).await == "closed").await;
        worker.stop().await;
        delete(&env, &beside).await;
        env.assert_drained().await;
    });
}
