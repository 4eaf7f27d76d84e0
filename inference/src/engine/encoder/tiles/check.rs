//! The self-check of AMX: computes some blocks on the unit and with the model, and compares them, before a worker uses AMX.
//!
//! The unit runs in a child process, so that a fault, such as an instruction that a hypervisor reports but does not support, ends
//! the child and not the worker.

use std::io;
use std::ptr;

use super::program::{BLOCK, DEPTH, Parts, Sums};
use super::{AmxAbsent, TileUnit, model};

/// Lengths of the compared blocks in steps: one step, an even number, an odd number.
const STEPS: [usize; 3] = [1, 2, 13];
const STEPS_MAX: usize = 13;

/// The most by which a sum may differ. Operands are below 1, so that the sum of `13 · 32 · 3` products has an error
/// below 1e-3 in whatever order it is added up; one wrong operand shows as a difference of some hundredths.
const DIFFERENCE_MAX: f32 = 1e-3;

/// Seconds after which a child that does not end is killed: it needs some microseconds.
const CHILD_SECONDS_MAX: libc::c_uint = 10;

/// Compares the unit with the model.
///
/// # Errors
/// [`AmxAbsent::NotChecked`] or [`AmxAbsent::Failed`].
pub(super) fn compare_with_model(unit: TileUnit) -> Result<(), AmxAbsent> {
    compare_after(|| {}, unit)
}

/// The same, after `prepare` in the child.
fn compare_after(prepare: impl FnOnce(), unit: TileUnit) -> Result<(), AmxAbsent> {
    let cases =
        [Parts::Split, Parts::Rounded].into_iter().flat_map(|parts| STEPS.map(|steps| (parts, steps)));
    let cases: Vec<(Parts, usize)> = cases.collect();
    let (left, right) = (operands(1), operands(2));
    let results = Shared::new(cases.len()).map_err(AmxAbsent::NotChecked)?;
    run_in_child(|| {
        prepare();
        let _configured = unit.configure();
        for (at, (parts, steps)) in cases.iter().enumerate() {
            // SAFETY: the child is a copy of this process with one thread, which has just configured its tiles. Both sides are as
            // long as the longest case, and no one else writes the result of a case.
            unsafe {
                let sums = &mut *results.start.add(at);
                unit.block(*parts, left.as_ptr().cast(), right.as_ptr().cast(), *steps, sums);
            }
        }
    })?;
    for (at, (parts, steps)) in cases.iter().enumerate() {
        let mut expected = Sums::ZERO;
        // SAFETY: as above; the child has ended, and has written the result.
        let found = unsafe {
            model::block(*parts, left.as_ptr().cast(), right.as_ptr().cast(), *steps, &mut expected);
            &*results.start.add(at)
        };
        compare(found, &expected)
            .map_err(|what| AmxAbsent::Failed(format!("{parts:?}, {steps} steps: {what}")))?;
    }
    Ok(())
}

/// Says where two blocks differ the most, if that is too much.
fn compare(found: &Sums, expected: &Sums) -> Result<(), String> {
    for (row, (found, expected)) in found.0.iter().zip(&expected.0).enumerate() {
        for (column, (found, expected)) in found.iter().zip(expected).enumerate() {
            let difference = (found - expected).abs();
            if difference.is_nan() || difference > DIFFERENCE_MAX {
                return Err(format!("at row {row}, column {column} it gives {found}, the model {expected}"));
            }
        }
    }
    Ok(())
}

/// bf16 between -1 and 1, for the longest case.
fn operands(seed: u32) -> Vec<u16> {
    let mut state = seed.wrapping_mul(0x9E37_79B9);
    let elements = STEPS_MAX * Parts::Split.step_bytes() / 2;
    let mut operand = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let x = (state >> 8) as f32 / (1_u32 << 23) as f32 - 1.0;
        (x.to_bits() >> 16) as u16
    };
    (0..elements).map(|_| operand()).collect()
}

