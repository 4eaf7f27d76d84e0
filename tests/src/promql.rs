//! Finds the metrics and labels in a PromQL query. Prometheus itself checks that the query is valid.

/// What all metrics of workers, of RabbitMQ and of Prometheus itself that are asked for begin with.
const PREFIXES: [&str; 5] = ["vramq_", "rabbitmq_", "process_", "up", "ALERTS"];

/// The selectors in a query, without ranges and offsets: `name` or `name{label="value"}`.
pub fn selectors(query: &str) -> Vec<String> {
    let mut selectors = Vec::new();
    let mut rest = query;
    while let Some(start) = rest.find(|c: char| c.is_ascii_alphabetic() || c == '_' || c == '"') {
        rest = &rest[start..];
        if rest.starts_with('"') {
            rest = &rest[end_of_string(rest)..];
            continue;
        }
        let end =
            rest.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == ':')).unwrap_or(rest.len());
        let (name, after) = rest.split_at(end);
        let is_metric = PREFIXES.iter().any(|prefix| match prefix.strip_suffix('_') {
            Some(_) => name.starts_with(prefix),
            None => name == *prefix,
        });
        let matchers = if after.starts_with('{') { &after[..end_of_braces(after)] } else { "" };
        if is_metric {
            selectors.push(format!("{name}{matchers}"));
        }
        rest = &after[matchers.len()..];
    }
    selectors
}

/// Labels that results are grouped by: those after `by`, `without` and `on`.
pub fn grouped_by(query: &str) -> Vec<String> {
    let mut labels = Vec::new();
    let mut words = query;
    while let Some((before, after)) = words.split_once('(') {
        let word = before.trim_end().rsplit(|c: char| !c.is_ascii_alphabetic()).next().unwrap_or("");
        if matches!(word, "by" | "without" | "on")
            && let Some((list, _)) = after.split_once(')')
        {
            labels.extend(
                list.split(',').map(|label| label.trim().to_owned()).filter(|label| !label.is_empty()),
            );
        }
        words = after;
    }
    labels
}

fn end_of_string(text: &str) -> usize {
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            '"' if !escaped => return at + 1,
            '\\' => escaped = !escaped,
            _ => escaped = false,
        }
    }
    text.len()
}

fn end_of_braces(text: &str) -> usize {
    let mut at = 0;
    while let Some(next) = text[at..].find(['"', '}']) {
        at += next;
        if text[at..].starts_with('}') {
            return at + 1;
        }
        at += end_of_string(&text[at..]);
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_query_asks_for() {
        let query = r#"sum by (le, model) (rate(vramq_a_bucket{model=~"x}\"|y", b!="up"}[5m])) / on (model) up
            and min_over_time(rabbitmq_b[30m] offset 5m) > 1 or label_replace(vramq_c, "up", "$1", "up", "(.*)")"#;
        assert_eq!(
            selectors(query),
            [r#"vramq_a_bucket{model=~"x}\"|y", b!="up"}"#, "up", "rabbitmq_b", "vramq_c"]
        );
        assert_eq!(grouped_by(query), ["le", "model", "model"]);
        assert_eq!(selectors("upper + ups + vector(0)"), [""; 0]);
    }
}
