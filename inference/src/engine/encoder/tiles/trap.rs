//! Runs the assembly of `amx` on CPUs without AMX: each instruction traps, and the handler runs the model's version of it.
//!
//! For tests. The decoder reads the instruction bytes by the encodings in Intel's Software Developer's Manual. So the tests cover
//! the assembled loop with its addresses and registers, not only the source of the program.

use std::ffi::c_void;
use std::ptr;

use super::model::{ROW, Registers};
use super::program::{TILE_ROW_BYTES, TILE_ROWS};

/// Why the process ends with this status: an instruction that the emulated unit would not take.
const UNKNOWN: i32 = 101;
const BAD_CONFIGURATION: i32 = 102;
const NOT_CONFIGURED: i32 = 103;

/// The emulated registers; `None` until `ldtilecfg`. Only the handler touches it, on the only thread of its process.
static mut TILES: Option<Registers> = None;

/// From here on this process's tile instructions are emulated. To be called in a process with one thread.
pub(super) fn emulate_amx() {
    let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut c_void) = handle;
    // SAFETY: the action is a valid one, and the handler has the three arguments that SA_SIGINFO asks for.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as usize;
        action.sa_flags = libc::SA_SIGINFO;
        libc::sigaction(libc::SIGILL, &action, ptr::null_mut());
    }
}

extern "C" fn handle(_: i32, _: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel's context of the trapped thread, whose instruction pointer is at a whole instruction; of what
    // it addresses, `amx::Amx::block` and `configure` promise that it is valid. Nothing else uses `TILES`.
    unsafe {
        let registers = &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs;
        let Some(instruction) = Instruction::decode(registers) else { libc::_exit(UNKNOWN) };
        if let Err(status) = instruction.run(&mut *ptr::addr_of_mut!(TILES)) {
            libc::_exit(status);
        }
        registers[libc::REG_RIP as usize] += instruction.length;
    }
}

/// A tile instruction: its opcode with its prefix, its operands, and its bytes.
struct Instruction {
    opcode: u8,
    prefix: u8,
    /// Of ModRM: 3 means registers alone.
    mode: u8,
    reg: usize,
    rm: usize,
    vvvv: usize,
    address: i64,
    /// The index register's value: bytes from a row to the next.
    stride: i64,
    length: i64,
}

/// A trapped thread's registers, as the kernel lays them out: `gregset_t`.
type GeneralRegisters = [libc::greg_t; 23];

/// General registers in the order of their numbers.
const NUMBERED: [i32; 16] = [
    libc::REG_RAX,
    libc::REG_RCX,
    libc::REG_RDX,
    libc::REG_RBX,
    libc::REG_RSP,
    libc::REG_RBP,
    libc::REG_RSI,
    libc::REG_RDI,
    libc::REG_R8,
    libc::REG_R9,
    libc::REG_R10,
    libc::REG_R11,
    libc::REG_R12,
    libc::REG_R13,
    libc::REG_R14,
    libc::REG_R15,
];

