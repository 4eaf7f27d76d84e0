//! A program's own control group. The program's keeper, which is outside of the group, makes it, and removes it when it is empty.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use rustix::process::{Pid, Signal, kill_process};

/// A group by its folder, which need not exist any more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    folder: PathBuf,
}

/// The kernel killed the processes of a group, because host memory ran out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostOom {
    /// The group reached its own limit; else the machine, or the worker's group, has no memory left.
    pub at_own_limit: bool,
    /// The most bytes that the group held; `None` if the kernel does not say. Before Linux 5.19 only the limit is known.
    pub peak: Option<u64>,
}

impl Group {
    pub fn at(folder: PathBuf) -> Self {
        Self { folder }
    }

    /// Makes the group, which bounds memory to `limit` bytes where it can. When memory runs out, the kernel kills all of its
    /// processes: a program that lost one of them would hang.
    ///
    /// # Errors
    /// The group cannot be made, or the kernel does not take the limit. There is no group then.
    pub fn make(folder: PathBuf, limit: Option<u64>) -> io::Result<Self> {
        fs::create_dir(&folder)?;
        let group = Self { folder };
        group.bound(limit).inspect_err(|_| {
            let _ = group.remove();
        })?;
        Ok(group)
    }

    fn bound(&self, limit: Option<u64>) -> io::Result<()> {
        if !self.bounds_memory() {
            return Ok(());
        }
        fs::write(self.folder.join("memory.oom.group"), "1")?;
        let Some(limit) = limit else { return Ok(()) };
        fs::write(self.folder.join("memory.max"), limit.to_string())?;
        // Swapped memory counts as beyond the limit too. A kernel without swap accounting has no such file.
        let _ = fs::write(self.folder.join("memory.swap.max"), "0");
        Ok(())
    }

    /// Whether the group has the memory controller.
    pub fn bounds_memory(&self) -> bool {
        self.folder.join("memory.max").exists()
    }

    /// Where a process writes `0` to enter the group.
    ///
    /// # Errors
    /// This process may not move others into it.
    pub fn entrance(&self) -> io::Result<File> {
        File::options().write(true).open(self.folder.join("cgroup.procs"))
    }

    /// Marks the group as in use while the returned file is open. Workers in other containers, which cannot see this process, see
    /// the mark too.
    ///
    /// # Errors
    /// The group is gone.
    pub fn hold(&self) -> io::Result<File> {
        let lock = File::open(&self.folder)?;
        lock.lock()?;
        Ok(lock)
    }

    /// Whether no process holds the group.
    pub fn is_abandoned(&self) -> bool {
        File::open(&self.folder).is_ok_and(|folder| folder.try_lock().is_ok())
    }

    /// Whether the kernel killed processes of it because memory ran out.
    pub fn host_oom(&self) -> Option<HostOom> {
        let events = self.read("memory.events").unwrap_or_default();
        let count = |name| number_of(&events, name).unwrap_or(0);
        // `oom` counts how often this group was full, not a group above it.
        let at_own_limit = count("oom") > 0;
        (count("oom_kill") > 0).then(|| HostOom { at_own_limit, peak: self.peak(at_own_limit) })
    }

    /// The most bytes of host memory that it held, page cache included. Linux has `memory.peak` since 5.19. What the group holds now
    /// does not stand for it: the kernel has killed the processes.
    fn peak(&self, at_own_limit: bool) -> Option<u64> {
        let bytes = |name| self.read(name)?.trim().parse().ok();
        bytes("memory.peak").or_else(|| if at_own_limit { bytes("memory.max") } else { None })
    }

    /// Kills all processes in it, and those in groups that they made below it.
    pub fn kill(&self) {
        if fs::write(self.folder.join("cgroup.kill"), "1").is_ok() {
            return;
        }
        // Kernels before 5.14 have no `cgroup.kill`. This kills only processes of the group itself.
        for pid in self.pids().into_iter().filter_map(Pid::from_raw) {
            let _ = kill_process(pid, Signal::KILL);
        }
    }

    /// The living processes in it.
    pub fn pids(&self) -> Vec<i32> {
        let text = self.read("cgroup.procs").unwrap_or_default();
        text.lines().filter_map(|line| line.parse().ok()).collect()
    }

