//! A kernel for the interpreter: instructions with resolved names, operands, labels and addresses.

use super::arithmetic::Function;

/// A register's place among those of its kernel.
pub type Register = usize;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operand {
    Register(Register),
    Number(u64),
}

/// A register's or an array's address, and bytes behind it.
#[derive(Clone, Copy, Debug)]
pub struct Address {
    pub base: Operand,
    pub offset: i64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateSpace {
    Global,
    Shared,
}

/// What a thread can ask about itself.
#[derive(Clone, Copy, Debug)]
pub enum Special {
    /// `%tid.x`, `%ntid.x`, `%ctaid.x`, `%ctaid.y`, `%nctaid.x`, `%nctaid.y`, `%laneid`.
    Thread,
    Threads,
    BlockAcross,
    BlockDown,
    BlocksAcross,
    BlocksDown,
    Lane,
    /// The other dimensions of a thread's number, which no launch here has.
    Zero,
    /// And their sizes.
    One,
}

/// How a shuffle finds the lane that it takes from.
#[derive(Clone, Copy, Debug)]
pub enum Shuffle {
    Butterfly,
    Up,
    Down,
    Index,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Half {
    F16,
    Bf16,
}

#[derive(Clone, Debug)]
pub enum Operation {
    Compute {
        function: Function,
        to: Register,
        from: Vec<Operand>,
    },
    Special {
        to: Register,
        which: Special,
    },
    /// One register from several parts, the lowest first, each of `bits` bits.
    Join {
        to: Register,
        from: Vec<Operand>,
        bits: u32,
    },
    Split {
        to: Vec<Option<Register>>,
        from: Operand,
        bits: u32,
    },
    /// A parameter of the kernel.
    Parameter {
        to: Register,
        number: usize,
    },
    /// Numbers of `bytes` each, one after the other. `signed`: extended by the sign to 64 bits.
    Load {
        space: StateSpace,
        to: Vec<Register>,
        bytes: usize,
        signed: bool,
        address: Address,
    },
    Store {
        space: StateSpace,
        from: Vec<Operand>,
        bytes: usize,
        address: Address,
    },
    /// Copies 16 bytes from global to shared memory. `read` of them are read; the rest are zeros.
    Copy {
        to: Address,
        from: Address,
        read: Operand,
    },
    CommitCopies,
    /// Waits until at most `left` groups of copies are under way.
    WaitForCopies {
        left: usize,
    },
    LoadMatrices {
        to: Vec<Register>,
        address: Address,
        transposed: bool,
    },
    Multiply {
        inner: usize,
        kind: Half,
        to: Vec<Register>,
        a: Vec<Operand>,
        b: Vec<Operand>,
        sum: Vec<Operand>,
    },
    /// `inside`: the predicate that says whether the lane taken from exists.
    Shuffle {
        how: Shuffle,
        to: Register,
        inside: Option<Register>,
        value: Operand,
        lane: Operand,
        clamp: Operand,
        members: Operand,
    },
    Barrier,
    WarpBarrier {
        members: Operand,
    },
    Branch {
        to: usize,
    },
    Return,
}

#[derive(Clone, Debug)]
pub struct Instruction {
    /// Lanes in which the predicate has another value do nothing.
    pub guard: Option<(Register, bool)>,
    pub operation: Operation,
    /// Of the text, from 1 on.
    pub line: usize,
    pub text: String,
}

#[derive(Clone, Debug)]
pub struct SharedArray {
    pub name: String,
    pub bytes: usize,
    pub address: u64,
}

#[derive(Clone, Debug)]
pub struct Kernel {
    pub name: String,
    /// Bytes of each parameter.
    pub parameters: Vec<usize>,
    pub threads_max: u32,
    pub shared: Vec<SharedArray>,
    pub registers: usize,
    pub code: Vec<Instruction>,
}
