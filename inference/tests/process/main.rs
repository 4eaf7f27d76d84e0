//! Process models with real programs: every test starts processes, and none is left behind.

mod configuration;
mod device;
mod env;
mod faults;
mod golden;
mod life;
mod memory;
mod once;
mod serving;
