//! Keeps deeply nested headers from lapin's parser.
//!
//! lapin parses tables and lists by recursion, on a thread of its own whose stack has the usual 2 MiB: a frame of 128 KiB
//! holds tables 20 000 deep, and would end the process. A table or list that is too deep becomes a byte array on its way
//! to lapin, which has the same layout. Nothing else is changed.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use async_rs::traits::{Reactor, RuntimeKit};
use async_rs::util::RuntimeParts;
use async_rs::{Runtime, Tokio};
use futures_util::Stream;
use futures_util::io::{AsyncRead, AsyncWrite};
use tokio::io::{AsyncRead as _, AsyncWrite as _, ReadBuf};

use crate::connect::BrokerStream;

/// Each level takes up to 11 KiB of stack in a debug build, and 2 KiB in a release build.
const MOST_LEVELS: usize = 32;
/// Type, channel and size of a frame (AMQP 0-9-1, 4.2.3).
const FRAME_START_BYTES: u64 = 7;
/// The frame type of message bodies, which hold no tables.
const BODY: u8 = 3;
/// The type and the size of a table, a list or a byte array.
const FIELD_START_BYTES: u64 = 5;
const TABLE: u8 = b'F';
const LIST: u8 = b'A';
const BYTE_ARRAY: u8 = b'x';

/// Looks for nested tables in the frames that pass.
#[derive(Debug, Default)]
struct Frames {
    /// The last bytes of this frame, the newest last.
    last: u64,
    /// How many bytes of this frame have passed.
    passed: u64,
    /// The length of this frame; zero until its start has passed.
    length: u64,
    has_tables: bool,
    /// Where the tables and lists end that the next byte may be in. Text that looks like the start of one counts as well.
    ends: Vec<u64>,
}

impl Frames {
    fn pass(&mut self, bytes: &mut [u8]) {
        for byte in bytes {
            if self.has_tables && matches!(*byte, TABLE | LIST) {
                let here = self.passed;
                self.ends.retain(|end| *end > here);
                if self.ends.len() >= MOST_LEVELS {
                    *byte = BYTE_ARRAY;
                }
            }
            self.last = self.last << 8 | u64::from(*byte);
            self.passed += 1;
            if self.passed == FRAME_START_BYTES {
                self.begin();
            } else if self.has_tables {
                self.note_field();
            }
            if self.passed == self.length {
                *self = Self::default();
            }
        }
    }

    fn begin(&mut self) {
        let size = self.last & u64::from(u32::MAX);
        // With the byte that ends each frame.
        self.length = FRAME_START_BYTES + size + 1;
        self.has_tables = (self.last >> 48) as u8 != BODY;
    }

    /// Whether a table or list has begun four bytes ago: its size has passed now.
    fn note_field(&mut self) {
        let kind = (self.last >> 32) as u8;
        let end = self.passed + (self.last & u64::from(u32::MAX));
        if self.passed >= FRAME_START_BYTES + FIELD_START_BYTES && matches!(kind, TABLE | LIST) && end < self.length {
            self.ends.push(end);
        }
    }
}

/// A connection to a broker that delivers no deeply nested headers.
pub(crate) struct ShallowStream {
    inner: BrokerStream,
    frames: Frames,
}

impl ShallowStream {
    pub fn new(inner: BrokerStream) -> Self {
        Self { inner, frames: Frames::default() }
    }
}

impl AsyncRead for ShallowStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut [u8]) -> Poll<io::Result<usize>> {
        let Self { inner, frames } = self.get_mut();
        let mut read = ReadBuf::new(buffer);
        ready!(Pin::new(inner).poll_read(cx, &mut read))?;
        frames.pass(read.filled_mut());
        Poll::Ready(Ok(read.filled().len()))
    }
}

impl AsyncWrite for ShallowStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().inner).poll_write(cx, buffer)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_flush(cx)
    }

    fn poll_close(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_shutdown(cx)
    }
}

/// tokio, whose connections are [`ShallowStream`]s.
pub(crate) fn runtime() -> Runtime<impl RuntimeKit<TcpStream = ShallowStream> + Clone + Send> {
    Runtime::new(RuntimeParts::new(Tokio::current(), ShallowReactor(Tokio::current())))
}

#[derive(Debug, Clone)]
struct ShallowReactor(Tokio);

impl Reactor for ShallowReactor {
    type TcpStream = ShallowStream;
    type Sleep = <Tokio as Reactor>::Sleep;

    fn register<H>(&self, _: H) -> io::Result<impl AsyncRead + AsyncWrite + Send + Unpin + 'static> {
        Err::<ShallowStream, _>(io::ErrorKind::Unsupported.into())
    }

    fn sleep(&self, duration: Duration) -> Self::Sleep {
        self.0.sleep(duration)
    }

    fn interval(&self, duration: Duration) -> impl Stream<Item = Instant> + Send + 'static {
        self.0.interval(duration)
    }

    fn tcp_connect_addr(
        &self,
        address: SocketAddr,
    ) -> impl Future<Output = io::Result<Self::TcpStream>> + Send + 'static {
        let connecting = self.0.tcp_connect_addr(address);
        async { Ok(ShallowStream::new(Box::new(connecting.await?.into_inner()))) }
    }
}

