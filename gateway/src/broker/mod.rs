//! The gateway's dealings with the broker besides jobs and replies: heartbeats, queue depths, dead letters and withdrawals.

mod answering;
pub mod dead_letters;
mod first_heartbeats;
pub mod fleet;
pub mod link;
pub mod outlook;
mod questions;
mod rates;
mod withdrawing;
