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
    let Ok(statm) = fs::read_to_string(format!("/proc/{pid}/statm")) else { return 0 };
    let pages: u64 = statm.split_ascii_whitespace().nth(1).and_then(|pages| pages.parse().ok()).unwrap_or(0);
    pages * rustix::param::page_size() as u64
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