    /// Whether no process is in it, or in a group below it.
    pub fn is_empty(&self) -> bool {
        match self.read("cgroup.events") {
            Some(events) => number_of(&events, "populated") == Some(0),
            None => self.pids().is_empty(),
        }
    }

    /// Removes it, with the groups below it.
    ///
    /// # Errors
    /// A process is in one of them.
    pub fn remove(&self) -> io::Result<()> {
        remove(&self.folder)
    }

    fn read(&self, file: &str) -> Option<String> {
        fs::read_to_string(self.folder.join(file)).ok()
    }
}

/// The files of a group go with its folder.
fn remove(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)?.flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove(&entry.path())?;
        }
    }
    fs::remove_dir(folder)
}

/// A number in a file of one name and number a line.
fn number_of(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder that imitates a group.
    fn imitated(files: &[(&str, &str)]) -> (tempfile::TempDir, Group) {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            fs::write(folder.path().join(name), text).unwrap();
        }
        let group = Group::at(folder.path().to_owned());
        (folder, group)
    }

    #[test]
    fn a_kill_for_memory_is_of_the_group_or_of_the_machine() {
        for (events, at_own_limit) in [
            ("low 0\nhigh 0\nmax 9\noom 1\noom_kill 3\noom_group_kill 1\n", Some(true)),
            // The machine was full, or a group above.
            ("low 0\nhigh 0\nmax 0\noom 0\noom_kill 1\noom_group_kill 0\n", Some(false)),
            // It was full, and nothing had to be killed.
            ("low 0\nhigh 0\nmax 4\noom 1\noom_kill 0\n", None),
            ("", None),
        ] {
            let files = [("memory.events", events), ("memory.current", "7\n"), ("memory.peak", "4096\n")];
            let (_folder, group) = imitated(&files);
            let expected = at_own_limit.map(|at_own_limit| HostOom { at_own_limit, peak: Some(4096) });
            assert_eq!(group.host_oom(), expected, "{events:?}");
        }
    }

    #[test]
    fn without_a_recorded_peak_the_limit_is_known() {
        for (events, at_own_limit, peak) in
            [("oom 1\noom_kill 1\n", true, Some(4096)), ("oom 0\noom_kill 1\n", false, None)]
        {
            let files = [("memory.events", events), ("memory.current", "7\n"), ("memory.max", "4096\n")];
            let (_folder, group) = imitated(&files);
            assert_eq!(group.host_oom(), Some(HostOom { at_own_limit, peak }), "{events:?}");
        }
    }

    #[test]
    fn a_limit_is_for_groups_that_can_bound_memory() {
        let (folder, group) = imitated(&[("memory.max", "max\n"), ("memory.swap.max", "max\n")]);
        let read = |name: &str| fs::read_to_string(folder.path().join(name)).unwrap();
        group.bound(None).unwrap();
        assert_eq!((read("memory.max").as_str(), read("memory.oom.group").as_str()), ("max\n", "1"));
        group.bound(Some(200 << 20)).unwrap();
        assert_eq!((read("memory.max").as_str(), read("memory.swap.max").as_str()), ("209715200", "0"));
        let (folder, without) = imitated(&[]);
        without.bound(Some(1)).unwrap();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is written");
    }

    #[test]
    fn a_group_is_empty_when_those_below_it_are() {
        let (_folder, group) =
            imitated(&[("cgroup.procs", ""), ("cgroup.events", "populated 1\nfrozen 0\n")]);
        assert!(!group.is_empty());
        let (_folder, group) =
            imitated(&[("cgroup.procs", ""), ("cgroup.events", "populated 0\nfrozen 0\n")]);
        assert!(group.is_empty());
        assert!(Group::at("/no/such/group".into()).is_empty());
    }

    #[test]
    fn the_processes_of_a_group() {
        let (folder, group) = imitated(&[("cgroup.procs", "12\n345\n")]);
        assert_eq!(group.pids(), [12, 345]);
        fs::write(folder.path().join("cgroup.kill"), "").unwrap();
        group.kill();
        assert_eq!(fs::read_to_string(folder.path().join("cgroup.kill")).unwrap(), "1");
    }

    #[test]
    fn a_group_is_removed_with_those_below_it() {
        let (folder, _) = imitated(&[]);
        let at = folder.path().join("program");
        fs::create_dir_all(at.join("one/two")).unwrap();
        Group::at(at.clone()).remove().unwrap();
        assert!(!at.exists());
    }
}
