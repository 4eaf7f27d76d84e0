//! Jobs that came over HTTP: each has an entry with its state and events, and a task that follows it until it has ended.

pub mod earlier;
pub mod entry;
pub mod output_files;
pub mod registry;
pub mod run;
pub mod store;
pub mod view;

pub use entry::{Entry, Failure, State};
pub use registry::Jobs;
pub use run::{Submission, start};
pub use store::ResultStore;
