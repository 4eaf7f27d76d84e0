//! Process models with real programs: every test starts processes, and none is left behind.

mod device;
mod env;
mod faults;
mod life;
mod memory;
mod serving;
