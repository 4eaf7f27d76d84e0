//! What runs passes: devices that hold memory, engines in this process, and programs of the user in processes of their own.
//! Nothing here knows RabbitMQ.

pub mod device;
pub mod engine;
pub mod process;
pub mod revision;
