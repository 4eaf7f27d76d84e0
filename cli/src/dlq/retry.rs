//! `vramq dlq retry`: publishes jobs to their queue again, and results to the reply queue that they did not reach.

use serde_json::json;
use vramq_dlq::destination::Target;
use vramq_dlq::plan::{Kinds, Plan};
use vramq_dlq::republish::{Changes, DIRECT_REPLIES};
use vramq_schemas::MODEL_REVISION_BYTES_MAX;
use vramq_schemas::topology::{RETRY_EXCHANGE, dead_queue};

use super::error::Error;
use super::{Common, Selection, prompt, transfer};
use crate::output::text::{counted, safe};
use crate::output::warn_renamed;
use crate::{duration, exit};

/// Retry dead letters: publish jobs to their queue again, and results to their reply queue.
///
/// Attempts are counted from zero; history and answered items are kept. Each dead letter leaves its queue when the broker has
/// confirmed its job. If `vramq` is killed meanwhile, no job is lost, and a few may run twice.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  vramq dlq retry 3fa94c12ab
  vramq dlq retry -m minilm --group out-of-memory/minilm/0.3.0 --first 10 --change batch-hint=4
  vramq dlq retry -m minilm --reason expired --since 2h --rate 50 --yes
  vramq dlq retry -m minilm --reason out-of-memory --to vramq.jobs.minilm-large")]
pub(super) struct Args {
    #[command(flatten)]
    selection: Selection,
    /// Jobs per second at most.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    rate: Option<u32>,
    /// Change jobs: batch-hint=N, priority=N, expiration=TIME or model-revision=REVISION; may be repeated.
    #[arg(long = "change", value_name = "NAME=VALUE")]
    settings: Vec<String>,
    /// The name of --change in 0.2: elsewhere --set is for keys of a configuration.
    #[arg(long = "set", hide = true, conflicts_with = "settings", value_name = "NAME=VALUE")]
    settings_of_old: Vec<String>,
    /// Publish jobs to this queue instead of their model's.
    #[arg(long, value_name = "QUEUE")]
    to: Option<String>,
    /// Run items again that are already answered.
    #[arg(long)]
    from_start: bool,
    /// Do not ask for confirmation.
    #[arg(long, short)]
    yes: bool,
    /// Only print what would be done.
    #[arg(long)]
    dry_run: bool,
}

pub(super) async fn run(args: &Args, common: &Common) -> Result<u8, Error> {
    let query = args.selection.query()?;
    if !args.settings_of_old.is_empty() {
        warn_renamed("--set", "--change");
    }
    let changes = changes(args)?;
    let audit_log = if args.dry_run { None } else { Some(common.changing("retry")?) };
    let (plans, all_there) = common.plan(&args.selection, &query).await?;
    let unchanged = if all_there { exit::DONE } else { exit::FAILED };
    if plans.is_empty() {
        eprintln!("no dead letters to retry");
        return Ok(unchanged);
    }
    for (model, plan) in &plans {
        eprintln!("{}", described(model, plan, &changes));
    }
    let Some(audit_log) = audit_log else {
        eprintln!("nothing was done: --dry-run");
        return Ok(unchanged);
    };
    if !args.yes {
        prompt::yes("Retry them?")?;
    }
    let detail = json!({"settings": args.settings(), "to": args.to, "from_start": args.from_start});
    let target = Target::Queues { changes: &changes, rate: args.rate };
    let code = transfer::run(common, audit_log, "retried", detail, plans, target).await?;
    Ok(code.max(unchanged))
}

impl Args {
    fn settings(&self) -> &[String] {
        if self.settings.is_empty() { &self.settings_of_old } else { &self.settings }
    }
}

