//! Faults of workers, devices, networks and brokers: every job still ends once.

mod addresses;
mod broker_faults;
mod channels;
mod connections;
mod crashes;
mod credentials;
mod deleted_topology;
mod full_reply_queues;
mod further_queues;
mod large_jobs;
mod ledger;
mod load;
mod neighbours;
mod quarantine;
mod queues;
mod refused_dead_letters;
mod session;
mod shutdown;
mod silence;
mod silent_job_queues;
mod silent_queues;
mod silent_replies;
mod slow_replies;
mod standstill;
mod trust;
mod unfinished_jobs;
