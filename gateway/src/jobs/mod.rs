//! Jobs that came over HTTP. Each has an entry with its state and events. The task of a job is in [`job_task`](crate::job_task).

pub mod claim;
pub mod earlier;
pub mod entry;
pub mod in_time;
pub mod output_files;
pub mod record;
pub mod registry;
pub mod shared_view;
pub mod store;
pub mod stored;
pub mod view;

pub use entry::{Entry, Failure, State};
pub use registry::Jobs;
pub use store::ResultStore;
