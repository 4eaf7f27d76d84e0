//! All that speaks to RabbitMQ.

pub mod message;
pub mod publish;
pub mod session;
pub mod settle;
pub mod topology;
