//! The faults of a kernel that the interpreter detects.

use std::fmt;

/// One wrong act of a kernel, found while it runs. The tests of the interpreter itself tell faults apart by these.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    #[error("{bytes} bytes at {address:#x}, which are not inside one {space} array")]
    OutOfBounds { space: &'static str, address: u64, bytes: usize },
    #[error("{bytes} bytes at {address:#x}, which is not a multiple of {bytes}")]
    Misaligned { address: u64, bytes: usize },
    #[error("reads {name} at byte {at}, which nobody has written")]
    Unwritten { name: String, at: usize },
    #[error("writes {name} at byte {at}, which is an input")]
    ReadOnly { name: String, at: usize },
    #[error(
        "thread {thread} touches {name} at byte {at}, and so did thread {other} with no barrier between, one of them to write"
    )]
    Race { name: String, at: usize, thread: u32, other: u32 },
    #[error("touches {name} at byte {at}, to which a copy is under way that was not waited for")]
    CopyUnderWay { name: String, at: usize },
    #[error("reads a register of lanes {lanes:#010x} that nobody has written")]
    UnwrittenRegister { lanes: u32 },
    #[error("an instruction for all of a warp is reached by lanes {lanes:#010x} alone")]
    Diverged { lanes: u32 },
    #[error("lanes {lanes:#010x} wait for others of their warp, which never come")]
    WarpStuck { lanes: u32 },
    #[error("some threads of the block wait at a barrier, others have ended")]
    BarrierUnreached,
    #[error("a thread ends with copies that it has not waited for")]
    CopyAtEnd,
    #[error("the operands have no defined result")]
    Undefined,
    #[error("more than {steps} steps of one warp")]
    Endless { steps: u64 },
}

/// A fault, and where it happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    pub fault: Fault,
    /// Of the PTX text, from 1 on.
    pub line: usize,
    pub instruction: String,
    pub block: (u32, u32),
    pub warp: usize,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { fault, line, instruction, block, warp } = self;
        write!(f, "line {line} `{instruction}`, block {block:?}, warp {warp}: {fault}")
    }
}

impl std::error::Error for Report {}
