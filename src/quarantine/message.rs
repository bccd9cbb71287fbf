//! A delivered message on the wire, read by a reader that accepts any bytes, and why the AMQP client would end its
//! connection because of it.
//!
//! Pure. The client's own parser decides whether a message is readable; this reader explains why it is not.

use amq_protocol::frame::parsing::parse_frame;
use order_timeout_core::message::MAX_BODY_BYTES;

use super::frame::{Frame, Kind};

/// Class and method of `basic.deliver` and `basic.get-ok`: the first bytes of a method's payload.
const DELIVER: [u8; 4] = [0, 60, 0, 60];
const GET_OK: [u8; 4] = [0, 60, 0, 71];
/// The most characters quoted of a name.
const MOST_QUOTED: usize = 40;

/// The properties in the order of their flags (AMQP 0-9-1, class "basic").
const PROPERTIES: [(&str, Value); 14] = [
    ("content_type", Value::Short),
    ("content_encoding", Value::Short),
    ("headers", Value::Table),
    ("delivery_mode", Value::Bytes(1)),
    ("priority", Value::Bytes(1)),
    ("correlation_id", Value::Short),
    ("reply_to", Value::Short),
    ("expiration", Value::Short),
    ("message_id", Value::Short),
    ("timestamp", Value::Bytes(8)),
    ("type", Value::Short),
    ("user_id", Value::Short),
    ("app_id", Value::Short),
    ("cluster_id", Value::Short),
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Value {
    Short,
    Table,
    Bytes(usize),
}

/// A delivered message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Message {
    method: Frame,
    header: Frame,
    /// The beginning of the body, as much as is parked.
    pub body: Vec<u8>,
    pub body_bytes: u64,
    /// The delivery tag, for the acknowledgement.
    pub tag: u64,
}

impl Message {
    /// Why a client with a negotiated frame size of `frame_max` bytes cannot read it; `None` if it can.
    pub fn why_unreadable(&self, frame_max: u32) -> Option<String> {
        let frame_bytes = self.header.bytes_on_the_wire();
        if frame_bytes > u64::from(frame_max) {
            return Some(format!(
                "its properties and headers take a frame of {frame_bytes} bytes, more than the negotiated maximum of {frame_max}; send smaller headers"
            ));
        }
        if !can_be_parsed(&self.method) {
            return Some(why_method(&self.method.payload));
        }
        (!can_be_parsed(&self.header)).then(|| why_header(&self.header.payload))
    }
}

fn can_be_parsed(frame: &Frame) -> bool {
    parse_frame(frame.to_bytes().as_slice()).is_ok()
}

/// Whether this frame announces a message.
pub(super) fn is_delivery(frame: &Frame) -> bool {
    frame.kind == Kind::Method && (frame.payload.starts_with(&DELIVER) || frame.payload.starts_with(&GET_OK))
}

/// A delivery that a broker never sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the broker sent a message that violates AMQP 0-9-1")]
pub(super) struct BrokenDeliveryError;

/// Assembles the messages of one channel from their frames.
#[derive(Debug, Default)]
pub(super) struct Assembler {
    method: Option<(Frame, u64)>,
    message: Option<Message>,
    missing: u64,
}

impl Assembler {
    /// Whether a message is incomplete.
    pub fn expects_content(&self) -> bool {
        self.method.is_some() || self.message.is_some()
    }

    /// Takes the next frame; returns the message with its last frame.
    ///
    /// # Errors
    /// [`BrokenDeliveryError`] if the frames form no message.
    pub fn add(&mut self, frame: Frame) -> Result<Option<Message>, BrokenDeliveryError> {
        match frame.kind {
            Kind::Method if !self.expects_content() => {
                let tag = delivery_tag(&frame.payload).ok_or(BrokenDeliveryError)?;
                self.method = Some((frame, tag));
            }
            Kind::Header => {
                let (method, tag) = self.method.take().ok_or(BrokenDeliveryError)?;
                // Class, weight, size of the body.
                let size = frame.payload.get(4..12).ok_or(BrokenDeliveryError)?;
                self.missing = u64::from_be_bytes(size.try_into().map_err(|_| BrokenDeliveryError)?);
                self.message = Some(Message { method, header: frame, body: Vec::new(), body_bytes: self.missing, tag });
            }
            Kind::Body => {
                let message = self.message.as_mut().ok_or(BrokenDeliveryError)?;
                let room = MAX_BODY_BYTES.saturating_sub(message.body.len());
                message.body.extend(&frame.payload[..frame.payload.len().min(room)]);
                self.missing = self.missing.checked_sub(frame.size.into()).ok_or(BrokenDeliveryError)?;
            }
            Kind::Method | Kind::Heartbeat => return Err(BrokenDeliveryError),
        }
        Ok(if self.missing == 0 { self.message.take() } else { None })
    }
}

