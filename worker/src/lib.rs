//! The worker: takes jobs from RabbitMQ as memory allows, runs them on a device, answers, acknowledges last.

pub mod admission;
pub mod amqp;
pub mod batcher;
pub mod capacity;
pub mod ceiling;
pub mod config;
pub mod device;
pub mod disposition;
pub mod doctor;
pub mod drain;
pub mod engine;
pub mod finished;
pub mod job;
pub mod model;
pub mod open;
pub mod pass;
pub mod pressure;
pub mod retry;
pub mod telemetry;
pub mod worker;
