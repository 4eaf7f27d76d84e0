//! How often the device is read while something waits for its memory.

use tokio::time::Duration;

/// The wait before the next look at the device, or at the account.
pub(super) const LOOK: Duration = Duration::from_millis(100);

/// The same after [`LATE_AFTER`]: a look at the device reads all processes of the machine, and memory may be missing for hours. Shorter than
/// what counts as no look at all (`STALE_MAX` in `entries.rs`).
const LATE_LOOK: Duration = Duration::from_secs(1);

/// Most waits are over by then.
const LATE_AFTER: Duration = Duration::from_secs(30);

/// How long to wait before the device is read again, by how long it has been waited for memory.
pub(super) fn until_look(waited: Duration) -> Duration {
    if waited < LATE_AFTER { LOOK } else { LATE_LOOK }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_device_is_read_less_often_after_a_while() {
        let waits = [0, 29, 30, 3600].map(|waited| until_look(Duration::from_secs(waited)).as_millis());
        assert_eq!(waits, [100, 100, 1000, 1000]);
    }
}
