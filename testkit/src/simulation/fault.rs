//! What goes wrong in a history.

use super::agenda::Micros;

#[derive(Clone, Copy, Debug)]
pub struct Fault {
    pub at: Micros,
    pub lasts: Micros,
    pub kind: FaultKind,
}

/// What goes wrong. Numbers name workers, devices and callers by their place, modulo how many there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// A process dies after so many more actions.
    Kill {
        worker: usize,
        after_actions: u32,
    },
    /// A host is lost: the broker learns of it only after `lasts`.
    HostLost {
        worker: usize,
    },
    /// A worker's connections break; the broker learns of it after `lasts`.
    Cut {
        worker: usize,
    },
    BrokerRestart,
    /// A memory alarm blocks who publishes.
    Alarm,
    /// Confirms come late.
    SlowConfirms,
    /// The job queue has no leader.
    Leaderless {
        model: usize,
    },
    /// A caller reads no replies.
    DeafCaller {
        caller: usize,
    },
    /// A reply queue is deleted, and comes back after `lasts`.
    RepliesDeleted {
        caller: usize,
    },
    /// The dead-letter queue is deleted, if it is empty.
    DeadDeleted {
        model: usize,
    },
    /// Other processes take a part of a device's memory, in percent.
    Stranger {
        device: usize,
        percent: u8,
    },
    /// Every pass on a device fails.
    Sick {
        device: usize,
    },
    /// A worker's device is lost until its process starts again.
    DeviceLost {
        worker: usize,
        is_late: bool,
    },
    /// The program that runs a pass of a worker dies.
    ProgramDies {
        worker: usize,
    },
    /// A worker's programs cannot be loaded.
    CannotLoad {
        worker: usize,
    },
    /// The next pass on a device never ends.
    Hang {
        device: usize,
    },
    Pause {
        worker: usize,
    },
    Drain {
        worker: usize,
    },
    Stop {
        worker: usize,
        twice: bool,
    },
    /// An operator cancels a job that a worker holds.
    Cancel {
        worker: usize,
    },
    /// The owner of a further queue deletes it with all that it holds. Workers declare it again; if it is forbidden to them, only when
    /// the owner has done so.
    FurtherDeleted {
        queue: usize,
        is_forbidden: bool,
    },
    /// A caller publishes many small jobs at once.
    Flood {
        caller: usize,
        jobs: usize,
    },
    /// A reply queue confirms nothing.
    SilentReplies {
        caller: usize,
    },
    /// The workers with larger devices take no jobs, so that their queue may become full.
    LargerStands,
    /// Memory of a worker's ended program stays missing.
    MemoryWithheld {
        worker: usize,
    },
    /// The disk of a worker's programs takes only passes of this cost.
    DiskFull {
        worker: usize,
        room: usize,
    },
}

impl FaultKind {
    /// It comes from shares or rarer things, and there is none without them.
    pub(super) fn is_of_more(self) -> bool {
        matches!(
            self,
            Self::FurtherDeleted { .. }
                | Self::Flood { .. }
                | Self::SilentReplies { .. }
                | Self::LargerStands
                | Self::MemoryWithheld { .. }
                | Self::DiskFull { .. }
        )
    }
}
