//! A second check of the embedded PTX, independent of the emulation. An interpreter that was written from NVIDIA's description of
//! PTX alone runs every kernel, and the tests compare with sums in f64 (`linear`, `attention`, `norms`, `rows`). Changed kernels
//! show which faults it finds (`mutations`). NVIDIA's assembler and disassembler show the resources of each kernel (`assembler`), from which
//! follows the least time of a pass (`bound`).
//! tinygrad has the same maps of fragments (`tinygrad`).
//!
//! The interpreter shares only the embedded PTX with the encoder, and nothing with the emulation in `tests/fake_cuda`.
//! docs/gpu-kernels.md says what these tests check, and what only a GPU can show.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod arithmetic;
mod assembler;
mod attention;
mod bound;
mod code;
mod fault;
mod fragments;
mod grid;
mod harness;
mod lanes;
mod linear;
mod memory;
mod mutations;
mod norms;
mod parse;
mod rows;
mod tinygrad;
mod warp;
