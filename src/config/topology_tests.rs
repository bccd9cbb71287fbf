//! The topology of the default settings: each queue's arguments, and the definitions file that is kept of it.
//!
//! Pure: no broker.

use order_timeout_amqp::topology::{Argument, Queue};
use order_timeout_core::kind::Kind;
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

#[test]
fn objects_belong_to_all_or_one() {
    let mut settings = Settings::defaults();
    for name in ["acceptance", "trial"] {
        let kind = settings.kinds.entry(Kind::new(name).unwrap()).or_default();
        kind.lanes = vec!["5m".parse().unwrap()];
    }
    let all = settings.topology();
    let kinds: Vec<Kind> = settings.all_kinds().into_iter().collect();
    let parts: Vec<_> = [all.shared()].into_iter().chain(kinds.iter().map(|kind| all.of_kind(kind))).collect();
    let exchanges: Vec<_> = parts.iter().flat_map(|part| &part.exchanges).collect();
    assert_eq!(exchanges, all.exchanges.iter().collect::<Vec<_>>());
    let count = |queue: &Queue| parts.iter().filter(|part| part.queues.contains(queue)).count();
    assert!(all.queues.iter().all(|queue| count(queue) == 1));
    let count = |binding| parts.iter().filter(|part| part.bindings.contains(binding)).count();
    assert!(all.bindings.iter().all(|binding| count(binding) == 1));
    let of_trial: Vec<&str> = parts[3].queues.iter().map(|queue| queue.name.as_str()).collect();
    assert!(kinds[2].as_str() == "trial" && of_trial[0] == "order.timeout.trial", "{of_trial:?}");
    assert!(of_trial[1..].iter().all(|name| name.starts_with("order.delay.trial.")), "{of_trial:?}");
    let seen = settings.topology().seen_by(&kinds[2]);
    assert_eq!(seen.queues.len(), parts[0].queues.len() + of_trial.len());
}
