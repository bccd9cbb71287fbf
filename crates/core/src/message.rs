//! The messages: the alarm that comes in ([`Alarm`]) and the event that goes out ([`OrderClosed`]).
//!
//! Bytes to types and back, nothing else: no broker, no database, no decision what to do with a message. The contract
//! for other languages is `docs/WIRE.md` in the repository. `tests/fixtures/` of this crate holds one file per message
//! as it is on the wire.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use time::macros::format_description;

use crate::kind::{Kind, KindError};
use crate::order::{ClosedBy, Deadline, OrderId, OrderIdError, Timestamp};

/// AMQP property `type` of version 1 of [`Alarm`].
pub const ALARM_TYPE: &str = "order.timeout.v1";
/// AMQP property `content_type` of everything we publish.
pub const CONTENT_TYPE: &str = "application/json";
/// The longest TTL that RabbitMQ accepts from 3.10.2 on, for a queue as for a message: ten years of 365 days. Beyond
/// it, it answers 406 and closes the channel.
pub const LONGEST_TTL: Duration = Duration::from_millis(315_360_000_000);

/// The capacity of an AMQP short string: names, routing keys, most properties.
pub const AMQP_MAX_SHORT_STRING_BYTES: usize = 255;

/// Header: how often handling this alarm has failed so far. Re-arming does not count.
pub const HEADER_ATTEMPT: &str = "attempt";
/// Header: when the slot releases the alarm that the worker wrote into it, in milliseconds since the epoch.
pub const HEADER_RETURNS_AT: &str = "returns-at";
/// Header: how often in a row the broker returned this alarm well before that.
pub const HEADER_EARLY_RETURNS: &str = "early-returns";
/// Header: W3C trace context of the publisher that scheduled the alarm.
pub const HEADER_TRACEPARENT: &str = "traceparent";
/// The longest text that is carried as a trace context, in bytes. Version 00 has 55; later versions may
/// have more.
pub const MAX_TRACEPARENT_BYTES: usize = 200;
/// The length of a trace context of version 00: W3C Trace Context, section 3.2.2.
const TRACEPARENT_BYTES: usize = 55;
/// What RabbitMQ itself writes into the property `type` of a message from an AMQP 1.0 publisher: RabbitMQ 3 the first
/// for a data section, all versions the second for any other (`rabbit_amqp1_0_message.erl`, `mc_amqpl.erl`). It does
/// not name our type.
const AMQP_1_0_TYPES: [&str; 2] = ["binary", "amqp-1.0"];
/// The largest alarm body accepted, in bytes.
pub const MAX_BODY_BYTES: usize = 16 * 1024;

/// Whether this text is a W3C trace context: version, trace id, parent id and flags as lower-case hexadecimal digits, with
/// a hyphen between them. A version later than 00 may append fields after another hyphen.
#[must_use]
pub fn is_traceparent(text: &str) -> bool {
    let bytes = text.as_bytes();
    let Some((known, rest)) = bytes.split_at_checked(TRACEPARENT_BYTES) else { return false };
    let is_hyphen_at = |at: &usize| [2, 35, 52].contains(at);
    let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    let is_formed =
        known.iter().enumerate().all(|(at, byte)| if is_hyphen_at(&at) { *byte == b'-' } else { is_digit(*byte) });
    let is_version_00 = known.starts_with(b"00");
    // The specification forbids version ff, and ids of zeros only.
    let is_allowed = !known.starts_with(b"ff") && known[3..35] != [b'0'; 32] && known[36..52] != [b'0'; 16];
    let is_rest_allowed = rest.is_empty() || (!is_version_00 && rest[0] == b'-' && rest.is_ascii());
    is_formed && is_allowed && is_rest_allowed && bytes.len() <= MAX_TRACEPARENT_BYTES
}

/// "This order expires at `deadline`": the body of an alarm, version 1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Alarm {
    /// The sort of deadline. On the wire only if it is not the default one.
    pub kind: Kind,
    /// The order to look at, as the publisher names it; it need not exist.
    pub order_id: OrderId,
    /// The deadline when the alarm was published; the row's may have changed since, and the row's counts.
    pub deadline: Deadline,
}

