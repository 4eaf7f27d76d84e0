//! One warp: 32 threads that run in lock step while they are at the same instruction. If a branch divides them, the threads at
//! the earliest instruction run first, so that all meet again after the branch.

use super::code::{Address, Kernel, Operand, Operation, Register, Special};
use super::fault::{Fault, Report};
use super::fragments::LANES;
use super::memory::{Moment, Space};

pub const ALL: u32 = u32::MAX;

/// More than any launch of the tests takes, so that an endless loop is reported.
const STEPS_MAX: u64 = 20_000_000;

/// What a warp has around it: the memory, and its block's place.
#[derive(Debug)]
pub struct Surroundings<'a> {
    pub global: &'a mut Space,
    pub shared: &'a mut Space,
    pub arguments: &'a [u64],
    pub blocks: (u32, u32),
    pub block: (u32, u32),
    pub threads: u32,
    /// Barriers that the block has passed.
    pub barriers: u32,
}

impl Surroundings<'_> {
    fn block_number(&self) -> u32 {
        self.block.1 * self.blocks.0 + self.block.0
    }
}

/// Why a warp stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    Barrier,
    Ended,
}

/// Lanes at the same instruction.
#[derive(Clone, Copy, Debug)]
struct Group {
    at: usize,
    lanes: u32,
    /// Waits for the other lanes that execute the instruction with it.
    waits: bool,
}

/// Copies that a thread has begun, by groups; the last group is still open. Each has a target and a source; without a source zeros
/// are copied.
#[derive(Clone, Debug)]
pub struct Copies(pub Vec<Vec<(u64, Option<u64>)>>);

#[derive(Debug)]
pub struct Warp<'k> {
    kernel: &'k Kernel,
    number: usize,
    pub values: Vec<[u64; LANES]>,
    /// For each register the lanes that have written it.
    pub written: Vec<u32>,
    groups: Vec<Group>,
    pub copies: Vec<Copies>,
    /// Barriers of this warp alone.
    barriers: u32,
    steps: u64,
}

pub fn lanes_of(lanes: u32) -> impl Iterator<Item = usize> {
    (0..LANES).filter(move |lane| lanes >> lane & 1 == 1)
}

impl<'k> Warp<'k> {
    pub fn new(kernel: &'k Kernel, number: usize) -> Self {
        Self {
            kernel,
            number,
            values: vec![[0; LANES]; kernel.registers],
            written: vec![0; kernel.registers],
            groups: vec![Group { at: 0, lanes: ALL, waits: false }],
            copies: vec![Copies(vec![Vec::new()]); LANES],
            barriers: 0,
            steps: 0,
        }
    }

    /// Until a barrier of the block, or the end.
    pub fn run(&mut self, around: &mut Surroundings<'_>) -> Result<Stop, Report> {
        while let Some((at, lanes)) = self.next() {
            match self.step(at, lanes, around) {
                Ok(None) => {}
                Ok(Some(stop)) => return Ok(stop),
                Err(fault) => return Err(self.report(fault, at, around)),
            }
        }
        match self.groups.first() {
            None => Ok(Stop::Ended),
            Some(stuck) => {
                let lanes = self.groups.iter().fold(0, |lanes, group| lanes | group.lanes);
                Err(self.report(Fault::WarpStuck { lanes }, stuck.at, around))
            }
        }
    }

    /// The report of a fault at this instruction.
    pub fn report(&self, fault: Fault, at: usize, around: &Surroundings<'_>) -> Report {
        let instruction = &self.kernel.code[at.min(self.kernel.code.len() - 1)];
        Report {
            fault,
            line: instruction.line,
            instruction: instruction.text.clone(),
            block: around.block,
            warp: self.number,
        }
    }

    /// Where lanes wait that have not ended.
    pub fn at(&self) -> usize {
        self.groups.first().map_or(self.kernel.code.len(), |group| group.at)
    }

    /// The earliest instruction, and all lanes that are there.
    fn next(&mut self) -> Option<(usize, u32)> {
        let at = self.groups.iter().filter(|group| !group.waits).map(|group| group.at).min()?;
        let mut lanes = 0;
        self.groups.retain(|group| {
            if group.at == at {
                lanes |= group.lanes;
            }
            group.at != at
        });
        Some((at, lanes))
    }

