//! Programs of the user as models, each in its own processes. A worker uses [`Pool`].

pub mod accepts;
pub mod child;
pub mod config;
pub mod cost;
pub mod frame;
mod frames;
pub mod item;
pub mod keeper;
pub mod launch;
mod media;
pub mod memory;
pub mod model;
pub mod need;
pub mod once;
pub mod oom;
pub mod outputs;
pub mod pass;
mod peak;
pub mod pool;
pub mod protocol;
mod reader;
pub mod rule;
pub mod scratch;
pub mod stderr;
pub mod transcript;
pub mod view;
pub mod warm;

pub use config::{Place, ProcessConfig};
pub use cost::Costs;
pub use item::Item;
pub use memory::{DeviceBook, DeviceView, HostView, Reading};
pub use model::ProcessModel;
pub use need::{Learned, Need};
pub use pass::{PassEnd, PassEvent, PassHandle, PassRequest};
pub use pool::{NotTaken, Pool, PoolOptions, SlotState, Status};
pub use view::WorkerDevice;
