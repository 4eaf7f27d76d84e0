//! The keeper's loop: orders from the worker, the program's death, and the end of all its descendants.

use std::fs::File;
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, ExitCode};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitOptions, kill_process, kill_process_group, pidfd_open, set_child_subreaper,
    setsid, wait,
};

use super::launch::{IGNORED, launch};
use super::{Death, Order, OutputUse, Report, Spec};
use crate::process::cgroup::{Group, HostOom};
use crate::process::scratch;
use crate::process_tree;

/// How often the keeper checks what the program takes of the host, and reaps adopted processes. A program that allocates some GB/s
/// is noticed after a few GB.
const LOOK: Duration = Duration::from_millis(500);

/// Between two rounds of killing, for the kernel to end what was killed.
const KILL_ROUND: Duration = Duration::from_millis(5);

/// How long to wait after SIGKILL before the keeper reports which processes remain. A driver may take seconds to clean up a GPU's
/// context.
const STUCK: Duration = Duration::from_secs(10);

/// Between two rounds after that. Longer, because a round reads all processes of the machine, and a driver may not end for hours.
const LATE_ROUND: Duration = Duration::from_millis(500);

/// The longest first line. An environment may be some 100 KiB.
const SPEC_BYTES_MAX: u64 = 4 << 20;

/// The main function of a keeper, for an executable that was started with [`ARGUMENT`](super::ARGUMENT). Call it first in `main`,
/// before any thread is started. Standard input must be a socket.
pub fn keeper_main() -> ExitCode {
    match keep() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("vramq keeper: {error}");
            ExitCode::FAILURE
        }
    }
}

fn keep() -> io::Result<()> {
    detach()?;
    let worker = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let mut line = String::new();
    BufReader::new(&worker).take(SPEC_BYTES_MAX).read_line(&mut line)?;
    let spec: Spec = serde_json::from_str(&line)?;
    let started = scratch::hold(&spec.scratch).and_then(|lock| Ok((lock, start(&spec)?)));
    let (_locks, (child, group)) = match started {
        Ok((scratch, Started { child, group, lock })) => ((scratch, lock), (child, group)),
        Err(error) => {
            let _ = std::fs::remove_dir_all(&spec.scratch);
            return report(&worker, &Report::NotStarted { error: error.to_string() });
        }
    };
    let mut keeper = Keeper::new(worker, spec, child, group.clone()).inspect_err(|_| {
        if let Some(group) = &group {
            end_group(group);
        }
    })?;
    keeper.watch();
    keeper.end_all();
    if keeper.spec.output == OutputUse::Stdout {
        let _ = report(&keeper.worker, &Report::Ended);
        // Until the worker has read the files that it wants, or is gone.
        keeper.order();
    }
    keeper.remove_scratch();
    remove_group(keeper.group.as_ref());
    // The worker may be gone.
    let _ = report(&keeper.worker, &Report::Gone);
    Ok(())
}

/// A program that runs, and its control group with the mark that it is in use.
struct Started {
    child: Child,
    group: Option<Group>,
    lock: Option<File>,
}

/// Starts the program, in a control group of its own where it can have one.
fn start(spec: &Spec) -> io::Result<Started> {
    let mut no_group = None;
    if let Some((group, lock, entrance)) = make_group(spec) {
        match launch(spec, Some(entrance)) {
            Ok(child) => return Ok(Started { child, group: Some(group), lock: Some(lock) }),
            Err(error) => {
                end_group(&group);
                no_group = Some(error);
            }
        }
    }
    // A fault of the program itself fails this launch too.
    let child = launch(spec, None)?;
    if let Some(error) = no_group {
        eprintln!("vramq keeper: the program was started outside of its cgroup: {error}");
    }
    Ok(Started { child, group: None, lock: None })
}

