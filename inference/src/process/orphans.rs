//! Ends the processes of a program whose keeper was killed.

use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::cgroup::Group;
use super::child::{GONE_LIMIT, SCRATCH_VARIABLE};

/// Between two rounds of killing, for the kernel to end what was killed.
const ROUND: Duration = Duration::from_millis(20);

/// The same after [`GONE_LIMIT`]. Longer, because a round reads the environments of all processes of the machine.
const LATE_ROUND: Duration = Duration::from_secs(1);

/// Kills the processes of the program with this scratch folder until none is left, then removes the folder and the control group.
pub(super) fn end(scratch: &Path, cgroup: Option<&Group>) {
    let mark = format!("{SCRATCH_VARIABLE}={}", scratch.display());
    let (began, mut round) = (Instant::now(), ROUND);
    loop {
        let marked = kill_marked(mark.as_bytes());
        // A process can change its environment, but not leave the group.
        let group = cgroup.filter(|group| !group.is_empty());
        if let Some(group) = group {
            group.kill();
        }
        if group.is_none() && marked.is_empty() {
            break;
        }
        if round == ROUND && began.elapsed() > GONE_LIMIT {
            round = LATE_ROUND;
            let in_group = group.map(Group::pids).unwrap_or_default();
            let scratch = scratch.display();
            tracing::error!(?marked, ?in_group, %scratch, "the keeper of a program died, and processes of the program do not end although they were killed");
        }
        sleep(round);
    }
    let _ = std::fs::remove_dir_all(scratch);
    let _ = cgroup.map(Group::remove);
}

/// Kills all processes that have this variable in their environment.
fn kill_marked(mark: &[u8]) -> Vec<i32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let marked = pids.filter(|pid| {
        // Empty once it is a zombie.
        std::fs::read(format!("/proc/{pid}/environ"))
            .is_ok_and(|env| env.split(|byte| *byte == 0).any(|variable| variable == mark))
    });
    let marked: Vec<_> = marked.collect();
    for pid in marked.iter().filter_map(|pid| Pid::from_raw(*pid)) {
        let _ = kill_process(pid, Signal::KILL);
    }
    marked
}
