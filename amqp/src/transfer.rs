//! How long a message may be on its way over a slow network.

/// The slowest network on which large messages are waited for: half a megabit a second. One of 16 MiB has four minutes there. A lower
/// rate would keep messages waiting longer for a broker that reads nothing.
const BYTES_PER_SECOND_MIN: usize = 64 * 1024;

/// The seconds that so many bytes may take to reach the broker, beside the time that it has for its answer. None for small messages.
pub fn transfer_seconds(bytes: usize) -> u32 {
    u32::try_from(bytes / BYTES_PER_SECOND_MIN).unwrap_or(u32::MAX)
}
