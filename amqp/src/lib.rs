//! What worker, client library and command share when they speak to RabbitMQ: the broker's address, and publishing with
//! confirms.

mod address;
mod confirms;
mod publisher;

pub use address::{Address, ConnectError, InvalidAddress};
pub use confirms::{Confirms, Verdict};
pub use publisher::{
    CONFIRMS_IN_FLIGHT, ConfirmedPublisher, Limits, MatchBy, Message, PublishOutcome, Settled,
};
