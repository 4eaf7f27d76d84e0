//! Shows bytes as MiB, for logs and error texts.

use std::fmt;

/// Bytes in MiB, rounded up to a tenth so that a shortage never reads as zero.
#[derive(Clone, Copy, Debug)]
pub struct Mib(pub u64);

impl fmt::Display for Mib {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tenths = (u128::from(self.0) * 10).div_ceil(1 << 20);
        write!(f, "{}.{} MiB", tenths / 10, tenths % 10)
    }
}
