//! A program that is tried without a configuration file: which command starts it.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use toml::{Table, Value};
use vramq_inference::process::config::ITEMS_MAX_DEFAULT;
use vramq_inference::process::protocol::PASS_ITEMS_MAX;
use vramq_inference::process::{Place, ProcessConfig};

use crate::tell;

/// What runs a Python file that names no interpreter itself.
const PYTHON: &str = "python3";

/// A program, and how it is to be started.
pub(crate) struct Program {
    pub(crate) file: String,
    pub(crate) interpreter: Option<String>,
    pub(crate) variables: Vec<(String, String)>,
    pub(crate) arguments: Vec<String>,
}

/// Whether a file is a program, and not a worker's configuration.
pub(crate) fn is_program(file: &str) -> bool {
    let file = Path::new(file);
    match file.extension().and_then(OsStr::to_str) {
        Some("toml") => false,
        Some("py") => true,
        // On some file systems all files are executable.
        _ => is_executable(file) && (begins_with(file, b"#!") || begins_with(file, b"\x7fELF")),
    }
}

/// The configuration that a worker would have for it, with passes of up to `batch` items; or all that is wrong.
pub(crate) fn read(program: &Program, batch: usize) -> Result<ProcessConfig, Vec<String>> {
    let file =
        std::path::absolute(&program.file).map_err(|error| vec![format!("{}: {error}", program.file)])?;
    if let Err(error) = file.metadata() {
        return Err(vec![format!("read {}: {error}", program.file)]);
    }
    let mut command = interpreter(program, &file).map_err(|fault| vec![fault])?;
    command.push(file.display().to_string());
    command.extend(program.arguments.iter().cloned());
    let name = file.file_stem().unwrap_or_default().to_string_lossy();
    let folder = file.parent().map_or_else(|| PathBuf::from("/"), Path::to_owned);
    let env = program.variables.iter().map(|(name, value)| (name.clone(), Value::from(value.clone())));
    let items_max = batch.clamp(ITEMS_MAX_DEFAULT, PASS_ITEMS_MAX);
    let mut table = Table::from_iter([
        ("command".to_owned(), Value::from(command)),
        ("folder".to_owned(), Value::from(folder.display().to_string())),
        ("items_max".to_owned(), Value::Integer(i64::try_from(items_max).unwrap_or(i64::MAX))),
    ]);
    if !program.variables.is_empty() {
        table.insert("env".to_owned(), Value::Table(env.collect()));
    }
    tell(format_args!("a worker serves it with this configuration:\n{}", configuration(&name, &table)));
    let place = Place { folder, scratch: std::env::temp_dir() };
    ProcessConfig::read(&name, table, &place)
        .map_err(|faults| faults.iter().map(|fault| format!("{}: {fault}", program.file)).collect())
}

/// The model's table in a worker's configuration.
fn configuration(name: &str, table: &Table) -> String {
    let mut model = table.clone();
    model.insert("engine".to_owned(), Value::from("process"));
    let models = Table::from_iter([(name.to_owned(), Value::Table(model))]);
    Table::from_iter([("model".to_owned(), Value::Table(models))]).to_string()
}

/// What runs the file: the interpreter that was asked for, none if it is executable, or else Python.
fn interpreter(program: &Program, file: &Path) -> Result<Vec<String>, String> {
    let is_python = file.extension() == Some(OsStr::new("py"));
    let wanted = match &program.interpreter {
        Some(interpreter) if interpreter.contains('/') => {
            let path = std::path::absolute(interpreter).map_err(|error| format!("{interpreter}: {error}"))?;
            return Ok(vec![path.display().to_string()]);
        }
        Some(interpreter) => interpreter,
        // A Python file may be executable only because its file system makes all files so.
        None if is_executable(file) && (!is_python || begins_with(file, b"#!")) => return Ok(Vec::new()),
        None if is_python => PYTHON,
        None => return Err(format!("{} is neither executable nor a Python file", program.file)),
    };
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let found =
        std::env::split_paths(&folders).map(|folder| folder.join(wanted)).find(|path| is_executable(path));
    let found = found.and_then(|path| std::path::absolute(path).ok());
    let path =
        found.ok_or_else(|| format!("`{wanted}` is not in PATH: name an interpreter by --python PATH"))?;
    Ok(vec![path.display().to_string()])
}

fn is_executable(file: &Path) -> bool {
    file.metadata().is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
}

fn begins_with<const N: usize>(file: &Path, magic: &[u8; N]) -> bool {
    let mut start = [0; N];
    File::open(file).and_then(|mut file| file.read_exact(&mut start)).is_ok() && start == *magic
}
