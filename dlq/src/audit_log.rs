//! The action log: who did what to which dead letters. A line of JSON before each action, and one after it.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::dead_letter::Fingerprint;
use crate::error::Error;
use crate::plan::{Kind, Selected};
use crate::text::safe;

/// An action log, open for one action. The file is only ever appended to, a line with one write.
#[derive(Debug)]
pub struct AuditLog {
    path: PathBuf,
    file: File,
    /// The action's id, the same in all of its lines.
    action: String,
    command: &'static str,
    who: String,
}

impl AuditLog {
    /// A log at `path`, whose folder is made if it is missing. `who` is in every line.
    ///
    /// # Errors
    /// The log cannot be written. Then the action must not run, because every action is logged.
    pub fn open(path: &Path, command: &'static str, who: String) -> Result<Self, Error> {
        let failed = |error: io::Error| {
            let path = safe(&path.to_string_lossy());
            Error::File(format!("write the action log {path}: {error}"))
        };
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder).map_err(failed)?;
        }
        let mut file = OpenOptions::new().create(true).append(true).open(path).map_err(failed)?;
        // An `Err`: the user may not read it.
        if is_cut_off(&file, path).unwrap_or(false) {
            file.write_all(b"\n").map_err(failed)?;
        }
        let action = uuid::Uuid::now_v7().to_string();
        Ok(Self { path: path.to_owned(), file, action, command, who })
    }

    /// The action's id, which all of its lines have.
    pub fn action(&self) -> &str {
        &self.action
    }

    /// Logs what is about to be done. The line is on the disk when this returns.
    pub(crate) fn log_begin(
        &mut self,
        queue: &str,
        letters: &[Selected],
        detail: Value,
    ) -> Result<(), Error> {
        let letters: Vec<_> = letters.iter().map(described).collect();
        self.write(json!({"phase": "begin", "queue": queue, "count": letters.len(), "letters": letters, "detail": detail}))
    }

    /// Logs what was done, and what ended it early.
    pub(crate) fn log_end(&mut self, queue: &str, end: &End<'_>, error: Option<&Error>) -> Result<(), Error> {
        let End { done, unknown, delivered, kept, gone } = *end;
        let texts = |of: &[Fingerprint]| of.iter().map(ToString::to_string).collect::<Vec<_>>();
        let kept: Vec<_> =
            kept.iter().map(|(of, why)| json!({"fingerprint": of.to_string(), "why": why})).collect();
        self.write(json!({
            "phase": "end", "queue": queue, "count": done.len(), "done": texts(done), "unknown": texts(unknown),
            "delivered": texts(delivered), "kept": kept, "gone": gone, "error": error.map(ToString::to_string),
        }))
    }

    /// Logs a step of an import.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn log_note(&mut self, phase: &str, detail: Value) -> Result<(), Error> {
        self.write(json!({"phase": phase, "detail": detail}))
    }

    fn write(&mut self, mut entry: Value) -> Result<(), Error> {
        let now = OffsetDateTime::now_utc();
        entry["time"] = json!(now.format(&Rfc3339).unwrap_or_default());
        entry["who"] = json!(self.who);
        entry["action"] = json!(self.action);
        entry["command"] = json!(self.command);
        let written =
            self.file.write_all(format!("{entry}\n").as_bytes()).and_then(|()| self.file.sync_data());
        match written {
            // A pipe or a terminal cannot be synced.
            Err(error) if error.kind() != io::ErrorKind::InvalidInput => {
                Err(Error::writing(&format!("the action log {}", self.path.display()), &error))
            }
            _ => Ok(()),
        }
    }
}

/// Whether the last line of a log is only a part of one, as a full disk leaves it. What is appended must not become a part of it.
fn is_cut_off(file: &File, path: &Path) -> io::Result<bool> {
    let metadata = file.metadata()?;
    let Some(end) = metadata.len().checked_sub(1).filter(|_| metadata.is_file()) else { return Ok(false) };
    let mut last = [0];
    File::open(path)?.read_exact_at(&mut last, end)?;
    Ok(last != *b"\n")
}

/// What an action did to one queue.
pub(crate) struct End<'a> {
    /// Left the queue.
    pub(crate) done: &'a [Fingerprint],
    /// Published, without an answer of the broker.
    pub(crate) unknown: &'a [Fingerprint],
    /// Results that were delivered, and are still in the queue because their job is.
    pub(crate) delivered: &'a [Fingerprint],
    /// Kept in the queue, and why.
    pub(crate) kept: &'a [(Fingerprint, String)],
    /// How many were gone before.
    pub(crate) gone: usize,
}

fn described(letter: &Selected) -> Value {
    let kind = match letter.kind {
        Kind::Job => "job",
        Kind::Results => "results",
        Kind::AnsweredBy(_) => "answered job",
    };
    json!({"fingerprint": letter.fingerprint.to_string(), "id": letter.id, "kind": kind})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_that_was_cut_off_spoils_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new/actions.jsonl");
        let logged = || {
            let mut log = AuditLog::open(&path, "import", "me@here".to_owned()).unwrap();
            log.log_note("begin", json!({})).unwrap();
            std::fs::read_to_string(&path).unwrap()
        };
        assert_eq!(logged().lines().count(), 1);
        assert_eq!(logged().lines().count(), 2, "nothing was cut off");
        std::fs::write(&path, "{\"phase\":\"end\",\"do").unwrap();
        let text = logged();
        let (cut_off, line) = text.split_once('\n').unwrap();
        assert_eq!(cut_off, "{\"phase\":\"end\",\"do");
        assert_eq!(serde_json::from_str::<Value>(line).unwrap()["phase"], "begin");
    }
}
