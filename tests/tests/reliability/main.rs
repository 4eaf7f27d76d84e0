//! Faults of workers, devices, networks and brokers: every job still ends once.

mod addresses;
mod broker;
mod crashes;
mod leaving;
mod ledger;
mod load;
mod session;
mod shutdown;
mod suspects;
