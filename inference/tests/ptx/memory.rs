//! Arrays in global and in shared memory, and the checks of every access. It must be inside one array, aligned, and read only what
//! was written. Two threads may not access one place, one of them writing, unless a barrier orders them.

use super::fault::Fault;

/// The size of a record of accesses, in bytes. No access of the kernels is smaller, or begins inside a cell.
const CELL: usize = 2;

/// When a thread accessed memory, for the order that barriers give.
#[derive(Clone, Copy, Debug, Default)]
pub struct Moment {
    /// The thread's number in the whole grid.
    pub thread: u32,
    pub block: u32,
    /// Barriers that the block, and that the thread's warp, had passed.
    pub barriers: u32,
    pub warp_barriers: u32,
}

impl Moment {
    fn warp(self) -> u32 {
        self.thread / 32
    }

    /// Whether a barrier of the block, or of the warp of both, lies between.
    fn is_before(self, later: Self) -> bool {
        self.block == later.block
            && (self.barriers < later.barriers
                || self.warp() == later.warp() && self.warp_barriers < later.warp_barriers)
    }
}

/// The threads that have read a cell since the last barrier that ordered them. Several readers are recorded only as exactly as the
/// check of a later writer needs.
#[derive(Clone, Copy, Debug, Default)]
enum Readers {
    #[default]
    None,
    One(Moment),
    /// Several threads of this one's warp, at the same time as it.
    Warp(Moment),
    Block(Moment),
    Grid(Moment),
}

impl Readers {
    fn add(self, now: Moment) -> Self {
        match self {
            Self::None => Self::One(now),
            Self::One(read) | Self::Warp(read) | Self::Block(read)
                if read.block == now.block && read.barriers < now.barriers =>
            {
                Self::One(now)
            }
            Self::One(read) if read.thread == now.thread => Self::One(now),
            Self::One(read) | Self::Warp(read) if read.warp() == now.warp() => {
                if read.warp_barriers < now.warp_barriers { Self::One(now) } else { Self::Warp(now) }
            }
            Self::One(read) | Self::Warp(read) | Self::Block(read) if read.block == now.block => {
                Self::Block(now)
            }
            Self::One(_) | Self::Warp(_) | Self::Block(_) | Self::Grid(_) => Self::Grid(now),
        }
    }

    /// A reader that is not ordered before a write at this moment.
    fn conflict(self, now: Moment) -> Option<u32> {
        let conflicts = match self {
            Self::None => return None,
            Self::One(read) => (read, read.thread != now.thread && !read.is_before(now)),
            Self::Warp(read) => (read, !read.is_before(now)),
            Self::Block(read) => (read, read.block != now.block || read.barriers >= now.barriers),
            Self::Grid(read) => (read, true),
        };
        conflicts.1.then_some(conflicts.0.thread)
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Unwritten,
    Written,
    /// A copy to it has begun and was not waited for.
    Copying,
}

#[derive(Clone, Copy, Debug, Default)]
struct Cell {
    state: State,
    /// By whom, while the kernel ran.
    writer: Option<Moment>,
    readers: Readers,
}

/// What a kernel may do with an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    Read,
    /// Its contents are there before the kernel.
    ReadWrite,
    /// Reading what the kernel has not written is a fault.
    Write,
}

#[derive(Debug)]
struct Array {
    name: String,
    base: u64,
    bytes: Vec<u8>,
    access: Access,
    /// Empty for inputs, which nobody writes.
    cells: Vec<Cell>,
}

impl Array {
    fn fault_at(&self, cell: usize, fault: fn(String, usize) -> Fault) -> Fault {
        fault(self.name.clone(), cell * CELL)
    }

    fn race(&self, cell: usize, thread: u32, other: u32) -> Fault {
        Fault::Race { name: self.name.clone(), at: cell * CELL, thread, other }
    }

    fn check_read(&mut self, at: usize, bytes: usize, now: Moment) -> Result<(), Fault> {
        if self.access == Access::Read {
            return Ok(());
        }
        for i in at / CELL..(at + bytes).div_ceil(CELL) {
            let cell = &mut self.cells[i];
            match cell.state {
                State::Written => {}
                State::Unwritten => return Err(self.fault_at(i, |name, at| Fault::Unwritten { name, at })),
                State::Copying => return Err(self.fault_at(i, |name, at| Fault::CopyUnderWay { name, at })),
            }
            if let Some(writer) = cell.writer
                && writer.thread != now.thread
                && !writer.is_before(now)
            {
                return Err(self.race(i, now.thread, writer.thread));
            }
            cell.readers = cell.readers.add(now);
        }
        Ok(())
    }

