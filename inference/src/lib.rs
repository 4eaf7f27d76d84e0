//! Devices that hold memory, and engines that run passes on them. Nothing here knows RabbitMQ.

pub mod device;
pub mod engine;
