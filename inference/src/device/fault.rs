//! Makes allocations fail on purpose, for tests. Off unless `device.cpu.fault` or `device.cuda.fault` asks for it
//! (`VRAMQ__DEVICE__CPU__FAULT`).

use std::str::FromStr;
use std::sync::{Mutex, PoisonError};

/// Which allocations of passes fail, though the device has room.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fault {
    /// `skip=N,fail=M`: `skip` allocations succeed, then `fail` allocations fail as if one byte were missing, then all succeed.
    Window { skip: u64, fail: u64 },
    /// `random=P,seed=S`: each fails with probability `P` although the device has room, as if another process had been faster.
    Random { probability: f64, seed: u64 },
    /// `above=BYTES`: larger ones fail, as if only this much were free.
    Above { bytes: u64 },
    /// `leak=BYTES`: none fails, but each keeps so many bytes for ever.
    Leak { bytes: u64 },
}

/// A fault in action.
#[derive(Debug)]
pub struct Injection {
    fault: Fault,
    state: Mutex<u64>,
}

impl FromStr for Fault {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || {
            format!("`{text}` is not a fault: skip=N,fail=M or random=P,seed=S or above=BYTES or leak=BYTES")
        };
        let pairs: Option<Vec<_>> = text.split(',').map(|pair| pair.split_once('=')).collect();
        let number = |value: &str| value.parse::<u64>().map_err(|_| expected());
        match pairs.ok_or_else(expected)?[..] {
            [("skip", skip), ("fail", fail)] => Ok(Self::Window { skip: number(skip)?, fail: number(fail)? }),
            [("random", probability), ("seed", seed)] => {
                let probability = probability.parse().ok().filter(|p| (0.0..=1.0).contains(p));
                Ok(Self::Random { probability: probability.ok_or_else(expected)?, seed: number(seed)? })
            }
            [("above", bytes)] => Ok(Self::Above { bytes: number(bytes)? }),
            [("leak", bytes)] => Ok(Self::Leak { bytes: number(bytes)? }),
            _ => Err(expected()),
        }
    }
}

impl Injection {
    pub fn new(fault: Fault) -> Self {
        let state = match fault {
            Fault::Random { seed, .. } => seed,
            _ => 0,
        };
        Self { fault, state: Mutex::new(state) }
    }

    /// Whether the next allocation of `bytes` fails. If so, returns the free bytes and the bytes of other processes to report;
    /// `free` and `foreign` are the real ones.
    pub fn refuses(&self, bytes: u64, free: u64, foreign: u64) -> Option<(u64, u64)> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match self.fault {
            Fault::Window { skip, fail } => {
                *state += 1;
                let within = *state > skip && *state - skip <= fail;
                within.then(|| (free.min(bytes.saturating_sub(1)), foreign))
            }
            Fault::Random { probability, .. } => {
                // The upper 53 bits are a fraction in [0, 1).
                let drawn = ((split_mix(&mut state) >> 11) as f64) / ((1u64 << 53) as f64);
                (drawn < probability).then_some((free, foreign))
            }
            // A device of that size: nobody else is to blame.
            Fault::Above { bytes: most } => (bytes > most).then(|| (free.min(most), 0)),
            Fault::Leak { .. } => None,
        }
    }

    /// Bytes that an allocation keeps when it is freed.
    pub fn leaks(&self) -> u64 {
        match self.fault {
            Fault::Leak { bytes } => bytes,
            _ => 0,
        }
    }
}

/// Steele, Lea, Flood: Fast splittable pseudorandom number generators (2014); the finaliser is Stafford's mix 13.
fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failures(fault: &str, allocations: usize) -> Vec<usize> {
        let injection = Injection::new(fault.parse().unwrap());
        (0..allocations).filter(|_| injection.refuses(100, 1000, 7).is_some()).collect()
    }

    #[test]
    fn faults_come_where_they_are_asked_for() {
        assert_eq!(failures("skip=2,fail=3", 10), [2, 3, 4]);
        assert_eq!(failures("above=99", 3), [0, 1, 2]);
        assert!(failures("above=100", 3).is_empty());
        assert!(failures("skip=18446744073709551615,fail=1", 3).is_empty());
        assert!(failures("leak=7", 3).is_empty());
        assert_eq!(Injection::new(Fault::Leak { bytes: 7 }).leaks(), 7);
    }

    #[test]
    fn the_reported_free_memory_fits_the_fault() {
        let out_of_memory = |fault: &str| Injection::new(fault.parse().unwrap()).refuses(100, 1000, 7);
        assert_eq!(out_of_memory("skip=0,fail=1"), Some((99, 7)));
        assert_eq!(out_of_memory("above=60"), Some((60, 0)));
        assert_eq!(out_of_memory("random=1,seed=1"), Some((1000, 7)));
    }

    #[test]
    fn a_seed_repeats_itself() {
        let some = failures("random=0.1,seed=1", 1000);
        assert_eq!(some, failures("random=0.1,seed=1", 1000));
        assert_ne!(some, failures("random=0.1,seed=2", 1000));
        assert!((60..140).contains(&some.len()), "{}", some.len());
        assert!(failures("random=0,seed=1", 1000).is_empty());
        assert_eq!(failures("random=1,seed=1", 1000).len(), 1000);
    }

    #[test]
    fn an_invalid_fault_is_refused() {
        for text in
            ["", "skip=1", "skip=1,fail=x", "random=2,seed=1", "above", "leak=-1", "skip=1,fail=1,x=1"]
        {
            assert!(text.parse::<Fault>().unwrap_err().contains("skip=N,fail=M"), "{text}");
        }
    }
}
