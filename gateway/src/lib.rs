//! `vramq-gateway`: an HTTP gateway to vramq workers. It turns a request into a job in RabbitMQ, and the job's replies into the
//! response.

// Nothing that a message, a peer or a device does may panic.
#![cfg_attr(not(test), warn(clippy::expect_used, clippy::panic, clippy::unreachable))]

pub mod adoption;
pub mod app;
pub mod background_work;
pub mod body;
pub mod body_memory;
pub mod broker;
pub mod byte_budget;
pub mod config;
pub mod descriptors;
pub mod drain;
pub mod files;
pub mod folder_store;
pub mod folder_threads;
pub mod followed;
pub mod held_body;
pub mod idle_timeout;
pub mod in_flight;
pub mod job_sessions;
pub mod job_task;
pub mod jobs;
pub mod keys;
pub mod lifecycle;
pub mod lingering_body;
pub mod metrics;
pub mod observe;
pub mod off_runtime;
pub mod operator;
pub mod outputs;
pub mod problem;
pub mod request_span;
pub mod routes;
pub mod send_timeout;
pub mod server;
pub mod shares;
pub mod storage;
pub mod trace;
#[cfg(test)]
mod until;
pub mod used;
pub mod vocabulary;
