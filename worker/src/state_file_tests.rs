//! Tests of the file that keeps learned limits and the memory of programs.

use super::*;

const LIMITS: &str = r#"{"version": 1, "ceilings": [[
    {"model": "m", "device": "cpu", "total": 1000, "longest_max": 128},
    {"fitted": 0, "failed": 80, "failed_at_ms": 7, "limit": 40}
], [
    {"model": "m", "device": "cuda:0", "total": 5000, "longest_max": 128},
    {"fitted": 1, "failed": 20, "failed_at_ms": 8, "limit": 10}
]]}"#;

const OTHER_VERSION: &str = r#"{"version": 9, "ceilings": {}}"#;

#[test]
fn a_folder_that_cannot_be_written_to_is_noticed_without_a_change() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("state/ceilings.json");
    could_write(&file).unwrap();
    assert_eq!(std::fs::read_dir(file.parent().unwrap()).unwrap().count(), 0, "it leaves nothing");
    std::fs::write(&file, "damaged").unwrap();
    could_write(&file).unwrap();
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "damaged");
    assert!(could_write(&file.join("below/ceilings.json")).is_err(), "a file is in the way");
}

#[test]
fn limits_outlive_the_process_and_those_of_other_devices_stay() {
    let folder = tempfile::tempdir().unwrap();
    let state = StateFile::in_folder(Some(&folder.path().join("made/for/it")));
    assert!(state.read().is_empty());
    let source = StateFile::in_folder(Some(folder.path()));
    std::fs::write(folder.path().join(FILE_NAME), LIMITS).unwrap();
    let all = source.read();
    assert_eq!(all.len(), 2);
    for (device, total) in [("cpu", 1000), ("cuda:0", 5000)] {
        let limits = LearnedLimits::new(device, total, all.clone());
        assert_eq!(limits.known().count(), 1);
        state.write(&limits);
    }
    assert_eq!(state.read(), all);
    let left: Vec<_> = std::fs::read_dir(folder.path().join("made/for/it")).unwrap().collect();
    assert_eq!(left.len(), 2, "nothing is left beside the file and its lock: {left:?}");
}

#[test]
fn needs_of_programs_are_saved_beside_the_limits() {
    let folder = tempfile::tempdir().unwrap();
    // As 0.2.0 wrote it.
    std::fs::write(folder.path().join(FILE_NAME), LIMITS).unwrap();
    let state = StateFile::in_folder(Some(folder.path()));
    assert!(state.read_programs().is_empty());
    let key = |model: &str| ProgramKey { model: model.to_owned(), device: "cpu".to_owned(), total: 1000 };
    let mut learned = Learned::default();
    learned.took(3.0, 70);
    learned.loaded(500);
    let memory = ProgramMemory { program: "program-1 items".to_owned(), learned };
    state.write_programs(BTreeMap::from([(key("a"), memory.clone())]));
    let other = ProgramMemory { program: "program-2 items".to_owned(), ..memory.clone() };
    state.write_programs(BTreeMap::from([(key("b"), other.clone())]));
    let limits = LearnedLimits::new("cpu", 1000, state.read());
    state.write(&limits);
    assert_eq!(state.read_programs(), BTreeMap::from([(key("a"), memory), (key("b"), other)]));
    assert_eq!(state.read().len(), 2);
}

#[test]
fn workers_that_write_at_a_time_lose_nothing() {
    const WRITERS: u64 = 8;
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("source.json");
    std::fs::write(&source, LIMITS).unwrap();
    let (key, limit) = read(&source).unwrap().limits.pop_first().unwrap();
    let file = folder.path().join(FILE_NAME);
    std::thread::scope(|scope| {
        for device in 0..WRITERS {
            let own = BTreeMap::from([(LimitKey { device: device.to_string(), ..key.clone() }, limit)]);
            let file = &file;
            scope.spawn(move || while update(file, |known| known.limits.extend(own.clone())).is_err() {});
        }
    });
    assert_eq!(read(&file).unwrap().limits.len() as u64, WRITERS);
}

