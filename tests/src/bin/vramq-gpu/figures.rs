//! Figures for programs to read, beside the tables for people.

use std::io::Write as _;

use anyhow::{Context as _, Result};
use serde_json::Value;

/// Adds a figure to the file that `VRAMQ_GPU_FIGURES` names, if it does: one JSON object a line.
pub fn put(figure: &Value) -> Result<()> {
    let Some(path) = std::env::var_os("VRAMQ_GPU_FIGURES") else { return Ok(()) };
    let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
    writeln!(file.context("open the file of figures")?, "{figure}").context("write a figure")
}
