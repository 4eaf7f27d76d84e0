//! The client library, the Python and npm packages, `vramq submit` and `vramq download`: against a real broker, and real or scripted workers.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod adopt;
mod common;
mod connect;
mod download;
mod node;
mod packages;
mod permits;
mod publish;
mod python;
mod reconnect;
mod replies;
mod samples;
mod submit;
mod submit_errors;
mod withdraw;