fn delivery_tag(method: &[u8]) -> Option<u64> {
    let mut reader = Reader(method.get(DELIVER.len()..)?);
    if method.starts_with(&DELIVER) {
        reader.short_string()?; // the consumer's tag
    }
    Some(u64::from_be_bytes(reader.take(8)?.try_into().ok()?))
}

/// Explains what is wrong with the exchange or the routing key.
fn why_method(method: &[u8]) -> String {
    let wrong = || {
        let mut reader = Reader(method.get(DELIVER.len()..)?);
        if method.starts_with(&DELIVER) {
            reader.short_string()?;
        }
        reader.take(8 + 1)?; // the delivery tag, redelivered
        ["exchange", "routing key"].into_iter().find_map(|name| {
            let text = reader.short_string()?;
            std::str::from_utf8(text).is_err().then(|| not_utf8(&format!("its {name}"), text))
        })
    };
    wrong().unwrap_or_else(|| "the AMQP client cannot parse its delivery method".into())
}

/// Names the property or header that is wrong.
fn why_header(header: &[u8]) -> String {
    let fallback = || "the AMQP client cannot parse its properties; publish with a standard AMQP 0-9-1 client".into();
    properties_fault(header).unwrap_or_else(fallback)
}

fn properties_fault(header: &[u8]) -> Option<String> {
    let mut reader = Reader(header.get(12..)?);
    let flags = u16::from_be_bytes(reader.take(2)?.try_into().ok()?);
    for (index, (name, value)) in PROPERTIES.iter().enumerate() {
        if flags & (1 << (15 - index)) == 0 {
            continue;
        }
        match value {
            Value::Bytes(count) => drop(reader.take(*count)?),
            Value::Short => {
                let text = reader.short_string()?;
                if std::str::from_utf8(text).is_err() {
                    return Some(not_utf8(&format!("its property {name}"), text));
                }
            }
            Value::Table => {
                let table = reader.long_bytes()?;
                if let Some(fault) = table_fault(table) {
                    return Some(fault);
                }
            }
        }
    }
    None
}

/// Names the wrong key or type in a table or in a nested one. Tables may be nested thousands deep.
fn table_fault(table: &[u8]) -> Option<String> {
    let mut open = vec![(Reader(table), true)];
    while let Some((reader, has_keys)) = open.last_mut() {
        if reader.0.is_empty() {
            open.pop();
            continue;
        }
        let key: &[u8] = if *has_keys { reader.short_string()? } else { b"" };
        if std::str::from_utf8(key).is_err() {
            return Some(not_utf8("the key of a header", key));
        }
        let kind = reader.take(1)?[0];
        match kind {
            b'F' | b'A' => {
                let inner = reader.long_bytes()?;
                open.push((Reader(inner), kind == b'F'));
            }
            b'S' | b'x' => drop(reader.long_bytes()?),
            b't' | b'b' | b'B' => drop(reader.take(1)?),
            b's' | b'u' | b'U' => drop(reader.take(2)?),
            b'I' | b'i' | b'f' => drop(reader.take(4)?),
            b'D' => drop(reader.take(5)?),
            b'l' | b'L' | b'd' | b'T' => drop(reader.take(8)?),
            b'V' => {}
            _ => {
                return Some(format!(
                    "the header {} has a value of the type {:?}, which the AMQP client does not know",
                    quoted(key),
                    char::from(kind)
                ));
            }
        }
    }
    None
}

fn not_utf8(what: &str, text: &[u8]) -> String {
    format!("{what} is not UTF-8 ({}); send text in UTF-8", quoted(text))
}

fn quoted(text: &[u8]) -> String {
    let shown: String = text.escape_ascii().to_string().chars().take(MOST_QUOTED).collect();
    format!("\"{shown}\"")
}