    fn put(&mut self, at: usize, lanes: u32) {
        if lanes != 0 {
            self.groups.push(Group { at, lanes, waits: false });
        }
    }

    fn step(&mut self, at: usize, lanes: u32, around: &mut Surroundings<'_>) -> Result<Option<Stop>, Fault> {
        self.steps += 1;
        if self.steps > STEPS_MAX {
            return Err(Fault::Endless { steps: STEPS_MAX });
        }
        let kernel = self.kernel;
        let Some(instruction) = kernel.code.get(at) else { return Err(Fault::Undefined) };
        let acting = match instruction.guard {
            None => lanes,
            Some((predicate, wanted)) => {
                self.check(&[Operand::Register(predicate)], lanes)?;
                let is_acting = |lane: &usize| (self.values[predicate][*lane] != 0) == wanted;
                lanes_of(lanes).filter(is_acting).fold(0, |acting, lane| acting | 1 << lane)
            }
        };
        match &instruction.operation {
            Operation::Branch { to } => {
                self.put(*to, acting);
                self.put(at + 1, lanes & !acting);
                return Ok(None);
            }
            Operation::Return => {
                if lanes_of(acting).any(|lane| self.copies[lane].0.iter().any(|group| !group.is_empty())) {
                    return Err(Fault::CopyAtEnd);
                }
                self.put(at + 1, lanes & !acting);
                return Ok(None);
            }
            Operation::Barrier if acting != 0 => {
                self.together(acting)?;
                self.put(at + 1, lanes);
                return Ok(Some(Stop::Barrier));
            }
            Operation::WarpBarrier { members } | Operation::Shuffle { members, .. } if acting != 0 => {
                self.check(&[*members], acting)?;
                let wanted = self.get(*members, acting.trailing_zeros() as usize) as u32;
                if acting & !wanted != 0
                    || lanes_of(acting).any(|lane| self.get(*members, lane) as u32 != wanted)
                {
                    return Err(Fault::Diverged { lanes: acting });
                }
                if acting != wanted {
                    // Other lanes have not arrived yet.
                    self.groups.push(Group { at, lanes, waits: true });
                    return Ok(None);
                }
                self.execute(&instruction.operation, acting, around)?;
            }
            operation if acting != 0 => self.execute(operation, acting, around)?,
            _ => {}
        }
        self.put(at + 1, lanes);
        Ok(None)
    }

    /// Fails unless all threads of the warp are here, which the ISA calls aligned.
    fn together(&self, lanes: u32) -> Result<(), Fault> {
        if lanes == ALL { Ok(()) } else { Err(Fault::Diverged { lanes }) }
    }