/// The program's control group, the mark that it is in use, and the file by which a process enters it. Without a group the keeper finds
/// processes by their parents.
fn make_group(spec: &Spec) -> Option<(Group, File, File)> {
    let made = Group::make(spec.cgroup.clone()?, spec.limits.host_memory_bytes).and_then(|group| {
        let files = group.hold().and_then(|lock| Ok((lock, group.entrance()?)));
        let (lock, entrance) = files.inspect_err(|_| remove_group(Some(&group)))?;
        Ok((group, lock, entrance))
    });
    made.inspect_err(|error| eprintln!("vramq keeper: the program has no cgroup of its own: {error}")).ok()
}

/// Kills the processes of a group, and removes it. If some do not end, the next start of a worker removes the group.
fn end_group(group: &Group) {
    let began = Instant::now();
    while !group.is_empty() && began.elapsed() < STUCK {
        group.kill();
        sleep(KILL_ROUND);
    }
    remove_group(Some(group));
}

fn remove_group(group: Option<&Group>) {
    if let Some(Err(error)) = group.map(Group::remove) {
        eprintln!("vramq keeper: remove the program's cgroup: {error}");
    }
}

/// Leaves the worker's session, so that no terminal sends signals. Becomes the reaper of all descendants, and closes descriptors
/// that the worker left open.
fn detach() -> io::Result<()> {
    // `Err` means that the keeper already leads a session.
    let _ = setsid();
    set_child_subreaper(Some(rustix::process::getpid()))?;
    // SAFETY: nothing here has opened a descriptor yet; those from 3 on were left open by the worker's libraries.
    unsafe { libc::syscall(libc::SYS_close_range, 3 as libc::c_uint, libc::c_uint::MAX, 0) };
    // SAFETY: ignoring a signal touches no memory.
    unsafe {
        for signal in IGNORED {
            libc::signal(signal, libc::SIG_IGN);
        }
    }
    Ok(())
}

fn report(mut worker: &UnixStream, report: &Report) -> io::Result<()> {
    let mut line = serde_json::to_vec(report)?;
    line.push(b'\n');
    worker.write_all(&line)
}

struct Keeper {
    worker: UnixStream,
    spec: Spec,
    pid: Pid,
    /// Readable when the program is dead, even while other processes hold its sockets.
    pidfd: OwnedFd,
    /// How it died, once it is reaped.
    death: Option<Death>,
    /// Why the keeper killed it, if it did.
    verdict: Option<Death>,
    /// What the program and all its descendants are in.
    group: Option<Group>,
}

fn own_pid() -> i32 {
    rustix::process::getpid().as_raw_nonzero().get()
}

/// What made [`Keeper::watch`] wake.
enum Wake {
    Order(Order),
    WorkerGone,
    Look,
}

impl Keeper {
    fn new(worker: UnixStream, spec: Spec, child: Child, group: Option<Group>) -> io::Result<Self> {
        // Reaped below by its id, so `child` is not waited for.
        let pid = Pid::from_child(&child);
        let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
        let _ = report(&worker, &Report::Started { pid: pid.as_raw_nonzero().get() });
        Ok(Self { worker, spec, pid, pidfd, death: None, verdict: None, group })
    }

    /// Watches until the program is dead, or everything must be killed.
    fn watch(&mut self) {
        loop {
            let wake = self.wait();
            self.reap();
            if self.death.is_some() {
                return;
            }
            match wake {
                Wake::Order(Order::Terminate) => {
                    let _ = kill_process_group(self.pid, Signal::TERM);
                }
                Wake::Order(Order::Kill | Order::Finish) | Wake::WorkerGone => return,
                Wake::Look => {
                    self.verdict = self.excess();
                    if self.verdict.is_some() {
                        return;
                    }
                }
            }
        }
    }

    fn wait(&self) -> Wake {
        let mut watched = [PollFd::new(&self.worker, PollFlags::IN), PollFd::new(&self.pidfd, PollFlags::IN)];
        let timeout = Timespec { tv_sec: 0, tv_nsec: LOOK.subsec_nanos().into() };
        match poll(&mut watched, Some(&timeout)) {
            Ok(0) | Err(_) => Wake::Look,
            Ok(_) if watched[0].revents().is_empty() => Wake::Look,
            Ok(_) => self.order(),
        }
    }

