//! The topology of the default settings: each queue's arguments, and the definitions file that is kept of it.
//!
//! Pure: no broker.

use order_timeout_amqp::topology::{Argument, Queue};
use serde_json::Value;

use super::Settings;

#[test]
fn delay_queues_dead_letter_at_least_once() {
    let settings = Settings::defaults();
    let slots = settings.slots();
    for queue in settings.topology().queues.into_iter().chain(slots.all().map(|slot| slot.queue)) {
        assert!(!queue.arguments.contains_key("x-expires"), "{queue:?}");
        if queue.arguments.contains_key("x-dead-letter-exchange") {
            assert_eq!(queue.arguments["x-dead-letter-strategy"], Argument::Text("at-least-once".into()));
            assert_eq!(queue.arguments["x-overflow"], Argument::Text("reject-publish".into()));
        }
    }
}

#[test]
fn queues_without_consumers_have_ttl() {
    let settings = Settings::defaults();
    let queues: Vec<Queue> =
        settings.topology().queues.into_iter().chain(settings.slots().all().map(|slot| slot.queue)).collect();
    let ttl_ms =
        |name: &str| queues.iter().find(|queue| queue.name == name).unwrap().arguments.get("x-message-ttl").cloned();
    assert_eq!(ttl_ms("order.delay.30m.3"), Some(Argument::Number(1_800_100)));
    assert_eq!(ttl_ms("order.wheel.5s-22.00"), Some(Argument::Number(110_000)));
    assert_eq!(ttl_ms("order.wheel.24h-8.07"), Some(Argument::Number(8 * 24 * 3_600_000)));
    for consumed in ["order.timeout", "order.schedule", "order.parked"] {
        assert_eq!(ttl_ms(consumed), None, "{consumed} keeps what it has until it is consumed");
    }
}

#[test]
fn defaults_need_few_queues() {
    let settings = Settings::defaults();
    assert!(settings.topology().queues.len() <= 16, "declared by setup");
    assert!(settings.slots().all().count() < 70, "slots that alarms may need");
}

#[test]
fn lane_queues_share_no_routing_key() {
    let bindings = Settings::defaults().topology().bindings;
    let mut keys: Vec<_> = bindings.iter().map(|b| (&b.exchange, &b.routing_key)).collect();
    let all = keys.len();
    keys.sort_unstable();
    keys.dedup();
    assert_eq!(keys.len(), all);
}

#[test]
fn definitions_json_is_printed_from_here() {
    let printed = Settings::defaults().topology().definitions("orders");
    let kept: Value = serde_json::from_str(include_str!("../../definitions.json")).unwrap();
    // Not assert_eq!: it would print both, 100 kB each.
    assert!(kept == printed, "definitions.json is out of date; run `order-timeout topology > definitions.json`");
}
