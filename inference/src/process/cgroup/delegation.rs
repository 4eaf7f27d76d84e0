//! Finds out whether the worker may make control groups, and prepares its own group for that.

use std::fmt;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use rustix::process::{Pid, geteuid, test_kill_process};

use super::group::Group;
use crate::process::scratch;

/// The group into which the worker moves: a group whose children use controllers may hold no processes itself.
const LEAF: &str = "vramq-worker";

/// The controller that bounds memory.
const MEMORY: &str = "memory";

/// Where the groups of programs are made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cgroups {
    root: PathBuf,
    /// Why the groups do not bound memory, if they do not.
    without_memory: Option<String>,
}

/// Why programs have no groups of their own.
#[derive(Debug, thiserror::Error)]
pub enum NotDelegated {
    #[error("no cgroup v2 file system is mounted that contains the cgroup of this process")]
    NotMounted,
    #[error("this process is in the root cgroup of the machine")]
    MachineRoot,
    #[error("read {}: {}", .folder.display(), .error)]
    NotRead { folder: PathBuf, error: io::Error },
    #[error("{} is not delegated (systemd: Delegate=memory; a container: a private, writable cgroup)", .0.display())]
    NotMarked(PathBuf),
    #[error("make {}: {}", .folder.display(), .error)]
    NotMade { folder: PathBuf, error: io::Error },
    #[error("move this process into {}: {}", .folder.display(), .error)]
    NotMoved { folder: PathBuf, error: io::Error },
}

impl Cgroups {
    /// Prepares this process's own group, if it is delegated. Moves this process with all its threads, and so later children, into
    /// a leaf of the group. Gives the memory controller to the groups beside that leaf.
    ///
    /// # Errors
    /// There is no delegated group, or it cannot be used. This process stays where it was.
    pub fn prepare() -> Result<Self, NotDelegated> {
        let read = |file| fs::read_to_string(file).unwrap_or_default();
        let own = Own::find(&read("/proc/self/mountinfo"), &read("/proc/self/cgroup"))?;
        own.check(geteuid().as_raw())?;
        if !own.is_in_leaf {
            enter_leaf(&own.root)?;
        }
        Ok(Self::below(own.root))
    }

    /// Programs have their groups below `root`. If `root` itself holds processes, those groups have no memory controller.
    pub fn below(root: PathBuf) -> Self {
        sweep(&root);
        let without_memory = hand_on_memory(&root).err();
        Self { root, without_memory }
    }

    /// Where the program with this scratch folder has its group: both have one name.
    pub fn folder(&self, scratch: &Path) -> Option<PathBuf> {
        scratch.file_name().map(|name| self.root.join(name))
    }

    /// Whether the kernel bounds the memory of the groups.
    pub fn has_memory(&self) -> bool {
        self.without_memory.is_none()
    }
}

impl fmt::Display for Cgroups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "each program has a cgroup of its own below {}", self.root.display())?;
        match &self.without_memory {
            None => f.write_str(", which bounds its host memory"),
            Some(why) => write!(f, ", which does not bound its host memory: {why}"),
        }
    }
}

/// The group that may be delegated to this process.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Own {
    root: PathBuf,
    /// This process is already in [`LEAF`]: another process, such as its parent, has prepared the group.
    is_in_leaf: bool,
    /// It is the topmost group that this process can see, as in a container with a cgroup namespace.
    is_top: bool,
    /// It belongs to the service manager of a user's session, which manages the groups of the user's programs.
    is_of_session: bool,
}

impl Own {
    /// By the texts of `/proc/self/mountinfo` and `/proc/self/cgroup`.
    fn find(mountinfo: &str, cgroup: &str) -> Result<Self, NotDelegated> {
        let path =
            cgroup.lines().find_map(|line| line.strip_prefix("0::")).ok_or(NotDelegated::NotMounted)?;
        let mut path = Path::new(path);
        let is_in_leaf = path.file_name().is_some_and(|name| name == LEAF);
        if is_in_leaf {
            path = path.parent().unwrap_or(path);
        }
        let seen = mountinfo.lines().filter_map(mount).find_map(|(top, point)| {
            let below = path.strip_prefix(top).ok()?;
            // The group is above the namespace's top.
            (!below.starts_with("..")).then(|| (point.join(below), below.as_os_str().is_empty()))
        });
        let (root, is_top) = seen.ok_or(NotDelegated::NotMounted)?;
        let is_of_session =
            path.components().any(|part| part.as_os_str().to_string_lossy().starts_with("user@"));
        Ok(Self { root: root.components().collect(), is_in_leaf, is_top, is_of_session })
    }

