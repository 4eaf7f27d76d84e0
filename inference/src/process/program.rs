//! Whether a program can be started, as far as its files show: the program itself, and the interpreter that a script names.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

/// Bytes of a script that Linux reads to find its interpreter (`BINPRM_BUF_SIZE`).
const FIRST_LINE_BYTES_MAX: u64 = 256;

/// Why a program cannot be started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Unusable {
    pub what: String,
    /// Whether the program, or its interpreter, does not exist on this machine.
    pub is_absent: bool,
}

/// Why the program cannot be started.
pub(super) fn fault(program: &Path) -> Option<Unusable> {
    let unusable = |what, is_absent| Some(Unusable { what, is_absent });
    match is_executable(program) {
        Err(error) => {
            return unusable(format!("the program {program:?} cannot be used: {error}"), is_absent(&error));
        }
        Ok(false) => return unusable(format!("{program:?} is not an executable file"), false),
        Ok(true) => {}
    }
    let interpreter = interpreter(program)?;
    let (what, is_absent) = match is_executable(&interpreter) {
        Err(error) => (error.to_string(), is_absent(&error)),
        Ok(false) => ("it is not an executable file".to_owned(), false),
        Ok(true) => return None,
    };
    let what =
        format!("the script {program:?} needs the interpreter {interpreter:?}, which cannot be used: {what}");
    unusable(what, is_absent)
}

fn is_absent(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound
}

fn is_executable(file: &Path) -> io::Result<bool> {
    let metadata = file.metadata()?;
    Ok(metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
}

/// The absolute path that the first line of a script names.
fn interpreter(program: &Path) -> Option<PathBuf> {
    let mut start = Vec::new();
    File::open(program).ok()?.take(FIRST_LINE_BYTES_MAX).read_to_end(&mut start).ok()?;
    let line = start.strip_prefix(b"#!")?.split(|byte| *byte == b'\n').next()?;
    let mut words = line.split(|byte| matches!(byte, b' ' | b'\t')).filter(|word| !word.is_empty());
    Some(PathBuf::from(OsStr::from_bytes(words.next()?))).filter(|path| path.is_absolute())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::Permissions;

    #[test]
    fn a_script_needs_its_interpreter() {
        let folder = tempfile::tempdir().unwrap();
        let script = folder.path().join("script");
        let fault_of = |text: &str| {
            std::fs::write(&script, text).unwrap();
            std::fs::set_permissions(&script, Permissions::from_mode(0o700)).unwrap();
            fault(&script)
        };
        for text in
            ["#!/bin/sh", "#! /bin/sh -e\ntrue", "#!\t/usr/bin/env python3\n", "", "#!", "#!relative\n"]
        {
            assert_eq!(fault_of(text), None, "{text:?}");
        }
        for (text, interpreter) in [
            ("#!/no/such/interpreter -x\n", "\"/no/such/interpreter\""),
            // Written by an editor on Windows.
            ("#!/bin/sh\r\ntrue\r\n", "\"/bin/sh\\r\""),
            ("#!/etc/passwd\n", "\"/etc/passwd\""),
        ] {
            let Unusable { what: fault, is_absent } = fault_of(text).unwrap();
            assert_eq!(is_absent, interpreter != "\"/etc/passwd\"", "{fault}");
            let named = format!("needs the interpreter {interpreter}, which cannot be used: ");
            assert!(fault.contains(&named), "{fault}");
        }
    }
}