/// Why the bytes of a message are not an [`Alarm`]. Each sentence says what to send instead.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unreadable {
    /// The body has no bytes.
    #[error("the body is empty; send {{\"order_id\": \"…\", \"deadline\": \"2026-11-20T10:30:00Z\"}}")]
    Empty,
    /// The body has this many bytes, more than [`MAX_BODY_BYTES`].
    #[error(
        "the body has {0} bytes, more than the {MAX_BODY_BYTES} allowed; send the order id and its deadline, not the order"
    )]
    TooBig(usize),
    /// The property `type` names another message, cut at 80 characters.
    #[error("the property type is {0:?}, not {ALARM_TYPE:?}; send that type or leave it out")]
    OtherType(String),
    /// The body is no JSON object with these fields; the text says what it is instead, or where the parser stopped.
    #[error("the body is not valid JSON of the expected shape: {0}")]
    NotTheShape(String),
    /// The field `order_id` is text, but no order id.
    #[error(transparent)]
    OrderId(#[from] OrderIdError),
    /// The field `deadline` is text, but no time from year 0 to 9999 in UTC; cut at 80 characters.
    #[error("the deadline {0:?} is not an RFC 3339 time such as 2026-11-20T10:30:00Z")]
    Deadline(String),
    /// The field `kind` is text, but no name of a kind.
    #[error("the field kind is wrong: {0}; leave it out for an order that is to be paid")]
    Kind(#[from] KindError),
}

/// What a body that does not begin as a JSON object most likely is, and what to send instead.
fn why_not_an_object(body: &[u8]) -> &'static str {
    match body {
        [0xEF, 0xBB, 0xBF, ..] => "it begins with a byte order mark (BOM); send UTF-8 without one",
        [0xFF, 0xFE, ..] | [0xFE, 0xFF, ..] | [0, b'{', ..] => "it is UTF-16; send UTF-8",
        [0x1F, 0x8B, ..] => "it is compressed with gzip; send it uncompressed",
        [0x78, 0x01 | 0x5E | 0x9C | 0xDA, ..] => "it is compressed with zlib; send it uncompressed",
        [0x28, 0xB5, 0x2F, 0xFD, ..] => "it is compressed with zstd; send it uncompressed",
        [0, 0x53, 0x76 | 0x77, ..] => "it is a value or sequence of AMQP 1.0; send the JSON as a data section",
        [0x80, 2..=5, ..] => "it is pickled by Python; send JSON",
        _ if is_celery_arguments(body) => CELERY,
        _ => "it is not a JSON object",
    }
}

const CELERY: &str =
    "it is the envelope of a Celery task; publish the JSON object itself, as docs/WIRE.md shows, not a task";

/// Celery's protocol 2: positional arguments, named ones, and an object of callbacks.
fn is_celery_arguments(body: &[u8]) -> bool {
    type Fields = BTreeMap<String, IgnoredAny>;
    let parts: Option<(Vec<IgnoredAny>, Fields, Fields)> = serde_json::from_slice(body).ok();
    parts.is_some_and(|(.., embedded)| {
        ["callbacks", "errbacks", "chain", "chord"].iter().all(|key| embedded.contains_key(*key))
    })
}

/// Celery's protocol 1, or the parser's error.
fn why_not_the_shape(body: &[u8], fault: &serde_json::Error) -> String {
    if body.starts_with(b"{\0") {
        return "it is UTF-16; send UTF-8".into();
    }
    let fields: BTreeMap<String, IgnoredAny> = serde_json::from_slice(body).unwrap_or_default();
    let is_task = ["task", "id", "args", "kwargs"].iter().all(|key| fields.contains_key(*key));
    if is_task { CELERY.into() } else { shortened(&fault.to_string()) }
}

/// How many characters of a message an error quotes at most.
const MAX_QUOTED_CHARS: usize = 80;

