//! `vramq dlq drop`: letters into a file, then out of the queue.

use std::path::PathBuf;

use serde_json::json;
use time::OffsetDateTime;
use time::macros::format_description;
use vramq_schemas::topology::dead_queue;

use super::archive::Archive;
use super::audit_log::AuditLog;
use super::destination::Destination;
use super::error::Error;
use super::plan::Plan;
use super::queue_lock::QueueLock;
use super::transfer::{Outcome, Transfer};
use super::{Common, Selection, prompt, scan};
use crate::exit;
use crate::output::progress::Progress;
use crate::output::text::{counted, safe};
use crate::signals::Signals;

/// Archive letters in a file, then remove them.
///
/// Each letter leaves its queue when the disk has it; `vramq dlq restore FILE` puts back what is not there.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  vramq dlq drop --model minilm --group malformed/minilm/0.1.0
  vramq dlq drop -m minilm --reason expired --archive expired.jsonl
  vramq dlq drop -m minilm --all --yes-drop 1200")]
pub(super) struct Args {
    #[command(flatten)]
    selection: Selection,
    /// Where they are kept; a new file. By default vramq-dropped-TIME.jsonl in this folder.
    #[arg(long, value_name = "FILE")]
    archive: Option<PathBuf>,
    /// Do not ask, if there are exactly so many.
    #[arg(long, value_name = "COUNT")]
    yes_drop: Option<u64>,
}

pub(super) async fn run(args: &Args, common: &Common) -> Result<u8, Error> {
    let query = args.selection.query()?;
    common.models()?;
    let mut audit_log = common.changing("drop")?;
    let (plans, all_there) = scan::plan(common, &query).await?;
    let total = plans.iter().map(|(_, plan)| plan.selected.len() as u64).sum();
    for (model, plan) in &plans {
        let count = counted(plan.selected.len() as u64, "letter");
        eprintln!("{}: {count} to be archived and removed", safe(&dead_queue(model)));
    }
    match args.yes_drop {
        Some(count) if count != total => {
            return Err(Error::Failed(format!("there are {total}, not {count}: nothing was done")));
        }
        _ if plans.is_empty() => {
            eprintln!("no letters to drop");
            return Ok(if all_there { exit::DONE } else { exit::FAILED });
        }
        Some(_) => {}
        None => prompt::count(&format!("Type {total} to drop them:"), total)?,
    }
    let mut archive = Archive::create(&args.archive.clone().unwrap_or_else(default_archive))?;
    let progress = Progress::new("letters", Some(total), common.quiet);
    let mut signals =
        Signals::new().map_err(|error| Error::Failed(format!("listen for signals: {error}")))?;
    let mut code = if all_there { exit::DONE } else { exit::FAILED };
    for (model, plan) in plans {
        let of_queue = Removal {
            common,
            audit_log: &mut audit_log,
            archive: &mut archive,
            progress: &progress,
            signals: &mut signals,
        };
        if !of_queue.run(&model, &plan).await? {
            code = exit::FAILED;
        }
    }
    progress.finish("dropped");
    let path = safe(&archive.path().to_string_lossy());
    eprintln!("{} in {path}: `vramq dlq restore {path}` puts them back", counted(archive.letters, "letter"));
    Ok(code)
}

struct Removal<'a> {
    common: &'a Common,
    audit_log: &'a mut AuditLog,
    archive: &'a mut Archive,
    progress: &'a Progress,
    signals: &'a mut Signals,
}

impl Removal<'_> {
    /// Whether every letter was removed.
    async fn run(self, model: &str, plan: &Plan) -> Result<bool, Error> {
        let Self { common, audit_log, archive, progress, signals } = self;
        let queue_lock = QueueLock::open_unless(&common.broker, model, signals).await?;
        let detail = json!({"archive": archive.path().to_string_lossy()});
        audit_log.log_begin(&queue_lock.queue, &plan.selected, detail)?;
        let mut outcome = Outcome::default();
        let transfer = Transfer {
            queue_lock: &queue_lock,
            destination: Destination::file(archive),
            progress,
            signals,
            outcome: &mut outcome,
        };
        let ended = transfer.run(plan).await;
        audit_log.log_end(&queue_lock.queue, &outcome, ended.as_ref().err())?;
        queue_lock.close().await;
        progress.suspended(|| outcome.tell("dropped", plan.selected.len(), ended.is_err()));
        ended.map(|()| outcome.is_whole())
    }
}

fn default_archive() -> PathBuf {
    let format = format_description!("[year][month][day]T[hour][minute][second]Z");
    let now = OffsetDateTime::now_utc().format(&format).unwrap_or_default();
    PathBuf::from(format!("vramq-dropped-{now}.jsonl"))
}
