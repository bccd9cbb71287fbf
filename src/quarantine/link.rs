//! An AMQP 0-9-1 connection that survives messages that the AMQP client cannot read: one channel, and only the methods
//! for searching a queue.
//!
//! Publishes nothing and knows no alarms. It negotiates no heartbeat: every wait for the broker has its own timeout.

use std::time::Duration;

use amq_protocol::auth::Credentials;
use amq_protocol::frame::parsing::parse_frame;
use amq_protocol::frame::{AMQPFrame, ProtocolVersion, gen_frame};
use amq_protocol::protocol::{AMQPClass, basic, channel, connection, queue};
use amq_protocol::types::{AMQPValue, FieldTable};
use futures_util::{AsyncReadExt, AsyncWriteExt};
use order_timeout_amqp::AmqpSettings;
use order_timeout_amqp::connect::{RawConnection, reply_code};
use tokio::time::timeout;

use super::frame::{Decoder, Frame, Kind};
use super::message::{Assembler, Message, is_delivery};
use super::{QuarantineError, Server};

/// The only channel.
const CHANNEL: u16 = 1;
/// Read from the socket at a time.
const CHUNK_BYTES: usize = 64 * 1024;
/// The minimum in the specification, which is also lapin's.
const FRAME_MIN_BYTES: u32 = 4_096;
/// How long the broker may take to close, with the deliveries that it still sends before.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

/// An open connection with its channel.
pub(super) struct Link {
    raw: RawConnection,
    decoder: Decoder,
    assembler: Assembler,
    chunk: Vec<u8>,
    /// The part of `chunk` that has not been decoded yet.
    unread: std::ops::Range<usize>,
    /// The largest frame that the client would read, as negotiated with the broker.
    pub frame_max: u32,
    timeout: Duration,
    server: Server,
}

/// What the broker sends during a search.
pub(super) enum Received {
    Message(Message),
    /// The number of ready messages.
    Ready(u64),
}

/// A message, or any other method.
enum Incoming {
    Message(Message),
    Method(AMQPClass),
}

impl Link {
    /// Connects with the same address, certificates and time limits as the AMQP client.
    pub async fn open(settings: &AmqpSettings) -> Result<Self, QuarantineError> {
        let raw = order_timeout_amqp::connect::connect_raw(settings).await?;
        let frame_max = raw.frame_max;
        let mut link = Self {
            raw,
            decoder: Decoder::new(bytes(frame_max)),
            assembler: Assembler::default(),
            chunk: vec![0; CHUNK_BYTES],
            unread: 0..0,
            frame_max,
            timeout: settings.connect_timeout,
            server: Server::default(),
        };
        link.handshake().await?;
        Ok(link)
    }

    async fn handshake(&mut self) -> Result<(), QuarantineError> {
        self.write(&[AMQPFrame::ProtocolHeader(ProtocolVersion::amqp_0_9_1())]).await?;
        let start = self.answer(|method| matches!(method, AMQPClass::Connection(connection::AMQPMethod::Start(_))));
        if let AMQPClass::Connection(connection::AMQPMethod::Start(start)) = start.await? {
            self.server = server(&start.server_properties);
        }
        let start_ok = connection::StartOk {
            client_properties: client_properties(),
            mechanism: self.raw.mechanism.name().into(),
            response: Credentials::from(self.raw.user.clone()).sasl_auth_string(self.raw.mechanism),
            locale: "en_US".into(),
        };
        self.call(0, AMQPClass::Connection(connection::AMQPMethod::StartOk(start_ok))).await?;
        let tune = self.answer(|method| matches!(method, AMQPClass::Connection(connection::AMQPMethod::Tune(_))));
        let AMQPClass::Connection(connection::AMQPMethod::Tune(tune)) = tune.await? else {
            unreachable!("only tune is accepted")
        };
        // As in lapin: the lower of the two, where zero means no limit.
        if tune.frame_max != 0 {
            self.frame_max = self.frame_max.min(tune.frame_max).max(FRAME_MIN_BYTES);
        }
        self.decoder.keep(bytes(self.frame_max));
        let tune_ok = connection::TuneOk { channel_max: tune.channel_max, frame_max: self.frame_max, heartbeat: 0 };
        self.call(0, AMQPClass::Connection(connection::AMQPMethod::TuneOk(tune_ok))).await?;
        let open = connection::Open { virtual_host: self.raw.vhost.as_str().into() };
        self.call(0, AMQPClass::Connection(connection::AMQPMethod::Open(open))).await?;
        self.answer(|method| matches!(method, AMQPClass::Connection(connection::AMQPMethod::OpenOk(_)))).await?;
        self.call(CHANNEL, AMQPClass::Channel(channel::AMQPMethod::Open(channel::Open {}))).await?;
        self.answer(|method| matches!(method, AMQPClass::Channel(channel::AMQPMethod::OpenOk(_)))).await?;
        Ok(())
    }