    /// Reads the worker's next order, byte by byte: `poll` would not see a buffered order.
    fn order(&self) -> Wake {
        let mut line = Vec::new();
        let mut byte = [0];
        while (&self.worker).read_exact(&mut byte).is_ok() && byte != *b"\n" {
            line.extend(byte);
        }
        // An incomplete or empty line means that the worker is gone.
        serde_json::from_slice(&line).map_or(Wake::WorkerGone, Wake::Order)
    }

    /// What the program takes of the host beyond its limits.
    fn excess(&self) -> Option<Death> {
        let limits = self.spec.limits;
        let pids = process_tree::descendants_nearby(own_pid());
        if pids.len() > limits.processes {
            return Some(Death::Processes(pids.len()));
        }
        // The kernel enforces the limit.
        if self.group.as_ref().is_some_and(Group::bounds_memory) {
            return None;
        }
        let limit = limits.host_memory_bytes?;
        let held = pids.into_iter().map(process_tree::resident_bytes).sum();
        (held > limit).then_some(Death::HostMemory(held))
    }

    fn descendants(&self) -> Vec<i32> {
        process_tree::descendants(own_pid())
    }

    /// Reaps dead processes. Returns whether any descendant is left.
    fn reap(&mut self) -> bool {
        loop {
            match wait(WaitOptions::NOHANG) {
                Ok(Some((pid, status))) if pid == self.pid => {
                    let by_signal = status.terminating_signal().map(Death::Killed);
                    let death = by_signal.unwrap_or(Death::Exited(status.exit_status().unwrap_or(-1)));
                    let death = self.verdict.or_else(|| self.host_oom(death)).unwrap_or(death);
                    self.death = Some(death);
                    let _ = report(&self.worker, &Report::Died(death));
                }
                Ok(Some(_)) => {}
                Ok(None) => return true,
                Err(rustix::io::Errno::INTR) => {}
                // There are no children.
                Err(_) => return false,
            }
        }
    }

    /// The death by lack of host memory, if the kernel killed the program for that.
    fn host_oom(&self, death: Death) -> Option<Death> {
        if death == Death::Exited(0) {
            return None;
        }
        Some(match self.group.as_ref()?.host_oom()? {
            HostOom { at_own_limit: true, peak: Some(peak) } => Death::HostMemory(peak),
            // In a group without a limit, `oom` also counts groups below it that reached their limits.
            HostOom { peak, .. } => Death::HostFull(peak),
        })
    }

    /// Kills until nothing is left. A process that moved to its own session is found by its parent: when the parent dies, the
    /// keeper adopts it.
    fn end_all(&mut self) {
        let began = Instant::now();
        let mut reported = false;
        while self.reap() || self.group.as_ref().is_some_and(|group| !group.is_empty()) {
            let mut left = self.descendants();
            if let Some(group) = &self.group {
                // Kills all at once, so that none can fork meanwhile.
                group.kill();
                left.extend(group.pids());
                left.sort_unstable();
                left.dedup();
            }
            if self.death.is_none() {
                let _ = kill_process_group(self.pid, Signal::KILL);
            }
            for pid in left.iter().filter_map(|pid| Pid::from_raw(*pid)) {
                let _ = kill_process(pid, Signal::KILL);
            }
            if !reported && began.elapsed() > STUCK {
                reported = true;
                let _ = report(&self.worker, &Report::Stuck { pids: left });
            }
            sleep(if reported { LATE_ROUND } else { KILL_ROUND });
        }
    }

    fn remove_scratch(&self) {
        if let Err(error) = std::fs::remove_dir_all(&self.spec.scratch) {
            eprintln!("vramq keeper: remove {}: {error}", self.spec.scratch.display());
        }
    }
}
