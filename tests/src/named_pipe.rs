//! Named pipes: who opens one to read it waits until somebody opens it to write.

use std::path::Path;

use anyhow::{Context as _, Result};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use tempfile::TempDir;

/// Makes one, for its owner alone.
///
/// # Errors
/// The file system has none, or there is a file of this name.
pub fn named_pipe(path: &Path) -> Result<()> {
    mknodat(CWD, path, FileType::Fifo, Mode::RWXU, 0)
        .with_context(|| format!("make the named pipe {}", path.display()))
}

/// The folder of a model that never loads: nobody ever writes its first file.
///
/// # Errors
/// As for [`named_pipe`].
pub fn model_that_never_loads() -> Result<TempDir> {
    let folder = tempfile::tempdir()?;
    named_pipe(&folder.path().join("config.json"))?;
    Ok(folder)
}
