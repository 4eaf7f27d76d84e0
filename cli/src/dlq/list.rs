//! `vramq dlq list`: counts dead letters in groups, then lists them.

use std::io::Write as _;

use serde_json::{Value, json};
use vramq_dlq::dead_letter::Summary;
use vramq_dlq::groups::Groups;
use vramq_dlq::scan::scan;
use vramq_dlq::text::unix_ms;

use super::Common;
use super::error::Error;
use super::filter::FilterArgs;
use crate::exit;
use crate::output::text::{Align, ago, bytes, counted, cut, moment, safe, safe_json, table};

/// Rows without --limit.
const ROWS: usize = 20;

/// The widths of ids and of errors.
const ID_COLUMNS: usize = 36;
const ERROR_COLUMNS: usize = 60;

/// Count dead letters by reason, model and worker version, then list them, oldest first.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  vramq dlq list
  vramq dlq list --model minilm --error 'illegal address' --worker gpu-3
  vramq dlq list --trace 4bf92f3577b34da6a3ce929d0e0e4736
  vramq dlq list -m minilm,bge --reason out-of-memory --since 2h --limit 100
  vramq dlq list -m minilm --reason expired --fingerprints
  vramq dlq list -m minilm --json | jq -r 'select(.kind == \"letter\" and .retries > 0) | .fingerprint'

--json writes a line for each group ({\"kind\": \"group\", …}), then one for each dead letter ({\"kind\": \"letter\", …}).")]
pub(super) struct Args {
    #[command(flatten)]
    filter: FilterArgs,
    /// The most rows; 0 for all. By default 20, and all with --json or --fingerprints.
    #[arg(long, value_name = "N")]
    limit: Option<usize>,
    /// Print JSON lines.
    #[arg(long)]
    json: bool,
    /// Print only fingerprints, one a line: commands accept them wherever they accept an id.
    #[arg(long, conflicts_with = "json")]
    fingerprints: bool,
}

pub(super) async fn run(args: &Args, common: &Common) -> Result<u8, Error> {
    let limit = match args.limit {
        Some(0) => usize::MAX,
        Some(limit) => limit,
        None if args.json || args.fingerprints => usize::MAX,
        None => ROWS,
    };
    let (access, filter) = (common.access()?, args.filter.filter());
    let (mut groups, mut rows) = (Groups::default(), Vec::new());
    for model in &common.models().await? {
        scan(&access, model, |letter| {
            let summary = letter.summary();
            if filter.takes(&letter, &summary) {
                groups.add(&summary);
                // Keep only what is printed: a queue may have millions of letters.
                if rows.len() < limit {
                    rows.push(summary);
                }
            }
            Ok(())
        })
        .await?;
    }
    let text = if args.json {
        in_json(&groups, &rows)
    } else if args.fingerprints {
        rows.iter().map(|row| format!("{}\n", row.fingerprint)).collect()
    } else if rows.is_empty() && !filter.is_empty() {
        "no dead letters match\n".to_owned()
    } else {
        in_words(&groups, &rows, unix_ms())
    };
    std::io::stdout().write_all(text.as_bytes()).map_err(|error| Error::writing("the list", &error))?;
    Ok(exit::DONE)
}

fn in_json(groups: &Groups, rows: &[Summary]) -> String {
    let mut out = String::new();
    let mut line = |value: Value| {
        out += &safe_json(&value.to_string());
        out.push('\n');
    };
    for (group, count) in groups.sorted() {
        line(json!({
            "kind": "group", "group": group.to_string(), "reason": group.reason, "model": group.model,
            "worker_version": group.version, "letters": count.dead_letters, "retried": count.retried,
            "results": count.results, "oldest": count.oldest_ms.map(moment), "newest": count.newest_ms.map(moment),
        }));
    }
    for row in rows {
        line(json!({
            "kind": "letter", "fingerprint": row.fingerprint.to_string(), "id": row.id,
            "group": row.group.to_string(), "reason": row.group.reason, "model": row.group.model,
            "worker_version": row.group.version, "worker": row.worker, "died": row.dead_at_ms.map(moment),
            "attempts": row.attempts, "retries": row.retries, "body_bytes": row.body_bytes, "error": row.error,
            "trace": row.trace,
            "results": row.results.map(vramq_schemas::ReplyKind::as_str),
        }));
    }
    out
}

