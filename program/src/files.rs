//! Reads the files that a configuration names, and says what is wrong with them in words that say what to do.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use rustix::fs::{Access, OFlags, access, fcntl_setfl, open, statfs};

/// The longest file of a configuration: a hundred models take some 100 KiB. Bounds what a wrong path makes a program read.
const FILE_BYTES_MAX: u64 = 4 * 1024 * 1024;

/// The types of file systems in which nobody makes files: `/proc` and `/sys`.
const NO_NEW_FILES: [u64; 2] = [0x9fa0, 0x6265_6572];

/// Reads a text file once. It may be a pipe, as of `--config <(decrypt worker.toml)`.
///
/// # Errors
/// What is wrong with the file, without its name.
pub fn read_text(file: &Path) -> Result<String, String> {
    let unreadable = |error: io::Error| format!("cannot be read: {error}");
    // Without `NONBLOCK`, opening a pipe waits until somebody writes to it.
    let opened = open(file, OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK, rustix::fs::Mode::empty());
    let opened = File::from(opened.map_err(|error| unreadable(error.into()))?);
    fcntl_setfl(&opened, OFlags::empty()).map_err(|error| unreadable(error.into()))?;
    let metadata = opened.metadata().map_err(unreadable)?;
    if metadata.is_dir() {
        return Err("is a folder: name a file".to_owned());
    }
    let mut bytes = Vec::new();
    opened.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(format!("has more than {FILE_BYTES_MAX} bytes: name another file"));
    }
    if bytes.is_empty() && !metadata.is_file() {
        return Err(
            "is empty, and no regular file: name a file, or a pipe that a program writes to".to_owned()
        );
    }
    String::from_utf8(bytes).map_err(|_| "is no text in UTF-8: name another file".to_owned())
}

/// Reads a text file that is read again later, and so is no pipe.
///
/// # Errors
/// As for [`read_text`].
pub fn read_lasting_text(file: &Path) -> Result<String, String> {
    match std::fs::metadata(file) {
        Ok(metadata) if !metadata.is_file() && !metadata.is_dir() => {
            Err("is no regular file, and is read more than once: name a file".to_owned())
        }
        _ => read_text(file),
    }
}

/// Why no folder can be at this path, although one may be missing; `None` if one can.
pub fn no_folder(path: &Path) -> Option<String> {
    let nearest = nearest(path)?;
    (!nearest.is_dir())
        .then(|| format!("cannot be a folder, because {} is a file: name another folder", nearest.display()))
}

/// Why this user cannot write to a folder, or make it; `None` if it can.
pub fn no_folder_to_write(path: &Path) -> Option<String> {
    no_folder(path).or_else(|| {
        let nearest = nearest(path)?;
        // root may write to the kernel's own file systems, and yet make no files there.
        if statfs(&*nearest).is_ok_and(|of| NO_NEW_FILES.contains(&(of.f_type as u64))) {
            return Some(format!(
                "cannot be written to: {} has files of the kernel only: name another folder",
                nearest.display()
            ));
        }
        let error = access(&*nearest, Access::WRITE_OK | Access::EXEC_OK).err()?;
        let error = io::Error::from(error);
        Some(format!("cannot be written to: {}: {error}: name another folder", nearest.display()))
    })
}

/// What there is of a path: itself, or the nearest of its parents.
fn nearest(path: &Path) -> Option<PathBuf> {
    let path = std::path::absolute(path).ok()?;
    path.ancestors().find(|known| known.exists()).map(Path::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_no_text_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::write(at("text"), "a = 1").unwrap();
        assert_eq!(read_text(&at("text")).as_deref(), Ok("a = 1"));
        std::fs::write(at("empty"), "").unwrap();
        assert_eq!(read_text(&at("empty")).as_deref(), Ok(""));
        std::fs::write(at("bytes"), b"\xff").unwrap();
        rustix::fs::mkfifoat(rustix::fs::CWD, at("pipe"), rustix::fs::Mode::RWXU).unwrap();
        for (name, words) in [
            ("nowhere", "cannot be read: No such file"),
            (".", "is a folder"),
            ("bytes", "no text in UTF-8"),
            ("pipe", "no regular file"),
            ("/dev/zero", "has more than"),
        ] {
            let fault = read_text(&at(name)).unwrap_err();
            assert!(fault.contains(words), "{name}: {fault}");
        }
        let written = std::thread::spawn({
            let pipe = at("pipe");
            move || std::fs::write(pipe, "b = 2")
        });
        let text = loop {
            match read_text(&at("pipe")) {
                Ok(text) => break text,
                Err(_) => std::thread::yield_now(),
            }
        };
        assert_eq!(text, "b = 2");
        written.join().unwrap().unwrap();
        assert!(read_lasting_text(&at("pipe")).unwrap_err().contains("no regular file"));
    }

    #[test]
    fn a_folder_may_be_missing_and_not_be_a_file_nor_below_one() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, "").unwrap();
        assert_eq!(no_folder_to_write(folder.path()), None);
        assert_eq!(no_folder_to_write(&folder.path().join("new/below")), None);
        for path in [file.clone(), file.join("below")] {
            let fault = no_folder_to_write(&path).unwrap();
            assert!(fault.contains(&format!("{} is a file", file.display())), "{fault}");
        }
        let fault = no_folder_to_write(Path::new("/proc/new/below")).unwrap();
        assert!(fault.contains("/proc has files of the kernel only"), "{fault}");
    }
}
