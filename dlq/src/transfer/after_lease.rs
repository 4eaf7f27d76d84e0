//! Decides what follows a reading of the queue. Pure.

/// How often the queue is read again for dead letters whose acknowledgement the broker lost. RabbitMQ 3.10 passes
/// acknowledgements to a quorum queue in groups of 32, and loses an incomplete group when the channel closes.
const CHECKS_MAX: u32 = 10;

/// How far a transfer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Remaining {
    /// Dead letters that are still to be taken.
    pub(super) left: usize,
    /// Results that their reply queue has. They are progress even if they are to be taken again, because their job stays.
    pub(super) delivered: usize,
}

/// What follows a reading of the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Another reading, which takes what is left.
    Read,
    /// Another reading, which removes what was acknowledged and is still there.
    Check,
    /// The end: nothing that was transferred is still in the queue.
    Done,
    /// The end: this reading took nothing. What is left stays, or is gone.
    Stalled,
    /// The end: what was acknowledged is still there after [`CHECKS_MAX`] checks.
    AcksUnsure,
}

/// What follows a reading that began at `before`, ended at `after`, and removed so many dead letters that had been acknowledged before.
/// `has_settled`: any reading has transferred a dead letter. `checks` is how many checks were decided on.
pub(super) fn after_lease(
    before: Remaining,
    after: Remaining,
    removed: usize,
    has_settled: bool,
    checks: u32,
) -> Next {
    let is_stalled = after == before;
    if after.left > 0 && !is_stalled {
        return Next::Read;
    }
    if after.left > 0 && removed == 0 {
        return Next::Stalled;
    }
    // A reading that takes the last of what is left ends there. Only one that began with nothing left reads the queue to its end.
    let is_clean = before.left == 0 && removed == 0;
    if !has_settled || is_clean {
        Next::Done
    } else if checks == CHECKS_MAX {
        Next::AcksUnsure
    } else {
        Next::Check
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_follows_a_reading() {
        let progress = |(left, delivered)| Remaining { left, delivered };
        // Before, after: what is left, and how many results are delivered. Then removed, has_settled, checks.
        for (before, after, removed, has_settled, checks, expected) in [
            // It took something, and something is left.
            ((3, 0), (1, 0), 0, true, 0, Next::Read),
            ((3, 0), (1, 0), 2, true, CHECKS_MAX, Next::Read),
            // It took something that could not be stored.
            ((3, 0), (1, 0), 0, false, 0, Next::Read),
            // It delivered results, which stay until their job's other results are delivered.
            ((2, 0), (2, 1), 0, false, 0, Next::Read),
            ((2, 0), (2, 1), 1, true, CHECKS_MAX, Next::Read),
            // It took nothing, and nothing had to be removed.
            ((2, 0), (2, 0), 0, false, 0, Next::Stalled),
            ((2, 1), (2, 1), 0, true, 0, Next::Stalled),
            ((2, 1), (2, 1), 0, true, CHECKS_MAX, Next::Stalled),
            // It took nothing, but acknowledgements were lost.
            ((2, 0), (2, 0), 1, true, 0, Next::Check),
            ((2, 0), (2, 0), 1, true, CHECKS_MAX - 1, Next::Check),
            ((2, 0), (2, 0), 1, true, CHECKS_MAX, Next::AcksUnsure),
            ((2, 0), (2, 0), 1, false, 0, Next::Done),
            // It took all.
            ((2, 0), (0, 0), 0, true, 0, Next::Check),
            ((2, 0), (0, 2), 1, true, 3, Next::Check),
            ((2, 0), (0, 0), 0, true, CHECKS_MAX, Next::AcksUnsure),
            // It took all, and nothing could be stored.
            ((2, 0), (0, 0), 0, false, 0, Next::Done),
            // A check.
            ((0, 0), (0, 0), 0, true, 1, Next::Done),
            ((0, 1), (0, 1), 0, true, CHECKS_MAX, Next::Done),
            ((0, 0), (0, 0), 3, true, 1, Next::Check),
            ((0, 0), (0, 0), 3, true, CHECKS_MAX, Next::AcksUnsure),
            // Nothing was selected.
            ((0, 0), (0, 0), 0, false, 0, Next::Done),
        ] {
            let (before, after) = (progress(before), progress(after));
            let next = after_lease(before, after, removed, has_settled, checks);
            assert_eq!(
                next, expected,
                "{before:?} to {after:?}, {removed} removed, settled: {has_settled}, {checks}"
            );
        }
    }
}
