//! What the gateway knows of the broker besides its jobs: workers' heartbeats, queues' depths, dead letters; and withdrawals.

pub mod dead_letters;
pub mod fleet;
pub mod link;
pub mod outlook;
pub mod withdrawals;
