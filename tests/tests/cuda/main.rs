//! The CUDA device without a GPU: a fake driver, an emulation of the kernels, and the real kernel compiler.

mod blame;
mod device;
mod device_lock;
mod emulation;
mod encoder;
mod gpu_script;
mod job;
mod kernels;
mod products;
mod program;
mod sensors;
mod several_gpus;
mod wait_list;
mod waits;
mod worker;
