//! A message as the broker delivers it: properties and headers as encoded on the wire, and a body. It becomes an alarm
//! that survives encoding and decoding, or a dead letter that fits into a table row.
#![cfg_attr(feature = "run", no_main)]

use lapin::BasicProperties;
use lapin::protocol::basic::parse_properties;
use order_timeout::deliver::read;
use order_timeout_amqp::envelope::{Route, address};
use order_timeout_amqp::publisher::properties;
use order_timeout_amqp::topology::Names;
use order_timeout_core::alarm::{DeadLetter, DeliveredAlarm};
use order_timeout_core::delay::Placement;
use order_timeout_core::message::MAX_BODY_BYTES;
use order_timeout_core::order::Timestamp;
use order_timeout_fuzz::fuzz_target;

/// More than any of our sentences, including quoted input.
const LONGEST_DETAIL_BYTES: usize = 1_024;
/// A W3C traceparent, with a margin.
const LONGEST_TRACEPARENT_BYTES: usize = 200;

fuzz_target!(|input: &[u8]| {
    let (properties, body) = split(input);
    match read(body, &properties) {
        Ok(alarm) => {
            assert!(alarm.traceparent.as_ref().is_none_or(|text| text.len() <= LONGEST_TRACEPARENT_BYTES));
            is_the_same_when_sent_again(alarm);
        }
        Err(dead_letter) => fits_into_its_table(&dead_letter, body),
    }
});

/// The first two bytes are the length of the properties, followed by the body; other input is only a body, such as a
/// message of crates/core/tests/fixtures.
fn split(input: &[u8]) -> (BasicProperties, &[u8]) {
    let plain = (BasicProperties::default(), input);
    let Some((length, rest)) = input.split_first_chunk() else { return plain };
    let Some((written, body)) = rest.split_at_checked(usize::from(u16::from_be_bytes(*length))) else { return plain };
    // Messages that the client cannot parse never reach us.
    parse_properties(written).map_or(plain, |(_, properties)| (properties, body))
}

fn is_the_same_when_sent_again(alarm: DeliveredAlarm) {
    // As the rearmer sends it: its counter fits into an AMQP integer, and times before 1970 have no timestamp.
    let attempt = alarm.attempt.min(i32::MAX.unsigned_abs());
    let first_published_at = alarm.first_published_at.unwrap_or(Timestamp::from_unix_micros(0));
    let route = Route::to(&Placement::Inbox, &alarm.alarm.kind, &Names::new("order"));
    let message = address(DeliveredAlarm { attempt, ..alarm.clone() }, route, first_published_at);
    assert!(message.body.len() <= MAX_BODY_BYTES);
    let properties = properties(&message).expect("an alarm that could be read can be sent");
    let again = read(&message.body, &properties).expect("an alarm that was sent can be read");
    assert_eq!(
        again,
        DeliveredAlarm { attempt, first_published_at: Some(in_whole_seconds(first_published_at)), ..alarm }
    );
}

/// AMQP's timestamps are in whole seconds.
fn in_whole_seconds(moment: Timestamp) -> Timestamp {
    Timestamp::from_unix_micros(moment.unix_micros() / 1_000_000 * 1_000_000)
}

fn fits_into_its_table(dead_letter: &DeadLetter, body: &[u8]) {
    assert!(dead_letter.detail.len() <= LONGEST_DETAIL_BYTES, "a detail of {} bytes", dead_letter.detail.len());
    // A Postgres text cannot contain NUL.
    assert!(!dead_letter.detail.contains('\0'), "{:?}", dead_letter.detail);
    assert!(dead_letter.body.len() <= MAX_BODY_BYTES && body.starts_with(&dead_letter.body));
}
