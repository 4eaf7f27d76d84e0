//! The descendants of a process, as `/proc` shows them.

use std::collections::HashMap;
use std::fs;

/// A process: its id, its parent's, and whether it is dead but not reaped.
struct Process {
    pid: i32,
    parent: i32,
    is_zombie: bool,
}

/// All processes of the machine at one time. Reading it takes two system calls or more for each of them.
pub struct ProcessTree {
    /// By parent.
    children: HashMap<i32, Vec<Process>>,
}

impl ProcessTree {
    pub fn read() -> Self {
        let mut children: HashMap<i32, Vec<Process>> = HashMap::new();
        for process in processes() {
            children.entry(process.parent).or_default().push(process);
        }
        Self { children }
    }

    /// The living descendants of some processes, without these.
    pub fn under(&self, roots: &[i32]) -> Vec<i32> {
        let mut found = Vec::new();
        let mut next = roots.to_vec();
        while let Some(parent) = next.pop() {
            for child in self.children.get(&parent).into_iter().flatten() {
                next.push(child.pid);
                if !child.is_zombie {
                    found.push(child.pid);
                }
            }
        }
        found
    }
}

/// The living descendants of a process, without itself.
pub fn descendants(root: i32) -> Vec<i32> {
    ProcessTree::read().under(&[root])
}

/// The same for a frequent look: asks only these processes for their children, not all of the machine. May miss some while processes end.
pub fn descendants_nearby(root: i32) -> Vec<i32> {
    let mut found = Vec::new();
    let mut next = vec![root];
    while let Some(parent) = next.pop() {
        // Without CONFIG_PROC_CHILDREN the kernel does not tell.
        let Some(children) = children(parent) else { return descendants(root) };
        next.extend(&children);
        found.extend(children.into_iter().filter(|pid| process(*pid).is_some_and(|child| !child.is_zombie)));
    }
    found
}

/// The children of all threads of a process: none if it is gone, `None` if the kernel does not list them.
fn children(pid: i32) -> Option<Vec<i32>> {
    let mut found = Vec::new();
    for thread in fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
        match fs::read_to_string(thread.path().join("children")) {
            Ok(list) => found.extend(list.split_ascii_whitespace().filter_map(|pid| pid.parse::<i32>().ok())),
            // The thread has ended, or the kernel has no such file.
            Err(_) if thread.path().exists() => return None,
            Err(_) => {}
        }
    }
    Some(found)
}

/// Resident bytes of a process; shared pages count in full. Zero if it is gone.
pub fn resident_bytes(pid: i32) -> u64 {
    let [resident, _] = resident_and_shared(pid);
    resident
}

/// The same without pages of files and of shared memory. Those of files are the system's cache, which counts as available.
pub fn private_bytes(pid: i32) -> u64 {
    let [resident, shared] = resident_and_shared(pid);
    resident.saturating_sub(shared)
}

fn resident_and_shared(pid: i32) -> [u64; 2] {
    let statm = fs::read_to_string(format!("/proc/{pid}/statm")).unwrap_or_default();
    let mut fields = statm.split_ascii_whitespace().skip(1).map(|pages| pages.parse().unwrap_or(0));
    [(); 2].map(|()| fields.next().unwrap_or(0u64) * rustix::param::page_size() as u64)
}

fn processes() -> impl Iterator<Item = Process> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter_map(process)
}

fn process(pid: i32) -> Option<Process> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The command, field 2, may hold blanks and parentheses; state and parent, fields 3 and 4, come after its last one.
    let mut fields = stat.get(stat.rfind(')')? + 1..)?.split_ascii_whitespace();
    let is_zombie = matches!(fields.next()?, "Z" | "X");
    Some(Process { pid, parent: fields.next()?.parse().ok()?, is_zombie })
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn both_ways_find_children_and_grandchildren_of_all_threads() {
        let own = std::process::id().cast_signed();
        let mut spawned = std::thread::spawn(|| {
            let mut shell = Command::new("/bin/sh");
            shell.args(["-c", "sleep 600 & echo $!; wait"]).stdout(Stdio::piped()).spawn().unwrap()
        })
        .join()
        .unwrap();
        let (shell, mut printed) = (spawned.id().cast_signed(), Vec::new());
        let mut stdout = spawned.stdout.take().unwrap();
        while !printed.ends_with(b"\n") {
            let mut byte = [0];
            stdout.read_exact(&mut byte).unwrap();
            printed.extend(byte);
        }
        let sleep: i32 = String::from_utf8(printed).unwrap().trim().parse().unwrap();
        let tree = ProcessTree::read();
        for found in [descendants(own), descendants_nearby(own), tree.under(&[own])] {
            assert!(found.contains(&shell) && found.contains(&sleep) && !found.contains(&own), "{found:?}");
        }
        for found in [descendants(shell), descendants_nearby(shell), tree.under(&[shell])] {
            assert_eq!(found, [sleep]);
        }
        rustix::process::kill_process(
            rustix::process::Pid::from_raw(sleep).unwrap(),
            rustix::process::Signal::KILL,
        )
        .unwrap();
        spawned.wait().unwrap();
        assert!(descendants(shell).is_empty() && descendants_nearby(shell).is_empty(), "they are gone");
    }
}
