//! Decodes AMQP 0-9-1 frames from a stream of bytes: frames of any size and payload, in bounded memory.
//!
//! Pure: no I/O, and no interpretation of payloads.

use order_timeout_core::message::MAX_BODY_BYTES;

/// Type, channel and size before the payload; an end octet follows it.
const HEAD_BYTES: usize = 7;
/// The bytes of a frame besides its payload.
pub(super) const OVERHEAD_BYTES: u64 = 8;
const END_OCTET: u8 = 0xCE;

/// Which payload follows (AMQP 0-9-1, 4.2.3 "Frame details").
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Method,
    Header,
    Body,
    Heartbeat,
}

impl Kind {
    fn of(octet: u8) -> Option<Self> {
        match octet {
            1 => Some(Self::Method),
            2 => Some(Self::Header),
            3 => Some(Self::Body),
            8 => Some(Self::Heartbeat),
            _ => None,
        }
    }

    const fn octet(self) -> u8 {
        match self {
            Self::Method => 1,
            Self::Header => 2,
            Self::Body => 3,
            Self::Heartbeat => 8,
        }
    }
}

/// One frame, with the beginning of its payload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Frame {
    pub kind: Kind,
    pub channel: u16,
    /// Bytes of the payload on the wire.
    pub size: u32,
    /// The payload, truncated at the decoder's limit.
    pub payload: Vec<u8>,
}

impl Frame {
    /// All bytes of the frame, for another parser; invalid if the payload was truncated.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.payload.len() + HEAD_BYTES + 1);
        bytes.push(self.kind.octet());
        bytes.extend(self.channel.to_be_bytes());
        bytes.extend(self.size.to_be_bytes());
        bytes.extend(&self.payload);
        bytes.push(END_OCTET);
        bytes
    }

    /// Bytes of the whole frame on the wire.
    pub fn bytes_on_the_wire(&self) -> u64 {
        u64::from(self.size) + OVERHEAD_BYTES
    }
}

/// The bytes are not frames: another protocol, or a connection that lost some.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the server does not send AMQP 0-9-1 frames")]
pub(super) struct NotFramesError;

/// Takes bytes in pieces of any length and returns frames.
#[derive(Debug)]
pub(super) struct Decoder {
    /// The most bytes kept of a payload other than a body's.
    kept: usize,
    head: Vec<u8>,
    frame: Option<Frame>,
    /// Bytes of the frame's payload that have not arrived yet.
    missing: usize,
}

impl Decoder {
    /// Keeps `kept` bytes of a method or header, and as much of a body as is parked.
    pub fn new(kept: usize) -> Self {
        Self { kept, head: Vec::with_capacity(HEAD_BYTES), frame: None, missing: 0 }
    }

    /// Keeps this many bytes of each method or header from now on.
    pub fn keep(&mut self, kept: usize) {
        self.kept = kept;
    }

    /// Takes bytes up to the end of one frame, which it returns, or all of them. The rest in `bytes` is for the next
    /// call.
    ///
    /// # Errors
    /// [`NotFramesError`]; the decoder cannot be used afterwards.
    pub fn feed(&mut self, bytes: &mut &[u8]) -> Result<Option<Frame>, NotFramesError> {
        while !bytes.is_empty() {
            let Some(frame) = &mut self.frame else {
                self.feed_head(bytes)?;
                continue;
            };
            if self.missing == 0 {
                let end = bytes[0];
                *bytes = &bytes[1..];
                return if end == END_OCTET { Ok(self.frame.take()) } else { Err(NotFramesError) };
            }
            let (taken, rest) = bytes.split_at(self.missing.min(bytes.len()));
            let most = if frame.kind == Kind::Body { MAX_BODY_BYTES } else { self.kept };
            let room = most.saturating_sub(frame.payload.len());
            frame.payload.extend(&taken[..taken.len().min(room)]);
            self.missing -= taken.len();
            *bytes = rest;
        }
        Ok(None)
    }

    fn feed_head(&mut self, bytes: &mut &[u8]) -> Result<(), NotFramesError> {
        let (taken, rest) = bytes.split_at((HEAD_BYTES - self.head.len()).min(bytes.len()));
        self.head.extend(taken);
        *bytes = rest;
        let &[kind, channel_high, channel_low, a, b, c, d] = self.head.as_slice() else { return Ok(()) };
        self.head.clear();
        let kind = Kind::of(kind).ok_or(NotFramesError)?;
        let size = u32::from_be_bytes([a, b, c, d]);
        self.missing = usize::try_from(size).map_err(|_| NotFramesError)?;
        let channel = u16::from_be_bytes([channel_high, channel_low]);
        self.frame = Some(Frame { kind, channel, size, payload: Vec::new() });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn frames_of(bytes: &[u8], piece: usize, kept: usize) -> Result<Vec<Frame>, NotFramesError> {
        let (mut decoder, mut frames) = (Decoder::new(kept), Vec::new());
        for mut piece in bytes.chunks(piece.max(1)) {
            // Each call takes at least one byte, or this would not end.
            while !piece.is_empty() {
                let before = piece.len();
                frames.extend(decoder.feed(&mut piece)?);
                assert!(piece.len() < before);
            }
        }
        Ok(frames)
    }

    fn any_frame() -> impl Strategy<Value = Frame> {
        let kind = prop_oneof![Just(Kind::Method), Just(Kind::Header), Just(Kind::Body), Just(Kind::Heartbeat)];
        (kind, any::<u16>(), proptest::collection::vec(any::<u8>(), 0..300)).prop_map(|(kind, channel, payload)| {
            Frame { kind, channel, size: u32::try_from(payload.len()).unwrap(), payload }
        })
    }

    #[test]
    fn large_payload_is_truncated_not_refused() {
        let payload = vec![7; 5_000_000];
        let frame = Frame { kind: Kind::Header, channel: 1, size: 5_000_000, payload };
        let read = frames_of(&frame.to_bytes(), 65_536, 1_000).unwrap();
        assert_eq!((read.len(), read[0].size, read[0].payload.len()), (1, 5_000_000, 1_000));
        assert_eq!(read[0].bytes_on_the_wire(), 5_000_008);
    }

    #[test]
    fn other_protocol_is_refused() {
        assert_eq!(frames_of(b"HTTP/1.1 400 Bad Request\r\n", 5, 100), Err(NotFramesError));
        assert_eq!(frames_of(b"AMQP\x00\x00\x09\x01", 8, 100), Err(NotFramesError));
        assert_eq!(frames_of(b"\x08\0\0\0\0\0\0\xCF", 8, 100), Err(NotFramesError));
    }

    proptest! {
        #[test]
        fn frames_survive_any_cut(frames in proptest::collection::vec(any_frame(), 0..8), piece in 1_usize..400) {
            let bytes: Vec<u8> = frames.iter().flat_map(Frame::to_bytes).collect();
            prop_assert_eq!(frames_of(&bytes, piece, 1_000), Ok(frames));
        }

        #[test]
        fn no_bytes_make_decoder_panic(
            bytes in proptest::collection::vec(any::<u8>(), 0..600), piece in 1_usize..50, kept in 0_usize..50,
        ) {
            if let Ok(frames) = frames_of(&bytes, piece, kept) {
                prop_assert!(frames.iter().all(|f| f.kind == Kind::Body || f.payload.len() <= kept));
            }
        }
    }
}
