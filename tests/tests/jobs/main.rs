//! What becomes of a job: its reply, the forms that it may have, and what is no job at all.

mod bad_input;
mod encoder;
mod fuzzed;
mod hostile;
mod large;
mod main_job;
mod poison;
mod returns;
mod shared_passes;
mod size;
mod slots;
