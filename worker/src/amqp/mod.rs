//! All that speaks to RabbitMQ.

pub mod acks;
pub mod aside;
pub mod commands;
pub mod direct_address;
pub mod direct_replies;
pub mod heartbeats;
pub mod message;
pub mod operators;
pub mod publish;
pub mod session;
pub mod settle;
pub mod topology;
pub mod wire_size;
