//! Notices when the files that count for a one-shot program's revision are exchanged while a worker serves it.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::Mutex;
use tokio::task::{JoinHandle, spawn_blocking};

use super::config::ProcessConfig;
use super::program_revision::CountedFile;
use crate::revision::ContentDigest;

/// The revision that a worker serves, and the files that it was computed from.
#[derive(Debug)]
pub(super) struct RevisionWatch {
    served: String,
    /// Locked while the files are looked at, also if the caller left meanwhile: a file system that hangs holds one thread only.
    seen: Arc<Mutex<Seen>>,
    running: Arc<AtomicUsize>,
}

/// Another revision than the one that the worker serves.
#[derive(Debug)]
pub(super) struct Exchange {
    pub(super) found: String,
    /// The files whose content is another one.
    pub(super) files: Vec<PathBuf>,
}

/// A program of the model may run, and write files. Dropped when it has ended.
#[derive(Debug)]
pub(super) struct Running(Arc<AtomicUsize>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl RevisionWatch {
    /// Reads all files.
    ///
    /// # Errors
    /// One of `revision_files` cannot be read, with its name.
    pub(super) async fn start(config: &ProcessConfig) -> Result<Self, String> {
        let config = config.clone();
        let read = spawn_blocking(move || Seen::start(config));
        let seen = read.await.unwrap_or_else(|error| Err(error.to_string()))?;
        Ok(Self { served: seen.revision(), seen: Arc::new(Mutex::new(seen)), running: Arc::default() })
    }

    /// The revision that the worker serves.
    pub(super) fn revision(&self) -> &str {
        &self.served
    }

    /// What the files are by now, if that is another revision. Reads those that changed; one caller does, and others wait. Cancel-safe.
    ///
    /// # Errors
    /// A file that counted is gone, or cannot be read.
    pub(super) async fn other(&self) -> Result<Option<Exchange>, String> {
        let mut seen = Arc::clone(&self.seen).lock_owned().await;
        let running = Arc::clone(&self.running);
        let looked = spawn_blocking(move || {
            let is_running = running.load(Ordering::SeqCst) > 0;
            seen.look(is_running).map(|_| Exchange { found: seen.revision(), files: seen.exchanged() })
        });
        let exchange = looked.await.unwrap_or_else(|error| Err(error.to_string()))?;
        Ok((exchange.found != self.served).then_some(exchange))
    }

    /// To be called before a program is started.
    pub(super) fn running(&self) -> Running {
        self.running.fetch_add(1, Ordering::SeqCst);
        Running(Arc::clone(&self.running))
    }

    /// To be called when a program has ended, before that is told: finds the arguments that it wrote. Begins at once, and goes on if nobody
    /// waits for it.
    pub(super) fn ended(&self, running: Running) -> JoinHandle<()> {
        let seen = Arc::clone(&self.seen);
        tokio::spawn(async move {
            let mut seen = seen.lock_owned().await;
            // An `Err` is a panic, which was logged.
            let _ = spawn_blocking(move || {
                seen.leave_out_written();
                drop(running);
            })
            .await;
        })
    }
}

/// The files when they were last read.
#[derive(Debug)]
struct Seen {
    config: ProcessConfig,
    files: Vec<Seeing>,
}

/// A file when it was last read.
#[derive(Debug)]
struct Seeing {
    file: CountedFile,
    stamp: Option<Stamp>,
    content: Option<ContentDigest>,
    /// The content when the worker started.
    served: Option<ContentDigest>,
    role: Role,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// One of `revision_files`, or the script: the first argument that names a file.
    Program,
    /// Another argument: a file of the program, or one that the program writes.
    Unknown,
    /// An argument that the program writes. What it contained at first counts.
    Written,
}

/// What changes with a file: a rename changes the inode, a write the times. The time of change of the inode shows a write whose time was set
/// back, as by `cp -p`.
#[derive(Debug, PartialEq, Eq)]
struct Stamp {
    inode: (u64, u64),
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl From<Metadata> for Stamp {
    fn from(file: Metadata) -> Self {
        Self {
            inode: (file.dev(), file.ino()),
            size: file.size(),
            modified: (file.mtime(), file.mtime_nsec()),
            changed: (file.ctime(), file.ctime_nsec()),
        }
    }
}

impl Seen {
    fn start(config: ProcessConfig) -> Result<Self, String> {
        let files: Result<Vec<_>, String> = config.counted_files().into_iter().map(Seeing::start).collect();
        let mut files = files?;
        if let Some(script) = files.iter_mut().find(|seeing| seeing.stamp.is_some()) {
            script.role = Role::Program;
        }
        Ok(Self { config, files })
    }

    fn revision(&self) -> String {
        let contents: Vec<_> = self.files.iter().map(|seeing| seeing.content).collect();
        self.config.revision_of(&contents).with(None)
    }

    /// The files that have another content than when the worker started.
    fn exchanged(&self) -> Vec<PathBuf> {
        let files = self.files.iter().filter(|seeing| seeing.content != seeing.served);
        files.map(|seeing| seeing.file.path.clone()).collect()
    }

    /// Reads the files that changed; how many.
    fn look(&mut self, is_running: bool) -> Result<usize, String> {
        if is_running {
            self.leave_out_written();
        }
        let mut read = 0;
        for seeing in &mut self.files {
            read += usize::from(seeing.look()?);
        }
        Ok(read)
    }

    /// An argument that changed while a program ran is one that the program writes. Otherwise each item would be followed by a restart.
    fn leave_out_written(&mut self) {
        for seeing in self.files.iter_mut().filter(|seeing| seeing.role == Role::Unknown) {
            if seeing.now().ok().flatten() != seeing.stamp {
                seeing.role = Role::Written;
                tracing::warn!(
                    model = self.config.name,
                    file = %seeing.file.path.display(),
                    "a file that the command names changed while the program ran: it is not watched any more; list a file of the program \
                     in revision_files"
                );
            }
        }
    }
}

impl Seeing {
    fn start(file: CountedFile) -> Result<Self, String> {
        let role = if file.is_named { Role::Program } else { Role::Unknown };
        // From before the file is read, so that a change meanwhile is seen the next time.
        let stamp = file.metadata().unwrap_or_default().map(Stamp::from);
        let content = file.read()?;
        Ok(Self { file, stamp, content, served: content, role })
    }

    /// What the file has now; `None`: it does not count.
    fn now(&self) -> Result<Option<Stamp>, String> {
        match self.file.metadata() {
            Ok(found) => Ok(found.map(Stamp::from)),
            // An argument that never was a file.
            Err(_) if self.stamp.is_none() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Reads it if it changed; whether it did. A file that is gone is an error and no other revision: it may just be exchanged by `rm`
    /// and `cp`.
    fn look(&mut self) -> Result<bool, String> {
        if self.role == Role::Written {
            return Ok(false);
        }
        let stamp = self.now()?;
        if stamp == self.stamp {
            return Ok(false);
        }
        self.content = match stamp.as_ref().map(|_| self.file.content()).transpose() {
            // An argument that the worker could not read before, either.
            Err(_) if self.content.is_none() => None,
            content => content?,
        };
        self.stamp = stamp;
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::process::config::Place;

    /// Of a script, a file, a folder, an argument that is no file, and one of `revision_files`.
    fn seen(folder: &Path) -> Seen {
        for name in ["script", "file", "named"] {
            std::fs::write(folder.join(name), name).unwrap();
        }
        std::fs::create_dir(folder.join("folder")).unwrap();
        let table = "command = [\"/bin/sh\", \"script\", \"file\", \"folder\", \"\", \"{input}\"]\nmode = \"once\"\n\
                     revision_files = [\"named\"]";
        let place = Place { folder: folder.to_owned(), scratch: folder.to_owned() };
        Seen::start(ProcessConfig::read("m", table.parse().unwrap(), &place).unwrap()).unwrap()
    }

    #[test]
    fn only_files_that_changed_are_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let mut seen = seen(folder.path());
        let served = seen.revision();
        assert_eq!(seen.look(false), Ok(0));
        // Folders do not count, whatever happens in them.
        std::fs::write(folder.path().join("folder/new"), "").unwrap();
        std::fs::write(folder.path().join("new"), "").unwrap();
        assert_eq!(seen.look(false), Ok(0));
        for name in ["script", "file", "named"] {
            let path = folder.path().join(name);
            // Of another length: on kernels with a coarse clock two writes may have the same time.
            std::fs::write(&path, "another").unwrap();
            assert_eq!((seen.look(false), seen.look(false)), (Ok(1), Ok(0)), "{name}");
            assert_ne!(seen.revision(), served, "{name}");
            assert_eq!(seen.exchanged(), std::slice::from_ref(&path));
            std::fs::write(&path, name).unwrap();
            assert_eq!((seen.look(false), seen.revision()), (Ok(1), served.clone()), "{name}");
            assert!(seen.exchanged().is_empty());
        }
    }

    #[test]
    fn an_argument_that_is_too_large_for_a_script_is_not_watched() {
        let folder = tempfile::tempdir().unwrap();
        let mut seen = seen(folder.path());
        let file = std::fs::File::options().write(true).open(folder.path().join("file")).unwrap();
        file.set_len(17 << 20).unwrap();
        assert_eq!(seen.look(false), Ok(1));
        let without = seen.revision();
        file.set_len(18 << 20).unwrap();
        assert_eq!((seen.look(false), seen.revision()), (Ok(0), without));
    }

    #[test]
    fn a_file_that_is_gone_is_no_other_revision() {
        let folder = tempfile::tempdir().unwrap();
        let mut seen = seen(folder.path());
        let served = seen.revision();
        for name in ["script", "file", "named"] {
            let path = folder.path().join(name);
            std::fs::remove_file(&path).unwrap();
            let error = seen.look(false).unwrap_err();
            assert!(error.contains(path.to_str().unwrap()) && error.contains("No such file"), "{error}");
            std::fs::write(&path, name).unwrap();
            assert!(seen.look(false).is_ok(), "{name}");
            assert_eq!(seen.revision(), served, "{name}");
        }
    }

    /// As of a job that is cancelled when its program has ended.
    #[tokio::test]
    async fn files_written_by_a_program_are_found_although_no_caller_waits() {
        let folder = tempfile::tempdir().unwrap();
        let seen = seen(folder.path());
        let watch = RevisionWatch {
            served: seen.revision(),
            seen: Arc::new(Mutex::new(seen)),
            running: Arc::default(),
        };
        let running = watch.running();
        std::fs::write(folder.path().join("file"), "written").unwrap();
        drop(watch.ended(running));
        assert!(watch.other().await.unwrap().is_none());
        assert!(watch.other().await.unwrap().is_none(), "it is not watched any more");
    }

    #[test]
    fn an_argument_that_the_program_writes_is_left_out() {
        let folder = tempfile::tempdir().unwrap();
        let mut seen = seen(folder.path());
        let served = seen.revision();
        // Another length, too: older kernels give a write so soon after another one the same time.
        let write = |name: &str| std::fs::write(folder.path().join(name), "another").unwrap();
        write("file");
        assert_eq!((seen.look(true), seen.revision()), (Ok(0), served.clone()));
        std::fs::remove_file(folder.path().join("file")).unwrap();
        assert_eq!((seen.look(false), seen.revision()), (Ok(0), served.clone()));
        // The script and `revision_files` are the program, whenever they change.
        write("script");
        assert_eq!(seen.look(true), Ok(1));
        write("named");
        assert_eq!(seen.look(true), Ok(1));
        assert_ne!(seen.revision(), served);
    }
}