    fn check_write(&mut self, at: usize, bytes: usize, now: Moment, next: State) -> Result<(), Fault> {
        for i in at / CELL..(at + bytes).div_ceil(CELL) {
            if self.access == Access::Read {
                return Err(self.fault_at(i, |name, at| Fault::ReadOnly { name, at }));
            }
            let cell = self.cells[i];
            if cell.state == State::Copying {
                return Err(self.fault_at(i, |name, at| Fault::CopyUnderWay { name, at }));
            }
            let writer = cell.writer.filter(|writer| writer.thread != now.thread && !writer.is_before(now));
            if let Some(other) = writer.map(|writer| writer.thread).or(cell.readers.conflict(now)) {
                return Err(self.race(i, now.thread, other));
            }
            self.cells[i] = Cell { state: next, writer: Some(now), readers: Readers::None };
        }
        Ok(())
    }
}

/// The arrays of one state space.
#[derive(Debug)]
pub struct Space {
    name: &'static str,
    arrays: Vec<Array>,
    next: u64,
}

/// The distance between arrays, so that an access behind one is not in the next.
const GAP: u64 = 4096;

/// The alignment of the driver's allocations. Arrays in shared memory ask for no more.
const ALIGNMENT: u64 = 256;

/// Where global memory begins: nowhere near shared memory, and beyond 32 bits.
const GLOBAL: u64 = 0x7f00_0000_0000;

impl Space {
    pub fn global() -> Self {
        Self { name: "global", arrays: Vec::new(), next: GLOBAL }
    }

    pub fn shared() -> Self {
        Self { name: "shared", arrays: Vec::new(), next: GAP }
    }

    /// Adds an array. Its address, a multiple of 256 bytes.
    pub fn add(&mut self, name: &str, bytes: Vec<u8>, access: Access) -> u64 {
        let base = self.next;
        self.add_at(base, name, bytes, access);
        base
    }

    /// The same, where another space has it.
    pub fn add_at(&mut self, base: u64, name: &str, bytes: Vec<u8>, access: Access) {
        self.next = (base + bytes.len() as u64 + GAP).next_multiple_of(ALIGNMENT);
        let state = if access == Access::Write { State::Unwritten } else { State::Written };
        let count = if access == Access::Read { 0 } else { bytes.len().div_ceil(CELL) };
        let cells = vec![Cell { state, ..Cell::default() }; count];
        self.arrays.push(Array { name: name.to_owned(), base, bytes, access, cells });
    }

    /// The contents of an array, and whether each byte of it was written.
    pub fn contents(&self, name: &str) -> Option<(&[u8], bool)> {
        let array = self.arrays.iter().find(|array| array.name == name)?;
        Some((&array.bytes, array.cells.iter().all(|cell| cell.state == State::Written)))
    }

    /// The array that has all of these bytes, and where in it they are.
    fn find(&mut self, address: u64, bytes: usize) -> Result<(&mut Array, usize), Fault> {
        if !address.is_multiple_of(bytes as u64) {
            return Err(Fault::Misaligned { address, bytes });
        }
        let space = self.name;
        let inside = |array: &Array| {
            let at = address.checked_sub(array.base)? as usize;
            (at + bytes <= array.bytes.len()).then_some(at)
        };
        let found = self.arrays.iter_mut().find_map(|array| inside(array).map(|at| (array, at)));
        found.ok_or(Fault::OutOfBounds { space, address, bytes })
    }

    pub fn read(&mut self, address: u64, to: &mut [u8], now: Moment) -> Result<(), Fault> {
        let (array, at) = self.find(address, to.len())?;
        array.check_read(at, to.len(), now)?;
        to.copy_from_slice(&array.bytes[at..at + to.len()]);
        Ok(())
    }

    pub fn write(&mut self, address: u64, from: &[u8], now: Moment) -> Result<(), Fault> {
        let (array, at) = self.find(address, from.len())?;
        array.check_write(at, from.len(), now, State::Written)?;
        array.bytes[at..at + from.len()].copy_from_slice(from);
        Ok(())
    }

    /// Marks bytes as the target of a copy: nobody may touch them before its end.
    pub fn begin_copy(&mut self, address: u64, bytes: usize, now: Moment) -> Result<(), Fault> {
        let (array, at) = self.find(address, bytes)?;
        array.check_write(at, bytes, now, State::Copying)
    }

    /// Ends a copy. Other threads see it after a barrier from now on.
    pub fn end_copy(&mut self, address: u64, from: &[u8], now: Moment) -> Result<(), Fault> {
        let (array, at) = self.find(address, from.len())?;
        for cell in &mut array.cells[at / CELL..(at + from.len()).div_ceil(CELL)] {
            *cell = Cell { state: State::Written, writer: Some(now), readers: Readers::None };
        }
        array.bytes[at..at + from.len()].copy_from_slice(from);
        Ok(())
    }
}
