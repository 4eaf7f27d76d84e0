//! When device memory runs out, is shared with other processes, is learned about, or leaks.

mod device_memory;
mod host_memory;
mod memory_growth;
mod out_of_memory;
mod rerankers;
mod soak;
