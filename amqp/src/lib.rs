//! What worker, client library, gateway and command share for RabbitMQ: addresses and credentials, publishing with confirms, withdrawing
//! jobs, reading heartbeats and queue depths.
//!
//! This crate works with `lapin` as published. vramq's programs use a patched `lapin`, because they read messages from untrusted
//! publishers; [`missing_patches`] lists the patches that a program lacks.

// Nothing that a message, a peer or a device does may panic.
#![cfg_attr(not(test), warn(clippy::expect_used, clippy::panic, clippy::unreachable))]
// What is `pub` can be used elsewhere.
#![warn(unreachable_pub)]

mod address;
mod confirm_clock;
mod confirms;
mod credentials;
mod header_frame;
mod last_error;
mod ledger;
mod monitor;
mod patches;
mod pipeline;
mod publisher;
pub mod reply_code;
mod returns;
mod transfer;
mod withdrawals;

pub use address::{Address, BrokerHost, ConnectError, InvalidAddress};
pub use confirms::PublishOutcome;
pub use credentials::{Credentials, InvalidCredentials};
pub use header_frame::{FRAME_MAX_DEFAULT, frame_max, header_frame_bytes};
pub use last_error::LastError;
pub use ledger::{OnItsWay, SLOWEST_FADES, UnknownOutcome};
pub use monitor::{Depth, next_delivery, queue_depth, subscribe_to_heartbeats};
pub use patches::{MissingPatch, missing_patches};
pub use pipeline::{CONFIRMS_IN_FLIGHT, Limits, Outcomes, PublishPipeline};
pub use publisher::{ConfirmedPublisher, Message, PERSISTENT, Unconfirmed};
pub use reply_code::{is_missing, reply_code};
pub use returns::MatchBy;
pub use transfer::{ConfirmTime, Transfer};
pub use withdrawals::{
    Excess, REPEAT_EVERY, WITHDRAWN_MAX, Withdrawals, Withdrawn, new_secret, publish_withdrawals,
};