fn changes(args: &Args) -> Result<Changes, Error> {
    let mut changes = Changes { from_start: args.from_start, to: args.to.clone(), ..Changes::default() };
    for setting in args.settings() {
        let (name, value) = setting.split_once('=').unwrap_or((setting, ""));
        let wrong = |must: &str| Error::Usage(format!("--change {}: {must}", safe(setting)));
        match name {
            "batch-hint" => {
                let hint = value.parse().ok().filter(|hint| *hint > 0);
                changes.batch_hint = Some(hint.ok_or_else(|| wrong("it must be a whole number from 1"))?);
            }
            "priority" => {
                changes.priority =
                    Some(value.parse().map_err(|_| wrong("it must be a whole number from 0 to 255"))?);
            }
            "expiration" => {
                let ms = duration::parse(value).ok().and_then(|time| u32::try_from(time.as_millis()).ok());
                changes.expiration_ms =
                    Some(ms.ok_or_else(|| wrong("it must be a time like 30m, of less than 50 days"))?);
            }
            "model-revision" => {
                let fits = (1..=MODEL_REVISION_BYTES_MAX).contains(&value.len());
                let revision = fits.then(|| value.to_owned());
                changes.model_revision = Some(revision.ok_or_else(|| {
                    wrong("it must be a revision, as `vramq status --json` shows them, of at most 2048 bytes")
                })?);
            }
            _ => return Err(wrong("it must be batch-hint=…, priority=…, expiration=… or model-revision=…")),
        }
    }
    match changes.to.as_deref() {
        Some("") => Err(Error::Usage("--to: name a queue of jobs".to_owned())),
        Some(queue) if queue.starts_with(&dead_queue("")) => {
            Err(Error::Usage("--to: this is a queue of dead letters; name a queue of jobs".to_owned()))
        }
        // The broker would close the connection over it.
        Some(queue) if queue.starts_with(DIRECT_REPLIES) => Err(Error::Usage(
            "--to: this is an address for direct replies, and no queue; name a queue of jobs".to_owned(),
        )),
        _ => Ok(changes),
    }
}

/// What will be done, for the operator to confirm.
fn described(model: &str, plan: &Plan, changes: &Changes) -> String {
    let Kinds { jobs, results, answered, retried } = plan.kinds();
    let mut text =
        format!("{}: {}", safe(&dead_queue(model)), counted(plan.selected.len() as u64, "dead letter"));
    if jobs > 0 {
        let to = match &changes.to {
            Some(queue) => format!("the queue {}", safe(queue)),
            None => format!("the exchange {RETRY_EXCHANGE}, routing key {}", safe(model)),
        };
        text += &format!("\n  {} to {to}", counted(jobs, "job"));
    }
    if results > 0 {
        text += &format!("\n  {results} with results, each to its reply queue");
    }
    if answered > 0 {
        text +=
            &format!("\n  {} answered by these results, which do not run again", counted(answered, "job"));
    }
    if retried > 0 {
        text += &format!("\n  {retried} of them were retried before and failed again");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser as _;

    #[derive(clap::Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    fn parsed(args: &[&str]) -> Result<Changes, Error> {
        changes(&Cli::parse_from([&["retry", "--all"], args].concat()).args)
    }

    #[test]
    fn settings_are_checked_before_anything_is_done() {
        let settings = ["batch-hint=4", "priority=9", "expiration=2h", "model-revision=f32-0a"];
        let given = |flag| settings.iter().flat_map(|setting| [flag, *setting]).collect::<Vec<_>>();
        let all = [&given("--change")[..], &["--to", "q"]].concat();
        let expected = Changes {
            batch_hint: Some(4),
            priority: Some(9),
            expiration_ms: Some(7_200_000),
            model_revision: Some("f32-0a".to_owned()),
            from_start: false,
            to: Some("q".to_owned()),
        };
        assert_eq!(parsed(&all).unwrap(), expected);
        let as_before = [&given("--set")[..], &["--to", "q"]].concat();
        assert_eq!(parsed(&as_before).unwrap(), expected);
        for wrong in [
            "batch-hint=0",
            "batch-hint",
            "priority=256",
            "expiration=50d",
            "expiration=1200h",
            "model-revision=",
            &format!("model-revision={}", "x".repeat(2049)),
            "model=x",
        ] {
            assert!(matches!(parsed(&["--change", wrong]), Err(Error::Usage(_))), "{wrong}");
        }
        for (queue, why) in [
            ("vramq.dead.minilm", "queue of dead letters"),
            ("", "--to: name a queue"),
            ("amq.rabbitmq.reply-to", "address for direct replies"),
            ("amq.rabbitmq.reply-to.x.y", "address for direct replies"),
        ] {
            let error = parsed(&["--to", queue]).unwrap_err();
            assert!(matches!(error, Error::Usage(_)) && error.to_string().contains(why), "{error}");
        }
    }
}
