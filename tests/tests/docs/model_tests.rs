//! The tests that docs/models.md names for a family exist where it says.

use std::path::Path;

use anyhow::{Result, ensure};
use vramq_tests::programs::root;
use vramq_tests::setup::Failed;

#[test]
fn the_tests_of_every_family_exist() -> Result<(), Failed> {
    Ok(exist()?)
}

fn exist() -> Result<()> {
    let page = std::fs::read_to_string(root().join("docs/models.md"))?;
    let mut titles: Vec<&str> = Vec::new();
    let mut found = 0;
    for line in page.lines() {
        let cells: Vec<&str> = line.split('|').collect();
        if cells.len() < 3 {
            titles.clear();
        } else if titles.is_empty() {
            titles = cells;
        } else {
            let columns = titles.iter().zip(&cells);
            for (title, cell) in columns.filter(|(title, _)| title.contains("tests")) {
                found += tests_of(title, cell)?;
            }
        }
    }
    ensure!(found > 30, "the tables name {found} tests only");
    Ok(())
}

/// How many tests a cell names. Each is in a file that the cell names, or where the column's title says; `…` stands for any end.
fn tests_of(title: &str, cell: &str) -> Result<usize> {
    let places: Vec<&str> = quoted(title).chain(quoted(cell)).filter(|word| word.contains('/')).collect();
    let mut sources = String::new();
    for place in places {
        append(&root().join(place), &mut sources)?;
    }
    let tests: Vec<&str> = quoted(cell).filter(|word| word.contains('_') && !word.contains('/')).collect();
    for test in &tests {
        let is_there = match test.strip_suffix('…') {
            Some(start) => sources.contains(&format!("fn {start}")),
            None => sources.contains(&format!("fn {test}(")),
        };
        ensure!(is_there, "docs/models.md names {test}, which is not there: {title}");
    }
    Ok(tests.len())
}

/// What stands between backticks.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// The text of a file, or of all Rust files of a folder.
fn append(path: &Path, sources: &mut String) -> Result<()> {
    if path.is_dir() {
        for entry in std::fs::read_dir(path)? {
            append(&entry?.path(), sources)?;
        }
    } else if path.extension().is_some_and(|own| own == "rs") {
        sources.push_str(&std::fs::read_to_string(path)?);
    }
    Ok(())
}
