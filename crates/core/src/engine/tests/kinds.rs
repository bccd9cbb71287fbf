//! What the engine of one kind does with alarms of other kinds.

use super::*;

fn alarm_of(kind: &str, deadline: Timestamp, source: SourceQueue) -> Input {
    let kind = Kind::new(kind).unwrap();
    let alarm = Alarm { kind, order_id: OrderId::new("a").unwrap(), deadline };
    Input::Delivered(Delivered {
        receipt: Receipt { session: 1, channel: 0, tag: 1 },
        source,
        content: Ok(alarm.into()),
        death: None,
    })
}

fn engine() -> Engine {
    let mut engine = Engine::new(policy());
    engine.handle(Input::SessionOpened(1), at_ms(0));
    engine
}

#[test]
fn alarm_of_other_kind_is_forwarded() {
    for source in [SourceQueue::Inbox, SourceQueue::Timeout] {
        // Due, soon and far: none of them is closed or held here.
        for deadline in [at_ms(0), at_ms(2_000), at_ms(3_600_000)] {
            let mut engine = engine();
            engine.handle(alarm_of("acceptance", deadline, source), at_ms(1_000));
            let actions = engine.poll_actions(at_ms(1_000));
            let [Action::Rearm(rearms)] = &actions[..] else { panic!("{actions:?}") };
            assert_eq!((rearms[0].wanted, rearms[0].alarm.alarm.kind.as_str()), (Wanted::BeforeDeadline, "acceptance"));
            assert_eq!(engine.snapshot(at_ms(1_000)).held, 0);
            let receipt = rearms[0].receipt;
            engine.handle(Input::Rearmed(vec![receipt]), at_ms(1_001));
            assert_eq!(
                engine.poll_actions(at_ms(1_001)),
                [Action::Settle(vec![(receipt, Settlement::Ack)])],
                "acknowledged once it is confirmed"
            );
        }
    }
}

#[test]
fn alarm_of_unknown_kind_is_parked() {
    let mut engine = engine();
    engine.handle(alarm_of("acceptanse", at_ms(2_000), SourceQueue::Inbox), at_ms(1_000));
    let actions = engine.poll_actions(at_ms(1_000));
    let [Action::Park(dead_letters)] = &actions[..] else { panic!("{actions:?}") };
    let (dead_letter, _) = &dead_letters[0];
    assert_eq!((dead_letter.reason, dead_letter.kind.as_str()), (ParkReason::UnknownKind, "acceptanse"));
    assert!(dead_letter.detail.contains("[kinds.acceptanse]"), "{}", dead_letter.detail);
}

#[test]
fn policy_cannot_detain_other_kinds() {
    let mut engine = engine();
    let Input::Delivered(delivered) = alarm_of("acceptance", at_ms(500), SourceQueue::Parked) else { unreachable!() };
    let death = Some(Death { reason: DeathReason::Expired, queue: "order.timeout.acceptance".into() });
    engine.handle(Input::Delivered(Delivered { death, ..delivered }), at_ms(1_000));
    let actions = engine.poll_actions(at_ms(1_000));
    assert!(matches!(&actions[..], [Action::Rearm(_)]), "{actions:?}");
}

#[test]
fn swept_order_has_kind_of_engine() {
    let mut engine = Engine::new(Policy {
        kind: Kind::new("acceptance").unwrap(),
        sweep_every: Duration::from_millis(250),
        ..policy()
    });
    engine.poll_actions(at_ms(0));
    engine.poll_actions(at_ms(1_000));
    let orders = vec![Overdue { order_id: OrderId::new("a").unwrap(), deadline: at_ms(100) }];
    engine.handle(Input::Swept(SweptPage { orders, next: None }), at_ms(1_001));
    let actions = engine.poll_actions(at_ms(1_010));
    let batch = actions.iter().find_map(|action| match action {
        Action::Close(batch) => Some(batch),
        _ => None,
    });
    assert_eq!(batch.unwrap().items[0].alarm.alarm.kind.as_str(), "acceptance");
}
