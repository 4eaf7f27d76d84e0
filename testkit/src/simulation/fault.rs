//! What goes wrong in a history.

use serde::{Deserialize, Serialize};

use super::agenda::Micros;

#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Fault {
    pub at: Micros,
    pub lasts: Micros,
    pub kind: FaultKind,
}

/// A fault. Numbers in a plan name workers, devices and so on by index modulo their count, so that a shortened plan still has its faults.
/// `hits` returns the actual indices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub enum FaultKind {
    /// A process dies after this many further actions.
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
    /// A memory alarm blocks publishers.
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
    /// The owner of a further queue deletes it with all messages. Workers declare it again; if it is forbidden to them, only after the
    /// owner has.
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
    /// The workers with larger devices stop taking jobs, so their queue may become full.
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

/// The number of each kind of thing that a fault can hit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Targets {
    pub(super) workers: usize,
    pub(super) devices: usize,
    pub(super) models: usize,
    pub(super) further_queues: usize,
    pub(super) callers: usize,
}

impl FaultKind {
    /// The same fault with the actual index of what it hits.
    pub(super) fn hits(mut self, targets: Targets) -> Self {
        let (place, count) = match &mut self {
            Self::Kill { worker, .. }
            | Self::HostLost { worker }
            | Self::Cut { worker }
            | Self::DeviceLost { worker, .. }
            | Self::ProgramDies { worker }
            | Self::CannotLoad { worker }
            | Self::Pause { worker }
            | Self::Drain { worker }
            | Self::Stop { worker, .. }
            | Self::Cancel { worker }
            | Self::MemoryWithheld { worker }
            | Self::DiskFull { worker, .. } => (worker, targets.workers),
            Self::Stranger { device, .. } | Self::Sick { device } | Self::Hang { device } => {
                (device, targets.devices)
            }
            Self::Leaderless { model } | Self::DeadDeleted { model } => (model, targets.models),
            Self::FurtherDeleted { queue, .. } => (queue, targets.further_queues),
            Self::DeafCaller { caller }
            | Self::RepliesDeleted { caller }
            | Self::SilentReplies { caller }
            | Self::Flood { caller, .. } => (caller, targets.callers),
            Self::BrokerRestart | Self::Alarm | Self::SlowConfirms | Self::LargerStands => return self,
        };
        *place %= count.max(1);
        self
    }

    /// Whether the fault belongs to shares or rare events, and does not occur without them.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_names_what_it_hits() {
        let targets = Targets { workers: 3, devices: 2, models: 1, further_queues: 0, callers: 4 };
        let table = [
            (
                FaultKind::Kill { worker: 7, after_actions: 9 },
                FaultKind::Kill { worker: 1, after_actions: 9 },
            ),
            (FaultKind::DiskFull { worker: 5, room: 64 }, FaultKind::DiskFull { worker: 2, room: 64 }),
            (FaultKind::Sick { device: 3 }, FaultKind::Sick { device: 1 }),
            (FaultKind::Leaderless { model: 6 }, FaultKind::Leaderless { model: 0 }),
            (FaultKind::DeafCaller { caller: 7 }, FaultKind::DeafCaller { caller: 3 }),
            (
                FaultKind::FurtherDeleted { queue: 5, is_forbidden: true },
                FaultKind::FurtherDeleted { queue: 0, is_forbidden: true },
            ),
            (FaultKind::Alarm, FaultKind::Alarm),
        ];
        for (planned, hit) in table {
            assert_eq!(planned.hits(targets), hit);
        }
    }
}
