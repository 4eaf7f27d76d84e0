//! Shared by the tests: configurations, pools, and the check that every process has ended.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;
use vramq_inference::process::cgroup::Cgroups;
use vramq_inference::process::child::KeeperProgram;
use vramq_inference::process::launch::Launcher;
use vramq_inference::process::warm::LoadError;
use vramq_inference::process::{
    DeviceAccount, DeviceView, HostView, Item, Learned, PassEnd, PassHandle, PassRequest, Place, Pool,
    PoolOptions, ProcessConfig,
};
use vramq_schemas::Output;

/// How long a condition may take to come true. It only costs time where a test fails.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// The executable that is a keeper with the hidden argument.
pub const PROGRAM: &str = env!("CARGO_BIN_EXE_vramq-run-model");

/// A device, and a folder for scratch folders.
pub struct Env {
    pub scratch: TempDir,
    pub account: Arc<DeviceAccount>,
    pub budget: u64,
    pub learned: Learned,
    pub shares_device: bool,
    /// Where programs have control groups of their own.
    pub cgroups: Option<Cgroups>,
}

impl Env {
    pub fn new() -> Self {
        Self::on(Arc::new(HostView))
    }

    pub fn on(view: Arc<dyn DeviceView>) -> Self {
        let scratch = tempfile::tempdir().unwrap();
        let (account, learned) = (DeviceAccount::new(view), Learned::default());
        Self { scratch, account, budget: 0, learned, shares_device: false, cgroups: None }
    }

    /// The configuration of `models/SCRIPT`, with more keys in TOML.
    pub fn config(&self, script: &str, more: &str) -> ProcessConfig {
        self.config_of(&[python().to_str().unwrap(), script], more)
    }

    pub fn config_of(&self, command: &[&str], more: &str) -> ProcessConfig {
        let command = serde_json::to_string(command).unwrap();
        let mut table: toml::Table = format!("command = {command}\n{more}").parse().unwrap();
        table.entry("kill_s").or_insert(toml::Value::Integer(1));
        let env = table.entry("env").or_insert_with(|| toml::Value::Table(toml::Table::new()));
        let path = format!("{}:{}", repository().join("python").display(), models().display());
        env.as_table_mut().unwrap().insert("PYTHONPATH".to_owned(), path.into());
        let place = Place { folder: models(), scratch: self.scratch.path().to_owned() };
        ProcessConfig::read("m", table, &place).unwrap()
    }

    pub async fn start(&self, config: ProcessConfig) -> Result<Pool, LoadError> {
        let launcher =
            Launcher { keeper: KeeperProgram { path: PROGRAM.into() }, cgroups: self.cgroups.clone() };
        let (account, learned) = (Arc::clone(&self.account), self.learned.clone());
        let (budget, shares_device) = (self.budget, self.shares_device);
        Pool::start(config, PoolOptions { launcher, account, budget, learned, shares_device }).await
    }

    /// A pool of `models/probe.py`.
    pub async fn probe(&self, more: &str) -> Pool {
        self.start(self.config("probe.py", more)).await.unwrap()
    }

    /// Ends a pool, and sees that nothing is left of it.
    pub async fn close(&self, pool: Pool) {
        pool.close().await;
        self.assert_clean();
    }

    pub fn assert_clean(&self) {
        assert_eq!(self.scratch_folders(), 0, "scratch folders are left");
        let left = processes_of(self.scratch.path());
        assert!(left.is_empty(), "processes are left: {left:?}");
    }

    /// Waits until nothing is left.
    pub async fn cleaned(&self) {
        until("all is gone", || self.scratch_folders() == 0 && processes_of(self.scratch.path()).is_empty())
            .await;
    }

    pub fn scratch_folders(&self) -> usize {
        std::fs::read_dir(self.scratch.path()).unwrap().count()
    }
}

pub fn texts(texts: &[&str]) -> PassRequest {
    let items = texts.iter().map(|text| Item::Text((*text).to_owned())).collect();
    PassRequest { items, ..PassRequest::default() }
}

pub fn run(pool: &Pool, items: &[&str]) -> PassHandle {
    pool.run(texts(items)).unwrap()
}

/// Runs items that must succeed; their outputs, which are JSON.
pub async fn done(pool: &Pool, items: &[&str]) -> Vec<Value> {
    let (outputs, end) = ended(pool, items).await;
    assert!(matches!(end, PassEnd::Done { .. }), "{end:?}");
    outputs.into_iter().map(json).collect()
}

/// Runs items; the outputs that there are, and the end.
pub async fn ended(pool: &Pool, items: &[&str]) -> (Vec<Output>, PassEnd) {
    run(pool, items).finish().await
}

pub fn json(output: Output) -> Value {
    match output {
        Output::Json(value) => value,
        other => panic!("no JSON: {other:?}"),
    }
}

pub async fn pid(pool: &Pool) -> i32 {
    done(pool, &["pid"]).await[0].as_i64().unwrap() as i32
}

/// The state of a pool's slot.
pub fn state(pool: &Pool, slot: usize) -> &'static str {
    pool.status().slots.get(slot).map_or("none", |slot| slot.state.as_str())
}

/// The three processes that a pass forked: one plain, one in its own session, one an orphan.
pub async fn forked(pool: &Pool) -> Vec<i32> {
    let pids: Vec<i32> = serde_json::from_value(done(pool, &["fork"]).await.remove(0)).unwrap();
    assert!(pids.iter().all(|pid| is_alive(*pid)));
    pids
}

/// Waits until the condition holds.
pub async fn until(what: &str, mut snapshot: impl FnMut() -> bool) {
    let end = tokio::time::Instant::now() + DEADLINE;
    while !snapshot() {
        assert!(tokio::time::Instant::now() < end, "waited in vain for: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Whether a process exists and is not a zombie.
pub fn is_alive(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with(['Z', 'X']))
}

/// A program's keeper.
pub fn parent(process: i32) -> i32 {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    stat.rsplit_once(')').unwrap().1.split_ascii_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Processes that were started with a scratch folder in `root`.
pub fn processes_of(root: &Path) -> Vec<i32> {
    let mark = format!("VRAMQ_SCRATCH={}/", root.display());
    let pids = std::fs::read_dir("/proc").unwrap().flatten();
    pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|pid: &i32| {
            let environ = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            environ.split(|byte| *byte == 0).any(|variable| variable.starts_with(mark.as_bytes()))
        })
        .collect()
}

pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

pub fn models() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/models")
}

/// The interpreter itself, not a script that looks for it.
pub fn python() -> &'static Path {
    static PYTHON: OnceLock<PathBuf> = OnceLock::new();
    PYTHON.get_or_init(|| {
        let named = std::env::var_os("VRAMQ_TEST_PYTHON").filter(|path| Path::new(path).exists());
        let asked = std::process::Command::new(named.unwrap_or_else(|| "python3".into()))
            .args(["-c", "import sys; print(sys.executable)"])
            .output()
            .expect("the tests need Python 3");
        PathBuf::from(String::from_utf8(asked.stdout).unwrap().trim())
    })
}
