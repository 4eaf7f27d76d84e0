//! Starts a program in its own session, without the worker's descriptors or environment.

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};

use rustix::process::{
    Pid, Resource, Rlimit, Signal, getppid, set_parent_process_death_signal, setrlimit, setsid,
};
use serde::{Deserialize, Serialize};

use super::{OutputUse, Spec};
use crate::process::protocol::FD;

/// Makes the kernel prefer a program when the host's memory runs out (proc(5), `oom_score_adj`). The worker, which holds jobs of
/// other programs, should not be killed.
const OOM_SCORE_ADJ: &str = "500";

/// Signals that the keeper ignores, because it must not end before its work is done.
pub(super) const IGNORED: [i32; 4] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGPIPE];

/// What a program may take of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Resident bytes of all its processes together.
    pub host_memory_bytes: Option<u64>,
    /// All its processes.
    pub processes: usize,
    /// Bytes of a file that it writes.
    pub file_bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        // Data loaders start a process for each core, also on large machines; a fork bomb passes this number in milliseconds. A
        // checkpoint may be a large file, but should not fill a disk.
        Self { host_memory_bytes: None, processes: 1024, file_bytes: 256 << 30 }
    }
}

/// Starts the program, in the control group of this `entrance`. The keeper's standard output goes to it as `spec.output` says, and what
/// it prints to the keeper's standard error.
///
/// # Errors
/// `exec` failed, or the program may not enter the group. Then nothing runs, and the standard output is unchanged.
pub fn launch(spec: &Spec, entrance: Option<File>) -> io::Result<Child> {
    let (program, arguments) = spec.command.split_first().ok_or(io::ErrorKind::InvalidInput)?;
    let image = Image::new(spec)?;
    let output: OwnedFd = io::stdout().as_fd().try_clone_to_owned()?;
    let errors: OwnedFd = io::stderr().as_fd().try_clone_to_owned()?;
    let is_protocol = spec.output == OutputUse::Protocol;
    let socket = output.as_raw_fd();
    let stdout =
        if is_protocol { Stdio::from(errors.try_clone()?) } else { Stdio::from(output.try_clone()?) };
    let mut command = Command::new(program);
    command
        .args(arguments)
        .current_dir(&spec.folder)
        .stdin(Stdio::null())
        .stdout(stdout)
        .stderr(Stdio::from(errors));
    let keeper = rustix::process::getpid();
    let limits = spec.limits;
    // SAFETY: the keeper has one thread, so the forked process may do what the keeper may.
    unsafe {
        command.pre_exec(move || {
            if let Some(mut entrance) = entrance.as_ref() {
                // 0 means the writing process.
                entrance.write_all(b"0")?;
            }
            in_child(keeper, limits, is_protocol.then_some(socket))?;
            Err(image.exec())
        })
    };
    let nowhere = File::options().write(true).open("/dev/null")?;
    let mut child = command.spawn()?;
    drop(output);
    // So the program's death ends the connection, unless its children hold it.
    // SAFETY: the keeper has one thread, and prints nothing, so that nobody else uses the descriptor.
    if unsafe { libc::dup2(nowhere.as_raw_fd(), libc::STDOUT_FILENO) } < 0 {
        let error = io::Error::last_os_error();
        let _ = child.kill().and_then(|()| child.wait());
        return Err(error);
    }
    Ok(child)
}

/// The arguments of `execve`, allocated before the fork.
struct Image {
    program: CString,
    arguments: Vec<CString>,
    env: Vec<CString>,
}

impl Image {
    fn new(spec: &Spec) -> io::Result<Self> {
        let text = |text: &str| CString::new(text).map_err(io::Error::from);
        let arguments = spec.command.iter().map(|argument| text(argument)).collect::<io::Result<Vec<_>>>()?;
        let variables = spec.env.iter().map(|(name, value)| text(&format!("{name}={value}")));
        let program = arguments.first().cloned().ok_or(io::ErrorKind::InvalidInput)?;
        Ok(Self { program, arguments, env: variables.collect::<io::Result<_>>()? })
    }

    /// Becomes the program; returns only if that fails. Unlike `execvp`, which the standard library calls, this does not give a
    /// file that is not a program to a shell.
    fn exec(&self) -> io::Error {
        let pointers = |texts: &[CString]| -> Vec<*const libc::c_char> {
            texts.iter().map(|text| text.as_ptr()).chain([std::ptr::null()]).collect()
        };
        let (arguments, env) = (pointers(&self.arguments), pointers(&self.env));
        // SAFETY: all are C strings that live through the call, and both lists end with a null.
        unsafe { libc::execve(self.program.as_ptr(), arguments.as_ptr(), env.as_ptr()) };
        io::Error::last_os_error()
    }
}

/// Between fork and exec.
fn in_child(keeper: Pid, limits: Limits, socket: Option<i32>) -> io::Result<()> {
    setsid()?;
    set_parent_process_death_signal(Some(Signal::KILL))?;
    // The keeper may have died before the parent-death signal was set.
    if getppid() != Some(keeper) {
        return Err(io::Error::other("the keeper is gone"));
    }
    let none = Rlimit { current: Some(0), maximum: Some(0) };
    // A core of a process with a model in it fills the disk.
    setrlimit(Resource::Core, none)?;
    let files = Rlimit { current: Some(limits.file_bytes), maximum: Some(limits.file_bytes) };
    setrlimit(Resource::Fsize, files)?;
    // Best effort: not every container allows it.
    let _ = std::fs::write("/proc/self/oom_score_adj", OOM_SCORE_ADJ);
    // SAFETY: sets dispositions, touches no memory. Signals that the keeper ignores would stay ignored after exec.
    unsafe {
        for signal in IGNORED {
            libc::signal(signal, libc::SIG_DFL);
        }
    }
    if let Some(socket) = socket {
        // FD is the first descriptor that the keeper opened: its connection to the worker. If it were the socket, dup2 would leave
        // its close-on-exec mark. The pipe that reports a failed exec must not be replaced either.
        debug_assert_ne!(socket, FD);
        // SAFETY: both are numbers, and `socket` is open.
        if unsafe { libc::dup2(socket, FD) } < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    let first = if socket.is_some() { FD + 1 } else { FD };
    close_on_exec_from(first)
}

/// Marks every descriptor from `first` on to be closed by exec.
fn close_on_exec_from(first: i32) -> io::Result<()> {
    // SAFETY: the arguments are numbers; descriptors are marked, not closed.
    let done = unsafe {
        libc::syscall(
            libc::SYS_close_range,
            first as libc::c_uint,
            libc::c_uint::MAX,
            libc::CLOSE_RANGE_CLOEXEC,
        )
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
