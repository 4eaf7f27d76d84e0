//! Newtypes for the numbers of models, executors, jobs, passes, consumers, deliveries and requests, so that they cannot be confused.

use std::fmt;

macro_rules! number {
    ($(#[$doc:meta] $name:ident($inner:ty);)*) => {$(
        #[$doc]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    )*};
}

/// A channel on which a model's jobs are delivered. A new channel that replaces another gets a new id within the session, because an ack is
/// valid only on the channel of its delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ChannelId {
    pub model: ModelIndex,
    /// Counts up within the session.
    pub number: u32,
}

number! {
    /// The index of a model in the worker's list of models.
    ModelIndex(usize);
    /// The index of a queue among those that a model's jobs come from: 0 is the model's own.
    QueueIndex(usize);
    /// The index of an executor in the worker's list of executors.
    ExecutorIndex(usize);
    /// The index of a store of inputs in the worker's list of stores.
    StoreIndex(usize);
    /// An item's place within its job.
    ItemIndex(u32);
    /// One delivery of a job within this process. The shell counts them up; no two deliveries share one.
    JobKey(u64);
    /// One pass within this process.
    PassId(u64);
    /// One consumer of a queue within this process.
    ConsumerId(u64);
    /// A delivery's number on its channel: 1, 2, 3, … in the order of delivery.
    DeliveryTag(u64);
    /// An operator's command that waits for its answer.
    RequestId(u64);
    /// Identifies a message, also when the broker delivers it again.
    Fingerprint(u64);
}

impl QueueIndex {
    /// The model's own queue.
    pub const OWN: Self = Self(0);

    /// Whether it is a further queue, not the model's own.
    pub fn is_further(self) -> bool {
        self != Self::OWN
    }
}
