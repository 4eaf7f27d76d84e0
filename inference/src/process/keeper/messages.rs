//! What a worker and a keeper say to each other: JSON, one message a line, over the keeper's standard input.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::Limits;

/// The program to start: the first line that a keeper reads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spec {
    /// Program and arguments. The program's path is absolute.
    pub command: Vec<String>,
    /// Where it runs.
    pub folder: PathBuf,
    /// All of its environment.
    pub env: BTreeMap<String, String>,
    /// The program's scratch folder. The keeper makes it, and removes it at the end.
    pub scratch: PathBuf,
    /// What the keeper's standard output is for the program.
    pub output: OutputUse,
    pub limits: Limits,
    /// Where the keeper makes a control group for the program, if the worker has such groups.
    pub cgroup: Option<PathBuf>,
}

/// What a keeper's standard output is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OutputUse {
    /// The socket of the protocol, at the descriptor [`FD`](crate::process::protocol::FD); what the program prints goes where its
    /// errors go.
    Protocol,
    /// The program's standard output.
    Stdout,
}

/// What a worker may ask a keeper for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// SIGTERM to the program's process group.
    Terminate,
    /// SIGKILL to the program and all its descendants.
    Kill,
    /// The files of an ended one-shot program are read: remove the scratch folder.
    Finish,
}

/// What a keeper reports.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Report {
    Started {
        pid: i32,
    },
    /// The last report: there is no program, and no scratch folder.
    NotStarted {
        error: String,
    },
    /// The program itself is dead. Its descendants are being killed.
    Died(Death),
    /// SIGKILL has not ended these descendants for some time: they wait in the kernel.
    Stuck {
        pids: Vec<i32>,
    },
    /// No descendant of a one-shot program is left; the scratch folder stays until [`Order::Finish`].
    Ended,
    /// The last report: no descendant is left, and the scratch folder is gone.
    Gone,
}

/// How a program ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Death {
    Exited(i32),
    Killed(i32),
    /// Killed at the program's own limit, by its keeper or by the kernel: the processes together held this many bytes of the host's
    /// memory.
    HostMemory(u64),
    /// Killed by the kernel, because the machine or the worker's control group had no memory left. The most bytes that the program
    /// held, if the kernel says.
    HostFull(Option<u64>),
    /// Killed by its keeper: it had so many processes.
    Processes(usize),
    /// Its keeper died, and the program with it.
    KeeperLost,
}

/// The explanation of a SIGKILL by an unknown sender.
const HOST_MEMORY: &str = "probably the host's memory ran out";

impl fmt::Display for Death {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // A shell exits with this code if its program was killed.
            Self::Exited(code) if *code == 128 + libc::SIGKILL => {
                write!(f, "exited with status {code}, as after SIGKILL: {HOST_MEMORY}")
            }
            Self::Exited(code) => write!(f, "exited with status {code}"),
            Self::Killed(libc::SIGKILL) => write!(f, "was killed by signal {}: {HOST_MEMORY}", libc::SIGKILL),
            Self::Killed(signal) => write!(f, "was killed by signal {signal}"),
            Self::HostMemory(bytes) => {
                write!(
                    f,
                    "was killed, because it held {bytes} bytes of the host's memory, above host_memory_mib"
                )
            }
            Self::HostFull(bytes) => {
                f.write_str("was killed by the kernel, because the host's memory ran out")?;
                bytes.map_or(Ok(()), |bytes| write!(f, "; it held {bytes} bytes at most"))
            }
            Self::Processes(count) => write!(f, "was killed, because it had {count} processes"),
            Self::KeeperLost => f.write_str("was killed together with its keeper"),
        }
    }
}
