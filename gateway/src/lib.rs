//! `vramq-gateway`: an HTTP gateway to vramq workers. A request becomes a job in RabbitMQ, and the job's replies its answer.

pub mod app;
pub mod body;
pub mod broker;
pub mod config;
pub mod files;
pub mod jobs;
pub mod keys;
pub mod metrics;
pub mod observe;
pub mod operator;
pub mod problem;
pub mod routes;
pub mod server;
pub mod storage;
