//! Applies environment variables and flags over a configuration file, by dotted key. Worker and gateway share these rules.

use crate::environment::{UnknownVariables, Vocabulary};

/// Values that override those of a file, the strongest last, and the faults in them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Overrides {
    pub values: Vec<(String, String)>,
    /// What was given, and what is wrong with it.
    pub faults: Vec<(String, String)>,
    /// Variables that look like vramq's and that nothing reads; for the log.
    pub unknown: Vec<String>,
}

impl Overrides {
    /// Reads this process's variables. With the prefix `VRAMQ__`, `VRAMQ__BROKER__URL` sets `broker.url`, and
    /// `VRAMQ__MODEL__MiniLM__PATH` sets `model.MiniLM.path`. Misspelt variables are faults.
    pub fn of_environment(vocabulary: &Vocabulary) -> Self {
        let variables = std::env::vars_os().filter_map(|(name, value)| {
            Some((name.into_string().ok()?, value.to_string_lossy().into_owned()))
        });
        Self::of(variables.collect(), vocabulary)
    }

    fn of(variables: Vec<(String, String)>, vocabulary: &Vocabulary) -> Self {
        let unknown = UnknownVariables::of(variables.clone(), vocabulary);
        let faults = unknown
            .misspelt
            .into_iter()
            .map(|(name, meant)| (format!("variable {name}"), format!("is unknown; did you mean {meant}?")))
            .collect();
        let values = variables
            .into_iter()
            .filter_map(|(name, value)| Some((dotted(name.strip_prefix(&vocabulary.prefix)?), value)));
        Self { values: values.collect(), faults, unknown: unknown.unknown }
    }

    /// Adds the value of a flag that stands for one key, if it was given.
    pub fn flag(&mut self, key: &str, value: Option<&String>) {
        self.values.extend(value.map(|value| (key.to_owned(), value.clone())));
    }

    /// Adds a pair `NAME=VALUE` of a flag that may be repeated; `key` makes the dotted key of the name.
    pub fn pair(&mut self, flag: &str, pair: &str, key: impl FnOnce(&str) -> String) {
        match pair.split_once('=') {
            Some((name, value)) => self.values.push((key(name), value.to_owned())),
            None => self.faults.push((format!("{flag} {pair}"), "has no `=`".to_owned())),
        }
    }
}

/// The dotted key of a variable's name. Capitals stand for small letters; a part with small letters in it, such as the name of a
/// model, is taken as it is, and so is the name of a variable for a model's program (`MODEL__NAME__ENV__HF_HOME`).
fn dotted(name: &str) -> String {
    match name.split_once("__ENV__") {
        Some((model, variable)) if model.starts_with("MODEL__") => {
            format!("{}.env.{variable}", folded(model))
        }
        _ => folded(name),
    }
}

fn folded(name: &str) -> String {
    let part = |part: &str| match part.bytes().any(|letter| letter.is_ascii_lowercase()) {
        true => part.to_owned(),
        false => part.to_ascii_lowercase(),
    };
    name.split("__").map(part).collect::<Vec<_>>().join(".")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(name: &str, value: &str) -> (String, String) {
        (name.to_owned(), value.to_owned())
    }

    #[test]
    fn a_name_keeps_its_capitals_if_it_has_small_letters() {
        for (name, key) in [
            ("BROKER__URL", "broker.url"),
            ("MODEL__MINILM__PATH", "model.minilm.path"),
            ("MODEL__MiniLM__PATH", "model.MiniLM.path"),
            ("MODEL__bge_Small__SLOTS_MAX", "model.bge_Small.slots_max"),
            ("MODEL__A__b__PATH", "model.a.b.path"),
            ("MODEL__WHISPER__ENV__HF_HOME", "model.whisper.env.HF_HOME"),
            ("MODEL__WHISPER__ENV__A__B", "model.whisper.env.A__B"),
            ("STORE__ENV__URL", "store.env.url"),
        ] {
            assert_eq!(dotted(name), key, "{name}");
        }
    }

    #[test]
    fn variables_come_first_then_flags_and_what_is_wrong_is_kept() {
        let variables =
            vec![pair("VRAMQ__BROKER__URL", "a"), pair("VRAMQ_BROKER_URI", "b"), pair("HOME", "/")];
        let vocabulary = Vocabulary {
            variables: vec!["VRAMQ_BROKER_URL".to_owned()],
            prefix: "VRAMQ__".to_owned(),
            keys: Vec::new(),
        };
        let mut overrides = Overrides::of(variables, &vocabulary);
        overrides.flag("broker.url", Some(&"c".to_owned()));
        overrides.flag("broker.ca", None);
        overrides.pair("--set", "http.listen=x=y", str::to_owned);
        overrides.pair("--model", "m=folder", |name| format!("model.{name}.path"));
        overrides.pair("--set", "nothing", str::to_owned);
        let values = [
            pair("broker.url", "a"),
            pair("broker.url", "c"),
            pair("http.listen", "x=y"),
            pair("model.m.path", "folder"),
        ];
        assert_eq!(overrides.values, values);
        let faults = [
            pair("variable VRAMQ_BROKER_URI", "is unknown; did you mean VRAMQ_BROKER_URL?"),
            pair("--set nothing", "has no `=`"),
        ];
        assert_eq!(overrides.faults, faults);
    }
}
