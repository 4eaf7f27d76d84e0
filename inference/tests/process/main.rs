//! Process models with real programs: every test starts processes, and checks that none is left.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod cancels;
mod cgroups;
mod configuration;
mod deaths;
mod device;
mod differences;
mod env;
mod faults;
mod frameworks;
mod golden;
mod kills;
mod life;
mod load_memory;
mod loading;
mod memory;
mod once;
mod once_memory;
mod programs;
mod pytorch;
mod restarts;
mod revisions;
mod rough;
mod serving;
mod trials;