impl Instruction {
    /// Reads a three-byte VEX prefix of map 0F38, the opcode, ModRM, SIB and displacement.
    ///
    /// # Safety
    /// The instruction pointer is at a whole instruction.
    unsafe fn decode(registers: &GeneralRegisters) -> Option<Self> {
        let value = |number: u8| registers[NUMBERED[number as usize] as usize];
        let at = value_at(registers);
        // SAFETY: by this function's contract; further bytes are read only if the ones before say that they are there.
        let byte = |offset: usize| unsafe { *at.add(offset) };
        let (escape, inverted, w_vvvv_l_pp) = (byte(0), byte(1), byte(2));
        // W and L are 0 in all of them.
        if escape != 0xc4 || inverted & 0x1f != 2 || w_vvvv_l_pp & 0x84 != 0 {
            return None;
        }
        let extends = |bit: u8| if inverted & bit == 0 { 8 } else { 0 };
        let (opcode, modrm) = (byte(3), byte(4));
        let (mode, rm) = (modrm >> 6, modrm & 7);
        let mut decoded = Self {
            opcode,
            prefix: w_vvvv_l_pp & 3,
            mode,
            reg: usize::from(modrm >> 3 & 7),
            rm: usize::from(rm),
            vvvv: usize::from(!w_vvvv_l_pp >> 3 & 15),
            address: 0,
            stride: 0,
            length: 5,
        };
        if mode == 3 {
            return Some(decoded);
        }
        decoded.address = match rm {
            4 => {
                let sib = byte(5);
                decoded.length += 1;
                let index = (sib >> 3 & 7) + extends(0x40);
                decoded.stride = if index == 4 { 0 } else { value(index) << (sib >> 6) };
                value((sib & 7) + extends(0x20))
            }
            _ => value(rm + extends(0x20)),
        };
        // SAFETY: as above.
        let displacement = unsafe { at.add(decoded.length as usize) };
        let (displacement, bytes) = match mode {
            0 => (0, 0),
            // SAFETY: as above.
            1 => (i64::from(unsafe { *displacement.cast::<i8>() }), 1),
            // SAFETY: as above.
            _ => (i64::from(unsafe { displacement.cast::<i32>().read_unaligned() }), 4),
        };
        decoded.address += displacement;
        decoded.length += bytes;
        Some(decoded)
    }

    /// # Errors
    /// The status for the process to end with.
    ///
    /// # Safety
    /// What the instruction addresses is valid.
    unsafe fn run(&self, tiles: &mut Option<Registers>) -> Result<(), i32> {
        let row = |at: usize| (self.address + at as i64 * self.stride) as *mut [u32; ROW];
        match (self.opcode, self.prefix, self.mode, tiles) {
            // LDTILECFG. SAFETY: by this function's contract: 64 bytes.
            (0x49, 0, 0..3, tiles) if self.reg == 0 => unsafe {
                let config = *(self.address as *const [u8; 64]);
                if config != full_configuration() {
                    return Err(BAD_CONFIGURATION);
                }
                *tiles = Some(Registers::ZERO);
            },
            // TILERELEASE.
            (0x49, 0, 3, tiles) if self.reg == 0 && self.rm == 0 => *tiles = None,
            // TILEZERO.
            (0x49, 3, 3, Some(tiles)) if self.rm == 0 => tiles.0[self.reg] = Registers::ZERO.0[0],
            // TILELOADD.
            (0x4b, 3, 0..3, Some(tiles)) if self.rm == 4 => {
                for (at, to) in tiles.0[self.reg].iter_mut().enumerate() {
                    // SAFETY: by this function's contract.
                    *to = unsafe { row(at).read_unaligned() };
                }
            }
            // TILESTORED.
            (0x4b, 2, 0..3, Some(tiles)) if self.rm == 4 => {
                for (at, from) in tiles.0[self.reg].iter().enumerate() {
                    // SAFETY: by this function's contract.
                    unsafe { row(at).write_unaligned(*from) };
                }
            }
            // TDPBF16PS: no two of its operands may be the same.
            (0x5c, 2, 3, Some(tiles)) if self.vvvv < 8 => {
                let (sums, a, b) = (self.reg, self.rm, self.vvvv);
                if sums == a || sums == b || a == b {
                    return Err(UNKNOWN);
                }
                tiles.dot(sums, a, b);
            }
            (0x49 | 0x4b | 0x5c, _, _, None) => return Err(NOT_CONFIGURED),
            _ => return Err(UNKNOWN),
        }
        Ok(())
    }
}

fn value_at(registers: &GeneralRegisters) -> *const u8 {
    registers[libc::REG_RIP as usize] as *const u8
}

/// Palette 1, eight registers of 16 rows of 64 bytes, all else zero.
fn full_configuration() -> [u8; 64] {
    let mut config = [0; 64];
    config[0] = 1;
    for tile in 0..8 {
        config[16 + 2 * tile] = TILE_ROW_BYTES as u8;
        config[48 + tile] = TILE_ROWS as u8;
    }
    config
}
