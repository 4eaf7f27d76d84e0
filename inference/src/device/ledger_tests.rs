//! Ledgers of one process and of several on a file.

use std::fs::{File, OpenOptions};

use super::table::{Holder, started};
use super::*;

fn shared(folder: &tempfile::TempDir, total: u64) -> Result<Ledger, LedgerError> {
    Ledger::shared(&folder.path().join("memory"), total)
}

#[test]
fn two_ledgers_on_a_file_share_its_memory() {
    let folder = tempfile::tempdir().unwrap();
    let (one, other) = (shared(&folder, 1000).unwrap(), shared(&folder, 1000).unwrap());
    one.take(600).unwrap();
    other.take(300).unwrap();
    assert_eq!(one.memory(), Memory { free: 100, total: 1000, foreign: 300 });
    assert_eq!(other.memory(), Memory { free: 100, total: 1000, foreign: 600 });
    let refused = other.take(101).unwrap_err();
    assert_eq!(refused, OutOfMemory { asked: 101, free: 100, total: 1000, foreign: 600 });
    one.give(600);
    other.take(101).unwrap();
    drop(other);
    assert_eq!(one.memory(), Memory { free: 1000, total: 1000, foreign: 0 });
}

#[test]
fn memory_of_programs_is_not_free() {
    let ledger = Ledger::own(1000);
    let programs_hold = |bytes: u64| {
        let Ledger::Own { programs, .. } = &ledger else { panic!("it is shared") };
        programs.store(bytes, Ordering::Release);
    };
    ledger.take(300).unwrap();
    programs_hold(500);
    assert_eq!(ledger.memory(), Memory { free: 200, total: 1000, foreign: 500 });
    let refused = ledger.take(201).unwrap_err();
    assert_eq!(refused, OutOfMemory { asked: 201, free: 200, total: 1000, foreign: 500 });
    // They may take more than there is.
    programs_hold(5000);
    assert_eq!(ledger.memory(), Memory { free: 0, total: 1000, foreign: 700 });
    assert_eq!(ledger.take(1).unwrap_err().free, 0);
}

#[test]
fn a_shared_device_tells_processes_apart() {
    let folder = tempfile::tempdir().unwrap();
    let ledger = shared(&folder, 1000).unwrap();
    let mut sleeper = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    let process = u64::from(sleeper.id());
    let file = OpenOptions::new().write(true).open(folder.path().join("memory")).unwrap();
    Holder { process, started: started(process).unwrap(), bytes: 400 }.write(&file, 7).unwrap();
    let pid = i32::try_from(process).unwrap();
    assert_eq!((ledger.held_by(&[pid]), ledger.held_by(&[pid + 1])), (Some(400), Some(0)));
    sleeper.kill().unwrap();
    sleeper.wait().unwrap();
    assert_eq!(ledger.held_by(&[pid]), Some(0));
}

/// Its process was stopped while it used the file. The event loop asks for the memory, and must go on.
#[test]
fn a_process_that_keeps_the_file_does_not_keep_others_from_reading_the_memory() {
    let folder = tempfile::tempdir().unwrap();
    let (ledger, other) = (shared(&folder, 1000).unwrap(), shared(&folder, 1000).unwrap());
    other.take(100).unwrap();
    ledger.take(300).unwrap();
    assert_eq!(ledger.memory(), Memory { free: 600, total: 1000, foreign: 100 });
    ledger.take(50).unwrap();
    ledger.give(200);
    let stopped = File::open(folder.path().join("memory")).unwrap();
    stopped.lock().unwrap();
    assert_eq!(ledger.memory(), Memory { free: 750, total: 1000, foreign: 100 });
    drop(stopped);
    other.give(100);
    assert_eq!(ledger.memory(), Memory { free: 850, total: 1000, foreign: 0 });
}

/// Nobody may take that for a device on which nobody holds anything.
#[test]
fn a_file_that_cannot_be_read_tells_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let ledger = shared(&folder, 1000).unwrap();
    ledger.take(300).unwrap();
    let file = OpenOptions::new().write(true).open(folder.path().join("memory")).unwrap();
    file.set_len(0).unwrap();
    assert_eq!((ledger.try_memory(), ledger.held_by(&[1])), (None, None));
    assert_eq!(ledger.memory(), Memory { free: 0, total: 1000, foreign: 0 });
}

#[test]
fn memory_of_dead_processes_is_free() {
    let folder = tempfile::tempdir().unwrap();
    let ledger = shared(&folder, 1000).unwrap();
    let file = OpenOptions::new().write(true).open(folder.path().join("memory")).unwrap();
    // This process's id with the start time of another, as after a reboot.
    let dead = Holder { process: u64::from(std::process::id()), started: 1, bytes: 900 };
    dead.write(&file, 7).unwrap();
    assert_eq!(ledger.memory().free, 1000);
    ledger.take(1000).unwrap();
}

#[test]
fn a_killed_process_gives_its_memory_back() {
    let folder = tempfile::tempdir().unwrap();
    let ledger = shared(&folder, 1000).unwrap();
    let mut sleeper = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    let process = u64::from(sleeper.id());
    let file = OpenOptions::new().write(true).open(folder.path().join("memory")).unwrap();
    Holder { process, started: started(process).unwrap(), bytes: 900 }.write(&file, 7).unwrap();
    assert_eq!(ledger.take(200).unwrap_err().foreign, 900);
    sleeper.kill().unwrap();
    sleeper.wait().unwrap();
    ledger.take(200).unwrap();
    assert_eq!(ledger.memory(), Memory { free: 800, total: 1000, foreign: 0 });
}

#[test]
fn processes_must_agree_on_the_size() {
    let folder = tempfile::tempdir().unwrap();
    let first = shared(&folder, 1000).unwrap();
    assert!(matches!(
        shared(&folder, 999),
        Err(LedgerError::OtherSize { stands: 1000, configured: 999, .. })
    ));
    drop(first);
    assert_eq!(shared(&folder, 999).unwrap().memory().total, 999);
}

#[test]
fn another_file_is_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("memory");
    std::fs::write(&path, "a letter to a friend").unwrap();
    assert!(matches!(Ledger::shared(&path, 1000), Err(LedgerError::Foreign { .. })));
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "a letter to a friend");
}

#[test]
fn threads_and_ledgers_never_take_more_than_there_is() {
    let folder = tempfile::tempdir().unwrap();
    let ledgers = [(); 3].map(|()| shared(&folder, 640).unwrap());
    std::thread::scope(|scope| {
        for ledger in ledgers.iter().chain(&ledgers) {
            scope.spawn(move || {
                for _ in 0..300 {
                    if ledger.take(200).is_ok() {
                        let Memory { free, foreign, .. } = ledger.memory();
                        assert!(free + foreign <= 440, "{free} free, {foreign} foreign");
                        ledger.give(200);
                    }
                }
            });
        }
    });
    assert_eq!(ledgers[0].memory(), Memory { free: 640, total: 640, foreign: 0 });
}