/// Reads from the front; `None` if there are too few bytes.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    fn short_string(&mut self) -> Option<&'a [u8]> {
        let size = self.take(1)?[0];
        self.take(size.into())
    }

    fn long_bytes(&mut self) -> Option<&'a [u8]> {
        let size = u32::from_be_bytes(self.take(4)?.try_into().ok()?);
        self.take(usize::try_from(size).ok()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const FRAME_MAX: u32 = 131_072;

    fn frame(kind: Kind, payload: Vec<u8>) -> Frame {
        Frame { kind, channel: 1, size: u32::try_from(payload.len()).unwrap(), payload }
    }

    fn short(text: &[u8]) -> Vec<u8> {
        [&[u8::try_from(text.len()).unwrap()][..], text].concat()
    }

    fn deliver(routing_key: &[u8]) -> Frame {
        let tag = 9_u64.to_be_bytes();
        let parts = [&DELIVER[..], &short(b"tag"), &tag, &[0], &short(b"order.schedule"), &short(routing_key)];
        frame(Kind::Method, parts.concat())
    }

    fn header(body_bytes: u64, flags: u16, properties: &[u8]) -> Frame {
        frame(Kind::Header, [&[0, 60, 0, 0][..], &body_bytes.to_be_bytes(), &flags.to_be_bytes(), properties].concat())
    }

    fn table(entries: &[u8]) -> Vec<u8> {
        [&u32::try_from(entries.len()).unwrap().to_be_bytes()[..], entries].concat()
    }

    fn message(method: Frame, header: Frame, bodies: &[&[u8]]) -> Message {
        let mut assembler = Assembler::default();
        let frames = [method, header].into_iter().chain(bodies.iter().map(|body| frame(Kind::Body, body.to_vec())));
        let last = frames.map(|frame| assembler.add(frame).unwrap()).last().flatten();
        last.expect("a whole message")
    }

    fn why(method: Frame, header: Frame) -> Option<String> {
        message(method, header, &[]).why_unreadable(FRAME_MAX)
    }

    const HEADERS: u16 = 1 << 13;

    #[test]
    fn readable_message_has_no_fault() {
        let read = message(deliver(b"key"), header(5, 1 << 5, &short(b"order.timeout.v1")), &[b"hel", b"lo"]);
        assert_eq!((read.tag, read.body.as_slice(), read.body_bytes), (9, &b"hello"[..], 5));
        assert_eq!(read.why_unreadable(FRAME_MAX), None);
    }

    #[test]
    fn text_outside_utf8_is_reported() {
        let plain = || header(0, 0, &[]);
        assert!(why(deliver(b"\xff"), plain()).unwrap().starts_with("its routing key is not UTF-8 (\"\\xff\")"));
        for (index, (name, value)) in PROPERTIES.iter().enumerate() {
            if *value == Value::Short {
                let fault = why(deliver(b""), header(0, 1 << (15 - index), &short(b"\xc3\x28"))).unwrap();
                assert!(fault.contains(&format!("property {name} is not UTF-8")), "{fault}");
            }
        }
        let key = table(&[&short(b"\xe4bc")[..], b"V"].concat());
        assert!(why(deliver(b""), header(0, HEADERS, &key)).unwrap().contains("key of a header is not UTF-8"));
        let inner = table(&[&short(b"outer")[..], b"F", &key].concat());
        assert!(why(deliver(b""), header(0, HEADERS, &inner)).unwrap().contains("\"\\xe4bc\""));
    }

    #[test]
    fn header_values_are_not_faults() {
        let bytes = [&short(b"raw")[..], b"S", &table(b"\xff\xfe")].concat();
        assert_eq!(why(deliver(b""), header(0, HEADERS, &table(&bytes))), None);
        let unknown = [&short(b"odd")[..], b"?", &[0]].concat();
        assert!(why(deliver(b""), header(0, HEADERS, &table(&unknown))).unwrap().contains("\"odd\""));
    }

    #[test]
    fn frame_beyond_negotiated_size_is_reported() {
        let filler = |bytes: usize| table(&[&short(b"stack")[..], b"S", &table(&vec![b'x'; bytes])].concat());
        let frame = header(0, HEADERS, &filler(131_000));
        let exact = u32::try_from(frame.bytes_on_the_wire()).unwrap();
        assert_eq!(message(deliver(b""), frame.clone(), &[]).why_unreadable(exact), None);
        let fault = message(deliver(b""), frame, &[]).why_unreadable(exact - 1).unwrap();
        assert!(fault.contains(&format!("{exact} bytes")), "{fault}");
    }

    #[test]
    fn frames_out_of_order_are_refused() {
        let mut assembler = Assembler::default();
        assert_eq!(assembler.add(header(0, 0, &[])), Err(BrokenDeliveryError));
        assert_eq!(assembler.add(deliver(b"")), Ok(None));
        assert_eq!(assembler.add(header(1, 0, &[])), Ok(None));
        assert_eq!(assembler.add(frame(Kind::Body, vec![1, 2])), Err(BrokenDeliveryError));
    }

    proptest! {
        #[test]
        fn no_payload_makes_reading_panic(
            method in proptest::collection::vec(any::<u8>(), 0..80),
            properties in proptest::collection::vec(any::<u8>(), 0..200),
            flags in any::<u16>(),
            body_bytes in 0_u64..3,
        ) {
            let method = frame(Kind::Method, [&DELIVER[..], &method].concat());
            let mut assembler = Assembler::default();
            if assembler.add(method).is_ok()
                && let Ok(Some(read)) = assembler.add(header(body_bytes, flags, &properties))
            {
                let _ = read.why_unreadable(FRAME_MAX);
            }
            let _ = (why_header(&properties), why_method(&properties), table_fault(&properties));
        }

        /// Whenever the client's parser fails on a text, the reader explains it.
        #[test]
        fn faulty_property_is_never_unnamed(text in proptest::collection::vec(any::<u8>(), 0..60)) {
            let fault = why(deliver(b""), header(0, 1 << 5, &short(&text)));
            prop_assert_eq!(fault.is_some(), std::str::from_utf8(&text).is_err());
            prop_assert!(fault.is_none_or(|fault| fault.contains("property type")));
        }
    }
}