const _: () = assert!(Parts::Split.step_bytes() == 2 * 2 * BLOCK * DEPTH);

/// Blocks of sums that this process and its children see.
struct Shared {
    start: *mut Sums,
    bytes: usize,
}

impl Shared {
    fn new(blocks: usize) -> io::Result<Self> {
        let bytes = blocks * size_of::<Sums>();
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping, which nothing else uses; it is filled with zeros and aligned to a page.
        let start = unsafe { libc::mmap(ptr::null_mut(), bytes, access, kind, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { start: start.cast(), bytes })
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, and borrowed by nothing that outlives it.
        unsafe { libc::munmap(self.start.cast(), self.bytes) };
    }
}

/// Runs `work` in a forked copy of this process, which then ends. The copy has no other threads, but their locks may still be held:
/// `work` must neither allocate nor wait.
fn run_in_child(work: impl FnOnce()) -> Result<(), AmxAbsent> {
    let no_core = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the child calls only what is safe after a fork (signal-safety(7)) and `work`, and never returns.
    let child = unsafe { libc::fork() };
    match child {
        ..0 => return Err(AmxAbsent::NotChecked(io::Error::last_os_error())),
        // SAFETY: as above.
        0 => unsafe {
            libc::setrlimit(libc::RLIMIT_CORE, &no_core);
            libc::alarm(CHILD_SECONDS_MAX);
            let mut all = std::mem::zeroed();
            libc::sigfillset(&raw mut all);
            // The parent may have blocked the alarm.
            libc::sigprocmask(libc::SIG_UNBLOCK, &raw const all, ptr::null_mut());
            for signal in [libc::SIGILL, libc::SIGSEGV, libc::SIGBUS, libc::SIGALRM] {
                libc::signal(signal, libc::SIG_DFL);
            }
            work();
            libc::_exit(0);
        },
        1.. => {}
    }
    let mut status = 0;
    // SAFETY: the status is this function's own; the child is no one else's to wait for.
    while unsafe { libc::waitpid(child, &mut status, 0) } < 0 {
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(AmxAbsent::NotChecked(error));
        }
    }
    match (libc::WIFEXITED(status), libc::WEXITSTATUS(status)) {
        (true, 0) => Ok(()),
        (true, code) => Err(AmxAbsent::Failed(format!("its process ended with status {code}"))),
        (false, _) => {
            Err(AmxAbsent::Failed(format!("its process died of signal {}", libc::WTERMSIG(status))))
        }
    }
}

#[cfg(test)]
mod tests {
    use vramq_testkit::not_run::not_run;

    use super::super::amx::Amx;
    use super::super::trap;
    use super::*;

    #[test]
    fn the_model_agrees_with_itself() {
        compare_with_model(TileUnit::Model).unwrap();
    }

    #[test]
    fn the_assembly_agrees_with_the_model_when_its_instructions_are_emulated() {
        let Err(AmxAbsent::NoInstructions(_)) = Amx::find() else {
            not_run("this CPU's tile instructions do not trap: `make portable` runs them where they do");
            return;
        };
        compare_after(trap::emulate_amx, TileUnit::Amx(Amx::untested())).unwrap();
    }

    #[test]
    fn a_wrong_sum_is_found() {
        let mut wrong = Sums::ZERO;
        wrong.0[3][17] = 0.01;
        let said = compare(&wrong, &Sums::ZERO).unwrap_err();
        assert_eq!(said, "at row 3, column 17 it gives 0.01, the model 0");
        wrong.0[3][17] = f32::NAN;
        assert!(compare(&wrong, &Sums::ZERO).is_err());
    }

    #[test]
    fn a_fault_costs_the_child() {
        // SAFETY: raises a signal in the child, which has no handler for it any more.
        let died = run_in_child(|| unsafe {
            libc::raise(libc::SIGILL);
        })
        .unwrap_err();
        assert_eq!(died.to_string(), "its self-check failed: its process died of signal 4");
        assert!(died.is_fault());
    }
}
