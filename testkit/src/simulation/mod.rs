//! A deterministic world to run workers in: one seed is one history.

pub mod broker;
mod random;

pub use random::Random;
