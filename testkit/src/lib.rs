//! What tests of several crates are built from: the simulation (workers, a model of RabbitMQ and callers, without a real broker, network or
//! clock), the keys of a configuration that a page has, and how a test says that it did not run.

pub mod keys_of_page;
pub mod not_run;
pub mod simulation;
