//! Finds misspelt environment variables, so that a program refuses them instead of running with a default.

/// What the variables of all programs of vramq begin with.
const PREFIX: &str = "VRAMQ_";

/// What those of the gateway begin with. The other programs leave them alone: one environment may serve several programs.
const GATEWAY_PREFIX: &str = "VRAMQ_GATEWAY_";

/// One spelling error is allowed per this many letters, and always one. More would take variables of other programs for misspelt ones.
const LETTERS_PER_ERROR: usize = 4;

/// The variables in `set` that are none of `known` and look like one of them, each with what was probably meant. Variables that
/// begin with `keys` (such as `VRAMQ__`) are keys of the configuration file, which are checked where the file is.
pub fn misspelt(
    set: impl IntoIterator<Item = String>,
    known: &[String],
    keys: &str,
) -> Vec<(String, String)> {
    let mut found: Vec<_> = set
        .into_iter()
        .filter(|name| name.starts_with(PREFIX) && !name.starts_with(keys) && !known.contains(name))
        .filter(|name| keys.starts_with(GATEWAY_PREFIX) || !name.starts_with(GATEWAY_PREFIX))
        .filter_map(|name| meant(&name, known, keys).map(|meant| (name, meant)))
        .collect();
    found.sort();
    found
}

fn meant(name: &str, known: &[String], keys: &str) -> Option<String> {
    // One underscore where two belong.
    let key = keys.strip_suffix('_').and_then(|start| name.strip_prefix(start));
    if let Some(key) = key.filter(|key| key.contains("__")) {
        return Some(format!("{keys}{key}"));
    }
    let nearest = known.iter().map(|candidate| (distance(name, candidate), candidate)).min()?;
    let errors_max = ((name.len() - PREFIX.len()) / LETTERS_PER_ERROR).max(1);
    (nearest.0 <= errors_max).then(|| nearest.1.clone())
}

/// How many letters have to be changed, added, left out, or exchanged with their neighbour (optimal string alignment).
fn distance(a: &str, b: &str) -> usize {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    let mut before: Vec<usize> = Vec::new();
    let mut last: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut row = vec![i + 1];
        for (j, y) in b.iter().enumerate() {
            let mut least = (last[j] + usize::from(x != y)).min(last[j + 1] + 1).min(row[j] + 1);
            if i > 0 && j > 0 && *x == b[j - 1] && a[i - 1] == *y {
                least = least.min(before[j - 1] + 1);
            }
            row.push(least);
        }
        before = std::mem::replace(&mut last, row);
    }
    last[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known() -> Vec<String> {
        ["BROKER_URL", "BROKER_CA", "LOG", "LOG_FORMAT", "MEMORY_MIB"]
            .map(|name| format!("{PREFIX}{name}"))
            .into()
    }

    fn found(name: &str, keys: &str) -> Option<String> {
        let found = misspelt([name.to_owned()], &known(), keys);
        found.into_iter().next().map(|(_, meant)| meant)
    }

    #[test]
    fn a_misspelt_variable_is_found_with_what_was_meant() {
        for (name, meant) in [
            ("VRAMQ_BROKR_URL", "VRAMQ_BROKER_URL"),
            ("VRAMQ_BORKER_ULR", "VRAMQ_BROKER_URL"),
            ("VRAMQ_LOGS", "VRAMQ_LOG"),
            ("VRAMQ_MEMROY_MIB", "VRAMQ_MEMORY_MIB"),
            ("VRAMQ_DEVICE__CPU__MEMORY_MIB", "VRAMQ__DEVICE__CPU__MEMORY_MIB"),
        ] {
            assert_eq!(found(name, "VRAMQ__").as_deref(), Some(meant), "{name}");
        }
        let gateway = "VRAMQ_GATEWAY__";
        let meant = Some("VRAMQ_GATEWAY__HTTP__REQUEST_S".to_owned());
        assert_eq!(found("VRAMQ_GATEWAY_HTTP__REQUEST_S", gateway), meant);
    }

    #[test]
    fn variables_of_other_programs_are_left_alone() {
        for name in [
            "VRAMQ_BROKER_URL",
            "VRAMQ__BROKER__URL",
            "VRAMQ_USER",
            "VRAMQ_MODEL",
            "VRAMQ_FD",
            "VRAMQ_GATEWAY__HTTP__LISTEN",
            "VRAMQ_GATEWAY_CONFIG",
            "VRAMQ_TEST_AMQP_URL",
            "XVRAMQ_LOGS",
        ] {
            assert_eq!(found(name, "VRAMQ__"), None, "{name}");
        }
    }
}
