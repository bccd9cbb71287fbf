//! AMQP written byte by byte, for messages that no client library would send.
//!
//! Frames and methods by their numbers in the AMQP 0-9-1 specification; just enough to publish one message with a
//! confirm.

use std::io::{Read, Write};
use std::net::TcpStream;

use lapin::uri::AMQPUri;
use order_timeout::Settings;
use secrecy::ExposeSecret;

const METHOD: u8 = 1;
const HEADER: u8 = 2;
const BODY: u8 = 3;
const FRAME_END: u8 = 0xCE;
/// Flags of the content header: which properties follow.
const HAS_HEADERS: u16 = 1 << 13;
const HAS_DELIVERY_MODE: u16 = 1 << 12;

/// A table in a table in a table, as deep as one frame of the size that RabbitMQ agrees to by default can hold.
pub fn nested_table() -> Vec<u8> {
    const LEVEL_BYTES: usize = 7;
    const ROOM: usize = 131_072 - 64;
    let levels = ROOM / LEVEL_BYTES;
    let mut table = Vec::with_capacity(ROOM);
    for level in (0..levels).rev() {
        table.extend(u32::try_from((level + 1) * LEVEL_BYTES).unwrap().to_be_bytes());
        // A field named "a", of type table.
        table.extend(*b"\x01aF");
    }
    table.extend(0_u32.to_be_bytes());
    table
}

/// Publishes a persistent message with this headers table; returns when the broker has confirmed it.
pub fn publish(settings: &Settings, exchange: &str, routing_key: &str, headers: &[u8], body: &[u8]) {
    let properties = Properties { flags: HAS_HEADERS | HAS_DELIVERY_MODE, bytes: [headers, &[2]].concat() };
    publish_with(settings, exchange, routing_key.as_bytes(), &properties, body);
}

/// Properties in their wire encoding.
pub struct Properties {
    /// Which ones follow (AMQP 0-9-1, class "basic").
    pub flags: u16,
    /// Their values, in the order of the flags.
    pub bytes: Vec<u8>,
}

impl Properties {
    /// One property that is a short string, with this flag.
    pub fn text(flag: u16, text: &[u8]) -> Self {
        Self { flags: flag, bytes: short_bytes(text) }
    }
}

/// Publishes a message with these properties under any routing key; returns when the broker has confirmed it.
pub fn publish_with(settings: &Settings, exchange: &str, routing_key: &[u8], properties: &Properties, body: &[u8]) {
    let mut connection = RawConnection::open(settings);
    connection.call(1, 85, 10, &[0]);
    connection.expect(85, 11);
    connection.call(1, 60, 40, &[&[0, 0][..], &short(exchange), &short_bytes(routing_key), &[0]].concat());
    let size = u64::try_from(body.len()).unwrap();
    let (flags, bytes) = (properties.flags.to_be_bytes(), &properties.bytes);
    connection.write(HEADER, 1, &[&60_u16.to_be_bytes()[..], &[0, 0], &size.to_be_bytes(), &flags, bytes].concat());
    connection.write(BODY, 1, body);
    connection.expect(60, 80);
}

fn short(text: &str) -> Vec<u8> {
    short_bytes(text.as_bytes())
}

fn short_bytes(text: &[u8]) -> Vec<u8> {
    [&[u8::try_from(text.len()).unwrap()][..], text].concat()
}

fn long(bytes: &[u8]) -> Vec<u8> {
    [&u32::try_from(bytes.len()).unwrap().to_be_bytes()[..], bytes].concat()
}

struct RawConnection(TcpStream);

impl RawConnection {
    /// A connection with one channel.
    fn open(settings: &Settings) -> Self {
        let uri: AMQPUri = settings.amqp.url.expose_secret().parse().unwrap();
        let mut connection = Self(TcpStream::connect((uri.authority.host.as_str(), uri.authority.port)).unwrap());
        connection.0.write_all(b"AMQP\x00\x00\x09\x01").unwrap();
        connection.expect(10, 10);
        let user = &uri.authority.userinfo;
        let response = format!("\0{}\0{}", user.username, user.password);
        let start_ok =
            [&0_u32.to_be_bytes()[..], &short("PLAIN"), &long(response.as_bytes()), &short("en_US")].concat();
        connection.call(0, 10, 11, &start_ok);
        let mut tune = connection.expect(10, 30);
        // The broker's limits of channels and frames; no heartbeat.
        tune.truncate(6);
        connection.call(0, 10, 31, &[&tune[..], &[0, 0]].concat());
        connection.call(0, 10, 40, &[&short(&uri.vhost)[..], &short(""), &[0]].concat());
        connection.expect(10, 41);
        connection.call(1, 20, 10, &short(""));
        connection.expect(20, 11);
        connection
    }

    fn write(&mut self, kind: u8, channel: u16, payload: &[u8]) {
        let size = u32::try_from(payload.len()).unwrap().to_be_bytes();
        let frame = [&[kind][..], &channel.to_be_bytes(), &size, payload, &[FRAME_END]].concat();
        self.0.write_all(&frame).unwrap();
    }

    fn call(&mut self, channel: u16, class: u16, method: u16, arguments: &[u8]) {
        let payload = [&class.to_be_bytes()[..], &method.to_be_bytes(), arguments].concat();
        self.write(METHOD, channel, &payload);
    }

    /// Reads the next method, which must be this one, and returns its arguments.
    fn expect(&mut self, class: u16, method: u16) -> Vec<u8> {
        let mut start = [0; 7];
        self.0.read_exact(&mut start).unwrap();
        let size = u32::from_be_bytes(start[3..].try_into().unwrap()) as usize;
        let mut payload = vec![0; size + 1];
        self.0.read_exact(&mut payload).unwrap();
        payload.pop();
        let wanted = [class.to_be_bytes(), method.to_be_bytes()].concat();
        assert_eq!(payload[..4], wanted, "{}", String::from_utf8_lossy(&payload));
        payload.split_off(4)
    }
}
