//! The exit codes.

/// The exit codes of the contract.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    Drained = 0,
    /// While draining.
    Killed = 1,
    /// Or configuration.
    Usage = 2,
    /// The broker, at start.
    Unreachable = 3,
    /// Device or model.
    Unusable = 4,
    /// A restart is wanted.
    Restart = 5,
}

impl Exit {
    /// That of a process that has ended; none if a signal ended it, or with a code that is none of these.
    pub fn of(code: Option<i32>) -> Option<Self> {
        use Exit::{Drained, Killed, Restart, Unreachable, Unusable, Usage};
        let all = [Drained, Killed, Usage, Unreachable, Unusable, Restart];
        all.into_iter().find(|exit| Some(*exit as i32) == code)
    }
}
