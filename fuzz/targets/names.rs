//! Short input strings: an order's id, the length of a lane, a time. Each is rejected, or survives formatting and
//! parsing.
#![cfg_attr(feature = "run", no_main)]

use std::time::Duration;

use order_timeout_core::delay::Lane;
use order_timeout_core::message::{ALARM_TYPE, Alarm, LONGEST_TTL, read_rfc3339, write_rfc3339};
use order_timeout_core::order::MAX_ORDER_ID_BYTES;
use order_timeout_core::order::{OrderId, Timestamp};
use order_timeout_fuzz::fuzz_target;

fuzz_target!(|text: &str| {
    order_id(text);
    lane(text);
    time(text);
});

fn order_id(text: &str) {
    let Ok(order_id) = OrderId::new(text) else { return };
    assert!((1..=MAX_ORDER_ID_BYTES).contains(&order_id.as_str().len()));
    assert!(!text.contains('\0'), "Postgres keeps no NUL in a text");
    let due = Alarm::new(order_id, Timestamp::from_unix_micros(0));
    assert_eq!(Alarm::read(&due.to_bytes(), Some(ALARM_TYPE)), Ok(due));
}

fn lane(text: &str) {
    let Ok(lane) = Lane::try_from(text.to_owned()) else { return };
    // Fractions of a millisecond, and delays longer than the broker's limit, are rejected later, where the setting's
    // name is known.
    let is_kept = lane.delay > Duration::ZERO && lane.longest_ttl() <= LONGEST_TTL;
    if is_kept && lane.delay.subsec_nanos().is_multiple_of(1_000_000) {
        let again = Lane::try_from(lane.name.clone()).expect("a lane's name is a length");
        assert_eq!(again, lane);
        assert!(lane.name.bytes().all(|byte| byte.is_ascii_alphanumeric()), "{:?}", lane.name);
    }
}

fn time(text: &str) {
    let Some(moment) = read_rfc3339(text) else { return };
    assert_eq!(read_rfc3339(&write_rfc3339(moment)), Some(moment), "{text:?}");
}
