//! Prepares a one-shot program for an item: its scratch folder, the file of the item, and the arguments.

use std::path::PathBuf;
use std::sync::Arc;

use serde_json::{Map, Value};

use super::aside::{Aside, tidy};
use super::config::{Once, ProcessConfig};
use super::keeper::{OutputUse, Spec};
use super::launch::Launcher;
use super::memory::DeviceAccount;
use super::pass::PassEnd;
use super::protocol::FailureKind;
use super::template::Template;

/// What to prepare.
pub(super) struct Preparation {
    pub config: ProcessConfig,
    pub once: Once,
    pub launcher: Launcher,
    pub account: Arc<DeviceAccount>,
    /// The item's, in its pass.
    pub index: usize,
    pub payload: Vec<u8>,
    pub params: Map<String, Value>,
}

/// A program that is ready to start.
pub(super) struct Prepared {
    pub spec: Spec,
    /// The file that the program writes; `None`: its output is what it prints.
    pub file: Option<PathBuf>,
}

impl Preparation {
    /// Prepares the program, on another thread. If this fails, or is dropped, nothing is left, or soon nothing.
    pub async fn run(self, aside: &Aside) -> Result<Prepared, PassEnd> {
        let prepared = aside.run(move || self.prepare(), discard).await;
        // A panic, which was logged. It counts, so that a job which causes it is not retried for ever.
        prepared.unwrap_or_else(|| {
            let detail = "internal error: the item was not written; please report it".to_owned();
            Err(PassEnd::Failed { kind: FailureKind::Model, item: None, detail, stderr: String::new() })
        })
    }

    fn prepare(self) -> Result<Prepared, PassEnd> {
        let spec = self
            .launcher
            .spec(&self.config, self.account.view(), Vec::new(), OutputUse::Stdout)
            .map_err(|error| PassEnd::NotRun { reason: format!("make the scratch folder: {error}") })?;
        let scratch = spec.scratch.clone();
        let prepared = self.write(spec);
        if prepared.is_err() {
            let _ = std::fs::remove_dir_all(scratch);
        }
        prepared
    }

    /// Fills in the arguments, and writes the item to the scratch folder.
    fn write(&self, mut spec: Spec) -> Result<Prepared, PassEnd> {
        let input = spec.scratch.join(format!("input{}", self.once.input_suffix));
        let output = spec.scratch.join(format!("output{}", self.once.output_suffix));
        let templates: Result<Vec<_>, _> =
            self.config.command.iter().map(|argument| Template::parse(argument)).collect();
        let templates = templates.map_err(|what| self.failed(FailureKind::Model, what))?;
        let arguments: Result<Vec<_>, _> =
            templates.iter().map(|template| template.fill(&input, &output, &self.params)).collect();
        spec.command = arguments.map_err(|what| self.failed(FailureKind::Input, what))?;
        std::fs::write(&input, &self.payload).map_err(|error| {
            // Makes room: a partly written file has taken disk space.
            let _ = std::fs::remove_file(&input);
            PassEnd::not_written(&error, 1, self.payload.len() as u64, &spec.scratch)
        })?;
        let file = templates.iter().any(Template::has_output).then_some(output);
        Ok(Prepared { spec, file })
    }

    fn failed(&self, kind: FailureKind, detail: String) -> PassEnd {
        PassEnd::Failed { kind, item: Some(self.index), detail, stderr: String::new() }
    }
}

impl Prepared {
    /// Removes what was made for a program that is not started.
    pub async fn remove(self) {
        tidy(move || discard(Ok(self))).await;
    }
}

fn discard(prepared: Result<Prepared, PassEnd>) {
    if let Ok(Prepared { spec, .. }) = prepared {
        let _ = std::fs::remove_dir_all(spec.scratch);
    }
}
