//! The simulation: workers, a model of RabbitMQ and callers, without a real broker, network or clock.

pub mod simulation;
