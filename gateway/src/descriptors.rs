//! File descriptors of the process: raises their limit, and says how many connections it leaves room for.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Descriptors for all but connections of clients: the broker, stored results, uploads, the file of keys, logs.
const OTHERS: u64 = 256;

/// Raises the process's limit as far as the system allows. Returns how many connections there may be, at most `wanted`: some descriptors
/// must be left for results and the broker.
pub fn connections(wanted: usize) -> usize {
    let limits = getrlimit(Resource::Nofile);
    // After an `Err` the limit is unchanged.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limits.maximum, maximum: limits.maximum });
    let limit = getrlimit(Resource::Nofile).current;
    let most = connections_within(limit, wanted);
    if most < wanted {
        tracing::warn!(
            connections = most,
            descriptors = limit,
            wanted,
            "fewer connections than http.connections_max: the limit of file descriptors allows no more (ulimit -Hn, LimitNOFILE=)"
        );
    }
    most
}

/// `None`: the system sets no limit.
fn connections_within(descriptors: Option<u64>, wanted: usize) -> usize {
    let Some(descriptors) = descriptors else { return wanted };
    // Use half of them for connections if there are very few.
    let left = descriptors.saturating_sub(OTHERS).max(descriptors / 2);
    wanted.min(usize::try_from(left).unwrap_or(usize::MAX)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_leave_descriptors_for_the_rest() {
        for (descriptors, wanted, most) in [
            (None, 20_000, 20_000),
            (Some(1_000_000), 20_000, 20_000),
            (Some(1_024), 20_000, 768),
            (Some(1_024), 8, 8),
            (Some(300), 20_000, 150),
            (Some(0), 20_000, 1),
        ] {
            assert_eq!(connections_within(descriptors, wanted), most, "{descriptors:?} {wanted}");
        }
    }
}