/// Enough of a parser's error to find the fault by it: it may quote a whole field, and escape each of its characters.
fn shortened(sentence: &str) -> String {
    sentence.chars().take(3 * MAX_QUOTED_CHARS).collect()
}

#[derive(Serialize, Deserialize)]
struct AlarmBody {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    kind: Option<String>,
    order_id: String,
    deadline: String,
    // No `deny_unknown_fields`: a publisher may add fields of its own.
}

impl Alarm {
    /// An alarm of the default kind.
    #[must_use]
    pub fn new(order_id: OrderId, deadline: Deadline) -> Self {
        Self { kind: Kind::ORDER, order_id, deadline }
    }

    /// Reads an alarm's body. `message_type` is the AMQP property `type`, if the publisher set one.
    ///
    /// # Errors
    /// [`Unreadable`] names the fault.
    pub fn read(body: &[u8], message_type: Option<&str>) -> Result<Self, Unreadable> {
        if let Some(other) = message_type.filter(|t| *t != ALARM_TYPE && !AMQP_1_0_TYPES.contains(t)) {
            return Err(Unreadable::OtherType(other.chars().take(MAX_QUOTED_CHARS).collect()));
        }
        if body.is_empty() {
            return Err(Unreadable::Empty);
        }
        if body.len() > MAX_BODY_BYTES {
            return Err(Unreadable::TooBig(body.len()));
        }
        // serde would also take an array for the fields in their order.
        if body.iter().find(|byte| !byte.is_ascii_whitespace()) != Some(&b'{') {
            return Err(Unreadable::NotTheShape(why_not_an_object(body).into()));
        }
        let body: AlarmBody =
            serde_json::from_slice(body).map_err(|fault| Unreadable::NotTheShape(why_not_the_shape(body, &fault)))?;
        Ok(Self {
            kind: body.kind.as_deref().map_or(Ok(Kind::ORDER), Kind::new)?,
            order_id: OrderId::new(&body.order_id)?,
            deadline: read_rfc3339(&body.deadline)
                .ok_or_else(|| Unreadable::Deadline(body.deadline.chars().take(MAX_QUOTED_CHARS).collect()))?,
        })
    }

    /// The body as it goes on the wire.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let body = AlarmBody {
            kind: (!self.kind.is_default()).then(|| self.kind.as_str().to_owned()),
            order_id: self.order_id.as_str().to_owned(),
            deadline: write_rfc3339(self.deadline),
        };
        serde_json::to_vec(&body).expect("two strings always serialize")
    }
}

/// "This order was closed": the body of an event on `order.events`, version 1. The close statement writes it in the closing
/// transaction; this type is how a consumer reads it. The AMQP `message_id` is the event's id: keep it to recognise a
/// second delivery.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OrderClosed {
    /// The id as the orders table prints it; the alarm may have spelled it differently.
    pub order_id: OrderId,
    /// The deadline in the order's row when it was closed; not after `closed_at`, unless the order was released.
    #[serde(with = "rfc3339_time")]
    pub deadline: Deadline,
    /// The database's time once the order's row was locked; the commit is later.
    #[serde(with = "rfc3339_time")]
    pub closed_at: Timestamp,
    /// The path that closed the order; every path closes it in the same way.
    pub closed_by: ClosedBy,
    /// Why the order was closed; that of the default tables is `unpaid`.
    pub reason: String,
    /// What the shop said when it released the order, or an operator who closed it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// The first and the last time that RFC 3339 can write in UTC. An offset, or rounding, can lead beyond them; a time
/// that was read and cannot be written again would come back from the broker as unreadable.
const WRITABLE: std::ops::RangeInclusive<i128> = -62_167_219_200_000_000..=253_402_300_799_999_999;

/// Reads an RFC 3339 time of any offset and precision; what is finer than a microsecond is rounded up.
#[must_use]
pub fn read_rfc3339(text: &str) -> Option<Timestamp> {
    let time = OffsetDateTime::parse(text, &Rfc3339).ok()?;
    let micros = time.unix_timestamp_nanos().div_euclid(1_000) + i128::from(time.nanosecond() % 1_000 != 0);
    let micros = Some(micros).filter(|micros| WRITABLE.contains(micros))?;
    i64::try_from(micros).ok().map(Timestamp::from_unix_micros)
}

