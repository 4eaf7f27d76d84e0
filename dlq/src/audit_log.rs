//! The action log: who did what to which dead letters. A line of JSON before each action, and one after it.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
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
        let file = OpenOptions::new().create(true).append(true).open(path).map_err(failed)?;
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
        let before = if self.ends_within_a_line() { "\n" } else { "" };
        let line = format!("{before}{entry}\n");
        let written = self.file.write_all(line.as_bytes()).and_then(|()| self.file.sync_data());
        match written {
            // A pipe or a terminal cannot be synced.
            Err(error) if error.kind() != io::ErrorKind::InvalidInput => {
                Err(Error::writing(&format!("the action log {}", self.path.display()), &error))
            }
            _ => Ok(()),
        }
    }

    /// Whether the last line of the file was cut off, by a full disk or a power cut: the next line must not join it. `false` for a pipe or a
    /// terminal, and for a file that this user may not read.
    fn ends_within_a_line(&self) -> bool {
        if !self.file.metadata().is_ok_and(|data| data.is_file()) {
            return false;
        }
        let mut last = [0];
        let read = File::open(&self.path).and_then(|mut file| {
            file.seek(SeekFrom::End(-1))?;
            file.read_exact(&mut last)
        });
        read.is_ok() && last != *b"\n"
    }
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
    fn a_line_that_was_cut_off_takes_no_other_line_with_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("actions.jsonl");
        for cut in ["{\"phase\": \"beg", "\0\0"] {
            std::fs::write(&path, format!("{{}}\n{cut}")).unwrap();
            let mut log = AuditLog::open(&path, "import", "me".to_owned()).unwrap();
            for phase in ["begin", "end"] {
                log.log_note(phase, json!({})).unwrap();
            }
            let text = std::fs::read_to_string(&path).unwrap();
            let lines: Vec<_> = text.lines().collect();
            let phase = |line: &str| serde_json::from_str::<Value>(line).unwrap()["phase"].clone();
            assert_eq!(lines[..2], ["{}", cut]);
            assert_eq!((lines.len(), phase(lines[2]), phase(lines[3])), (4, json!("begin"), json!("end")));
        }
    }
}
