//! Finds environment variables that begin with `VRAMQ_` and that no program reads. A program refuses those that look like a misspelt
//! setting, because it would run with a default instead; it warns of the others.

/// What the variables of all programs of vramq begin with.
const PREFIX: &str = "VRAMQ_";

/// What those of the gateway begin with. The other programs leave them to it: one environment may serve several programs.
const GATEWAY_PREFIX: &str = "VRAMQ_GATEWAY_";

/// The variables that vramq's programs read, without the prefix. Each program leaves those of the others alone; a test of each program
/// holds it to this list.
const OF_PROGRAMS: [&str; 20] = [
    "ACTION_LOG",
    "BROKER_CA",
    "BROKER_CERTIFICATE",
    "BROKER_KEY",
    "BROKER_MANAGEMENT_URL",
    "BROKER_PASSWORD_FILE",
    "BROKER_URL",
    "CONFIG",
    "FD",
    "GATEWAY_CONFIG",
    "GATEWAY_KEYS",
    "GATEWAY_LISTEN",
    "HTTP_LISTEN",
    "LOG",
    "LOG_FORMAT",
    "MEMORY_MIB",
    "MODEL",
    "READ_ONLY",
    "SCRATCH",
    "WORKER_NAME",
];

/// Variables of docker-compose.yml.
const OF_COMPOSE: [&str; 8] = [
    "AMQP_PORT",
    "GRAFANA_PORT",
    "HTTP_PORT",
    "MANAGEMENT_PORT",
    "PASSWORD",
    "PROMETHEUS_PORT",
    "RUNBOOKS",
    "USER",
];

/// What variables of the project's scripts and tests begin with.
const OF_SCRIPTS: [&str; 12] = [
    "BENCH_",
    "BROKER_SCRIPTS",
    "BROKER_SEED",
    "DEMO_",
    "GOLDEN",
    "GPU_",
    "MAINTAINER",
    "MUTANT",
    "RABBITMQ",
    "SOAK_",
    "TEST_",
    "WRITE_GOLDEN",
];

/// The errors that are allowed in the spelling of a name: one per this many letters, and always one. More would take variables of other
/// programs for misspelt ones.
const LETTERS_PER_ERROR: usize = 4;

/// What stands for the name that the user chose, in keys such as `model.NAME.path`.
pub const NAME: &str = "NAME";

/// What a program reads from the environment.
#[derive(Clone, Debug, Default)]
pub struct Vocabulary {
    /// Its variables for flags, with `VRAMQ_`.
    pub variables: Vec<String>,
    /// What the variables for its configuration keys begin with, such as `VRAMQ__`.
    pub prefix: String,
    /// The dotted keys of its configuration, with [`NAME`] for a name that the user chooses.
    pub keys: Vec<String>,
}

/// Variables that begin with `VRAMQ_` and that nothing reads.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnknownVariables {
    /// Those that look like one that the program reads, each with what was probably meant: a setting that would have no effect.
    pub misspelt: Vec<(String, String)>,
    /// All others. They may be a stranger's.
    pub unknown: Vec<String>,
}

impl UnknownVariables {
    /// Finds them in the names and values that are set.
    pub fn of(set: impl IntoIterator<Item = (String, String)>, vocabulary: &Vocabulary) -> Self {
        let mut found = Self::default();
        for (name, value) in set {
            if !name.starts_with(PREFIX) || vocabulary.reads(&name) || is_of_others(&name, &value) {
                continue;
            }
            // The gateway alone knows which of these there are.
            if name.starts_with(GATEWAY_PREFIX) && !vocabulary.prefix.starts_with(GATEWAY_PREFIX) {
                continue;
            }
            match vocabulary.meant(&name) {
                Some(meant) => found.misspelt.push((name, meant)),
                None => found.unknown.push(name),
            }
        }
        found.misspelt.sort();
        found.unknown.sort();
        found
    }
}

/// Whether one of vramq's programs reads the variable.
pub fn is_known_variable(name: &str) -> bool {
    name.strip_prefix(PREFIX).is_some_and(|name| OF_PROGRAMS.contains(&name))
}

/// Whether the variable is there for something else than the program that asks.
fn is_of_others(name: &str, value: &str) -> bool {
    let rest = name.strip_prefix(PREFIX).unwrap_or(name);
    is_known_variable(name)
        // Keys of the worker.
        || rest.starts_with('_')
        || OF_COMPOSE.contains(&rest)
        || OF_SCRIPTS.iter().any(|start| rest.starts_with(start))
        || is_of_kubernetes(name, value)
}

