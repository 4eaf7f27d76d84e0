//! Serves the model: starts it, and runs the lines of standard input.

use std::io::{self, Write as _};
use std::sync::Arc;

use serde_json::{Map, Value};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use vramq_inference::process::cgroup::Cgroups;
use vramq_inference::process::config::Mode;
use vramq_inference::process::launch::Launcher;
use vramq_inference::process::{
    Costs, DeviceAccount, DeviceView as _, HostView, Item, Learned, Need, PassEnd, PassEvent, PassRequest,
    Pool, PoolOptions, ProcessConfig,
};

use crate::arguments::Trial;
use crate::ends::{of_lines, told};
use crate::items::{self, Admission};
use crate::{EXIT_BROKEN_PIPE, EXIT_UNUSABLE, tell};

/// Starts the model and runs all lines; the exit code.
pub(crate) async fn serve(config: ProcessConfig, trial: Trial) -> u8 {
    let account = DeviceAccount::new(Arc::new(HostView));
    // As in a worker. On a developer's machine there are none, and the keeper watches the program's host memory.
    let cgroups = Cgroups::prepare().inspect(|cgroups| tell(cgroups)).ok();
    let launcher = Launcher { cgroups, ..Launcher::default() };
    let budget = HostView.memory(&[]).map_or(0, |reading| reading.total);
    let options =
        PoolOptions { launcher, account, budget, learned: Learned::default(), shares_device: false };
    let pool = match Pool::start(config, options).await {
        Ok(pool) => pool,
        Err(error) => {
            tell(error.stderr().trim_end());
            tell(format_args!("vramq-run-model: {error}"));
            return EXIT_UNUSABLE;
        }
    };
    let mut runner = Runner::new(pool, trial);
    let ended = runner.lines().await;
    runner.pool.close().await;
    match ended {
        Ok(()) => u8::from(runner.has_failed),
        // The reader of the outputs has enough, as `head` does.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => EXIT_BROKEN_PIPE,
        Err(error) => {
            tell(format_args!("vramq-run-model: write an output: {error}"));
            1
        }
    }
}

/// Runs lines as passes.
struct Runner {
    pool: Pool,
    /// Items of a pass.
    batch: usize,
    params: Map<String, Value>,
    /// A line was not run, or failed.
    has_failed: bool,
    /// It was said that the peak of a pass is unknown.
    has_told_peak: bool,
}

impl Runner {
    fn new(pool: Pool, trial: Trial) -> Self {
        let config = pool.config();
        match config.mode {
            Mode::Warm => {
                let (resident_mib, instances) = (pool.resident().unwrap_or(0) >> 20, pool.instances());
                tell(format_args!("loaded: {resident_mib} MiB, up to {instances} process(es)"));
            }
            Mode::Once(_) => tell("the program is started for each item"),
        }
        let items_max = config.items_max;
        if trial.batch > items_max {
            tell(format_args!("passes have at most {items_max} items (items_max), as in a worker"));
        }
        let batch = trial.batch.min(items_max);
        Self { pool, batch, params: trial.params, has_failed: false, has_told_peak: false }
    }

    /// Runs all lines.
    ///
    /// # Errors
    /// The outputs cannot be written.
    async fn lines(&mut self) -> io::Result<()> {
        let mut lines = BufReader::new(tokio::io::stdin()).lines();
        let mut items = Vec::new();
        let mut number = 0;
        while let Some(line) = lines.next_line().await.transpose() {
            number += 1;
            // After a line that is no UTF-8 the next one can be read; after another error nothing can.
            let is_last = line.as_ref().is_err_and(|error| error.kind() != io::ErrorKind::InvalidData);
            let item = line
                .map_err(|error| format!("read an item: {error}"))
                .and_then(|line| self.admit(number, &line));
            match item {
                Ok(item) => items.push((number, item)),
                Err(error) => self.failed(format_args!("line {number}: {error}")),
            }
            if items.len() == self.batch {
                self.run(std::mem::take(&mut items)).await?;
            }
            if is_last {
                break;
            }
        }
        if items.is_empty() { Ok(()) } else { self.run(items).await }
    }

    /// A line as an item, if a worker would run it.
    fn admit(&self, number: usize, line: &str) -> Result<Item, String> {
        let item = items::read(line)?;
        match items::admit(&self.pool, &item) {
            Admission::Refused(why) => Err(why),
            Admission::Runs(note) => {
                if let Some(note) = note {
                    tell(format_args!("line {number}: {note}"));
                }
                Ok(item)
            }
        }
    }

    /// Runs items, each with the number of its line, in one pass.
    ///
    /// # Errors
    /// An output cannot be written. The pass is cancelled then.
    async fn run(&mut self, items: Vec<(usize, Item)>) -> io::Result<()> {
        let (lines, items): (Vec<usize>, Vec<Item>) = items.into_iter().unzip();
        let costs: Vec<_> = items.iter().map(Costs::new).collect();
        let need = match self.pool.need(&costs) {
            Need::Bytes(bytes) => format!("{} MiB", bytes >> 20),
            Need::Unknown => "unknown".to_owned(),
        };
        let request = PassRequest { items, params: self.params.clone(), ..PassRequest::default() };
        let mut pass = match self.pool.run(request) {
            Ok(pass) => pass,
            Err(error) => {
                self.failed(format_args!("{}: {error}", of_lines(&lines)));
                return Ok(());
            }
        };
        while let Some(event) = pass.next().await {
            match event {
                PassEvent::Output { output, .. } => {
                    let mut out = io::stdout().lock();
                    serde_json::to_writer(&mut out, &output)?;
                    writeln!(out)?;
                    out.flush()?;
                }
                PassEvent::Progress { fraction, note, .. } => {
                    tell(format_args!("{:3.0} % {note}", fraction * 100.0));
                }
                PassEvent::End(PassEnd::Done { peak }) => {
                    let peak = self.peak(peak);
                    tell(format_args!("done; need {need}{peak}"));
                }
                PassEvent::End(end) => self.failed(told(&end, &lines)),
            }
        }
        Ok(())
    }

    /// What is known of a pass's peak. That it is unknown is said once.
    fn peak(&mut self, peak: Option<u64>) -> String {
        match peak {
            Some(peak) => format!(", peak {} MiB", peak >> 20),
            None if std::mem::replace(&mut self.has_told_peak, true) => String::new(),
            None => ", peak unknown: this pass was not measured, and the program does not report its peak"
                .to_owned(),
        }
    }

    fn failed(&mut self, what: impl std::fmt::Display) {
        tell(format_args!("vramq-run-model: {what}"));
        self.has_failed = true;
    }
}
