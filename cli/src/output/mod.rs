//! What commands print: text without control characters, tables, and progress.

pub(crate) mod progress;
pub(crate) mod text;
