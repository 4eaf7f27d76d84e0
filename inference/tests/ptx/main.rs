//! A second opinion on the PTX that comes with the program: an interpreter of it, written from NVIDIA's description of PTX alone,
//! runs every kernel and compares with sums in f64 (`linear`, `attention`, `norms`, `rows`); changed kernels show what it finds
//! (`mutations`); NVIDIA's assembler and disassembler tell what each kernel takes of a GPU (`assembler`); and tinygrad
//! has the same maps of fragments (`tinygrad`).
//!
//! Nothing here is shared with the encoder, nor with the emulation of `tests/fake_cuda`, but the embedded texts themselves.
//! docs/gpu.md says what that checks, and what only a GPU can tell.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod arithmetic;
mod assembler;
mod attention;
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
