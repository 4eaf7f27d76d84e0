//! `vramq dlq drop`: archives dead letters in a file, and removes them from their queue.

use std::path::PathBuf;

use serde_json::json;
use vramq_dlq::archive::{self, Archive};
use vramq_dlq::destination::Target;
use vramq_schemas::topology::dead_queue;

use super::error::Error;
use super::{Common, Selection, prompt, transfer};
use crate::exit;
use crate::output::text::{counted, safe};

/// Archive dead letters in a file, then remove them.
///
/// Each leaves its queue when it is on the disk; `vramq dlq restore FILE` publishes those again that are not in the queue.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  vramq dlq drop --model minilm --group malformed/minilm/0.3.0
  vramq dlq drop -m minilm --reason expired --archive expired.jsonl
  vramq dlq drop -m minilm --all --yes-drop 1200")]
pub(super) struct Args {
    #[command(flatten)]
    selection: Selection,
    /// The archive, a new file; by default vramq-dropped-TIME.jsonl in the current folder.
    #[arg(long, value_name = "FILE")]
    archive: Option<PathBuf>,
    /// Do not ask if exactly this many dead letters are selected.
    #[arg(long, value_name = "COUNT")]
    yes_drop: Option<u64>,
}

pub(super) async fn run(args: &Args, common: &Common) -> Result<u8, Error> {
    let query = args.selection.query()?;
    let audit_log = common.changing("drop")?;
    let (plans, all_there) = common.plan(&args.selection, &query).await?;
    let total = plans.iter().map(|(_, plan)| plan.selected.len() as u64).sum();
    for (model, plan) in &plans {
        let count = counted(plan.selected.len() as u64, "dead letter");
        eprintln!("{}: {count} to be archived and removed", safe(&dead_queue(model)));
    }
    match args.yes_drop {
        Some(count) if count != total => {
            return Err(Error::Failed(format!("there are {total}, not {count}: nothing was done")));
        }
        _ if plans.is_empty() => {
            eprintln!("no dead letters to drop");
            return Ok(if all_there { exit::DONE } else { exit::FAILED });
        }
        Some(_) => {}
        None => prompt::count(&format!("Type {total} to drop them:"), total)?,
    }
    let mut archive =
        Archive::create(&args.archive.clone().unwrap_or_else(|| archive::file_name("").into()))?;
    let detail = json!({"archive": archive.path().to_string_lossy()});
    let result = transfer::run(common, audit_log, "dropped", detail, plans, Target::File(&mut archive)).await;
    let path = safe(&archive.path().to_string_lossy());
    let archived = archive.dead_letters;
    // A dead letter leaves its queue after it is in the file.
    if archive.remove_if_empty() {
        eprintln!("no dead letter left its queue; {path} had none and is removed");
    } else {
        let (what, next) = match result {
            Ok(_) => (counted(archived, "dead letter"), ""),
            // Some of the last letters may not be on the disk. Those are still in their queue.
            Err(_) => (
                "the dead letters that left their queue are".to_owned(),
                "; for the others name another archive",
            ),
        };
        eprintln!("{what} in {path}: `vramq dlq restore {path}` puts them back{next}");
    }
    Ok(if all_there { result? } else { result.and(Ok(exit::FAILED))? })
}
