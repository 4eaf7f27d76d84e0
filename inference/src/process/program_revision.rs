//! The revision of a program's model: what the program says, or a hash of what the configuration names.

use std::fmt;
use std::path::{Path, PathBuf};

use super::config::ProcessConfig;
use crate::revision::RevisionHash;

/// Larger files do not count as scripts: they are weights, which the program itself or `revision_files` must identify.
const SCRIPT_BYTES_MAX: u64 = 16 << 20;

/// What a revision tells apart, in words for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Covers {
    /// What the program says of itself.
    Said,
    /// The program, and not its weights.
    Program,
    /// The program, these files, and what the program says.
    Files(usize),
}

impl fmt::Display for Covers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Said => f.write_str("as the program says"),
            Self::Program => f.write_str(
                "of command, scripts and variables; other weights do not change it: set revision_files, or the revision in the program",
            ),
            Self::Files(files) => {
                write!(f, "of command, scripts, variables, {files} file(s) of revision_files, and what the program says, if anything")
            }
        }
    }
}

impl ProcessConfig {
    /// What the revision tells apart, if the program said one or not.
    pub fn revision_covers(&self, is_said: bool) -> Covers {
        match self.revision_files.len() {
            0 if is_said => Covers::Said,
            0 => Covers::Program,
            files => Covers::Files(files),
        }
    }

    /// What of the revision is on the disk. It must be read before the program starts, so that the program has read no other files.
    ///
    /// # Errors
    /// One of `revision_files` cannot be read, with its name.
    pub async fn revision_of_files(&self) -> Result<RevisionOfFiles, String> {
        Ok(RevisionOfFiles { program: self.program_revision(), files: self.hash_files().await? })
    }

    /// A hash of the program's command, the scripts that the command names, and its variables. It does not distinguish other weights,
    /// libraries or interpreters.
    pub fn program_revision(&self) -> String {
        let mut hash = RevisionHash::default();
        for argument in &self.command {
            hash.add("argument", argument.as_bytes());
        }
        for path in self.scripts() {
            let is_script =
                |metadata: std::fs::Metadata| metadata.is_file() && metadata.len() <= SCRIPT_BYTES_MAX;
            if path.metadata().is_ok_and(is_script) {
                // One that cannot be read is the program's to complain about.
                let _ = hash.add_file("script", &path);
            }
        }
        for (name, value) in &self.env {
            hash.add(name, value.as_bytes());
        }
        hash.finish("program")
    }

    /// The files whose content the revision may depend on. Some of them may not exist: arguments that are no files.
    pub(super) fn files_of_revision(&self) -> impl Iterator<Item = PathBuf> {
        self.scripts().chain(self.revision_files.iter().cloned())
    }

    /// What may be a script of the command. The interpreter is the machine's; what it runs is the model's.
    fn scripts(&self) -> impl Iterator<Item = PathBuf> {
        self.command.iter().skip(1).map(|argument| self.folder.join(argument))
    }

    /// A hash of `revision_files`, if there are any; reads all of them, off the runtime.
    async fn hash_files(&self) -> Result<Option<String>, String> {
        if self.revision_files.is_empty() {
            return Ok(None);
        }
        let files = self.revision_files.clone();
        let hashed = tokio::task::spawn_blocking(move || {
            let mut hash = RevisionHash::default();
            for file in &files {
                add(&mut hash, file)
                    .map_err(|error| format!("read {} (revision_files): {error}", file.display()))?;
            }
            Ok(hash.finish("files"))
        });
        hashed.await.unwrap_or_else(|error| Err(error.to_string())).map(Some)
    }
}

/// The parts of a revision that do not depend on what the program says.
#[derive(Clone, Debug)]
pub struct RevisionOfFiles {
    /// [`ProcessConfig::program_revision`].
    program: String,
    /// Of `revision_files`.
    files: Option<String>,
}

impl RevisionOfFiles {
    /// The revision of the model, whose program said this one or none.
    pub fn with(&self, said: Option<&str>) -> String {
        let Some(files) = &self.files else { return said.unwrap_or(&self.program).to_owned() };
        let mut hash = RevisionHash::default();
        hash.add("program", self.program.as_bytes());
        hash.add("files", files.as_bytes());
        if let Some(said) = said {
            hash.add("said", said.as_bytes());
        }
        hash.finish("program")
    }
}

/// By its name without its folder, which differs between machines.
fn add(hash: &mut RevisionHash, file: &Path) -> std::io::Result<()> {
    file.metadata()?;
    hash.add_file(&file.file_name().unwrap_or_default().to_string_lossy(), file)
}
