//! A real terminal, in tmux: a test reads its screen and presses keys.

use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};
use tempfile::TempDir;
use tokio::process::Command;

use crate::programs::program;
use crate::wait::until;

/// A terminal with a shell in it. Its server, and all that runs in it, ends when it is dropped.
#[derive(Debug)]
pub struct Terminal {
    folder: TempDir,
}

impl Terminal {
    /// Opens one of this size.
    ///
    /// # Errors
    /// There is no tmux: `scripts/setup terminal` installs it.
    pub async fn open(columns: u16, rows: u16) -> Result<Self> {
        let this = Self { folder: tempfile::tempdir()? };
        let (columns, rows) = (columns.to_string(), rows.to_string());
        // A shell without anybody's settings, so that its prompt is known.
        let shell = "env PS1='$ ' TERM=screen-256color bash --norc --noprofile";
        this.tmux(&["new-session", "-d", "-x", &columns, "-y", &rows, shell]).await?;
        this.shows("the prompt", |screen| screen.starts_with('$')).await?;
        Ok(this)
    }

    async fn tmux(&self, arguments: &[&str]) -> Result<String> {
        let mut command = Command::new("tmux");
        command.arg("-S").arg(self.socket()).args(["-f", "/dev/null"]).args(arguments);
        // bash warns of a locale that the machine does not have, and programs under NO_COLOR have no colours.
        command.env("LC_ALL", "C.UTF-8").env_remove("NO_COLOR");
        let output = command.output().await.context("run tmux: scripts/setup terminal installs it")?;
        ensure!(
            output.status.success(),
            "tmux {arguments:?}: {}",
            String::from_utf8_lossy(&output.stderr).trim_end()
        );
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("tmux")
    }

    /// Types a command line, with one of the workspace's programs in front, and Enter.
    ///
    /// # Errors
    /// No such program, or no terminal any more.
    pub async fn run(&self, name: &str, arguments: &str) -> Result<()> {
        let line = format!("{} {arguments}", program(name)?.display());
        self.type_line(&line).await
    }

    /// Types a line, and Enter.
    ///
    /// # Errors
    /// No terminal any more.
    pub async fn type_line(&self, line: &str) -> Result<()> {
        self.tmux(&["send-keys", "-l", line]).await?;
        self.press("Enter").await
    }

    /// Presses a key, as tmux calls it: `q`, `C-c`, `Down`.
    ///
    /// # Errors
    /// No terminal any more.
    pub async fn press(&self, key: &str) -> Result<()> {
        self.tmux(&["send-keys", key]).await.map(drop)
    }

    /// # Errors
    /// No terminal any more.
    pub async fn resize(&self, columns: u16, rows: u16) -> Result<()> {
        self.tmux(&["resize-window", "-x", &columns.to_string(), "-y", &rows.to_string()]).await.map(drop)
    }

    /// What is on it, without what is blank at the end.
    ///
    /// # Errors
    /// No terminal any more.
    pub async fn screen(&self) -> Result<String> {
        Ok(self.tmux(&["capture-pane", "-p"]).await?.trim_end().to_owned())
    }

    /// The same with the escape sequences of colours and the like.
    ///
    /// # Errors
    /// No terminal any more.
    pub async fn coloured(&self) -> Result<String> {
        self.tmux(&["capture-pane", "-p", "-e"]).await
    }

    /// Waits until it shows something; what it shows then.
    ///
    /// # Errors
    /// It does not, with what it shows instead.
    pub async fn shows(&self, what: &str, look: impl Fn(&str) -> bool) -> Result<String> {
        let seen = until(&format!("a terminal that shows {what}"), async || {
            let screen = self.screen().await?;
            Ok(look(&screen).then_some(screen))
        })
        .await;
        match seen {
            Ok(screen) => Ok(screen),
            Err(error) => {
                Err(error.context(format!("it shows:\n{}", self.screen().await.unwrap_or_default())))
            }
        }
    }

    /// Whether the terminal is as a shell wants it: its own screen, a cursor, an echo.
    ///
    /// # Errors
    /// No terminal any more.
    pub async fn is_restored(&self) -> Result<bool> {
        let state =
            self.tmux(&["display-message", "-p", "#{alternate_on} #{cursor_flag} #{pane_tty}"]).await?;
        let mut words = state.split_whitespace();
        let (alternate, cursor) = (words.next(), words.next());
        let tty = words.next().context("no terminal")?;
        let modes = Command::new("stty").args(["-F", tty, "-a"]).output().await?;
        let modes = String::from_utf8_lossy(&modes.stdout).into_owned();
        // The shell's own line editing turns off ICANON and ECHO. Only a raw mode turns off ISIG and OPOST.
        let raw = modes.split_whitespace().any(|mode| mode == "-isig" || mode == "-opost");
        Ok(alternate == Some("0") && cursor == Some("1") && !raw)
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let mut command = std::process::Command::new("tmux");
        let _ = command.arg("-S").arg(self.socket()).arg("kill-server").status();
    }
}
