//! The generations of RabbitMQ that the model knows, and their differences.

use serde::{Deserialize, Serialize};

/// A line of RabbitMQ releases that behave alike. The flags below were read from the sources of 3.10.8 and 4.0.5 and
/// are checked against these versions (`tests/broker_model`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize, Serialize)]
pub enum Generation {
    V3_10,
    V4_0,
}

/// The delivery limit of a quorum queue that names none, from 4.0 on.
const DELIVERY_LIMIT_V4: u32 = 20;

impl Generation {
    /// The number of returns after which a quorum queue gives a message up. `configured`: the queue's `x-delivery-limit`.
    pub fn delivery_limit(self, configured: Option<i64>) -> Option<u32> {
        match (self, configured) {
            // In 4.0 a negative limit means no limit.
            (_, Some(limit)) => u32::try_from(limit).ok(),
            (Self::V3_10, None) => None,
            (Self::V4_0, None) => Some(DELIVERY_LIMIT_V4),
        }
    }

    /// Quorum queues serve messages of a priority above 4 first, two of them for each other message.
    pub fn quorum_priorities(self) -> bool {
        self == Self::V4_0
    }

    /// Whether a quorum consumer gets credit twice for a returned message that the queue gave up. From then on it holds one message more
    /// than its prefetch.
    pub fn credit_counted_twice(self) -> bool {
        self == Self::V3_10
    }

    /// Whether a message that `basic.get` takes for the first time has a delivery count (of 0). At its first delivery to a consumer it has
    /// none.
    pub fn counts_from_zero(self) -> bool {
        self == Self::V3_10
    }

    /// How a quorum queue names a consumer in its map (`consumer_key` of `rabbit_fifo.erl`): by the index of the log entry that subscribed
    /// it, instead of by tag and channel. A consumer that subscribes again then gets another key. Messages of `basic.get` are kept by tag
    /// and channel in all generations.
    pub fn consumers_have_log_indexes(self) -> bool {
        self == Self::V4_0
    }

    /// Whether settled messages raise the credit of a quorum consumer at most to its prefetch (`increase_credit` of `rabbit_fifo.erl`). A
    /// consumer can settle more than that after it took over the messages of a cancelled consumer with its tag.
    pub fn credit_ends_at_prefetch(self) -> bool {
        self == Self::V4_0
    }

    /// Whether a message that a quorum queue dead-letters keeps the number of clients' failures.
    pub fn dead_letters_keep_failures(self) -> bool {
        self == Self::V4_0
    }

    /// Whether a dead-lettered message also has its last death in headers.
    pub fn last_death_headers(self) -> bool {
        self == Self::V4_0
    }
}
