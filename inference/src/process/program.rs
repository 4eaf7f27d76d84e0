//! Whether a program can be started, as far as its files show: the program itself, and the interpreter that a script names.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Read as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

/// Bytes of a script that Linux reads to find its interpreter (`BINPRM_BUF_SIZE`).
const FIRST_LINE_BYTES_MAX: u64 = 256;

/// Why the program cannot be started.
pub(super) fn fault(program: &Path) -> Option<String> {
    match is_executable(program) {
        Err(error) => return Some(format!("the program {program:?} cannot be used: {error}")),
        Ok(false) => return Some(format!("{program:?} is not an executable file")),
        Ok(true) => {}
    }
    let interpreter = interpreter(program)?;
    let what = match is_executable(&interpreter) {
        Err(error) => error.to_string(),
        Ok(false) => "it is not an executable file".to_owned(),
        Ok(true) => return None,
    };
    Some(format!(
        "the script {program:?} needs the interpreter {interpreter:?}, which cannot be used: {what}"
    ))
}

fn is_executable(file: &Path) -> std::io::Result<bool> {
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
            let fault = fault_of(text).unwrap();
            let named = format!("needs the interpreter {interpreter}, which cannot be used: ");
            assert!(fault.contains(&named), "{fault}");
        }
    }
}
