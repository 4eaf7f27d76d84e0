//! What runs a pass, without AMQP.

pub mod process;
