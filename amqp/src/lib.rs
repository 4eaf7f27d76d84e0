//! Shared code of worker, client library, gateway and command: the broker's address and credentials for it, publishing with
//! confirms, reading heartbeats and queue depths, finding misspelt environment variables, and applying environment and flags over
//! a configuration file.

mod address;
mod confirms;
mod credentials;
mod environment;
mod monitor;
mod overrides;
mod publisher;

pub use address::{Address, ConnectError, InvalidAddress};
pub use confirms::{Confirms, Verdict};
pub use credentials::{Credentials, InvalidCredentials};
pub use environment::misspelt;
pub use monitor::{Depth, is_missing, next_delivery, queue_depth, reply_code, subscribe_to_heartbeats};
pub use overrides::Overrides;
pub use publisher::{
    CONFIRMS_IN_FLIGHT, ConfirmedPublisher, Limits, MatchBy, Message, PublishOutcome, Settled,
};
