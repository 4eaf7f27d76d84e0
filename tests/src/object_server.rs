//! A real S3 server for tests: s3rver. It rejects unknown keys, and lets requests without a key read and write.

use std::io::{BufRead as _, BufReader, ErrorKind};
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::http;
use crate::programs::{root, setting};

/// The key that the server knows, and its secret.
pub const KEY: &str = "S3RVER";

/// The bucket that it has.
pub const BUCKET: &str = "jobs";

/// A running server. Ends when it is dropped, and with the test's process: its standard input is a pipe from there.
#[derive(Debug)]
pub struct ObjectServer {
    server: Child,
    address: String,
    folder: TempDir,
}

impl ObjectServer {
    /// Starts it, and waits until it listens.
    ///
    /// # Errors
    /// `make test` did not set it up, or it does not start; why is on standard error.
    pub fn start() -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let mut server = Command::new(setting("VRAMQ_TEST_NODE")?)
            .arg(root().join("tests/foreign/s3_server.mjs"))
            .arg(folder.path())
            .arg(BUCKET)
            .env("VRAMQ_TEST_NODE_MODULES", setting("VRAMQ_TEST_NODE_MODULES")?)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("start s3rver")?;
        let mut port = String::new();
        let output = server.stdout.take().context("no output")?;
        let read = BufReader::new(output).read_line(&mut port);
        // From here on the process ends with this.
        let this = Self { server, address: format!("127.0.0.1:{}", port.trim_end()), folder };
        read.context("read s3rver's port")?;
        ensure!(!port.is_empty(), "s3rver ended at once");
        Ok(this)
    }

    /// Where it is, as the option `endpoint` of a store has it.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Stops the server's answers until [`resume`](Self::resume). It still accepts connections.
    ///
    /// # Errors
    /// It has ended.
    pub fn pause(&self) -> Result<()> {
        self.signal(Signal::STOP)
    }

    /// # Errors
    /// It has ended.
    pub fn resume(&self) -> Result<()> {
        self.signal(Signal::CONT)
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        Ok(kill_process(Pid::from_child(&self.server), signal)?)
    }

    /// Uploads in parts that have neither been completed nor aborted.
    ///
    /// # Errors
    /// The server's folder cannot be read.
    pub fn unfinished_uploads(&self) -> Result<usize> {
        // The protocol has a request for them, which s3rver does not know.
        match std::fs::read_dir(self.folder.path().join(BUCKET).join("._S3rver_uploads")) {
            Ok(found) => Ok(found.count()),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(0),
            Err(error) => Err(error.into()),
        }
    }

    /// Writes an object.
    ///
    /// # Errors
    /// The server does not take it.
    pub async fn put(&self, key: &str, bytes: &[u8]) -> Result<()> {
        let (status, body) = http::send(&self.address, "PUT", &format!("/{BUCKET}/{key}"), bytes).await?;
        ensure!(status == 200, "PUT {key}: {status}: {}", String::from_utf8_lossy(&body));
        Ok(())
    }

    /// The bytes of an object; `None` if there is none.
    ///
    /// # Errors
    /// The server does not answer, or fails.
    pub async fn get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        let (status, body) = http::send(&self.address, "GET", &format!("/{BUCKET}/{key}"), &[]).await?;
        ensure!(matches!(status, 200 | 404), "GET {key}: {status}");
        Ok((status == 200).then_some(body))
    }

    /// The keys that begin with a prefix, in order.
    ///
    /// # Errors
    /// The server does not answer, or fails.
    pub async fn keys(&self, prefix: &str) -> Result<Vec<String>> {
        let path = format!("/{BUCKET}?list-type=2&prefix={prefix}");
        let (status, body) = http::send(&self.address, "GET", &path, &[]).await?;
        ensure!(status == 200, "list {prefix}: {status}");
        let text = String::from_utf8(body)?;
        let keys = text.split("<Key>").skip(1).filter_map(|rest| rest.split("</Key>").next());
        Ok(keys.map(str::to_owned).collect())
    }
}

impl Drop for ObjectServer {
    fn drop(&mut self) {
        // An `Err`: it has ended.
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}
