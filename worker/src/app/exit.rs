//! The exit codes.

/// The exit codes of the contract.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    Drained = 0,
    /// A drain was cut short.
    Killed = 1,
    /// Wrong arguments or configuration.
    Usage = 2,
    /// The broker could not be reached at start, or refused the login.
    Unreachable = 3,
    /// The device or a model cannot be used.
    Unusable = 4,
    /// The process wants to be restarted.
    Restart = 5,
}

impl Exit {
    /// The exit of a process by its code. `None` if a signal ended it, or if its code has no meaning here.
    pub fn of(code: Option<i32>) -> Option<Self> {
        use Exit::{Drained, Killed, Restart, Unreachable, Unusable, Usage};
        let all = [Drained, Killed, Usage, Unreachable, Unusable, Restart];
        all.into_iter().find(|exit| Some(*exit as i32) == code)
    }
}
