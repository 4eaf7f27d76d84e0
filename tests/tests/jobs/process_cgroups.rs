//! Control groups of programs: a worker has them where its own group is delegated.

use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};
use rustix::fs::{XattrFlags, setxattr};
use rustix::io::Errno;
use rustix::process::geteuid;
use serde_json::Value;
use vramq_testkit::not_run::not_run;
use vramq_tests::on_one_setup;
use vramq_tests::test_env::TestEnv;
use vramq_tests::wait::until;
use vramq_tests::worker::{command, run_to_end};

use super::process::Served;

on_one_setup!(programs_have_cgroups_where_the_workers_own_is_delegated);

/// A control group for a worker. When a test fails, what is left of it goes with the guard.
struct WorkerGroup(PathBuf);

impl Drop for WorkerGroup {
    fn drop(&mut self) {
        let entries = std::fs::read_dir(&self.0).into_iter().flatten().flatten();
        let mut groups: Vec<_> = entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect();
        groups.push(self.0.clone());
        for group in groups {
            // The test removes them itself if it succeeds.
            let _ = std::fs::remove_dir(group);
        }
    }
}

/// Makes the group; the error says why this machine lets the test make none.
fn worker_group() -> Result<WorkerGroup> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo")?;
    let mount = mounts.lines().find(|line| line.contains(" - cgroup2 ")).context("there is no cgroup v2")?;
    let mount = mount.split(' ').nth(4).context("no mount point")?;
    let own = std::fs::read_to_string("/proc/self/cgroup")?;
    let own = own.lines().find_map(|line| line.strip_prefix("0::")).context("no group of cgroup v2")?;
    let own = own.trim_end_matches('/');
    let path = PathBuf::from(format!("{mount}{own}/vramq-test-{}", std::process::id()));
    std::fs::create_dir(&path).with_context(|| format!("make {}", path.display()))?;
    Ok(WorkerGroup(path))
}

async fn programs_have_cgroups_where_the_workers_own_is_delegated(env: &mut TestEnv) -> Result<()> {
    let made = match worker_group() {
        Ok(made) => made,
        Err(why) => {
            not_run(format!("{why:#}"));
            return Ok(());
        }
    };
    let group = &made.0;
    let served = Served::new(env, "instances = 1", &[])?;
    let leaf = group.join("vramq-worker");
    // A group that belongs to a user other than root is that user's without a mark.
    let cases: &[bool] = if geteuid().is_root() { &[false, true] } else { &[true] };
    for is_delegated in cases.iter().copied() {
        if is_delegated {
            // As systemd marks it.
            match setxattr(group, "user.delegate", b"1", XattrFlags::empty()) {
                // Before Linux 5.7.
                Err(Errno::OPNOTSUPP) => {
                    not_run(format!("the delegated half: {} cannot be marked as delegated", group.display()));
                    return Ok(());
                }
                marked => marked?,
            }
        }
        let entrance = std::fs::File::options().write(true).open(group.join("cgroup.procs"))?;
        let mut doctor = command("vramq-worker")?;
        doctor.args(["doctor", "--json", "--config"]).arg(served.config());
        // SAFETY: one write to an open file, without allocating.
        unsafe { doctor.pre_exec(move || Ok(rustix::io::write(&entrance, b"0").map(drop)?)) };
        let output = run_to_end(doctor).await?;
        ensure!(output.code == Some(0), "{output:?}");
        let report: Value = serde_json::from_str(&output.stdout)?;
        ensure!(report["cgroups"]["delegated"] == is_delegated, "{report}");
        let words = report["cgroups"]["in_words"].as_str().context("no words")?;
        ensure!(words.contains(&group.display().to_string()), "{words}");
        ensure!(
            leaf.exists() == is_delegated,
            "the doctor moves into a leaf of its own group, and of no other"
        );
    }
    // A group is removed when no process is in it.
    until("nothing is left of the worker", async || Ok(std::fs::remove_dir(&leaf).ok())).await?;
    let left = std::fs::read_dir(group)?.flatten().filter(|entry| entry.path().is_dir()).count();
    ensure!(left == 0, "{left} groups of programs are left");
    Ok(std::fs::remove_dir(group)?)
}