#[test]
fn a_lock_that_is_not_given_back_is_not_waited_for_for_ever() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join(FILE_NAME);
    let held = lock(&file.with_extension("lock")).unwrap();
    let refused = update(&file, |_| {}).unwrap_err();
    assert!(
        matches!(&refused, StateError::File(error) if error.kind() == io::ErrorKind::WouldBlock),
        "{refused}"
    );
    drop(held);
    update(&file, |_| {}).unwrap();
}

#[test]
fn a_write_that_fails_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    // A folder comes into the file's place: all but the renaming works.
    let file = folder.path().join(FILE_NAME);
    assert!(update(&file, |_| std::fs::create_dir_all(file.join("full")).unwrap()).is_err());
    let left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|it| it.unwrap().file_name()).collect();
    assert_eq!(left.len(), 2, "the folder and the lock: {left:?}");
}

#[test]
fn a_file_that_cannot_be_read_counts_as_missing() {
    let folder = tempfile::tempdir().unwrap();
    let state = StateFile::in_folder(Some(folder.path()));
    for text in ["", "{}", "[1", OTHER_VERSION] {
        std::fs::write(folder.path().join(FILE_NAME), text).unwrap();
        assert!(state.read().is_empty(), "{text}");
    }
    assert!(StateFile::in_folder(None).read().is_empty());
}

/// It may hold what other workers learned: those of another version, or all of them if the disk cannot read it at the moment.
#[test]
fn a_file_that_cannot_be_read_is_not_overwritten() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join(FILE_NAME);
    std::fs::write(&file, OTHER_VERSION).unwrap();
    assert!(matches!(update(&file, |_| {}), Err(StateError::OtherVersion(9))));
    assert_eq!(std::fs::read_to_string(&file).unwrap(), OTHER_VERSION);
    // A loop of links: even root cannot read it, and a rename would replace it.
    std::fs::remove_file(&file).unwrap();
    std::os::unix::fs::symlink(&file, &file).unwrap();
    assert!(matches!(update(&file, |_| {}), Err(StateError::File(_))));
    assert!(file.is_symlink(), "it was replaced");
}

#[test]
fn a_damaged_file_is_kept_under_another_name() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join(FILE_NAME);
    for text in ["", r#"{"version": 1, "ceilings": 7}"#] {
        std::fs::write(&file, text).unwrap();
        update(&file, |_| {}).unwrap();
        assert!(read(&file).unwrap().limits.is_empty());
        let kept = std::fs::read_to_string(file.with_extension("damaged")).unwrap();
        assert_eq!(kept, text);
    }
}

#[test]
fn a_full_file_keeps_the_newest_failures() {
    let folder = tempfile::tempdir().unwrap();
    let state = StateFile::in_folder(Some(folder.path()));
    std::fs::write(folder.path().join(FILE_NAME), LIMITS).unwrap();
    let (key, limit) = state.read().pop_first().unwrap();
    let all = (0..LIMITS_MAX as u64 + 76).map(|at| {
        let (key, mut limit) = (LimitKey { model: format!("{at:04}"), ..key.clone() }, limit);
        limit.failed_at_ms = at;
        (key, limit)
    });
    state.write(&LearnedLimits::new("cpu", 1000, all.collect()));
    let kept: Vec<_> = state.read().into_keys().map(|key| key.model).collect();
    assert_eq!((kept.len(), kept[0].as_str(), kept[LIMITS_MAX - 1].as_str()), (LIMITS_MAX, "0076", "1099"));
    let learned = Learned::default();
    let program = |at: usize| {
        let key = ProgramKey { model: format!("{at:04}"), device: "cpu".to_owned(), total: 1000 };
        (key, ProgramMemory { program: "p".to_owned(), learned: learned.clone() })
    };
    (0..=PROGRAMS_MAX).for_each(|at| state.write_programs(BTreeMap::from([program(at)])));
    let kept = state.read_programs();
    assert_eq!(kept.len(), PROGRAMS_MAX);
    assert!(kept.contains_key(&program(PROGRAMS_MAX).0), "the new one is not kept");
}
