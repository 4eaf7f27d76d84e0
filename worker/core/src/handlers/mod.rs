//! The handlers of events: a file for each kind, in the order in which a job passes them.

mod commands;
mod consumers;
mod deliveries;
pub(crate) mod drain;
pub(crate) mod health;
mod passes;
mod preparation;
mod references;
mod settlement;
mod tick;
mod withdrawals;

#[cfg(test)]
mod health_tests;
#[cfg(test)]
mod passes_tests;
#[cfg(test)]
mod queues_tests;
#[cfg(test)]
mod test_worker;
#[cfg(test)]
mod withdrawals_tests;
