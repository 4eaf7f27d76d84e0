//! Instructions of a whole warp: loads and stores, copies, matrices, products and shuffles.

use half::{bf16, f16};

use super::code::{Address, Half, Operand, Register, Shuffle, StateSpace};
use super::fault::Fault;
use super::fragments::{self, LANES};
use super::warp::{ALL, Surroundings, Warp, lanes_of};

impl Warp<'_> {
    pub fn load(
        &mut self,
        space: StateSpace,
        to: &[Register],
        (bytes, signed): (usize, bool),
        address: Address,
        lanes: u32,
        around: &mut Surroundings<'_>,
    ) -> Result<(), Fault> {
        self.check(&[address.base], lanes)?;
        for lane in lanes_of(lanes) {
            let mut read = [0; 32];
            let read = &mut read[..bytes * to.len()];
            let (at, now) = (self.address(address, lane), self.now(lane, around));
            match space {
                StateSpace::Global => around.global.read(at, read, now)?,
                StateSpace::Shared => around.shared.read(at, read, now)?,
            }
            for (to, read) in to.iter().zip(read.chunks(bytes)) {
                let mut number = [0; 8];
                number[..bytes].copy_from_slice(read);
                let mut number = u64::from_le_bytes(number);
                if signed && bytes < 8 {
                    let unused = 64 - 8 * bytes as u32;
                    number = ((number << unused).cast_signed() >> unused).cast_unsigned();
                }
                self.values[*to][lane] = number;
            }
        }
        to.iter().for_each(|to| self.written[*to] |= lanes);
        Ok(())
    }

    pub fn store(
        &mut self,
        space: StateSpace,
        from: &[Operand],
        bytes: usize,
        address: Address,
        lanes: u32,
        around: &mut Surroundings<'_>,
    ) -> Result<(), Fault> {
        self.check(from, lanes)?;
        self.check(&[address.base], lanes)?;
        for lane in lanes_of(lanes) {
            let mut written = [0; 32];
            for (from, to) in from.iter().zip(written.chunks_mut(bytes)) {
                to.copy_from_slice(&self.get(*from, lane).to_le_bytes()[..bytes]);
            }
            let written = &written[..bytes * from.len()];
            let (at, now) = (self.address(address, lane), self.now(lane, around));
            match space {
                StateSpace::Global => around.global.write(at, written, now)?,
                StateSpace::Shared => around.shared.write(at, written, now)?,
            }
        }
        Ok(())
    }

    pub fn begin_copy(
        &mut self,
        to: Address,
        from: Address,
        read: Operand,
        lanes: u32,
        around: &mut Surroundings<'_>,
    ) -> Result<(), Fault> {
        self.check(&[to.base, from.base, read], lanes)?;
        for lane in lanes_of(lanes) {
            let (to, from, now) = (self.address(to, lane), self.address(from, lane), self.now(lane, around));
            let from = match self.get(read, lane) {
                0 => None,
                16 => Some(from),
                // More is undefined. Reading only a part is not needed by any kernel here.
                _ => return Err(Fault::Undefined),
            };
            // Checks only whether the bytes may be read. The copy takes them at its end.
            if let Some(from) = from {
                around.global.read(from, &mut [0; 16], now)?;
            }
            around.shared.begin_copy(to, 16, now)?;
            if let Some(open) = self.copies[lane].0.last_mut() {
                open.push((to, from));
            }
        }
        Ok(())
    }

    /// Copies happen as late as they may: when they are waited for.
    pub fn end_copies(
        &mut self,
        left: usize,
        lanes: u32,
        around: &mut Surroundings<'_>,
    ) -> Result<(), Fault> {
        for lane in lanes_of(lanes) {
            let now = self.now(lane, around);
            let committed = self.copies[lane].0.len() - 1;
            for (to, from) in self.copies[lane].0.drain(..committed.saturating_sub(left)).flatten() {
                let mut bytes = [0; 16];
                if let Some(from) = from {
                    around.global.read(from, &mut bytes, now)?;
                }
                around.shared.end_copy(to, &bytes, now)?;
            }
        }
        Ok(())
    }

    pub fn load_matrices(
        &mut self,
        to: &[Register],
        address: Address,
        transposed: bool,
        around: &mut Surroundings<'_>,
    ) -> Result<(), Fault> {
        self.check(&[address.base], ALL)?;
        for (matrix, to) in to.iter().enumerate() {
            let mut elements = [[0; 8]; 8];
            for (row, elements) in elements.iter_mut().enumerate() {
                let lane = matrix * 8 + row;
                let mut bytes = [0; 16];
                around.shared.read(self.address(address, lane), &mut bytes, self.now(lane, around))?;
                for (element, bytes) in elements.iter_mut().zip(bytes.as_chunks().0) {
                    *element = u16::from_le_bytes(*bytes);
                }
            }
            for lane in 0..LANES {
                let [low, high] = [0, 1].map(|i| {
                    let (row, column) = fragments::loaded(transposed, lane, i);
                    u64::from(elements[row][column])
                });
                self.values[*to][lane] = high << 16 | low;
            }
            self.written[*to] = ALL;
        }
        Ok(())
    }

    pub fn multiply(&mut self, inner: usize, kind: Half, to: &[Register], [a, b, sum]: [&[Operand]; 3]) {
        let widen = |bits: u64| match kind {
            Half::F16 => f16::from_bits(bits as u16).to_f32(),
            Half::Bf16 => bf16::from_bits(bits as u16).to_f32(),
        };
        let halves = |from: &[Operand], lane: usize| {
            let registers = from.iter().map(|from| self.get(*from, lane));
            registers.flat_map(|pair| [widen(pair), widen(pair >> 16)]).collect()
        };
        let number = |from: Operand, lane: usize| f32::from_bits(self.get(from, lane) as u32);
        let a_of: Vec<Vec<f32>> = (0..LANES).map(|lane| halves(a, lane)).collect();
        let b_of: Vec<Vec<f32>> = (0..LANES).map(|lane| halves(b, lane)).collect();
        let sum_of: Vec<[f32; 4]> =
            (0..LANES).map(|lane| std::array::from_fn(|i| number(sum[i], lane))).collect();
        let sums = fragments::multiply(inner, &a_of, &b_of, &sum_of);
        for (lane, sums) in sums.iter().enumerate() {
            for (to, sum) in to.iter().zip(sums) {
                self.values[*to][lane] = u64::from(sum.to_bits());
            }
        }
        to.iter().for_each(|to| self.written[*to] = ALL);
    }

    /// PTX ISA 8.8, chapter 9.7.9, "shfl.sync".
    pub fn shuffle(
        &mut self,
        how: Shuffle,
        (to, inside): (Register, Option<Register>),
        [value, by, clamp]: [Operand; 3],
        lanes: u32,
    ) -> Result<(), Fault> {
        let mut taken = [0; LANES];
        let mut is_inside = [0; LANES];
        for lane in lanes_of(lanes) {
            let (by, clamp) = (self.get(by, lane) as usize & 31, self.get(clamp, lane) as usize);
            let segment = clamp >> 8 & 31;
            let (lowest, highest) = (lane & segment, (lane & segment) | (clamp & 31 & !segment));
            let (from, exists) = match how {
                Shuffle::Up => (lane.wrapping_sub(by), lane >= by + highest),
                Shuffle::Down => (lane + by, lane + by <= highest),
                Shuffle::Butterfly => (lane ^ by, lane ^ by <= highest),
                Shuffle::Index => (lowest | (by & !segment), lowest | (by & !segment) <= highest),
            };
            let from = if exists { from } else { lane };
            // A value from a lane that does not take part is undefined.
            if lanes >> from & 1 == 0 {
                return Err(Fault::Undefined);
            }
            taken[lane] = self.get(value, from) & 0xffff_ffff;
            is_inside[lane] = u64::from(exists);
        }
        for lane in lanes_of(lanes) {
            self.values[to][lane] = taken[lane];
            if let Some(inside) = inside {
                self.values[inside][lane] = is_inside[lane];
            }
        }
        self.written[to] |= lanes;
        if let Some(inside) = inside {
            self.written[inside] |= lanes;
        }
        Ok(())
    }
}
