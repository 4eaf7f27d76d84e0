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
    /// The returns after which a quorum queue gives a message up; `configured` is the queue's `x-delivery-limit`.
    pub fn delivery_limit(self, configured: Option<i64>) -> Option<u32> {
        match (self, configured) {
            // A negative limit is how a queue of 4.0 asks for none.
            (_, Some(limit)) => u32::try_from(limit).ok(),
            (Self::V3_10, None) => None,
            (Self::V4_0, None) => Some(DELIVERY_LIMIT_V4),
        }
    }

    /// Quorum queues serve messages of a priority above 4 first, two of them for each other message.
    pub fn quorum_priorities(self) -> bool {
        self == Self::V4_0
    }

    /// A quorum consumer whose returned message was given up gets its credit twice, so that from then on it holds one
    /// message more than its prefetch.
    pub fn credit_counted_twice(self) -> bool {
        self == Self::V3_10
    }

    /// What `basic.get` takes for the first time has a delivery count, of 0. What is delivered for the first time has none.
    pub fn counts_from_zero(self) -> bool {
        self == Self::V3_10
    }

    /// The key of a consumer in a quorum queue's map (`consumer_key` of `rabbit_fifo.erl`) is the index of the log entry that
    /// subscribed it, not its tag and channel. A consumer that is gone and subscribes again has another key. What `basic.get`
    /// took is kept by its tag and channel in all generations.
    pub fn consumers_have_log_indexes(self) -> bool {
        self == Self::V4_0
    }

    /// Settled messages give a quorum consumer no more credit than its prefetch (`increase_credit` of `rabbit_fifo.erl`). It has
    /// settled more than that when it took over what a cancelled consumer of its tag held.
    pub fn credit_ends_at_prefetch(self) -> bool {
        self == Self::V4_0
    }

    /// What a quorum queue dead-letters tells how often clients failed with it.
    pub fn dead_letters_keep_failures(self) -> bool {
        self == Self::V4_0
    }

    /// A dead-lettered message names its last death in headers, too.
    pub fn last_death_headers(self) -> bool {
        self == Self::V4_0
    }
}
