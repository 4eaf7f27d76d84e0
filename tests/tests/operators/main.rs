//! What operators see and do: start-up errors, commands, dead letters, metrics, alerts, traces.

mod callers;
mod cancel;
mod configuration;
mod control_command;
mod control_messages;
mod dlq;
mod dlq_actions;
mod dlq_early_ends;
mod dlq_import;
mod dlq_results;
mod http;
mod logs;
mod monitoring;
mod progress;
mod start;
mod status;
mod traces;
mod units;