/// Writes a time as RFC 3339 in UTC, with milliseconds, or microseconds if it has them. A time for which RFC 3339 has no form
/// is written as Postgres prints it.
#[must_use]
pub fn write_rfc3339(moment: Timestamp) -> String {
    let nanos = i128::from(moment.unix_micros()) * 1_000;
    let time = OffsetDateTime::from_unix_timestamp_nanos(nanos).ok();
    let Some(time) = time.filter(|_| WRITABLE.contains(&i128::from(moment.unix_micros()))) else {
        return write_as_postgres(moment);
    };
    let millis = format_description!("[year]-[month]-[day]T[hour]:[minute]:[second].[subsecond digits:3]Z");
    let micros = format_description!("[year]-[month]-[day]T[hour]:[minute]:[second].[subsecond digits:6]Z");
    let written = if moment.unix_micros() % 1_000 == 0 { time.format(millis) } else { time.format(micros) };
    written.expect("these components exist in every date")
}

/// A time before the year 0 or after 9999: with its era, or as `infinity`.
fn write_as_postgres(moment: Timestamp) -> String {
    const DAY_MICROS: i64 = 86_400_000_000;
    match moment.unix_micros() {
        i64::MIN => return "-infinity".to_owned(),
        i64::MAX => return "infinity".to_owned(),
        _ => {}
    }
    let (days, micros) = (moment.unix_micros().div_euclid(DAY_MICROS), moment.unix_micros().rem_euclid(DAY_MICROS));
    // The proleptic Gregorian calendar in eras of 400 years that begin on 1 March (Howard Hinnant, "chrono-Compatible
    // Low-Level Date Algorithms", civil_from_days).
    let (era, day_of_era) = ((days + 719_468).div_euclid(146_097), (days + 719_468).rem_euclid(146_097));
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    let (year, era) = if year > 0 { (year, "") } else { (1 - year, " BC") };
    let (seconds, fraction) = (micros / 1_000_000, micros % 1_000_000);
    let fraction =
        if fraction == 0 { String::new() } else { format!(".{fraction:06}").trim_end_matches('0').to_owned() };
    let (hour, minute, second) = (seconds / 3_600, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}{fraction}+00{era}")
}

