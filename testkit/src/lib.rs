//! Parts for tests that need no broker, no network and no clock.

pub mod simulation;
