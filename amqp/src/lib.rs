//! What worker, client library, gateway and command share: the broker's address, publishing with confirms, and finding misspelt
//! environment variables.

mod address;
mod confirms;
mod environment;
mod publisher;

pub use address::{Address, ConnectError, InvalidAddress};
pub use confirms::{Confirms, Verdict};
pub use environment::misspelt;
pub use publisher::{
    CONFIRMS_IN_FLIGHT, ConfirmedPublisher, Limits, MatchBy, Message, PublishOutcome, Settled,
};
