//! How long a message may be on its way over a slow network.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The slowest network on which large messages are waited for: half a megabit a second. One of 16 MiB has four minutes there. A lower
/// rate would keep messages waiting longer for a broker that reads nothing.
const BYTES_PER_SECOND_MIN: u64 = 64 * 1024;

/// The most time for messages on their way: three of 16 MiB. More are not waited for at once: each confirm starts the time again.
const TRANSFER_SECONDS_MAX: u32 = 15 * 60;

/// The seconds that so many bytes may take to reach the broker, beside the time that it has for its answer. None for small messages.
fn transfer_seconds(bytes: u64) -> u32 {
    let seconds = u32::try_from(bytes / BYTES_PER_SECOND_MIN).unwrap_or(u32::MAX);
    seconds.min(TRANSFER_SECONDS_MAX)
}

/// How many bytes of bodies were published over a connection, and up to which of them the broker has read. Clones share the counts.
///
/// A connection carries the messages of all its channels in order. So a confirm shows that the broker has read all that was published
/// before, on whichever channel. Messages that are never confirmed, for example those of a closed channel, are no longer counted once a
/// later message is confirmed.
#[derive(Clone, Debug, Default)]
pub struct Transfer {
    counts: Arc<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    published: AtomicU64,
    read: AtomicU64,
}

impl Transfer {
    /// Counts a message that is about to be published, with a body of so many bytes. Returns where it ends: the number of bytes up to its
    /// last one. Each message counts as one byte more, so that no two end at the same place.
    pub fn publish(&self, body_bytes: usize) -> u64 {
        let bytes = u64::try_from(body_bytes).unwrap_or(u64::MAX).saturating_add(1);
        self.counts.published.fetch_add(bytes, Ordering::Relaxed) + bytes
    }

    /// Where the last message ends.
    pub fn published(&self) -> u64 {
        self.counts.published.load(Ordering::Relaxed)
    }

    /// The broker has confirmed a message that ends there.
    pub fn confirmed(&self, end: u64) {
        self.counts.read.fetch_max(end, Ordering::Relaxed);
    }

    /// The bytes that the broker is known to have read.
    pub(crate) fn read(&self) -> u64 {
        self.counts.read.load(Ordering::Relaxed)
    }

    /// The bytes up to the end of a message that may still be on their way.
    pub fn unread(&self, end: u64) -> u64 {
        end.saturating_sub(self.read())
    }

    /// All bytes that may still be on their way.
    pub fn all_unread(&self) -> u64 {
        self.unread(self.published())
    }
}

/// How long the broker has had for confirms: the configured time, and the time for messages that were on their way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConfirmTime {
    pub confirm_s: u32,
    pub transfer_s: u32,
}

impl ConfirmTime {
    /// The time for a confirm while so many bytes may be on their way.
    pub fn new(confirm_s: u32, unread_bytes: u64) -> Self {
        Self { confirm_s, transfer_s: transfer_seconds(unread_bytes) }
    }

    pub fn seconds(self) -> u32 {
        self.confirm_s.saturating_add(self.transfer_s)
    }

    /// This time and another one after it.
    pub fn and(self, other: Self) -> Self {
        Self {
            confirm_s: self.confirm_s.saturating_add(other.confirm_s),
            transfer_s: self.transfer_s.saturating_add(other.transfer_s),
        }
    }
}

impl fmt::Display for ConfirmTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { confirm_s, transfer_s } = self;
        match transfer_s {
            0 => write!(f, "{confirm_s} s"),
            _ => write!(
                f,
                "{} s ({confirm_s} s, and {transfer_s} s because large messages were on their way)",
                self.seconds()
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_for_bytes_has_a_bound() {
        assert_eq!([0, 65_535, 65_536, 16 << 20].map(transfer_seconds), [0, 0, 1, 256]);
        assert_eq!([1 << 30, u64::MAX].map(transfer_seconds), [TRANSFER_SECONDS_MAX; 2]);
    }

    #[test]
    fn a_confirm_shows_that_all_before_it_was_read_whichever_channel_it_used() {
        let transfer = Transfer::default();
        let other_channel = transfer.clone();
        let large = other_channel.publish(16 << 20);
        let empty = transfer.publish(0);
        let later = transfer.publish(2);
        let of_large = (16 << 20) + 1;
        assert_eq!(
            [large, empty, later].map(|end| transfer.unread(end)),
            [of_large, of_large + 1, of_large + 4]
        );
        assert_eq!(transfer.all_unread(), of_large + 4);
        transfer.confirmed(empty);
        assert_eq!([large, empty, later].map(|end| other_channel.unread(end)), [0, 0, 3]);
        // Its queue was slower than that of the later one.
        other_channel.confirmed(large);
        assert_eq!(transfer.unread(later), 3);
    }

    #[test]
    fn a_time_says_why_it_was_longer_than_configured() {
        assert_eq!(ConfirmTime::new(30, 1000).to_string(), "30 s");
        let first = ConfirmTime::new(30, 16 << 20);
        assert_eq!(
            first.and(ConfirmTime::new(30, 0)).to_string(),
            "316 s (60 s, and 256 s because large messages were on their way)"
        );
    }
}
