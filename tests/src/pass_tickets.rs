//! Lets a worker run its passes one by one: each needs a ticket. So a test counts passes instead of seconds.

use std::fs::{File, OpenOptions};
use std::io::Write as _;

use anyhow::{Context as _, Result};
use tempfile::TempDir;

use crate::named_pipe::named_pipe;
use crate::test_env::TestEnv;

/// The tickets of one worker. Without them, also after they are dropped, passes run freely.
#[derive(Debug)]
pub struct PassTickets {
    folder: TempDir,
    /// Open for reading too, so that opening it waits for nobody.
    pipe: Option<File>,
}

impl PassTickets {
    /// # Errors
    /// The system makes no named pipe.
    pub fn new(env: &mut TestEnv) -> Result<Self> {
        env.announce("a failpoint is set");
        Self::unannounced()
    }

    /// For tests without a [`TestEnv`], which check no warnings in logs.
    ///
    /// # Errors
    /// The system makes no named pipe.
    pub fn unannounced() -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("tickets");
        named_pipe(&path)?;
        let pipe = OpenOptions::new().read(true).write(true).open(&path)?;
        Ok(Self { folder, pipe: Some(pipe) })
    }

    /// The setting that makes a worker ask for them.
    pub fn setting(&self) -> String {
        format!("worker.drill=pass=hang,tickets={}", self.folder.path().join("tickets").display())
    }

    /// Lets so many more passes run.
    ///
    /// # Errors
    /// Passes need no tickets any more.
    pub fn give(&mut self, passes: usize) -> Result<()> {
        let pipe = self.pipe.as_mut().context("passes need no tickets any more")?;
        Ok(pipe.write_all(&vec![0; passes])?)
    }

    /// Tickets that no pass has taken yet.
    ///
    /// # Errors
    /// Passes need no tickets any more, or the system does not tell.
    pub fn left(&self) -> Result<u64> {
        let pipe = self.pipe.as_ref().context("passes need no tickets any more")?;
        Ok(rustix::io::ioctl_fionread(pipe)?)
    }

    /// From now on passes run freely.
    pub fn release(&mut self) {
        self.pipe = None;
    }
}
