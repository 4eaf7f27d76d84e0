//! Detects processes that leak device memory. Reads their memory once in a number of passes, after they have returned their caches.

/// Passes between two snapshots. Giving caches back costs the next pass some time.
const PASSES: u64 = 50;

/// Growth that is not yet a leak: at least so many bytes, and this part of what the process held when it was loaded. Frameworks take a
/// workspace here and there.
const TOLERATED_MIN: u64 = 64 << 20;
const TOLERATED_PART: u64 = 8;

/// What a process held at the snapshots.
#[derive(Clone, Copy, Debug, Default)]
pub struct Leak {
    /// The first reading (passes, bytes), when a framework has allocated what it keeps.
    first: Option<(u64, u64)>,
}

impl Leak {
    /// Whether to look after so many passes. Not before the first one: what that allocates is no growth.
    pub fn is_due(passes: u64) -> bool {
        passes > 0 && passes.is_multiple_of(PASSES)
    }

    /// Records what the process holds. Returns the bytes per pass if it leaks.
    pub fn snapshot(&mut self, passes: u64, held: u64, base: u64) -> Option<u64> {
        let (since, first) = *self.first.get_or_insert((passes, held));
        let grown = held.saturating_sub(first);
        let is_leak = grown > TOLERATED_MIN.max(base / TOLERATED_PART);
        is_leak.then(|| grown / passes.saturating_sub(since).max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn growth_with_the_passes_is_a_leak_and_what_a_framework_keeps_is_none() {
        let mut leak = Leak::default();
        assert_eq!(leak.snapshot(50, 1500 * MIB, 1000 * MIB), None);
        assert_eq!(leak.snapshot(100, 1620 * MIB, 1000 * MIB), None);
        assert_eq!(leak.snapshot(150, 1700 * MIB, 1000 * MIB), Some(2 * MIB));
        let mut steady = Leak::default();
        assert!((1..100).all(|snapshot| {
            steady.snapshot(snapshot * 50, (1500 + snapshot % 60) * MIB, 1000 * MIB).is_none()
        }));
        assert_eq!([0, 1, 50, 51, 100].map(Leak::is_due), [false, false, true, false, true]);
    }
}
