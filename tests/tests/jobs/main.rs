//! Jobs: their replies, their forms, and messages that are not valid jobs.

mod bad_bodies;
mod bad_input;
mod broker_limits;
mod direct_replies;
mod encoder;
mod large;
mod main_job;
mod malformed_at_random;
mod malformed_headers;
mod malformed_properties;
mod model_files;
mod object_stores;
mod preparation;
mod process;
mod process_cancel;
mod process_faults;
mod process_jobs;
mod process_kills;
mod process_memory;
mod queue_bytes;
mod shared_passes;
mod slots;
mod speech;
mod stores;
mod unroutable;
mod whisper;
