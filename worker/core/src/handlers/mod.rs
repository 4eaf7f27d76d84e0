//! The handlers of events, one file for each kind. A handler asks the sub-states of the core, which own all facts, and adds actions.

mod commands;
mod consumers;
mod deliveries;
mod drain;
mod failed_passes;
mod further_queues;
pub(crate) mod health;
mod isolation;
mod large_turns;
mod passes;
mod preparation;
mod references;
mod settlement;
mod successors;
mod tick;
mod time_limits;
mod withdrawals;

#[cfg(test)]
mod bulk_tests;
#[cfg(test)]
mod commands_tests;
#[cfg(test)]
mod drain_tests;
#[cfg(test)]
mod further_queues_tests;
#[cfg(test)]
mod health_tests;
#[cfg(test)]
mod parallel_passes_tests;
#[cfg(test)]
mod passes_tests;
#[cfg(test)]
mod queues_tests;
#[cfg(test)]
mod session_tests;
#[cfg(test)]
mod status_tests;
#[cfg(test)]
mod test_worker;
#[cfg(test)]
mod tick_tests;
#[cfg(test)]
mod withdrawals_tests;
