//! `vramq dlq show`: explains a dead letter, and prints its properties, headers and body.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use lapin::types::{AMQPValue, FieldTable, ShortString};
use vramq_dlq::dead_letter::DeadLetter;
use vramq_dlq::explain::explain;
use vramq_dlq::preview::preview;
use vramq_dlq::scan::scan;
use vramq_dlq::select::{Name, NameMatch};
use vramq_schemas::fields::{as_text, integer};

use super::error::Error;
use super::{Common, not_found};
use crate::exit;
use crate::output::text::{cut, moment, safe};

/// The most dead letters with one name that are printed. Identical ones count once.
const SHOWN_MAX: usize = 20;

/// The width of a header's value.
const VALUE_COLUMNS: usize = 100;

/// Explain a dead letter: what happened, why it ended, what would fit, what to do; then print headers and body.
///
/// Inputs may be personal data: of the body, only the shape and the beginnings of a few inputs are printed.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  vramq dlq show 019a7c4e-5d1f-7e61-b1a5-33d1c0a7e6f2
  vramq dlq show -m minilm 3fa94c12ab --body
  vramq dlq show -m minilm 3fa94c12ab --save body.bin")]
pub(super) struct Args {
    /// A message id, or the start of a fingerprint (at least 6 digits); id:… or fp:… restricts it to one of them.
    #[arg(value_name = "ID")]
    name: String,
    /// Print the whole body, with control characters escaped.
    #[arg(long)]
    body: bool,
    /// Write the body's bytes to a new file.
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,
}

pub(super) async fn run(args: &Args, common: &Common) -> Result<u8, Error> {
    let name = Name { text: args.name.clone() };
    let access = common.access()?;
    // Each with the number of identical ones.
    let (mut found, mut more): (Vec<(DeadLetter, u64)>, _) = (Vec::new(), 0);
    for model in &common.models().await? {
        scan(&access, model, |letter| {
            if name.matches(&letter.summary()) != NameMatch::None {
                let fingerprint = letter.fingerprint();
                match found.iter().position(|(known, _)| known.fingerprint() == fingerprint) {
                    Some(at) => found[at].1 += 1,
                    None if found.len() < SHOWN_MAX => found.push((letter, 1)),
                    None => more += 1,
                }
            }
            Ok(())
        })
        .await?;
    }
    if found.is_empty() {
        return Err(Error::Failed(not_found(&args.name)));
    }
    if let Some(file) = &args.save {
        let [(letter, _)] = found.as_slice() else {
            let all: Vec<_> = found.iter().map(|(letter, _)| letter.fingerprint().to_string()).collect();
            return Err(Error::Usage(format!(
                "several dead letters match: choose one of {}",
                all.join(", ")
            )));
        };
        save(file, &letter.body)?;
    }
    let mut out = String::new();
    for (letter, copies) in &found {
        out += &described(letter, args.body).join("\n");
        out += "\n\n";
        if *copies > 1 {
            let name = letter.fingerprint();
            out += &format!(
                "There are {copies} identical ones: `retry` and `drop` take all by {name}, and one with --first 1\n\n"
            );
        }
    }
    if more > 0 {
        out += &format!("… and {more} more with this name\n");
    }
    std::io::stdout().write_all(out.as_bytes()).map_err(|error| Error::writing("the explanation", &error))?;
    Ok(exit::DONE)
}

fn save(file: &Path, body: &[u8]) -> Result<(), Error> {
    let path = file.to_string_lossy();
    let created = std::fs::OpenOptions::new().write(true).create_new(true).open(file);
    let mut file = created.map_err(|error| Error::File(format!("create {}: {error}", safe(&path))))?;
    let saved = file.write_all(body).and_then(|()| file.sync_all());
    saved.map_err(|error| Error::writing(&path, &error))
}

fn described(letter: &DeadLetter, whole_body: bool) -> Vec<String> {
    let mut headers = Vec::new();
    list(&mut headers, "", &letter.headers);
    let body = if whole_body { whole(&letter.body) } else { preview(letter) };
    let mut sections = explain(letter);
    sections.extend([("Properties", properties(letter)), ("Headers", headers), ("Body", body)]);
    laid_out(letter, sections)
}

/// The name of a dead letter, then sections of lines under their headings.
pub(super) fn laid_out(letter: &DeadLetter, sections: Vec<(&str, Vec<String>)>) -> Vec<String> {
    let mut lines = vec![format!("Dead letter {}", letter.fingerprint())];
    for (heading, texts) in sections {
        lines.extend([String::new(), heading.to_owned()]);
        lines.extend(texts.into_iter().map(|text| format!("  {text}")));
    }
    lines
}

fn properties(letter: &DeadLetter) -> Vec<String> {
    let p = &letter.properties;
    let text = |text: &Option<ShortString>| text.as_ref().map(|text| safe(text.as_str()));
    let number = |number: Option<u64>| number.map(|number| number.to_string());
    let all = [
        ("message_id", text(p.message_id())),
        ("correlation_id", text(p.correlation_id())),
        ("reply_to", text(p.reply_to())),
        ("type", text(p.kind())),
        ("content_type", text(p.content_type())),
        ("content_encoding", text(p.content_encoding())),
        ("delivery_mode", number(p.delivery_mode().map(u64::from))),
        ("priority", number(p.priority().map(u64::from))),
        ("expiration", text(p.expiration())),
        ("timestamp", number(*p.timestamp())),
        ("user_id", text(p.user_id())),
        ("app_id", text(p.app_id())),
        ("cluster_id", text(p.cluster_id())),
    ];
    all.into_iter().filter_map(|(name, value)| Some(format!("{name}: {}", value?))).collect()
}

/// Headers as lines; nested ones with their path.
fn list(lines: &mut Vec<String>, path: &str, table: &FieldTable) {
    for (name, value) in table {
        value_lines(lines, &format!("{path}{}", safe(name.as_str())), value);
    }
}

fn value_lines(lines: &mut Vec<String>, path: &str, value: &AMQPValue) {
    let text = match value {
        AMQPValue::FieldTable(table) => return list(lines, &format!("{path}."), table),
        AMQPValue::FieldArray(items) => {
            for (at, item) in items.as_slice().iter().enumerate() {
                value_lines(lines, &format!("{path}[{at}]"), item);
            }
            return;
        }
        AMQPValue::LongString(_) | AMQPValue::ShortString(_) | AMQPValue::ByteArray(_) => {
            cut(&as_text(value).unwrap_or_default(), VALUE_COLUMNS)
        }
        AMQPValue::Void => "void".to_owned(),
        AMQPValue::Boolean(yes) => yes.to_string(),
        AMQPValue::Float(x) => x.to_string(),
        AMQPValue::Double(x) => x.to_string(),
        AMQPValue::Timestamp(at) => moment(at.saturating_mul(1000)),
        AMQPValue::DecimalValue(decimal) => format!("{decimal:?}"),
        number => integer(Some(number)).unwrap_or_default().to_string(),
    };
    lines.push(format!("{path}: {text}"));
}

fn whole(body: &[u8]) -> Vec<String> {
    String::from_utf8_lossy(body).lines().map(safe).collect()
}
