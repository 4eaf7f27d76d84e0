//! Programs in control groups of their own, where this machine has cgroup v2 and the tests may make groups in it. Elsewhere these tests
//! run nothing, and say so.

use std::path::{Path, PathBuf};

use serde_json::json;
use vramq_inference::process::PassEnd;
use vramq_inference::process::cgroup::{Cgroups, Group};
use vramq_inference::process::keeper::Death;
use vramq_testkit::not_run::not_run;

use crate::env::{Env, done, ended, forked, is_alive, parent, pid, run, until};

/// A group below this process's own, for the groups of programs.
struct Root(PathBuf);

impl Root {
    /// Below a group that hands the memory controller on, if there is one. This process's own group cannot do that: it holds processes.
    fn new(name: &str) -> Option<Self> {
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let mount = mounts.lines().find(|line| line.contains(" - cgroup2 "))?.split(' ').nth(4)?;
        let own = format!("{mount}{}", group_of("self")?);
        let name = format!("vramq-test-{name}-{}", std::process::id());
        let above = Path::new(&own).ancestors().take_while(|group| group.starts_with(mount));
        let (mut with_memory, mut without) = (None, None);
        for group in above {
            let made = Self(group.join(&name));
            if std::fs::create_dir(&made.0).is_err() {
                continue;
            }
            let controllers = std::fs::read_to_string(made.0.join("cgroup.controllers")).unwrap();
            let has_memory = controllers.split_ascii_whitespace().any(|controller| controller == "memory");
            let place = if has_memory { &mut with_memory } else { &mut without };
            place.get_or_insert(made);
        }
        let made = with_memory.or(without);
        if made.is_none() {
            not_run(format!("no control group can be made in {own}, or above"));
        }
        made
    }

    fn programs(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(&self.0).unwrap().flatten().map(|entry| entry.path());
        entries.filter(|path| path.is_dir()).collect()
    }

    fn env(&self) -> Env {
        Env { cgroups: Some(Cgroups::below(self.0.clone())), ..Env::new() }
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        let removed = std::fs::remove_dir(&self.0);
        assert!(removed.is_ok() || std::thread::panicking(), "a group is left: {removed:?}");
    }
}

/// The group of a process in cgroup v2, without the slash of the topmost one.
fn group_of(process: &str) -> Option<String> {
    let text = std::fs::read_to_string(format!("/proc/{process}/cgroup")).ok()?;
    let group = text.lines().find_map(|line| line.strip_prefix("0::"))?;
    Some(group.trim_end_matches('/').to_owned())
}

fn is_in(process: i32, group: &Path) -> bool {
    let group = group.file_name().unwrap().to_str().unwrap();
    group_of(&process.to_string()).is_some_and(|own| own.ends_with(&format!("/{group}")))
}

#[tokio::test]
async fn all_processes_of_a_program_are_in_its_group_and_end_with_it() {
    let Some(root) = Root::new("life") else { return };
    let env = root.env();
    let pool = env.probe("").await;
    let process = pid(&pool).await;
    let [group] = &root.programs()[..] else { panic!("{:?}", root.programs()) };
    let forked = forked(&pool).await;
    assert!(forked.iter().chain([&process]).all(|pid| is_in(*pid, group)));
    assert!(!is_in(parent(process), group), "the keeper outlives its program");
    assert!(!Group::at(group.clone()).is_abandoned(), "the keeper holds it");
    let (_, end) = ended(&pool, &["kill"]).await;
    assert!(matches!(end, PassEnd::Crashed { death: Death::Killed(libc::SIGKILL), .. }), "{end:?}");
    assert!(forked.iter().all(|pid| !is_alive(*pid)));
    assert!(!group.exists());
    assert_eq!(done(&pool, &["echo a"]).await, [json!("a")]);
    env.close(pool).await;
    assert!(root.programs().is_empty(), "{:?}", root.programs());
}

#[tokio::test]
async fn the_worker_ends_the_group_of_a_killed_keeper() {
    let Some(root) = Root::new("keeper") else { return };
    let env = root.env();
    let pool = env.probe("").await;
    let process = pid(&pool).await;
    // This process has left the session, and has no mark in its environment.
    let stranger = done(&pool, &["unmarked"]).await[0].as_i64().unwrap() as i32;
    let [group] = &root.programs()[..] else { panic!("{:?}", root.programs()) };
    assert!(is_in(stranger, group) && is_alive(stranger));
    let folder = tempfile::tempdir().unwrap();
    let begun = folder.path().join("begun");
    let pass = run(&pool, &[&format!("write {}", begun.display()), "sleep 100"]);
    until("it has begun", || begun.exists()).await;
    // SAFETY: a number of a process of this test's own.
    unsafe { libc::kill(parent(process), libc::SIGKILL) };
    let (_, end) = pass.finish().await;
    assert!(matches!(end, PassEnd::Crashed { .. }), "{end:?}");
    assert!(!is_alive(stranger) && !is_alive(process));
    assert!(!group.exists());
    assert_eq!(done(&pool, &["echo a"]).await, [json!("a")]);
    env.close(pool).await;
    assert!(root.programs().is_empty(), "{:?}", root.programs());
}

#[tokio::test]
async fn a_program_that_cannot_be_started_leaves_no_group() {
    let Some(root) = Root::new("start") else { return };
    let env = root.env();
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("script");
    std::fs::write(&script, "#!/bin/sh\n").unwrap();
    std::fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let config = env.config_of(&[script.to_str().unwrap()], "");
    // The script existed when the configuration was checked.
    std::fs::remove_file(&script).unwrap();
    let error = env.start(config).await.unwrap_err();
    assert!(error.to_string().contains("No such file"), "{error}");
    assert!(root.programs().is_empty(), "{:?}", root.programs());
    env.assert_clean();
}

#[tokio::test]
async fn a_program_that_may_not_enter_its_group_runs_without_one() {
    let Some(root) = Root::new("entrance") else { return };
    // Groups below a threaded one can be made, and the kernel lets no process into them.
    if let Err(error) = std::fs::write(root.0.join("cgroup.type"), "threaded") {
        not_run(format!("no group can be made threaded: {error}"));
        return;
    }
    let env = root.env();
    let pool = env.probe("").await;
    assert_eq!(done(&pool, &["echo a"]).await, [json!("a")]);
    assert!(root.programs().is_empty(), "{:?}", root.programs());
    env.close(pool).await;
}

#[tokio::test]
async fn the_kernel_kills_a_whole_group_over_its_limit() {
    let Some(root) = Root::new("memory") else { return };
    let env = root.env();
    let cgroups = env.cgroups.clone().unwrap();
    if !cgroups.has_memory() {
        not_run(cgroups);
        return;
    }
    let pool = env.probe("host_memory_mib = 200").await;
    let [group] = &root.programs()[..] else { panic!("{:?}", root.programs()) };
    assert_eq!(std::fs::read_to_string(group.join("memory.max")).unwrap().trim(), (200 << 20).to_string());
    let forked = forked(&pool).await;
    let (_, end) = ended(&pool, &["host 400"]).await;
    let PassEnd::Crashed { death: Death::HostMemory(bytes), .. } = end else { panic!("{end:?}") };
    assert!((100 << 20..=200 << 20).contains(&bytes), "{bytes}");
    assert!(forked.iter().all(|pid| !is_alive(*pid)));
    assert_eq!(done(&pool, &["echo a"]).await, [json!("a")]);
    env.close(pool).await;
}
