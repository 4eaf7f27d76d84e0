//! What tests of several crates are built from: the simulation (workers, a model of RabbitMQ and callers, without a real broker, network or
//! clock), and how a test says that it did not run.

pub mod not_run;
pub mod simulation;
