//! How many letters may be on their way to a reader at once. Pure.

/// Bytes of letters that are here and not looked at yet, about.
const BYTES_MAX: u64 = 16 * 1024 * 1024;

/// The size of the first window: nothing is known yet of the size of letters.
const FIRST: u64 = 256;

/// Windows of one reading. A quorum queue gives back what a dead consumer held consumer by consumer, in the order of a map
/// of Erlang, which is that of its keys up to 32 of them and none beyond. So there are no more than that, and the names of
/// consumers are in order.
const WINDOWS_MAX: u64 = 32;

/// The largest prefetch that AMQP can say.
const PREFETCH_MAX: u64 = u16::MAX as u64;

/// The windows of one reading: as many letters each as fit into [`BYTES_MAX`] by what was seen so far, and more where there
/// would be more windows than [`WINDOWS_MAX`].
#[derive(Debug)]
pub(super) struct Windows {
    /// What was to be read at first.
    first_due: u64,
    opened: u64,
    letters: u64,
    bytes: u64,
}

impl Windows {
    pub(super) fn new(due: u64) -> Self {
        Self { first_due: due, opened: 0, letters: 0, bytes: 0 }
    }

    pub(super) fn note(&mut self, bytes: usize) {
        self.letters += 1;
        // Properties and headers take something, too.
        self.bytes += bytes as u64 + 1024;
    }

    /// The name and the size of the next window, with so many letters still to be read.
    pub(super) fn next(&mut self, left: u64) -> (String, u16) {
        let fitting = match self.bytes.checked_div(self.letters) {
            Some(mean) => (BYTES_MAX / mean.max(1)).max(1),
            None => FIRST,
        };
        // The last few are left for letters that come meanwhile.
        let windows_left = WINDOWS_MAX.saturating_sub(self.opened + 4).max(1);
        let size = fitting.max(left.div_ceil(windows_left)).min(left.max(1)).clamp(1, PREFETCH_MAX);
        let tag = format!("vramq-dlq-{:06}", self.opened);
        self.opened += 1;
        (tag, u16::try_from(size).unwrap_or(u16::MAX))
    }

    /// Whether reading on would never end, with letters coming as fast as they are read.
    pub(super) fn is_last_round(&self, seen: u64, more: u64) -> bool {
        seen + more > (2 * self.first_due).max(FIRST) && seen >= self.first_due && seen > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(letters: u64, bytes: usize) -> (u64, Vec<u64>) {
        let mut windows = Windows::new(letters);
        let (mut left, mut sizes) = (letters, Vec::new());
        while left > 0 {
            let size = u64::from(windows.next(left).1);
            (0..size).for_each(|_| windows.note(bytes));
            left = left.saturating_sub(size);
            sizes.push(size);
        }
        (sizes.iter().copied().max().unwrap_or(0) * bytes as u64, sizes)
    }

    #[test]
    fn what_is_on_its_way_has_a_bound_that_does_not_grow() {
        for letters in [1, 1_000, 10_000, 20_000] {
            let (bytes, sizes) = read(letters, 20_000);
            assert!(bytes <= BYTES_MAX, "{letters}: {bytes} in {sizes:?}");
        }
        assert_eq!(read(10, 100).1, [10]);
    }

    #[test]
    fn names_are_in_the_order_of_their_windows() {
        let mut windows = Windows::new(9);
        let names: Vec<_> = (0..40).map(|_| windows.next(9).0).collect();
        assert!(names.is_sorted());
    }

    proptest! {
        #[test]
        fn there_are_never_more_windows_than_keep_the_order(letters in 1u64..1_500_000, bytes in 0usize..16_000_000) {
            let (_, sizes) = read(letters, bytes);
            prop_assert!(sizes.len() as u64 <= WINDOWS_MAX, "{} windows", sizes.len());
            prop_assert!(sizes.iter().sum::<u64>() >= letters);
        }
    }

    #[test]
    fn letters_that_keep_coming_do_not_keep_it_going() {
        let windows = Windows::new(1000);
        assert!(!windows.is_last_round(1000, 1000));
        assert!(windows.is_last_round(1000, 1001));
        assert!(!Windows::new(0).is_last_round(0, 5000));
    }
}
