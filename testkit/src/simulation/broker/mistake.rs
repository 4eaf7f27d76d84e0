//! Deliberate mistakes of the model. Tests use them to show that the check against a real broker detects mistakes.

/// A deliberate mistake; only for tests of the check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mistake {
    /// A requeued message is delivered as if for the first time.
    ForgetsRedelivered,
    /// The delivery count does not grow.
    ForgetsDeliveryCount,
    /// The limit of deliveries is one higher.
    LimitOffByOne,
    /// A consumer holds one message more than its prefetch.
    PrefetchOffByOne,
    /// The same consumer is served again as long as it has credit.
    NoRoundRobin,
    /// Priorities of consumers are ignored.
    IgnoresConsumerPriority,
    /// Priorities of messages are ignored.
    IgnoresMessagePriority,
    /// A requeued message goes to the wrong end of the queue.
    RequeuesElsewhere,
    /// Cancelling a consumer returns its unacknowledged messages.
    CancelReturnsUnacked,
    /// Messages that a lost connection held are lost.
    LossLosesUnacked,
    /// `multiple` settles its own delivery only.
    IgnoresMultiple,
    /// A mandatory message without a queue is not returned.
    ForgetsReturn,
    /// A full queue takes one message more.
    LengthOffByOne,
    /// A full queue drops instead of refusing.
    DropsInsteadOfRejecting,
    /// An expired message is not dead-lettered.
    ExpiresSilently,
    /// A rejected message is not dead-lettered.
    RejectsSilently,
    /// `x-death` counts only once.
    CountsDeathsOnce,
    /// A dead-lettered message keeps its expiration.
    KeepsExpiration,
    /// Counts include unacknowledged messages as ready.
    CountsUnacked,
}

impl Mistake {
    pub const ALL: [Self; 19] = [
        Self::ForgetsRedelivered,
        Self::ForgetsDeliveryCount,
        Self::LimitOffByOne,
        Self::PrefetchOffByOne,
        Self::NoRoundRobin,
        Self::IgnoresConsumerPriority,
        Self::IgnoresMessagePriority,
        Self::RequeuesElsewhere,
        Self::CancelReturnsUnacked,
        Self::LossLosesUnacked,
        Self::IgnoresMultiple,
        Self::ForgetsReturn,
        Self::LengthOffByOne,
        Self::DropsInsteadOfRejecting,
        Self::ExpiresSilently,
        Self::RejectsSilently,
        Self::CountsDeathsOnce,
        Self::KeepsExpiration,
        Self::CountsUnacked,
    ];
}
