//! The descendants of a process, as `/proc` shows them.

use std::collections::HashMap;
use std::fs;

/// A process: its id, its parent's, and whether it is dead but not reaped.
struct Process {
    pid: i32,
    parent: i32,
    is_zombie: bool,
}

/// The living descendants of a process, without itself.
pub fn descendants(root: i32) -> Vec<i32> {
    let mut children: HashMap<i32, Vec<Process>> = HashMap::new();
    for process in processes() {
        children.entry(process.parent).or_default().push(process);
    }
    let mut found = Vec::new();
    let mut next = vec![root];
    while let Some(parent) = next.pop() {
        for child in children.remove(&parent).unwrap_or_default() {
            next.push(child.pid);
            if !child.is_zombie {
                found.push(child.pid);
            }
        }
    }
    found
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
