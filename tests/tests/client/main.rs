//! The client library and `vramq submit` against a real broker, and workers that answer as a test wants.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;
mod connect;
mod permits;
mod publish;
mod reconnect;
mod replies;
mod submit;
mod submit_errors;