mod rfc3339_time {
    use super::{Timestamp, read_rfc3339, write_rfc3339};
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub fn serialize<S: Serializer>(time: &Timestamp, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&write_rfc3339(*time))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Timestamp, D::Error> {
        let text = String::deserialize(from)?;
        read_rfc3339(&text).ok_or_else(|| D::Error::custom(format!("{text:?} is not an RFC 3339 time")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn check(body: &str, expect: &str) {
        let fault = Alarm::read(body.as_bytes(), None).expect_err("must not be readable");
        assert!(fault.to_string().contains(expect), "{fault} does not contain {expect:?}");
    }

    #[test]
    fn every_fault_is_named() {
        check("", "empty");
        check("{", "EOF");
        check("[]", "not a JSON object");
        check(r#"{"order_id": 7, "deadline": "2026-11-20T10:30:00Z"}"#, "expected a string");
        check(r#"{"order_id": "a"}"#, "missing field `deadline`");
        check(r#"{"deadline": "2026-11-20T10:30:00Z"}"#, "missing field `order_id`");
        check(r#"{"order_id": "", "deadline": "2026-11-20T10:30:00Z"}"#, "empty");
        check(r#"{"order_id": "a", "deadline": "tomorrow"}"#, "\"tomorrow\" is not an RFC 3339 time");
        check(r#"{"order_id": "a", "deadline": "2026-11-20T10:30:00Z", "kind": "Trial"}"#, "\"Trial\"");
        check(&"x".repeat(MAX_BODY_BYTES + 1), "16385 bytes");
        let other = Alarm::read(b"{}", Some("order.timeout.v2")).unwrap_err();
        assert!(other.to_string().contains("order.timeout.v2"));
    }

    #[test]
    fn foreign_encodings_are_named() {
        let json = r#"{"order_id":"a","deadline":"2026-11-20T10:30:00Z"}"#;
        let utf16 = |to_bytes: fn(u16) -> [u8; 2]| json.encode_utf16().flat_map(to_bytes).collect::<Vec<u8>>();
        let celery_2 = br#"[["a"], {}, {"callbacks": null, "errbacks": null, "chain": null, "chord": null}]"#;
        let celery_1 = br#"{"task": "close", "id": "7", "args": ["a"], "kwargs": {}, "retries": 0}"#;
        let cases: [(Vec<u8>, &str); 12] = [
            ([b"\xEF\xBB\xBF", json.as_bytes()].concat(), "byte order mark"),
            ([&[0xFF, 0xFE][..], &utf16(u16::to_le_bytes)].concat(), "UTF-16"),
            ([&[0xFE, 0xFF][..], &utf16(u16::to_be_bytes)].concat(), "UTF-16"),
            (utf16(u16::to_le_bytes), "UTF-16"),
            (utf16(u16::to_be_bytes), "UTF-16"),
            (b"\x1F\x8B\x08\0\0\0\0\0".to_vec(), "gzip"),
            (b"\x78\x9C\xAB\x56".to_vec(), "zlib"),
            (b"\x28\xB5\x2F\xFD\x04".to_vec(), "zstd"),
            ([b"\0Sw\xA1Y", json.as_bytes()].concat(), "data section"),
            (b"\x80\x04\x95\x05".to_vec(), "pickled"),
            (celery_2.to_vec(), "Celery"),
            (celery_1.to_vec(), "Celery"),
        ];
        for (body, expected) in cases {
            let fault = Alarm::read(&body, None).unwrap_err().to_string();
            assert!(fault.contains(expected), "{fault} does not contain {expected:?}");
        }
    }

    #[test]
    fn trace_contexts_are_told_from_other_text() {
        let context = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        assert!(is_traceparent(context));
        assert!(is_traceparent(&format!("01{}-more", &context[2..])));
        let zeros = "00-00000000000000000000000000000000-00f067aa0ba902b7-01";
        let no_parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01";
        for other in ["", "00", zeros, no_parent, &context.to_uppercase(), &context[..54], &format!("{context}-more")] {
            assert!(!is_traceparent(other), "{other}");
        }
        assert!(!is_traceparent(&format!("ff{}", &context[2..])));
        assert!(!is_traceparent(&format!("01{}-{}", &context[2..], "x".repeat(200))));
        assert!(!is_traceparent(&format!("{}é", &context[..54])));
    }

    #[test]
    fn types_of_amqp_1_0_are_ignored() {
        let body = br#"{"order_id":"a","deadline":"2026-11-20T10:30:00Z"}"#;
        for broker_type in AMQP_1_0_TYPES {
            assert_eq!(Alarm::read(body, Some(broker_type)), Alarm::read(body, None));
        }
        assert!(Alarm::read(body, None).is_ok());
    }

    #[test]
    fn alarm_matches_golden_file() {
        let golden = include_bytes!("../tests/fixtures/timeout_due.v1.json").trim_ascii();
        let alarm = Alarm::new(
            OrderId::new("01939f6e-7a3c-7c11-9d1a-6b1f0e2d3c4b").unwrap(),
            Timestamp::from_unix_micros(1_795_170_600_000_000),
        );
        assert_eq!(String::from_utf8_lossy(&alarm.to_bytes()), String::from_utf8_lossy(golden));
        assert_eq!(Alarm::read(golden, Some(ALARM_TYPE)), Ok(alarm));
    }

    #[test]
    fn alarm_of_kind_matches_golden_file() {
        let golden = include_bytes!("../tests/fixtures/timeout_due_of_kind.v1.json").trim_ascii();
        let alarm = Alarm {
            kind: Kind::new("acceptance").unwrap(),
            order_id: OrderId::new("4711").unwrap(),
            deadline: Timestamp::from_unix_micros(1_795_170_600_000_000),
        };
        assert_eq!(String::from_utf8_lossy(&alarm.to_bytes()), String::from_utf8_lossy(golden));
        assert_eq!(Alarm::read(golden, Some(ALARM_TYPE)), Ok(alarm));
    }

    #[test]
    fn event_reads_from_golden_file() {
        let golden = include_bytes!("../tests/fixtures/order_closed.v1.json");
        let event: OrderClosed = serde_json::from_slice(golden).unwrap();
        assert_eq!(event.closed_by, ClosedBy::Alarm);
        assert_eq!(event.closed_at.since(event.deadline).as_micros(), 3_142);
    }

    #[test]
    fn unwritable_time_is_not_read() {
        for (first, beyond) in [
            ("0000-01-01T00:00:00Z", "0000-01-01T00:00:00+23:59"),
            ("9999-12-31T23:59:59.999999Z", "9999-12-31T23:59:59.9999999Z"),
            ("9999-12-31T23:59:59Z", "9999-12-31T23:59:59-23:59"),
        ] {
            let moment = read_rfc3339(first).unwrap();
            assert_eq!(read_rfc3339(&write_rfc3339(moment)), Some(moment));
            assert_eq!(read_rfc3339(beyond), None, "{beyond}");
        }
    }

    #[test]
    fn other_times_are_written_as_postgres_does() {
        for (micros, written) in [
            (i64::MIN, "-infinity"),
            (i64::MAX, "infinity"),
            (253_402_300_800_000_000, "10000-01-01 00:00:00+00"),
            (-63_549_360_000_000_000, "0045-03-15 00:00:00+00 BC"),
            (-63_549_360_000_000_000 + 43_200_500_000, "0045-03-15 12:00:00.5+00 BC"),
            (-210_866_803_200_000_000, "4714-11-24 00:00:00+00 BC"),
            (9_223_371_331_200_000_000 - 1, "294247-01-01 23:59:59.999999+00"),
        ] {
            assert_eq!(write_rfc3339(Timestamp::from_unix_micros(micros)), written);
        }
    }

    #[test]
    fn error_quotes_only_part_of_message() {
        let long = format!(
            r#"{{"order_id": "a", "deadline": "2026-11-20T10:30:00Z", "order_id": "{}"}}"#,
            "\u{1}".repeat(9_000)
        );
        let escaped = format!(r#"{{"order_id": 1, "kind": {{}}, "deadline": "{}"}}"#, "\\u0000".repeat(2_000));
        let wrong_type = format!("{{\"kind\": [\"{}\"]}}", "x".repeat(9_000));
        for body in [long, escaped, wrong_type] {
            let fault = Alarm::read(body.as_bytes(), None).unwrap_err().to_string();
            assert!(fault.len() < 1_024 && !fault.contains('\0'), "{fault}");
        }
    }

    #[test]
    fn sub_microsecond_rounds_up() {
        assert_eq!(read_rfc3339("1970-01-01T00:00:00.000001001Z"), Some(Timestamp::from_unix_micros(2)));
        assert_eq!(read_rfc3339("1970-01-01T01:00:00.000001+01:00"), Some(Timestamp::from_unix_micros(1)));
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_back(
            kind in "[a-z][a-z0-9_]{0,39}",
            id in "[ -~]{1,200}",
            micros in 0_i64..253_402_300_799_000_000,
        ) {
            let (kind, order_id) = (Kind::new(&kind).unwrap(), OrderId::new(id).unwrap());
            let alarm = Alarm { kind, order_id, deadline: Timestamp::from_unix_micros(micros) };
            prop_assert_eq!(Alarm::read(&alarm.to_bytes(), Some(ALARM_TYPE)), Ok(alarm));
        }

        #[test]
        fn no_bytes_make_reading_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _ = Alarm::read(&bytes, None);
        }
    }
}
