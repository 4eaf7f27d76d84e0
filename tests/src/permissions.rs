//! Reads the least permissions of each role from docs/security.md, so that tests use exactly the documented lines.

use anyhow::{Context as _, Result};

use crate::programs::root;

const PAGE: &str = "docs/security.md";
const COMMAND: &str = "rabbitmqctl set_permissions -p VHOST ";

/// Regular expressions for the names of what a user may declare, publish to and read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Permissions {
    pub configure: String,
    pub write: String,
    pub read: String,
}

/// The permissions of a role.
///
/// # Errors
/// The page has no `rabbitmqctl set_permissions` for it.
pub fn documented(role: &str) -> Result<Permissions> {
    let page = std::fs::read_to_string(root().join(PAGE))?;
    let start = format!("{COMMAND}{role} ");
    let line = page.lines().find_map(|line| line.strip_prefix(&start));
    let quoted: Vec<_> = line.unwrap_or_default().split('\'').skip(1).step_by(2).map(str::to_owned).collect();
    let [configure, write, read] = <[String; 3]>::try_from(quoted)
        .ok()
        .with_context(|| format!("{PAGE} has no line `{start}` with three patterns"))?;
    Ok(Permissions { configure, write, read })
}
