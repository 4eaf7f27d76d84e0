//! The configuration keys that a page of the documentation has. The tests of the programs compare them with the keys that the programs read.

use std::collections::BTreeSet;

/// The keys of a page's first example in TOML, as `model.NAME.path`. `NAME` stands for the names of models and stores, which the user chooses. A key
/// that is a comment there counts, too.
pub fn keys_of_page(page: &str) -> BTreeSet<String> {
    let mut table = String::new();
    let mut keys = BTreeSet::new();
    for line in page.lines().skip_while(|line| !line.starts_with("```toml")).skip(1) {
        let line = line.strip_prefix("# ").unwrap_or(line);
        if line.starts_with("```") {
            break;
        }
        if let Some((name, _)) = line.strip_prefix('[').and_then(|line| line.split_once(']')) {
            table = without_own_name(name);
        } else if let Some((key, _)) = line.split_once(" = ").filter(|(key, _)| !key.contains(' ')) {
            keys.insert(format!("{table}.{key}"));
        }
    }
    keys
}

/// `model.NAME.vram` for `model.minilm.vram`.
fn without_own_name(table: &str) -> String {
    let mut parts: Vec<_> = table.split('.').collect();
    if let ["model" | "store", name, ..] = &mut parts[..] {
        *name = "NAME";
    }
    parts.join(".")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_have_their_tables_and_no_own_names() {
        let page = "# A page\na = 1\n```toml\n[worker]\ndrain_s = 25   # seconds\n# name = \"w\"\n# This is = prose.\n\n\
                    [model.minilm]\npath = \"m\"\n[model.minilm.vram]\nbase_mib = 1\n# [store.in]\n# url = \"x\"\n```\n\
                    ```toml\nother = 1\n```\n";
        let keys = [
            "model.NAME.path",
            "model.NAME.vram.base_mib",
            "store.NAME.url",
            "worker.drain_s",
            "worker.name",
        ];
        assert_eq!(keys_of_page(page).into_iter().collect::<Vec<_>>(), keys);
    }
}