#[cfg(test)]
mod tests {
    use amq_protocol::frame::AMQPFrame;
    use amq_protocol::frame::parsing::parse_frame;
    use amq_protocol::types::AMQPValue;
    use proptest::prelude::*;

    use super::*;

    /// The header frame of a message, with these headers in their wire encoding.
    fn frame(headers: &[u8]) -> Vec<u8> {
        const HEADERS: u16 = 1 << 13;
        let size = u32::try_from(headers.len()).unwrap().to_be_bytes();
        let properties = [&HEADERS.to_be_bytes()[..], &size, headers].concat();
        let payload = [&[0, 60, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0][..], &properties].concat();
        let size = u32::try_from(payload.len()).unwrap().to_be_bytes();
        [&[2, 0, 1][..], &size, &payload, &[0xce]].concat()
    }

    /// Headers with a table in a table with this key, or a list in a list, as deep as they fit into `room`.
    fn nested(kind: u8, key: &[u8], room: usize) -> Vec<u8> {
        let before = if kind == TABLE { [&[u8::try_from(key.len()).unwrap()][..], key].concat() } else { Vec::new() };
        let level = before.len() + 5;
        let sizes = (0..room / level).rev().map(|inner| u32::try_from(inner * level).unwrap().to_be_bytes());
        let fields = sizes.flat_map(|size| [&before[..], &[kind], &size].concat()).collect();
        if kind == TABLE { fields } else { [&b"\x01l"[..], &fields].concat() }
    }

    fn levels(value: &AMQPValue) -> usize {
        let deepest = |values: &mut dyn Iterator<Item = &AMQPValue>| values.map(levels).max().unwrap_or(0) + 1;
        match value {
            AMQPValue::FieldTable(table) => deepest(&mut table.inner().values()),
            AMQPValue::FieldArray(list) => deepest(&mut list.as_slice().iter()),
            _ => 0,
        }
    }

    /// The headers that lapin's parser finds, if it can parse them.
    fn parsed(bytes: &[u8]) -> Option<AMQPValue> {
        match parse_frame(bytes).ok()?.1 {
            AMQPFrame::Header(_, header) => header.properties.headers().clone().map(AMQPValue::FieldTable),
            other => panic!("{other:?}"),
        }
    }

    /// Passes the bytes in pieces of this size.
    fn passed(mut bytes: Vec<u8>, piece: usize) -> Vec<u8> {
        let mut frames = Frames::default();
        bytes.chunks_mut(piece).for_each(|piece| frames.pass(piece));
        assert_eq!((frames.passed, frames.length), (0, 0), "the frame has ended");
        bytes
    }

    #[test]
    fn deepest_headers_are_parsed_to_limit() {
        for (kind, key) in [(TABLE, &b"a"[..]), (TABLE, b""), (TABLE, b"FA"), (LIST, b"")] {
            let frame = frame(&nested(kind, key, 131_000));
            for piece in [1, 7, 4_096, usize::MAX] {
                let headers = parsed(&passed(frame.clone(), piece)).expect("only values have changed");
                assert_eq!(levels(&headers), MOST_LEVELS + 1);
            }
        }
    }

    #[test]
    fn usual_headers_are_unchanged() {
        let text = b"\x04noteS\0\0\0\x0bFAFAFAFAFAF";
        let headers = [&nested(TABLE, b"x-death", 200)[..], text].concat();
        assert!(levels(&parsed(&frame(&headers)).unwrap()) > 10);
        assert_eq!(passed(frame(&headers), 3), frame(&headers));
        let body = [&[3, 0, 1, 0, 0, 0, 200][..], &b"F\0\0\0\x05".repeat(40), &[0xce]].concat();
        assert_eq!(passed(body.clone(), 9), body);
    }

    proptest! {
        /// What lapin would parse, whatever the bytes are: starts of tables inside one another and inside text.
        #[test]
        fn no_bytes_are_parsed_deeper(
            pieces in prop::collection::vec(
                prop_oneof![
                    (prop_oneof![Just(TABLE), Just(LIST)], 0_u32..400).prop_map(|(kind, size)| {
                        [&[kind][..], &size.to_be_bytes()].concat()
                    }),
                    prop::collection::vec(any::<u8>(), 0..4),
                    Just(b"\0F".to_vec()),
                ],
                0..200,
            ),
            piece in 1_usize..50,
        ) {
            let headers = nested(TABLE, b"", 300).into_iter().chain(pieces.concat()).collect::<Vec<u8>>();
            if let Some(headers) = parsed(&passed(frame(&headers), piece)) {
                prop_assert!(levels(&headers) <= MOST_LEVELS + 1);
            }
        }
    }
}