    /// How the broker has introduced itself.
    pub fn server(&self) -> &Server {
        &self.server
    }

    /// Asks how many messages of a queue are ready for delivery; the answer arrives between deliveries.
    pub async fn ask_for_ready(&mut self, name: &str) -> Result<(), QuarantineError> {
        let declare = queue::Declare {
            queue: name.into(),
            passive: true,
            durable: true,
            exclusive: false,
            auto_delete: false,
            nowait: false,
            arguments: FieldTable::default(),
        };
        self.call(CHANNEL, AMQPClass::Queue(queue::AMQPMethod::Declare(declare))).await
    }

    /// Sets how many unacknowledged messages each further consumer may have.
    pub async fn prefetch(&mut self, messages: u16) -> Result<(), QuarantineError> {
        let qos = basic::Qos { prefetch_count: messages, global: false };
        self.call(CHANNEL, AMQPClass::Basic(basic::AMQPMethod::Qos(qos))).await?;
        self.answer(|method| matches!(method, AMQPClass::Basic(basic::AMQPMethod::QosOk(_)))).await?;
        Ok(())
    }

    /// Starts consuming a queue; does not wait for the answer, which arrives before the first delivery.
    pub async fn consume(&mut self, name: &str) -> Result<(), QuarantineError> {
        let consume = basic::Consume {
            queue: name.into(),
            consumer_tag: "".into(),
            no_local: false,
            no_ack: false,
            exclusive: false,
            nowait: false,
            arguments: FieldTable::default(),
        };
        self.call(CHANNEL, AMQPClass::Basic(basic::AMQPMethod::Consume(consume))).await
    }

    /// Fetches one message from the front of a queue, unacknowledged; `None` if there is none.
    pub async fn get(&mut self, name: &str) -> Result<Option<Message>, QuarantineError> {
        let get = basic::Get { queue: name.into(), no_ack: false };
        self.call(CHANNEL, AMQPClass::Basic(basic::AMQPMethod::Get(get))).await?;
        loop {
            match self.incoming(self.timeout).await? {
                Some(Incoming::Message(message)) => return Ok(Some(message)),
                Some(Incoming::Method(AMQPClass::Basic(basic::AMQPMethod::GetEmpty(_)))) => return Ok(None),
                Some(Incoming::Method(_)) => {}
                None => return Err(self.silent()),
            }
        }
    }

    /// Acknowledges messages.
    pub async fn acknowledge(&mut self, tags: &[u64]) -> Result<(), QuarantineError> {
        let ack = |tag: &u64| basic::Ack { delivery_tag: *tag, multiple: false };
        let acks = tags.iter().map(|tag| AMQPClass::Basic(basic::AMQPMethod::Ack(ack(tag))));
        let frames: Vec<_> = acks.map(|ack| AMQPFrame::Method(CHANNEL, ack)).collect();
        self.write(&frames).await
    }

    /// Closes the channel, then the connection. The channel answers when it has processed every acknowledgement, and
    /// requeues all other messages.
    pub async fn close(mut self) -> Result<(), QuarantineError> {
        match timeout(CLOSE_TIMEOUT, self.close_both()).await {
            Ok(closed) => closed,
            Err(_) => Err(self.silent()),
        }
    }

    async fn close_both(&mut self) -> Result<(), QuarantineError> {
        let done = reply_code::CONTENT_OK;
        let close = channel::Close { reply_code: done, reply_text: "done".into(), class_id: 0, method_id: 0 };
        self.call(CHANNEL, AMQPClass::Channel(channel::AMQPMethod::Close(close))).await?;
        self.answer(|method| matches!(method, AMQPClass::Channel(channel::AMQPMethod::CloseOk(_)))).await?;
        let close = connection::Close { reply_code: done, reply_text: "done".into(), class_id: 0, method_id: 0 };
        self.call(0, AMQPClass::Connection(connection::AMQPMethod::Close(close))).await?;
        self.answer(|method| matches!(method, AMQPClass::Connection(connection::AMQPMethod::CloseOk(_)))).await?;
        Ok(())
    }

    /// The next message or answer; `None` if nothing has arrived for `limit`.
    pub async fn receive(&mut self, limit: Duration) -> Result<Option<Received>, QuarantineError> {
        loop {
            match self.incoming(limit).await? {
                Some(Incoming::Message(message)) => return Ok(Some(Received::Message(message))),
                Some(Incoming::Method(AMQPClass::Queue(queue::AMQPMethod::DeclareOk(declared)))) => {
                    return Ok(Some(Received::Ready(declared.message_count.into())));
                }
                Some(Incoming::Method(_)) => {}
                None => return Ok(None),
            }
        }
    }

