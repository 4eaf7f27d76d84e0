//! The action log: who did what to which dead letters. A line of JSON before each action, and one after it.

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use super::error::Error;
use super::plan::{Kind, Selected};
use super::transfer::Outcome;
use crate::output::text::safe;

/// An action log, open for one action. The file is only ever appended to, a line with one write.
pub(super) struct AuditLog {
    path: PathBuf,
    file: File,
    /// The same in all lines of one action.
    action: String,
    command: &'static str,
}

impl AuditLog {
    /// `path`, or by default `vramq/actions.jsonl` in the user's state folder.
    ///
    /// # Errors
    /// It cannot be written. Then nothing may be done: every action is logged.
    pub(super) fn open(path: Option<&Path>, command: &'static str) -> Result<Self, Error> {
        let path = path.map(Path::to_owned).or_else(default_path).ok_or_else(|| {
            Error::Usage("there is no state folder for the action log: name a file with --log".to_owned())
        })?;
        let failed = |error: std::io::Error| {
            let path = safe(&path.to_string_lossy());
            Error::Usage(format!("write the action log {path}: {error}; name another file with --log"))
        };
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder).map_err(failed)?;
        }
        let file = OpenOptions::new().create(true).append(true).open(&path).map_err(failed)?;
        let action = uuid::Uuid::now_v7().to_string();
        Ok(Self { path, file, action, command })
    }

    /// Logs what is about to be done; on the disk when it returns.
    pub(super) fn log_begin(
        &mut self,
        queue: &str,
        letters: &[Selected],
        detail: Value,
    ) -> Result<(), Error> {
        let letters: Vec<_> = letters.iter().map(described).collect();
        self.write(json!({"phase": "begin", "queue": queue, "count": letters.len(), "letters": letters, "detail": detail}))
    }

    /// Logs what was done.
    pub(super) fn log_end(
        &mut self,
        queue: &str,
        outcome: &Outcome,
        error: Option<&Error>,
    ) -> Result<(), Error> {
        let done: Vec<_> = outcome.done.iter().map(ToString::to_string).collect();
        let kept: Vec<_> =
            outcome.kept.iter().map(|(of, why)| json!({"fingerprint": of.to_string(), "why": why})).collect();
        self.write(json!({
            "phase": "end", "queue": queue, "count": done.len(), "done": done, "kept": kept, "gone": outcome.gone,
            "error": error.map(ToString::to_string),
        }))
    }

    /// Logs a step of an import.
    pub(super) fn log_note(&mut self, phase: &str, detail: Value) -> Result<(), Error> {
        self.write(json!({"phase": phase, "detail": detail}))
    }

    fn write(&mut self, mut entry: Value) -> Result<(), Error> {
        let now = OffsetDateTime::now_utc();
        entry["time"] = json!(now.format(&Rfc3339).unwrap_or_default());
        entry["who"] = json!(who());
        entry["action"] = json!(self.action);
        entry["command"] = json!(self.command);
        let written =
            self.file.write_all(format!("{entry}\n").as_bytes()).and_then(|()| self.file.sync_data());
        match written {
            // A pipe or a terminal cannot be synced.
            Err(error) if error.kind() != std::io::ErrorKind::InvalidInput => {
                Err(Error::writing(&self.path.to_string_lossy(), &error))
            }
            _ => Ok(()),
        }
    }
}

fn described(letter: &Selected) -> Value {
    let kind = match letter.kind {
        Kind::Job => "job",
        Kind::Results => "results",
        Kind::AnsweredBy(_) => "answered job",
    };
    json!({"fingerprint": letter.fingerprint.to_string(), "id": letter.id, "kind": kind})
}

fn default_path() -> Option<PathBuf> {
    let folder = dirs::state_dir().or_else(dirs::data_local_dir)?;
    Some(folder.join("vramq").join("actions.jsonl"))
}

/// `user@host`.
fn who() -> String {
    let user = ["USER", "LOGNAME"].into_iter().find_map(|name| std::env::var(name).ok());
    let user = user.unwrap_or_else(|| format!("uid-{}", rustix::process::getuid().as_raw()));
    format!("{user}@{}", rustix::system::uname().nodename().to_string_lossy())
}
