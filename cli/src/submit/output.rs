//! Results, in the order of the input: JSON lines or NumPy.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::Value;
use vramq_producer::{Embedding, Output};

use super::input::Item;
use super::npy::NpyWriter;
use crate::output::text::safe_json;

/// The output. A file gets its name when it is complete; until then it is `NAME.partial`.
pub(super) struct Results {
    to: Format,
    file: Option<Names>,
    with_text: bool,
}

enum Format {
    JsonLines {
        to: Box<dyn Write + Send>,
        /// Escapes what a terminal would act on: the output may be one.
        escape: bool,
    },
    Npy(NpyWriter<BufWriter<File>>),
}

struct Names {
    partial: PathBuf,
    complete: PathBuf,
}

#[derive(Serialize)]
struct Line<'a> {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<&'a str>,
    #[serde(flatten)]
    output: &'a Output,
}

/// Whether the output is a NumPy file, by its name.
pub(super) fn is_npy(path: &Path) -> bool {
    path.extension().is_some_and(|e| e.eq_ignore_ascii_case("npy"))
}

impl Results {
    pub(super) fn create(path: Option<&Path>, with_text: bool) -> io::Result<Self> {
        let Some(path) = path.filter(|path| *path != Path::new("-")) else {
            return Ok(Self {
                to: Format::JsonLines { to: Box::new(BufWriter::new(io::stdout())), escape: true },
                file: None,
                with_text,
            });
        };
        let is_npy = is_npy(path);
        match fs::metadata(path) {
            Ok(existing) if existing.is_dir() => return Err(io::Error::other("it is a folder")),
            Ok(existing) if !existing.is_file() && is_npy => {
                return Err(io::Error::other("a .npy must be a regular file"));
            }
            // A pipe or a device must not be replaced by a file.
            Ok(existing) if !existing.is_file() => {
                let to = Box::new(BufWriter::new(File::options().write(true).open(path)?));
                return Ok(Self { to: Format::JsonLines { to, escape: true }, file: None, with_text });
            }
            // A new file, or another fault that its creation reports.
            _ => {}
        }
        let mut partial = path.as_os_str().to_owned();
        partial.push(".partial");
        let names = Names { partial: partial.into(), complete: path.to_owned() };
        let file = BufWriter::new(File::create(&names.partial)?);
        let to = match is_npy {
            true => Format::Npy(NpyWriter::new(file)?),
            false => Format::JsonLines { to: Box::new(file), escape: false },
        };
        Ok(Self { to, file: Some(names), with_text })
    }

    /// Writes one item's result; `None` if it has none.
    pub(super) fn write(&mut self, index: usize, item: &Item, output: Option<&Output>) -> io::Result<()> {
        match (&mut self.to, output) {
            (Format::JsonLines { to, escape }, Some(output)) => {
                let line =
                    Line { index, id: item.id.as_ref(), text: self.with_text.then_some(item.text()), output };
                let line = serde_json::to_string(&line)?;
                // Embeddings are ASCII, and JSON escapes the control characters of ASCII.
                let line = if *escape && !line.is_ascii() { safe_json(&line) } else { line };
                writeln!(to, "{line}")
            }
            (Format::JsonLines { .. }, None) => Ok(()),
            (Format::Npy(npy), Some(Output::Embedding(Embedding { values, .. }))) => {
                npy.row(&values.to_f32())
            }
            (Format::Npy(_), Some(_)) => Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the model's outputs are not embeddings, which .npy cannot hold; use .jsonl",
            )),
            (Format::Npy(npy), None) => npy.missing(),
        }
    }

    /// Makes what was written visible to readers.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        match &mut self.to {
            Format::JsonLines { to, .. } => to.flush(),
            Format::Npy(_) => Ok(()),
        }
    }

    /// Completes the output.
    pub(super) fn finish(self) -> io::Result<()> {
        match self.to {
            Format::JsonLines { mut to, .. } => to.flush()?,
            Format::Npy(npy) => {
                if let Err(error) = npy.finish() {
                    // As in `abandon`.
                    let _ = self.file.map(|names| fs::remove_file(names.partial));
                    return Err(error);
                }
            }
        }
        match self.file {
            Some(Names { partial, complete }) => fs::rename(partial, complete),
            None => Ok(()),
        }
    }

    /// Leaves the output incomplete. Incomplete JSON lines are useful, so their path is returned, and whether they end in a whole line. A
    /// file without any, and an incomplete NumPy file, are removed.
    pub(super) fn abandon(self) -> Option<(PathBuf, bool)> {
        let Names { partial, .. } = self.file?;
        // Best effort: the command has failed already.
        let is_whole = match self.to {
            Format::JsonLines { mut to, .. } => Some(to.flush().is_ok()),
            Format::Npy(npy) => {
                drop(npy);
                None
            }
        };
        let has_lines = fs::metadata(&partial).is_ok_and(|file| file.len() > 0);
        match is_whole.filter(|_| has_lines) {
            Some(is_whole) => Some((partial, is_whole)),
            None => {
                let _ = fs::remove_file(partial);
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;
    use vramq_schemas::Input;

    use super::*;

    fn names(folder: &TempDir) -> Vec<String> {
        let entries = fs::read_dir(folder.path()).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn of_an_incomplete_output_only_lines_stay() {
        let folder = tempfile::tempdir().unwrap();
        let create = |name: &str| Results::create(Some(&folder.path().join(name)), false).unwrap();
        for name in ["out.jsonl", "out.npy"] {
            assert_eq!(create(name).abandon(), None, "{name}");
            assert_eq!(names(&folder), [""; 0], "{name}");
        }
        let mut results = create("out.jsonl");
        let item = Item { input: Input::Text("x".to_owned()), id: None };
        let output = Output::Json(Value::from(7));
        results.write(0, &item, Some(&output)).unwrap();
        assert_eq!(results.abandon(), Some((folder.path().join("out.jsonl.partial"), true)));
        assert_eq!(names(&folder), ["out.jsonl.partial"]);
    }

    #[test]
    fn a_numpy_file_without_numbers_does_not_stay() {
        let folder = tempfile::tempdir().unwrap();
        let results = Results::create(Some(&folder.path().join("out.npy")), false).unwrap();
        assert!(results.finish().is_err());
        assert_eq!(names(&folder), [""; 0]);
    }
}
