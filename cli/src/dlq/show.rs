//! `vramq dlq show`: one letter, from its explain to its bytes.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use lapin::types::{AMQPValue, FieldTable, ShortString};

use super::Common;
use super::dead_letter::DeadLetter;
use super::error::Error;
use super::explain::explain;
use super::preview::preview;
use super::scan::scan;
use super::select::{Name, NameMatch};
use crate::exit;
use crate::output::text::{cut, safe};

/// Letters with one name that are shown: more than a person reads.
const SHOWN_MAX: usize = 20;

/// Columns of a header's value.
const VALUE_COLUMNS: usize = 100;

/// Tell the explain of a letter: what happened, why it ended, what would fit, what to do; then headers and body.
///
/// Of the body only the shape is shown and the beginnings of a few inputs, which may be personal data.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  vramq dlq show --model minilm 019a7c4e-5d1f-7e61-b1a5-33d1c0a7e6f2
  vramq dlq show -m minilm 3fa94c12ab --body
  vramq dlq show -m minilm 3fa94c12ab --save body.bin")]
pub(super) struct Args {
    /// A message id, or the start of a fingerprint; id:… or fp:… says which is meant.
    #[arg(value_name = "ID")]
    name: String,
    /// The whole body, with control characters escaped.
    #[arg(long)]
    body: bool,
    /// Write the body's bytes to a file, which must not exist.
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,
}

pub(super) async fn run(args: &Args, common: &Common) -> Result<u8, Error> {
    let name = Name { text: args.name.clone() };
    let (mut found, mut more) = (Vec::new(), 0);
    for model in common.models()? {
        scan(common, model, |letter| {
            if name.matches(&letter.summary()) != NameMatch::None {
                if found.len() < SHOWN_MAX { found.push(letter) } else { more += 1 }
            }
            Ok(())
        })
        .await?;
    }
    if found.is_empty() {
        return Err(Error::Failed(format!("no letter is called {}", safe(&args.name))));
    }
    if let Some(file) = &args.save {
        let [letter] = found.as_slice() else {
            let all: Vec<_> = found.iter().map(|letter| letter.fingerprint().to_string()).collect();
            return Err(Error::Usage(format!(
                "several letters are called that: say which, of {}",
                all.join(", ")
            )));
        };
        save(file, &letter.body)?;
    }
    let mut out = String::new();
    for letter in &found {
        // Writing to a string does not fail.
        let _ = tell(&mut out, letter, args.body);
    }
    if more > 0 {
        out += &format!("… and {more} more with this name\n");
    }
    std::io::stdout().write_all(out.as_bytes()).map_err(|error| Error::writing("the explanation", &error))?;
    Ok(exit::DONE)
}

fn save(file: &Path, body: &[u8]) -> Result<(), Error> {
    let created = std::fs::OpenOptions::new().write(true).create_new(true).open(file);
    let saved = created.and_then(|mut file| file.write_all(body).and_then(|()| file.sync_all()));
    saved.map_err(|error| Error::writing(&file.to_string_lossy(), &error))
}

fn tell(out: &mut String, letter: &DeadLetter, whole_body: bool) -> std::fmt::Result {
    writeln!(out, "Letter {}", letter.fingerprint())?;
    for (heading, lines) in explain(letter) {
        section(out, heading, &lines)?;
    }
    section(out, "Properties", &properties(letter))?;
    let mut headers = Vec::new();
    list(&mut headers, "", &letter.headers);
    section(out, "Headers", &headers)?;
    let body = if whole_body { whole(&letter.body) } else { preview(letter) };
    section(out, "Body", &body)?;
    out.write_char('\n')
}

fn section(out: &mut String, heading: &str, lines: &[String]) -> std::fmt::Result {
    writeln!(out, "\n{heading}")?;
    lines.iter().try_for_each(|line| writeln!(out, "  {line}"))
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

/// Headers as lines, those within others under a path.
fn list(lines: &mut Vec<String>, path: &str, table: &FieldTable) {
    for (name, value) in table {
        value_lines(lines, &format!("{path}{}", safe(name.as_str())), value);
    }
}

fn value_lines(lines: &mut Vec<String>, path: &str, value: &AMQPValue) {
    match value {
        AMQPValue::FieldTable(table) => list(lines, &format!("{path}."), table),
        AMQPValue::FieldArray(items) => {
            for (at, item) in items.as_slice().iter().enumerate() {
                value_lines(lines, &format!("{path}[{at}]"), item);
            }
        }
        AMQPValue::LongString(text) => {
            lines.push(format!("{path}: {}", cut(&String::from_utf8_lossy(text.as_bytes()), VALUE_COLUMNS)));
        }
        AMQPValue::ShortString(text) => lines.push(format!("{path}: {}", cut(text.as_str(), VALUE_COLUMNS))),
        AMQPValue::ByteArray(bytes) => {
            lines.push(format!("{path}: {}", cut(&String::from_utf8_lossy(bytes.as_slice()), VALUE_COLUMNS)));
        }
        AMQPValue::Void => lines.push(format!("{path}: void")),
        AMQPValue::Boolean(yes) => lines.push(format!("{path}: {yes}")),
        AMQPValue::Float(x) => lines.push(format!("{path}: {x}")),
        AMQPValue::Double(x) => lines.push(format!("{path}: {x}")),
        AMQPValue::Timestamp(at) => {
            lines.push(format!("{path}: {}", crate::output::text::moment(at.saturating_mul(1000))));
        }
        AMQPValue::DecimalValue(decimal) => lines.push(format!("{path}: {decimal:?}")),
        whole => {
            lines
                .push(format!("{path}: {}", vramq_schemas::fields::integer(Some(whole)).unwrap_or_default()));
        }
    }
}

fn whole(body: &[u8]) -> Vec<String> {
    String::from_utf8_lossy(body).lines().map(safe).collect()
}
