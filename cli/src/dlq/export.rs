//! `vramq dlq export`: writes dead letters as lines of JSON. They stay in their queue.

use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};

use vramq_dlq::archive::Archive;
use vramq_dlq::plan::{Plan, PlanBuilder, Query, unmatched};
use vramq_dlq::scan::scan;
use vramq_dlq::{Access, record};

use super::error::Error;
use super::{Common, Selection, print_missing};
use crate::exit;
use crate::output::text::{counted, safe, safe_json};

/// Write dead letters to a file, with all their properties, headers and bytes. They stay in their queue.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  vramq dlq export --model minilm --all -o letters.jsonl
  vramq dlq export -m minilm --reason malformed | jq -r .body | base64 -d

A line is a JSON object: vramq_letter (the format's version, 1), queue, fingerprint, properties, headers (each value with its
AMQP type, as {\"i64\": 7}), body (base64).")]
pub(super) struct Args {
    #[command(flatten)]
    selection: Selection,
    /// A new file; by default standard output.
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
}

pub(super) async fn run(args: &Args, common: &Common) -> Result<u8, Error> {
    let query = args.selection.query()?;
    let models = common.models().await?;
    let access = common.access()?;
    let file = args.output.as_deref().filter(|path| *path != Path::new("-"));
    let mut archive = file.map(Archive::create).transpose()?;
    let exported = export(&access, &models, &query, archive.as_mut()).await;
    if let Some(archive) = archive {
        let path = safe(&archive.path().to_string_lossy());
        match &exported {
            Ok(_) => eprintln!("{} in {path}", counted(archive.dead_letters, "dead letter")),
            Err(_) => {
                let is_removed = archive.remove_if_empty();
                let what = if is_removed {
                    "removed: it had no dead letter"
                } else {
                    "incomplete: remove it, or name another file next time"
                };
                eprintln!("{path} is {what}");
            }
        }
    }
    let plans = exported?;
    let missing = unmatched(plans.iter(), &query.names)?;
    print_missing(&missing);
    Ok(if missing.is_empty() { exit::DONE } else { exit::FAILED })
}

/// Writes the selected dead letters of all models to the archive, or to standard output if there is none. Returns what was selected.
async fn export(
    access: &Access,
    models: &[String],
    query: &Query,
    mut archive: Option<&mut Archive>,
) -> Result<Vec<Plan>, Error> {
    let mut stdout = BufWriter::new(std::io::stdout().lock());
    let failed = |error: std::io::Error| Error::writing("the dead letters", &error);
    let (mut plans, mut written) = (Vec::new(), 0);
    for model in models {
        let mut builder = PlanBuilder::default();
        scan(access, model, |letter| {
            if builder.consider(&letter, query, written) {
                match archive.as_deref_mut() {
                    Some(archive) => archive.write(&letter)?,
                    None => {
                        let line = record::write(&letter).map_err(|error| failed(error.into()))?;
                        writeln!(stdout, "{}", safe_json(&line)).map_err(failed)?;
                    }
                }
            }
            Ok(())
        })
        .await?;
        let plan = builder.finish();
        written += plan.selected.len() as u64;
        plans.push(plan);
    }
    stdout.flush().map_err(failed)?;
    if let Some(archive) = archive {
        archive.sync()?;
    }
    Ok(plans)
}