fn in_words(groups: &Groups, rows: &[Summary], now_ms: u64) -> String {
    if rows.is_empty() {
        return "no dead letters\n".to_owned();
    }
    let counts: Vec<_> = groups
        .sorted()
        .into_iter()
        .map(|(group, count)| {
            vec![
                safe(&group.to_string()),
                count.dead_letters.to_string(),
                count.retried.to_string(),
                ago(count.oldest_ms, now_ms),
                ago(count.newest_ms, now_ms),
            ]
        })
        .collect();
    let (left, right) = (Align::Left, Align::Right);
    let head = [("GROUP", left), ("COUNT", right), ("RETRIED", right), ("OLDEST", right), ("NEWEST", right)];
    let mut out = table(&head, &counts);
    out.push('\n');
    out += &letter_table(rows, groups.models() > 1, now_ms);
    let more = groups.dead_letters().saturating_sub(rows.len() as u64);
    if more > 0 {
        out += &format!("… and {} more: --limit 0 lists all\n", counted(more, "dead letter"));
    }
    out
}

/// A head, then a row for each dead letter. With letters of several models, a column names the model.
pub(super) fn letter_table(rows: &[Summary], of_models: bool, now_ms: u64) -> String {
    let (left, right) = (Align::Left, Align::Right);
    let lines: Vec<_> = rows.iter().map(|row| line(row, of_models, now_ms)).collect();
    let mut head = vec![("FINGERPRINT", left)];
    head.extend(of_models.then_some(("MODEL", left)));
    head.extend([
        ("ID", left),
        ("REASON", left),
        ("AGE", right),
        ("ATTEMPTS", right),
        ("RETRIES", right),
        ("BODY", right),
        ("WORKER", left),
        ("ERROR", left),
    ]);
    table(&head, &lines)
}

fn line(row: &Summary, with_model: bool, now_ms: u64) -> Vec<String> {
    let reason = safe(&row.group.reason);
    let reason = match row.results {
        Some(_) => format!("{reason} (results)"),
        None => reason,
    };
    let mut cells = vec![row.fingerprint.to_string()];
    cells.extend(with_model.then(|| cut(&row.group.model, ID_COLUMNS)));
    cells.extend([
        row.id.as_deref().map_or("-".to_owned(), |id| cut(id, ID_COLUMNS)),
        reason,
        ago(row.dead_at_ms, now_ms),
        row.attempts.to_string(),
        row.retries.to_string(),
        bytes(row.body_bytes as u64),
        row.worker.as_deref().map_or("-".to_owned(), |worker| cut(worker, 24)),
        cut(&row.error, ERROR_COLUMNS),
    ]);
    cells
}

#[cfg(test)]
mod tests {
    use super::*;
    use lapin::BasicProperties;
    use vramq_dlq::dead_letter::{DeadLetter, Group};

    /// What is listed of a dead letter.
    fn summary(id: &str) -> Summary {
        let group =
            Group { reason: "malformed".to_owned(), model: "minilm".to_owned(), version: "0.1.0".to_owned() };
        let plain = DeadLetter::new("vramq.dead.minilm", BasicProperties::default(), b"{}".to_vec());
        Summary {
            id: Some(id.to_owned()),
            group,
            dead_at_ms: Some(1_700_000_000_000),
            error: "it went wrong".to_owned(),
            ..plain.summary()
        }
    }

    #[test]
    fn groups_then_rows_then_what_is_left_out() {
        let hostile = summary("\u{1b}[2Jjob");
        let plain = summary("b");
        let mut groups = Groups::default();
        [&hostile, &plain, &plain].into_iter().for_each(|letter| groups.add(letter));
        let shown = in_words(&groups, &[hostile.clone(), plain], 1_700_000_060_000);
        let lines: Vec<_> = shown.lines().collect();
        assert!(
            lines[0].starts_with("GROUP")
                && lines[1].starts_with("malformed/minilm/0.1.0      3        0     60s")
        );
        assert!(lines[4].contains("\\u{1b}[2Jjob") && lines[4].ends_with("it went wrong"), "{shown}");
        assert_eq!(lines[6], "… and 1 dead letter more: --limit 0 lists all");
        assert_eq!(in_words(&Groups::default(), &[], 0), "no dead letters\n");
        assert!(!shown.contains("MODEL"), "{shown}");
        let mut elsewhere = summary("c");
        elsewhere.group.model = "bge".to_owned();
        let mut of_two_models = groups.clone();
        of_two_models.add(&elsewhere);
        let shown_with_models = in_words(&of_two_models, &[hostile.clone(), elsewhere], 1_700_000_060_000);
        let lines: Vec<_> = shown_with_models.lines().collect();
        assert!(lines[4].starts_with("FINGERPRINT  MODEL   ID"), "{shown_with_models}");
        assert!(lines[6].contains("  bge     c  "), "{shown_with_models}");
        let json = in_json(&groups, &[hostile]);
        let values: Vec<Value> = json.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(
            (values[0]["letters"].as_u64(), values[1]["id"].as_str()),
            (Some(3), Some("\u{1b}[2Jjob"))
        );
    }
}
