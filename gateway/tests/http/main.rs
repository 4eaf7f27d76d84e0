//! The gateway from outside: real processes of gateway and worker, a real RabbitMQ, and published clients.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod adoption;
mod answers;
mod bounds;
mod claims;
mod clients;
mod configuration;
mod connections;
mod damaged;
mod dead_letters;
mod drain;
mod early_answers;
mod embeddings;
mod events;
mod failures;
mod files;
mod foreign;
mod harness;
mod hostile;
mod hung_folder;
mod invalid_replies;
mod jobs;
mod keys;
mod large_files;
mod logs;
mod memory;
mod object_store;
mod output_files;
mod page;
mod pages;
mod permissions;
mod processes;
mod program_model;
mod readiness;
mod request_gate;
mod requests;
mod scores;
mod sparse;
mod tls;
mod traces;
mod withdrawals;
mod withdrawn_jobs;
