//! Where the threads of a pass wait for each other.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// A thread among those that work on one shard.
#[derive(Clone, Copy)]
pub(super) struct Participant<'a> {
    pub barrier: &'a Barrier,
    pub rank: usize,
}

/// Where the threads of a pass wait for each other, so that they go through the same operations in step.
pub(super) struct Barrier {
    pub width: usize,
    /// How many threads wait in the current generation.
    arrived: AtomicUsize,
    /// How many times all threads have arrived.
    generation: AtomicUsize,
    broken: AtomicBool,
}

/// Returned by a wait if another thread of the barrier has panicked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Broken;

/// How often a thread polls before it yields. Waits are short, because all threads have the same work, and a sleep in the kernel
/// usually costs more.
const SPINS: usize = 4096;

impl Barrier {
    pub fn new(width: usize) -> Self {
        Self {
            width,
            arrived: AtomicUsize::new(0),
            generation: AtomicUsize::new(0),
            broken: AtomicBool::new(false),
        }
    }
}

impl Participant<'_> {
    /// Waits until all threads have arrived: what each wrote before, all see after.
    pub fn wait(&self) -> Result<(), Broken> {
        let barrier = self.barrier;
        if barrier.width == 1 {
            return Ok(());
        }
        let generation = barrier.generation.load(Ordering::Acquire);
        if barrier.arrived.fetch_add(1, Ordering::AcqRel) + 1 == barrier.width {
            barrier.arrived.store(0, Ordering::Relaxed);
            barrier.generation.store(generation.wrapping_add(1), Ordering::Release);
            return Ok(());
        }
        let mut looks = 0;
        while barrier.generation.load(Ordering::Acquire) == generation {
            if barrier.broken.load(Ordering::Relaxed) {
                return Err(Broken);
            }
            looks += 1;
            if looks < SPINS {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
        Ok(())
    }
}

/// Breaks the barrier when its thread unwinds, so that no other thread waits for it for ever.
pub(super) struct BreaksBarrier<'a>(pub &'a Barrier);

impl Drop for BreaksBarrier<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.broken.store(true, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_meet_at_a_barrier_and_see_what_each_has_done() {
        let barrier = Barrier::new(3);
        let done: Vec<AtomicUsize> = (0..3).map(|_| AtomicUsize::new(0)).collect();
        std::thread::scope(|scope| {
            for rank in 0..3 {
                let (barrier, done) = (&barrier, &done);
                scope.spawn(move || {
                    for round in 1..=500 {
                        done[rank].store(round, Ordering::Relaxed);
                        Participant { barrier, rank }.wait().unwrap();
                        assert!(done.iter().all(|done| done.load(Ordering::Relaxed) == round));
                        Participant { barrier, rank }.wait().unwrap();
                    }
                });
            }
        });
    }

    #[test]
    fn a_panic_frees_the_threads_that_wait() {
        let barrier = Barrier::new(2);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| Participant { barrier: &barrier, rank: 0 }.wait());
            let panics = scope.spawn(|| {
                let _breaks = BreaksBarrier(&barrier);
                std::panic::resume_unwind(Box::new("gone"));
            });
            assert!(panics.join().is_err());
            assert_eq!(waits.join().unwrap(), Err(Broken));
        });
    }
}
