//! All that speaks to RabbitMQ.

pub mod aux_channel;
pub mod commands;
pub mod control_plane;
pub mod direct_address;
pub mod direct_replies;
pub mod fingerprint;
pub mod heartbeats;
pub mod message;
pub mod model_channel;
pub mod publisher;
pub mod publisher_rules;
pub mod received;
pub mod session;
pub mod topology;
pub mod wire_size;
pub mod withdrawals;
