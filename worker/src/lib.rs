//! The worker: takes jobs from RabbitMQ as memory allows, runs them on a device, answers, acknowledges last.

pub mod admission;
pub mod amqp;
pub mod batcher;
pub mod board;
pub mod capacity;
pub mod ceiling;
pub mod config;
pub mod device;
pub mod disposition;
pub mod doctor;
pub mod drain;
pub mod drill;
pub mod engine;
pub mod health;
pub mod http;
pub mod job;
pub mod metrics;
pub mod model;
pub mod open;
pub mod pass;
pub mod pressure;
pub mod remembered;
pub mod retry;
pub mod suspicion;
pub mod telemetry;
pub mod worker;
