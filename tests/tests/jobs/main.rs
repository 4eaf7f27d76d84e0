//! What becomes of a job: its reply, the forms that it may have, and what is no job at all.

mod bad_input;
mod broker_limits;
mod direct_replies;
mod encoder;
mod large;
mod main_job;
mod malformed_at_random;
mod malformed_headers;
mod malformed_properties;
mod object_stores;
mod preparation;
mod process;
mod process_jobs;
mod process_kills;
mod queue_bytes;
mod shared_passes;
mod slots;
mod speech;
mod stores;
mod unroutable;
