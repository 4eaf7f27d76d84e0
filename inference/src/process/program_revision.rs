//! The revision of a program's model: what the program says, or a hash of what the configuration names.

use std::fmt;
use std::fs::Metadata;
use std::io;
use std::path::PathBuf;

use super::config::ProcessConfig;
use crate::revision::{ContentDigest, RevisionHash, content_digest};

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
        let config = self.clone();
        // Off the runtime: there may be much to read, over a network.
        let read = tokio::task::spawn_blocking(move || {
            let files = config.counted_files();
            let contents: Result<Vec<_>, _> = files.iter().map(CountedFile::read).collect();
            contents.map(|contents| config.revision_of(&contents))
        });
        read.await.unwrap_or_else(|error| Err(error.to_string()))
    }

    /// A hash of the program's command, the scripts that the command names, and its variables. It does not distinguish other weights,
    /// libraries or interpreters. Reads the scripts.
    pub fn program_revision(&self) -> String {
        let scripts: Vec<_> = self.arguments().map(|file| file.read().ok().flatten()).collect();
        self.hash_program(&scripts)
    }

    /// The files whose content may count: arguments of the command, then `revision_files`. The interpreter is the machine's; what it runs
    /// is the model's.
    pub(super) fn counted_files(&self) -> Vec<CountedFile> {
        let named = self.revision_files.iter().map(|file| CountedFile { path: file.clone(), is_named: true });
        self.arguments().chain(named).collect()
    }

    fn arguments(&self) -> impl Iterator<Item = CountedFile> {
        let arguments = self.command.iter().skip(1);
        arguments.map(|argument| CountedFile { path: self.folder.join(argument), is_named: false })
    }

    /// `contents`: of [`counted_files`](Self::counted_files), in their order.
    pub(super) fn revision_of(&self, contents: &[Option<ContentDigest>]) -> RevisionOfFiles {
        let (scripts, named) = contents.split_at(contents.len() - self.revision_files.len());
        let mut hash = RevisionHash::default();
        // By its name without its folder, which differs between machines.
        for (file, content) in self.revision_files.iter().zip(named) {
            let name = file.file_name().unwrap_or_default().to_string_lossy();
            content.iter().for_each(|content| hash.add(&name, content));
        }
        let files = (!named.is_empty()).then(|| hash.finish("files"));
        RevisionOfFiles { program: self.hash_program(scripts), files }
    }

    fn hash_program(&self, scripts: &[Option<ContentDigest>]) -> String {
        let mut hash = RevisionHash::default();
        self.command.iter().for_each(|argument| hash.add("argument", argument.as_bytes()));
        scripts.iter().flatten().for_each(|content| hash.add("script", content));
        self.env.iter().for_each(|(name, value)| hash.add(name, value.as_bytes()));
        hash.finish("program")
    }
}

/// A file whose content may count for a revision.
#[derive(Clone, Debug)]
pub(super) struct CountedFile {
    pub path: PathBuf,
    /// By `revision_files`: it must be there. Otherwise it is an argument of the command, which may be no file at all.
    pub is_named: bool,
}

impl CountedFile {
    /// What the file system says of it; `None`: it is there, and does not count.
    ///
    /// # Errors
    /// There is no such file, or it cannot be reached.
    pub fn metadata(&self) -> Result<Option<Metadata>, String> {
        let found = self.path.metadata().map_err(|error| self.unreadable(&error))?;
        match (found.is_file(), self.is_named) {
            (true, true) => Ok(Some(found)),
            (true, false) => Ok((found.len() <= SCRIPT_BYTES_MAX).then_some(found)),
            (false, true) => Err(self.unreadable(&io::Error::other("not a file"))),
            (false, false) => Ok(None),
        }
    }

    /// Its content; `None`: it does not count.
    ///
    /// # Errors
    /// It is named, and cannot be read. An argument that cannot be read is the program's to complain about.
    pub fn read(&self) -> Result<Option<ContentDigest>, String> {
        let content = self.metadata().and_then(|found| found.map(|_| self.content()).transpose());
        if self.is_named { content } else { Ok(content.unwrap_or_default()) }
    }

    /// Its content, whether it counts or not.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn content(&self) -> Result<ContentDigest, String> {
        content_digest(&self.path).map_err(|error| self.unreadable(&error))
    }

    fn unreadable(&self, error: &io::Error) -> String {
        let role = if self.is_named { "revision_files" } else { "an argument of the program" };
        format!("read {} ({role}): {error}", self.path.display())
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
