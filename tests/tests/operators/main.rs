//! What operators see and do: start-up errors, commands, dead letters, metrics, alerts, traces.

mod cancel;
mod control;
mod dlq;
mod dlq_actions;
mod http;
mod monitoring;
mod operators;
mod start;
mod status;
mod traces;