/// Whether Kubernetes (or a link of Docker's) made the variable for a service. With `enableServiceLinks`, which is the default, a service
/// `vramq-gateway` makes `VRAMQ_GATEWAY_SERVICE_HOST`, `VRAMQ_GATEWAY_PORT=tcp://…` and `VRAMQ_GATEWAY_PORT_80_TCP_ADDR` in every pod.
fn is_of_kubernetes(name: &str, value: &str) -> bool {
    let of_a_port = name.rsplit_once("_PORT_").is_some_and(|(_, rest)| {
        let mut parts = rest.split('_');
        let is_number = parts.next().is_some_and(|port| port.parse::<u16>().is_ok());
        is_number && parts.next().is_some_and(|protocol| ["TCP", "UDP", "SCTP"].contains(&protocol))
    });
    name.ends_with("_SERVICE_HOST")
        || name.ends_with("_SERVICE_PORT")
        || name.contains("_SERVICE_PORT_")
        || of_a_port
        // A port that a person sets is a number.
        || name.ends_with("_PORT") && ["tcp://", "udp://", "sctp://"].iter().any(|start| value.starts_with(start))
}

impl Vocabulary {
    /// Whether the program reads the variable. Whether there is a key of this name is checked where the file is.
    fn reads(&self, name: &str) -> bool {
        name.starts_with(&self.prefix) || self.variables.iter().any(|variable| variable == name)
    }

    /// The variables for configuration keys of another program that are set, each with the variable of this program for the same, if that is
    /// not set. This program ignores them.
    pub fn ignored(&self, set: &[(String, String)]) -> Vec<(String, String)> {
        let is_set = |variable: &str| set.iter().any(|(name, _)| name == variable);
        let of_keys = set.iter().map(|(name, _)| name).filter(|name| name.starts_with(&self.prefix));
        let ignored = of_keys.filter_map(|name| {
            let read = self.with_words_of(name).filter(|read| !is_set(read))?;
            Some((name.clone(), read.clone()))
        });
        ignored.collect()
    }

    /// The program's variable with the same words, whatever is between them.
    fn with_words_of(&self, name: &str) -> Option<&String> {
        let words = words(name);
        self.variables.iter().find(|variable| self::words(variable) == words)
    }

    /// What a misspelt name was probably meant to be.
    fn meant(&self, name: &str) -> Option<String> {
        if let Some(variable) = self.with_words_of(name) {
            return Some(variable.clone());
        }
        // One underscore where two belong, if the program has such keys.
        let start = self.prefix.strip_suffix('_').filter(|_| !self.keys.is_empty());
        let key = start.and_then(|start| name.strip_prefix(start));
        if let Some(key) = key.filter(|key| key.contains("__")) {
            return Some(format!("{}{key}", self.prefix));
        }
        let words =
            words(name.strip_prefix(self.prefix.trim_end_matches('_')).unwrap_or(&name[PREFIX.len()..]));
        self.keys.iter().find_map(|key| self.named_by(&words, key)).or_else(|| self.nearest(name, &words))
    }

    /// The variable for the key, if these are its words or, of two words or more, its last ones.
    fn named_by(&self, words: &str, key: &str) -> Option<String> {
        let variable = |key: &str| format!("{}{}", self.prefix, key.replace('.', "__"));
        let upper = key.to_ascii_uppercase();
        let is_end = |key: &str| {
            let is_last = |(at, _): (usize, &str)| self::words(&key[at + 1..]) == words;
            words.contains('_') && key.match_indices('.').any(is_last)
        };
        match upper.split_once(&format!(".{NAME}.")) {
            Some((table, key)) => {
                let (start, end) = (format!("{table}_"), format!("_{}", self::words(key)));
                match words.strip_prefix(&start).and_then(|rest| rest.strip_suffix(&end)) {
                    Some(name) if !name.is_empty() => Some(variable(&format!("{table}.{name}.{key}"))),
                    // Without a name.
                    _ => (words == format!("{table}{end}") || is_end(&upper[table.len() + 1..]))
                        .then(|| variable(&upper)),
                }
            }
            None => (self::words(&upper) == words || is_end(&upper)).then(|| variable(&upper)),
        }
    }

    /// The variable or key with the fewest errors, if these are few.
    fn nearest(&self, name: &str, words: &str) -> Option<String> {
        let variables = self.variables.iter().map(|known| (distance(name, known), known.clone()));
        let plain = self.keys.iter().filter(|key| !key.contains(NAME)).map(|key| key.to_ascii_uppercase());
        let keys = plain.map(|key| {
            (distance(words, &self::words(&key)), format!("{}{}", self.prefix, key.replace('.', "__")))
        });
        let (errors, nearest) = variables.chain(keys).min()?;
        let errors_max = ((name.len() - PREFIX.len()) / LETTERS_PER_ERROR).max(1);
        (errors <= errors_max).then_some(nearest)
    }
}

/// A name's or a key's words with one underscore between them.
fn words(name: &str) -> String {
    name.split(['_', '.']).filter(|word| !word.is_empty()).collect::<Vec<_>>().join("_")
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
mod tests;
