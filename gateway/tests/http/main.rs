//! The gateway from outside: real processes of gateway and worker, a real RabbitMQ, and published clients.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod clients;
mod dead_letters;
mod failures;
mod foreign;
mod harness;
mod hostile;
mod jobs;
mod object_store;
mod page;
mod pages;
mod request_gate;
mod requests;
mod scores;
mod sparse;
mod withdrawals;
mod withdrawn_jobs;
