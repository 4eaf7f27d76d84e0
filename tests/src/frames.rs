//! Takes frames out of what a connection to the broker carries.

use std::collections::BTreeSet;

/// A frame of `basic.ack`, `basic.nack` or `basic.reject`.
const ACK_BYTES: usize = 21;

/// The methods of class 60 that a program settles deliveries with, and those that the broker confirms publishes with.
pub(crate) const SETTLING: [u8; 2] = [80, 90];
pub(crate) const CONFIRMING: [u8; 2] = [80, 120];

/// Deliveries that a connection has settled, by channel and number. An ack of several (`multiple`) counts from the channel's first
/// delivery, which is right only if acks are lost from the channel's start on.
pub(crate) type Lost = BTreeSet<(u16, u64)>;

/// Removes the frames of some methods (class 60: a number and a flag) from what was read, and appends them to `taken`. Returns how many
/// bytes are left. Handles only whole frames, which programs write at once.
pub(crate) fn without_acks(buffer: &mut [u8], read: usize, methods: [u8; 2], taken: &mut Vec<u8>) -> usize {
    let (mut at, mut kept) = (0, 0);
    while at < read {
        match buffer[at..read].get(..ACK_BYTES) {
            Some(frame @ &[1, _, _, 0, 0, 0, 13, 0, 60, 0, method, .., 0xce])
                if methods.contains(&method) =>
            {
                taken.extend_from_slice(frame);
                at += ACK_BYTES;
            }
            _ => {
                buffer[kept] = buffer[at];
                (at, kept) = (at + 1, kept + 1);
            }
        }
    }
    kept
}

/// Notes what the frames of acknowledgements and rejections were for.
pub(crate) fn note_lost(frames: &[u8], lost: &mut Lost) {
    for frame in frames.chunks_exact(ACK_BYTES) {
        if let &[_, c, d, _, _, _, _, _, _, _, method, ref tag @ .., flag, _] = frame {
            let (channel, last) =
                (u16::from_be_bytes([c, d]), tag.iter().fold(0, |n, b| n << 8 | u64::from(*b)));
            let first = if method == 80 && flag == 1 { 1 } else { last };
            lost.extend((first..=last).map(|tag| (channel, tag)));
        }
    }
}

/// What a connection begins with, before any frame.
const PROTOCOL_HEADER: &[u8] = b"AMQP\0\0\x09\x01";

/// A frame's type, channel, size and end.
const AROUND_FRAME: usize = 8;

/// The type of a frame that has a method.
const METHOD: u8 = 1;

/// `connection.close`: its class and its method.
const CLOSE_CONNECTION: [u8; 4] = [0, 10, 0, 50];

/// A request that the broker answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// `channel.open`
    OpenChannel,
    /// `queue.declare`, also a passive one, by which a program counts a queue's messages.
    DeclareQueue,
    /// `queue.delete`
    DeleteQueue,
    /// `basic.get`
    Get,
}

impl Request {
    /// Its class and its method.
    const fn method(self) -> [u8; 4] {
        match self {
            Self::OpenChannel => [0, 20, 0, 10],
            Self::DeclareQueue => [0, 50, 0, 10],
            Self::DeleteQueue => [0, 50, 0, 40],
            Self::Get => [0, 60, 0, 70],
        }
    }
}

/// Whether a program closes its connection with these frames, and does not just end it. Handles only whole frames.
pub(crate) fn closes_connection(frames: &[u8]) -> bool {
    let mut rest = frames.strip_prefix(PROTOCOL_HEADER).unwrap_or(frames);
    while let Some(&[_, _, _, s0, s1, s2, s3]) = rest.get(..AROUND_FRAME - 1) {
        let size = AROUND_FRAME + u32::from_be_bytes([s0, s1, s2, s3]) as usize;
        let (frame, after) = rest.split_at(size.min(rest.len()));
        if frame[0] == METHOD && frame[AROUND_FRAME - 1..].starts_with(&CLOSE_CONNECTION) {
            return true;
        }
        rest = after;
    }
    false
}

/// Removes the frames of all channels except 0, the connection's own, from what was read. Returns how many bytes are left. Handles only
/// whole frames.
pub(crate) fn without_channels(buffer: &mut [u8], read: usize) -> usize {
    without_frames(buffer, read, |frame| frame[1..3] != [0, 0])
}

/// The same with the frames of one kind of request.
pub(crate) fn without_requests(buffer: &mut [u8], read: usize, request: Request) -> usize {
    without_frames(buffer, read, |frame| frame[0] == METHOD && frame[7..].starts_with(&request.method()))
}

fn without_frames(buffer: &mut [u8], read: usize, is_taken: impl Fn(&[u8]) -> bool) -> usize {
    let mut at = if buffer[..read].starts_with(PROTOCOL_HEADER) { PROTOCOL_HEADER.len() } else { 0 };
    let mut kept = at;
    while let Some(&[_, _, _, s0, s1, s2, s3]) = buffer[at..read].get(..AROUND_FRAME - 1) {
        let size = AROUND_FRAME + u32::from_be_bytes([s0, s1, s2, s3]) as usize;
        let end = read.min(at + size);
        if !is_taken(&buffer[at..end]) {
            buffer.copy_within(at..end, kept);
            kept += end - at;
        }
        at = end;
    }
    kept
}