    async fn incoming(&mut self, limit: Duration) -> Result<Option<Incoming>, QuarantineError> {
        loop {
            let Some(frame) = self.frame(limit).await? else { return Ok(None) };
            if frame.kind == Kind::Heartbeat {
                continue;
            }
            if self.assembler.expects_content() || is_delivery(&frame) {
                let added = self.assembler.add(frame).map_err(|fault| self.broken(&fault))?;
                if let Some(message) = added {
                    return Ok(Some(Incoming::Message(message)));
                }
                continue;
            }
            let Ok((_, AMQPFrame::Method(_, method))) = parse_frame(frame.to_bytes().as_slice()) else {
                return Err(self.broken(&super::frame::NotFramesError));
            };
            return self.unless_closed(method).map(|method| Some(Incoming::Method(method)));
        }
    }

    /// The end of the connection or of the channel is an error for every caller.
    fn unless_closed(&self, method: AMQPClass) -> Result<AMQPClass, QuarantineError> {
        let (code, text) = match &method {
            AMQPClass::Connection(connection::AMQPMethod::Close(close)) => (close.reply_code, &close.reply_text),
            AMQPClass::Channel(channel::AMQPMethod::Close(close)) => (close.reply_code, &close.reply_text),
            AMQPClass::Basic(basic::AMQPMethod::Cancel(_)) => {
                return Err(self.broken(&"the broker cancelled the consumer; was the queue deleted?"));
            }
            _ => return Ok(method),
        };
        Err(QuarantineError::Closed { place: self.raw.place.clone(), code, text: text.to_string() })
    }

    /// Waits for this answer; ignores deliveries in the meantime.
    async fn answer(&mut self, is_answer: impl Fn(&AMQPClass) -> bool) -> Result<AMQPClass, QuarantineError> {
        loop {
            match self.incoming(self.timeout).await? {
                Some(Incoming::Method(method)) if is_answer(&method) => return Ok(method),
                Some(_) => {}
                None => return Err(self.silent()),
            }
        }
    }

    async fn frame(&mut self, limit: Duration) -> Result<Option<Frame>, QuarantineError> {
        loop {
            let mut bytes = &self.chunk[self.unread.clone()];
            let decoded = self.decoder.feed(&mut bytes);
            self.unread.start = self.unread.end - bytes.len();
            if let Some(frame) = decoded.map_err(|fault| self.broken(&fault))? {
                return Ok(Some(frame));
            }
            let Ok(read) = timeout(limit, self.raw.stream.read(&mut self.chunk)).await else { return Ok(None) };
            match read {
                Ok(0) => return Err(self.broken(&"the broker ended the connection")),
                Ok(count) => self.unread = 0..count,
                Err(error) => return Err(self.broken(&error)),
            }
        }
    }

    async fn call(&mut self, channel: u16, method: AMQPClass) -> Result<(), QuarantineError> {
        self.write(&[AMQPFrame::Method(channel, method)]).await
    }

    async fn write(&mut self, frames: &[AMQPFrame]) -> Result<(), QuarantineError> {
        let mut bytes = Vec::new();
        for frame in frames {
            let written = gen_frame(frame)(Vec::new().into()).map_err(|error| self.broken(&error))?;
            bytes.extend(written.into_inner().0);
        }
        let writing = async {
            self.raw.stream.write_all(&bytes).await?;
            self.raw.stream.flush().await
        };
        match timeout(self.timeout, writing).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(self.broken(&error)),
            Err(_) => Err(self.silent()),
        }
    }

    fn broken(&self, why: &dyn std::fmt::Display) -> QuarantineError {
        QuarantineError::Broken { place: self.raw.place.clone(), why: why.to_string() }
    }

    fn silent(&self) -> QuarantineError {
        self.broken(&format!("the broker did not answer within {:?}", self.timeout))
    }
}

/// AMQP `connection.start`, `server-properties`.
fn server(properties: &FieldTable) -> Server {
    let text = |name: &str| match properties.inner().get(name) {
        Some(AMQPValue::LongString(text)) => text.to_string(),
        _ => String::new(),
    };
    Server { product: text("product"), version: text("version"), cluster: text("cluster_name") }
}

/// The properties that `rabbitmqctl list_connections` shows, and the supported capabilities.
fn client_properties() -> FieldTable {
    let mut capabilities = FieldTable::default();
    for capability in ["authentication_failure_close", "consumer_cancel_notify"] {
        capabilities.insert(capability.into(), AMQPValue::Boolean(true));
    }
    let mut properties = FieldTable::default();
    properties.insert("capabilities".into(), AMQPValue::FieldTable(capabilities));
    properties.insert("product".into(), AMQPValue::LongString("order-timeout".into()));
    properties.insert("connection_name".into(), AMQPValue::LongString("order-timeout quarantine".into()));
    properties
}

fn bytes(frame_max: u32) -> usize {
    usize::try_from(frame_max).unwrap_or(usize::MAX)
}
