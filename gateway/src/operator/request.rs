//! The request for an action: which dead letters, and whether they are only to be counted.

use serde::Deserialize;
use vramq_dlq::plan::Query;
use vramq_dlq::select::{Filter, Name};

use crate::broker::dead_letters::SHOWN_MAX;
use crate::problem::Problem;

/// The most letters of one action: its plan is in memory, and its request waits. For more, repeat the action or use `vramq dlq`.
const ACTION_LETTERS_MAX: u64 = 10_000;

/// Letters that one action may name: as many as the page shows.
const NAMES_MAX: usize = SHOWN_MAX;

/// Which dead letters.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ActionRequest {
    pub model: String,
    /// Fingerprints of the selected letters.
    #[serde(default)]
    pub fingerprints: Vec<String>,
    /// The letters of one group, `REASON/MODEL/VERSION`.
    pub group: Option<String>,
    /// Selects only the oldest letters, at most this many.
    pub first: Option<u64>,
    /// The number of letters in the plan that the operator saw. Without it the action is only planned.
    pub confirm: Option<u64>,
}

impl ActionRequest {
    /// # Errors
    /// Nothing is selected, or too much.
    pub(super) fn query(&self) -> Result<Query, Problem> {
        let invalid =
            |message: &str, param: &'static str| Err(Problem::invalid(message.to_owned()).about(param));
        vramq_schemas::topology::check_model_name(&self.model)
            .map_err(|e| Problem::invalid(e.to_string()).about("model"))?;
        if self.fingerprints.is_empty() && self.group.is_none() {
            return invalid("select dead letters: `fingerprints`, or a `group`", "fingerprints");
        }
        if self.fingerprints.len() > NAMES_MAX {
            let message = format!("at most {NAMES_MAX} dead letters can be named: select a `group`");
            return invalid(&message, "fingerprints");
        }
        let is_fingerprint = |text: &String| {
            (6..=32).contains(&text.len()) && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
        };
        if !self.fingerprints.iter().all(is_fingerprint) {
            return invalid("a fingerprint has 6 to 32 hexadecimal digits", "fingerprints");
        }
        Ok(Query {
            names: self.fingerprints.iter().map(|digits| Name { text: format!("fp:{digits}") }).collect(),
            filter: Filter { group: self.group.clone(), ..Filter::default() },
            first: Some(self.first.unwrap_or(u64::MAX).min(ACTION_LETTERS_MAX)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(fingerprints: &[&str], group: Option<&str>) -> ActionRequest {
        ActionRequest {
            model: "m".to_owned(),
            fingerprints: fingerprints.iter().map(|digits| (*digits).to_owned()).collect(),
            group: group.map(str::to_owned),
            first: None,
            confirm: None,
        }
    }

    #[test]
    fn an_action_names_its_letters() {
        assert_eq!(request(&[], Some("expired/m/1")).query().unwrap().filter.group.unwrap(), "expired/m/1");
        let named = request(&["0123456789"], None).query().unwrap();
        assert_eq!((named.names[0].text.as_str(), named.first), ("fp:0123456789", Some(ACTION_LETTERS_MAX)));
        for wrong in [request(&[], None), request(&["xyzxyz"], None), request(&["01234"], None)] {
            assert_eq!(wrong.query().unwrap_err().status, 400);
        }
        assert_eq!(request(&["0123456789"; NAMES_MAX + 1], None).query().unwrap_err().status, 400);
    }
}
