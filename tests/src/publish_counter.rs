//! Counts a program's publishes by the frames that it sends to the broker. The broker's own statistics may miss those just before a channel
//! closed.

use vramq_schemas::topology::STATUS_EXCHANGE;

/// What a connection begins with, before any frame: `AMQP` and a version.
const PROTOCOL_HEADER_BYTES: usize = 8;

/// A frame's type, channel and size.
const FRAME_HEAD_BYTES: usize = 7;

/// The longest beginning of a `basic.publish` that names its exchange: class and method, a reserved number, a short string.
const METHOD_HEAD_BYTES: usize = 4 + 2 + 1 + 255;

/// Follows the frames of one connection towards the broker.
#[derive(Debug)]
pub(crate) struct PublishCounter {
    /// The beginning of the current frame.
    head: Vec<u8>,
    /// Bytes that are of no interest, before the next frame begins.
    skip: usize,
    has_publishes: bool,
}

impl PublishCounter {
    pub(crate) fn new() -> Self {
        Self { head: Vec::new(), skip: PROTOCOL_HEADER_BYTES, has_publishes: false }
    }

    /// Whether anything was published, heartbeats included.
    pub(crate) fn has_publishes(&self) -> bool {
        self.has_publishes
    }

    /// Takes in the next bytes of the connection. Gives how many publishes began in them, without heartbeats to the status exchange.
    pub(crate) fn take_in(&mut self, mut bytes: &[u8]) -> usize {
        let mut publishes = 0;
        while !bytes.is_empty() {
            if self.skip > 0 {
                let skipped = self.skip.min(bytes.len());
                (self.skip, bytes) = (self.skip - skipped, &bytes[skipped..]);
                continue;
            }
            let missing = FRAME_HEAD_BYTES + self.looked_at() - self.head.len();
            let (more, rest) = bytes.split_at(missing.min(bytes.len()));
            self.head.extend_from_slice(more);
            bytes = rest;
            if self.head.len() < FRAME_HEAD_BYTES || self.head.len() < FRAME_HEAD_BYTES + self.looked_at() {
                continue;
            }
            if let Some(is_heartbeat) = is_publish(&self.head) {
                self.has_publishes = true;
                publishes += usize::from(!is_heartbeat);
            }
            // The frame's end is one byte more.
            self.skip = self.size() + 1 - self.looked_at();
            self.head.clear();
        }
        publishes
    }

    /// The size of the current frame's payload, once that is known.
    fn size(&self) -> usize {
        match self.head[..] {
            [_, _, _, a, b, c, d, ..] => u32::from_be_bytes([a, b, c, d]) as usize,
            _ => 0,
        }
    }

    /// Bytes of the payload that are looked at.
    fn looked_at(&self) -> usize {
        self.size().min(METHOD_HEAD_BYTES)
    }
}

/// Whether a frame that is `basic.publish` (class 60, method 40) is of a heartbeat; nothing of another frame.
fn is_publish(frame: &[u8]) -> Option<bool> {
    let [1, _, _, _, _, _, _, 0, 60, 0, 40, _, _, length, rest @ ..] = frame else { return None };
    Some(rest.get(..usize::from(*length)) == Some(STATUS_EXCHANGE.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, payload: &[u8]) -> Vec<u8> {
        let size = u32::try_from(payload.len()).unwrap().to_be_bytes();
        [&[kind, 0, 1][..], &size, payload, &[0xce]].concat()
    }

    fn publish(exchange: &str) -> Vec<u8> {
        let length = u8::try_from(exchange.len()).unwrap();
        let payload = [&[0, 60, 0, 40, 0, 0, length][..], exchange.as_bytes(), b"\x03key\0"].concat();
        // Method, header, and a body that looks like another publish.
        [frame(1, &payload), frame(2, &[0; 20]), frame(3, &frame(1, &payload))].concat()
    }

    #[test]
    fn publishes_are_counted_however_the_bytes_are_cut() {
        let ack = frame(1, &[0, 60, 0, 80, 0, 0, 0, 0, 0, 0, 0, 1, 0]);
        let long = "x".repeat(255);
        let stream = [
            b"AMQP\0\0\x09\x01".to_vec(),
            publish(""),
            frame(8, &[]),
            ack.clone(),
            publish("vramq.dead"),
            publish(STATUS_EXCHANGE),
            publish(&long),
        ]
        .concat();
        for piece in [1, 2, 3, 7, 64, stream.len()] {
            let mut counter = PublishCounter::new();
            let count: usize = stream.chunks(piece).map(|bytes| counter.take_in(bytes)).sum();
            assert_eq!(count, 3, "in pieces of {piece} bytes");
            assert!(counter.has_publishes());
        }
        let mut counter = PublishCounter::new();
        assert_eq!(counter.take_in(&[b"AMQP\0\0\x09\x01".to_vec(), ack].concat()), 0);
        assert!(!counter.has_publishes());
        counter.take_in(&publish(STATUS_EXCHANGE));
        assert!(counter.has_publishes());
    }
}