    /// Whether it is delegated to a process of this user: another manager of the same group would undo what is made there.
    fn check(&self, user: u32) -> Result<(), NotDelegated> {
        // Every group but the machine's root has this file.
        if let Err(error) = fs::metadata(self.root.join("cgroup.type")) {
            let is_root = error.kind() == io::ErrorKind::NotFound && self.root.exists();
            return Err(if is_root {
                NotDelegated::MachineRoot
            } else {
                NotDelegated::NotRead { folder: self.root.clone(), error }
            });
        }
        // systemd gives only delegated groups to the service's user.
        let is_given = || {
            user != 0 && !self.is_of_session && fs::metadata(&self.root).is_ok_and(|root| root.uid() == user)
        };
        if self.is_top || is_marked(&self.root) || is_given() {
            return Ok(());
        }
        Err(NotDelegated::NotMarked(self.root.clone()))
    }
}

/// Which group a mount shows, and where, by its line in `/proc/self/mountinfo`; nothing if it is no cgroup v2.
fn mount(line: &str) -> Option<(&Path, &Path)> {
    let (mount, file_system) = line.split_once(" - ")?;
    if file_system.split(' ').next() != Some("cgroup2") {
        return None;
    }
    let mut fields = mount.split(' ').skip(3);
    Some((Path::new(fields.next()?), Path::new(fields.next()?)))
}

/// Whether systemd marked a group as delegated: `trusted.delegate` is for root to read, `user.delegate` is there from systemd 251 on.
fn is_marked(folder: &Path) -> bool {
    ["user.delegate", "trusted.delegate"].into_iter().any(|name| {
        let mut value = [0_u8; 8];
        let read = rustix::fs::getxattr(folder, name, &mut value);
        read.is_ok_and(|length| value[..length] == *b"1")
    })
}

fn enter_leaf(root: &Path) -> Result<(), NotDelegated> {
    let leaf = root.join(LEAF);
    if let Err(error) = fs::create_dir(&leaf)
        && error.kind() != io::ErrorKind::AlreadyExists
    {
        return Err(NotDelegated::NotMade { folder: leaf, error });
    }
    // 0 means the writing process.
    let moved = fs::write(leaf.join("cgroup.procs"), "0");
    moved.map_err(|error| {
        // Fails, as it should, if another process of this worker is in it.
        let _ = fs::remove_dir(&leaf);
        NotDelegated::NotMoved { folder: leaf, error }
    })
}

/// Hands the memory controller to the groups below `root`, or says why that cannot be.
fn hand_on_memory(root: &Path) -> Result<(), String> {
    let has = |file: &str| {
        let text = fs::read_to_string(root.join(file)).unwrap_or_default();
        text.split_ascii_whitespace().any(|controller| controller == MEMORY)
    };
    if !has("cgroup.controllers") {
        return Err("the memory controller is not available there".to_owned());
    }
    let control = "cgroup.subtree_control";
    if has(control) {
        return Ok(());
    }
    fs::write(root.join(control), format!("+{MEMORY}")).map_err(|error| match error.kind() {
        io::ErrorKind::ResourceBusy => {
            let pids = Group::at(root.to_owned()).pids();
            format!("other processes are in that group ({pids:?})")
        }
        _ => format!("write {control}: {error}"),
    })
}

/// Ends what remains of workers that were killed together with their keepers. Workers in several containers may share `root`.
/// Process ids of other containers mean nothing here, but keepers that run hold their groups.
fn sweep(root: &Path) {
    for entry in fs::read_dir(root).into_iter().flatten().flatten() {
        let worker = entry.file_name().to_str().and_then(scratch::worker_of);
        let is_gone = |pid| test_kill_process(pid) == Err(rustix::io::Errno::SRCH);
        if worker.and_then(Pid::from_raw).is_some_and(is_gone) {
            let group = Group::at(entry.path());
            // A new group may not be held by its keeper yet. No process enters it before that.
            let is_new = group.is_empty() && is_young(&entry.path());
            if group.is_abandoned() && !is_new {
                group.kill();
                // The next start removes a group that is not empty yet.
                let _ = group.remove();
            }
        }
    }
}

fn is_young(folder: &Path) -> bool {
    let made = fs::metadata(folder).and_then(|folder| folder.modified());
    made.is_ok_and(|made| made.elapsed().unwrap_or_default() < scratch::SETTLED)
}

#[cfg(test)]
#[path = "delegation_tests.rs"]
mod tests;
