//! Shows bytes as MiB, for logs and error texts.

use std::fmt;

/// Bytes in MiB, rounded up to a tenth, so that a shortage never reads as zero, and what is said to be needed is enough.
#[derive(Clone, Copy, Debug)]
pub struct Mib(pub u64);

/// Bytes that are free, or the whole that they are a part of: rounded down, so that what does not fit never reads as if it did.
#[derive(Clone, Copy, Debug)]
pub struct FreeMib(pub u64);

impl fmt::Display for Mib {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        in_tenths(f, (u128::from(self.0) * 10).div_ceil(1 << 20))
    }
}

impl fmt::Display for FreeMib {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        in_tenths(f, (u128::from(self.0) * 10) >> 20)
    }
}

fn in_tenths(f: &mut fmt::Formatter<'_>, tenths: u128) -> fmt::Result {
    write!(f, "{}.{} MiB", tenths / 10, tenths % 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn needs_are_rounded_up_and_what_is_free_is_rounded_down() {
        for (bytes, needed, free) in [
            (0, "0.0 MiB", "0.0 MiB"),
            (1, "0.1 MiB", "0.0 MiB"),
            (2_543_360, "2.5 MiB", "2.4 MiB"),
            (3 << 20, "3.0 MiB", "3.0 MiB"),
            (u64::MAX, "17592186044416.0 MiB", "17592186044415.9 MiB"),
        ] {
            assert_eq!((Mib(bytes).to_string(), FreeMib(bytes).to_string()), (needed.into(), free.into()));
        }
    }
}