    fn execute(
        &mut self,
        operation: &Operation,
        lanes: u32,
        around: &mut Surroundings<'_>,
    ) -> Result<(), Fault> {
        match operation {
            Operation::Compute { function, to, from } => {
                self.check(from, lanes)?;
                for lane in lanes_of(lanes) {
                    let mut operands = [0; 4];
                    for (operand, from) in operands.iter_mut().zip(from) {
                        *operand = self.get(*from, lane);
                    }
                    self.values[*to][lane] = function(operands).ok_or(Fault::Undefined)?;
                }
                self.written[*to] |= lanes;
            }
            Operation::Special { to, which } => {
                for lane in lanes_of(lanes) {
                    self.values[*to][lane] = u64::from(self.special(*which, lane, around));
                }
                self.written[*to] |= lanes;
            }
            Operation::Parameter { to, number } => {
                lanes_of(lanes).for_each(|lane| self.values[*to][lane] = around.arguments[*number]);
                self.written[*to] |= lanes;
            }
            Operation::Join { to, from, bits } => self.join(*to, from, *bits, lanes)?,
            Operation::Split { to, from, bits } => self.split(to, *from, *bits, lanes)?,
            Operation::Load { space, to, bytes, signed, address } => {
                self.load(*space, to, (*bytes, *signed), *address, lanes, around)?;
            }
            Operation::Store { space, from, bytes, address } => {
                self.store(*space, from, *bytes, *address, lanes, around)?;
            }
            Operation::Copy { to, from, read } => self.begin_copy(*to, *from, *read, lanes, around)?,
            Operation::CommitCopies => lanes_of(lanes).for_each(|lane| self.copies[lane].0.push(Vec::new())),
            Operation::WaitForCopies { left } => self.end_copies(*left, lanes, around)?,
            Operation::LoadMatrices { to, address, transposed } => {
                self.together(lanes)?;
                self.load_matrices(to, *address, *transposed, around)?;
            }
            Operation::Multiply { inner, kind, to, a, b, sum } => {
                self.together(lanes)?;
                self.check(a, lanes)?;
                self.check(b, lanes)?;
                self.check(sum, lanes)?;
                self.multiply(*inner, *kind, to, [a, b, sum]);
            }
            Operation::Shuffle { how, to, inside, value, lane, clamp, .. } => {
                self.check(&[*value, *lane, *clamp], lanes)?;
                self.shuffle(*how, (*to, *inside), [*value, *lane, *clamp], lanes)?;
            }
            Operation::WarpBarrier { .. } => self.barriers += u32::from(lanes == ALL),
            Operation::Barrier | Operation::Branch { .. } | Operation::Return => {}
        }
        Ok(())
    }

    /// Puts parts of `bits` bits each into one register, the first part lowest.
    fn join(&mut self, to: Register, from: &[Operand], bits: u32, lanes: u32) -> Result<(), Fault> {
        self.check(from, lanes)?;
        for lane in lanes_of(lanes) {
            let parts = from.iter().enumerate();
            self.values[to][lane] =
                parts.fold(0, |all, (i, from)| all | self.get(*from, lane) << (i as u32 * bits));
        }
        self.written[to] |= lanes;
        Ok(())
    }

    /// Takes a value apart into parts of `bits` bits each, the lowest first. A part without a register is dropped.
    fn split(&mut self, to: &[Option<Register>], from: Operand, bits: u32, lanes: u32) -> Result<(), Fault> {
        self.check(&[from], lanes)?;
        for lane in lanes_of(lanes) {
            let whole = self.get(from, lane);
            for (i, to) in to.iter().enumerate() {
                let Some(to) = to else { continue };
                self.values[*to][lane] = whole >> (i as u32 * bits) & (u64::MAX >> (64 - bits));
            }
        }
        to.iter().flatten().for_each(|to| self.written[*to] |= lanes);
        Ok(())
    }

    pub fn check(&self, operands: &[Operand], lanes: u32) -> Result<(), Fault> {
        for operand in operands {
            if let Operand::Register(register) = operand
                && self.written[*register] & lanes != lanes
            {
                return Err(Fault::UnwrittenRegister { lanes: lanes & !self.written[*register] });
            }
        }
        Ok(())
    }

    pub fn get(&self, operand: Operand, lane: usize) -> u64 {
        match operand {
            Operand::Register(register) => self.values[register][lane],
            Operand::Number(number) => number,
        }
    }

    fn special(&self, which: Special, lane: usize, around: &Surroundings<'_>) -> u32 {
        match which {
            Special::Thread => (self.number * LANES + lane) as u32,
            Special::Threads => around.threads,
            Special::BlockAcross => around.block.0,
            Special::BlockDown => around.block.1,
            Special::BlocksAcross => around.blocks.0,
            Special::BlocksDown => around.blocks.1,
            Special::Lane => lane as u32,
            Special::Zero => 0,
            Special::One => 1,
        }
    }

    pub fn now(&self, lane: usize, around: &Surroundings<'_>) -> Moment {
        let block = around.block_number();
        Moment {
            thread: block * around.threads + (self.number * LANES + lane) as u32,
            block,
            barriers: around.barriers,
            warp_barriers: self.barriers,
        }
    }

    pub fn address(&self, address: Address, lane: usize) -> u64 {
        self.get(address.base, lane).wrapping_add_signed(address.offset)
    }
}
