//! The queues that a model's jobs come from: its own, and those that `queues` names, with their weights.

use std::num::NonZeroU32;

use toml::Value;
use vramq_core::settings::QueueFacts;
use vramq_schemas::topology::jobs_queue;

use super::ModelConfig;
use super::read::WEIGHT_MAX;
use super::section::{FromValue, Section, whole};

const KEY: &str = "queues";

/// The most queues of a model. Each takes at least one slot, and is counted every second.
const QUEUES_MAX: usize = 8;

/// AMQP's short string.
const NAME_BYTES_MAX: usize = 255;

/// Names that start with this belong to vramq; those with the next, to RabbitMQ.
const OURS: &str = "vramq.";
const BROKERS: &str = "amq.";

/// Queues with their weights in the order of the configuration; `None` if a weight is not a number.
struct Weights(Vec<(String, Option<u32>)>);

impl FromValue for Weights {
    const EXPECTED: &'static str =
        "a table of queues with their weights, { \"NAME\" = 1 }, or a text, NAME=1,OTHER=2";

    fn from_value(value: Value) -> Option<Self> {
        match value {
            Value::Table(table) => {
                Some(Self(table.into_iter().map(|(name, weight)| (name, whole(&weight))).collect()))
            }
            Value::String(text) => {
                let pair = |part: &str| {
                    let (name, weight) = part.rsplit_once('=')?;
                    Some((name.trim().to_owned(), weight.trim().parse().ok()))
                };
                text.split(',').map(pair).collect::<Option<_>>().map(Self)
            }
            _ => None,
        }
    }
}

/// Reads a model's `queues`. The model's own queue always comes first, even if it is not named, because it receives all jobs that are tried
/// again.
pub(super) fn queues(section: &mut Section, key: &str) -> Vec<QueueFacts> {
    let mut queues = vec![QueueFacts::own(key)];
    let Some(Weights(named)) = section.take(KEY) else { return queues };
    let mut seen = Vec::with_capacity(named.len());
    for (name, weight) in named {
        if let Some(what) = name_fault(&name, key) {
            section.fault(KEY, format!("names `{name}`, {what}"));
        }
        if seen.contains(&name) {
            section.fault(KEY, format!("names `{name}` twice"));
        }
        let weight = weight.filter(|weight| (1..=WEIGHT_MAX).contains(weight)).and_then(NonZeroU32::new);
        if weight.is_none() {
            section.fault(KEY, format!("gives `{name}` a weight that is not from 1 to {WEIGHT_MAX}"));
        }
        let weight = weight.unwrap_or(NonZeroU32::MIN);
        match name == queues[0].name {
            true => queues[0].weight = weight,
            false => queues.push(QueueFacts { name: name.clone(), weight }),
        }
        seen.push(name);
    }
    if queues.len() > QUEUES_MAX {
        let count = queues.len();
        section.fault(
            KEY,
            format!("makes {count} queues, the model's own included; a model has at most {QUEUES_MAX}"),
        );
    }
    queues
}

/// Why a queue cannot be a job queue of the model with this routing key, if it cannot.
fn name_fault(name: &str, key: &str) -> Option<String> {
    if name.is_empty() || name.len() > NAME_BYTES_MAX {
        return Some(format!("which must have 1 to {NAME_BYTES_MAX} bytes"));
    }
    if name.starts_with(OURS) && name != jobs_queue(key) {
        let own = jobs_queue(key);
        return Some(format!(
            "which is reserved: of the names that begin with `{OURS}` only the model's own, `{own}`, is allowed"
        ));
    }
    name.starts_with(BROKERS)
        .then(|| format!("which is reserved: names that begin with `{BROKERS}` are RabbitMQ's"))
}

/// Reports queues with two uses: jobs of two models, or both jobs and replies.
pub(super) fn check_models(root: &Section, models: &[ModelConfig]) {
    for (at, model) in models.iter().enumerate() {
        if let Some(other) = models[..at].iter().find(|other| other.key == model.key) {
            let (key, other) = (&model.key, &other.name);
            let what = format!(
                "is `{key}`, the key of the model `{other}`, too: each would take the other's jobs and dead-letter them"
            );
            root.fault(&format!("model.{}.key", model.name), what);
        }
        for queue in further(model) {
            let fault = |what: String| root.fault(&format!("model.{}.{KEY}", model.name), what);
            let is_theirs = |other: &&ModelConfig| further(other).any(|theirs| theirs.name == queue.name);
            if let Some(other) = models[..at].iter().find(is_theirs) {
                let (queue, other) = (&queue.name, &other.name);
                fault(format!(
                    "names `{queue}`, which is a queue of the model `{other}`: jobs belong to one model"
                ));
            }
            if let Some(other) = models.iter().find(|other| other.reply_queue == queue.name) {
                let (queue, other) = (&queue.name, &other.name);
                fault(format!("names `{queue}`, which is the reply queue of the model `{other}`"));
            }
        }
    }
}

/// The queues of a model besides its own.
pub(super) fn further(model: &ModelConfig) -> impl Iterator<Item = &QueueFacts> {
    model.queues.iter().skip(1)
}

#[cfg(test)]
mod tests {
    use super::super::{Config, Invalid};

    fn read(text: &str) -> Result<Config, Invalid> {
        Config::read(Some(text), &[])
    }

    /// Names and weights of the queues of each model.
    fn queues(config: &Config) -> Vec<Vec<(&str, u32)>> {
        let models = config.models.iter();
        models
            .map(|model| model.queues.iter().map(|queue| (queue.name.as_str(), queue.weight.get())).collect())
            .collect()
    }

    #[test]
    fn a_model_has_its_own_queue_and_those_that_are_named() {
        let file = "
            [model.a]
            engine = 'echo'
            [model.b]
            engine = 'echo'
            key = 'k'
            queues = { 'team-a.jobs' = 2, 'vramq.jobs.k' = 3 }
            [model.c]
            engine = 'echo'
            queues = { 'team-b.jobs' = '7' }";
        let config = read(file).unwrap();
        let expected = [
            vec![("vramq.jobs.a", 1)],
            vec![("vramq.jobs.k", 3), ("team-a.jobs", 2)],
            vec![("vramq.jobs.c", 1), ("team-b.jobs", 7)],
        ];
        assert_eq!(queues(&config), expected);
        let text = ("model.a.queues".to_owned(), "vramq.jobs.a=3, x=y=1".to_owned());
        let config = Config::read(Some("[model.a]\nengine = 'echo'"), &[text]).unwrap();
        assert_eq!(queues(&config), [vec![("vramq.jobs.a", 3), ("x=y", 1)]]);
    }

    #[test]
    fn two_models_cannot_have_one_key() {
        let models = |key: &str| {
            format!(
                "[model.a]\nengine = 'echo'\nkey = '{key}'\n[model.b]\nengine = 'echo'\n[model.c]\nengine = 'echo'"
            )
        };
        assert!(read(&models("k")).is_ok());
        let Invalid(faults) = read(&models("b")).unwrap_err();
        let [fault] = &faults[..] else { panic!("{faults:?}") };
        assert_eq!(fault.key, "model.b.key");
        assert!(fault.what.contains("the key of the model `a`, too"), "{fault}");
    }

    #[test]
    fn all_faults_of_queues_come_at_once() {
        let file = "
            [model.a]
            engine = 'echo'
            queues = { 'zero' = 0, 'many' = 1001, 'none' = 'x', '' = 1, 'vramq.dead.a' = 1, 'vramq.jobs.b' = 1, 'amq.gen' = 1 }
            [model.b]
            engine = 'echo'
            reply_queue = 'answers'
            queues = { 'both' = 1, 'answers' = 1 }
            [model.c]
            engine = 'echo'
            queues = { 'both' = 1 }
            [model.d]
            engine = 'echo'
            queues = 'twice=1,twice=2'
            [model.e]
            engine = 'echo'
            queues = { a1 = 1, a2 = 1, a3 = 1, a4 = 1, a5 = 1, a6 = 1, a7 = 1, a8 = 1 }
            [model.f]
            engine = 'echo'
            queues = ['list']";
        let faults: Vec<_> = read(file).unwrap_err().0.iter().map(ToString::to_string).collect();
        let expected = [
            ("model.a.queues", "gives `zero` a weight that is not from 1 to 1000"),
            ("model.a.queues", "gives `many` a weight that is not"),
            ("model.a.queues", "gives `none` a weight that is not"),
            ("model.a.queues", "names ``, which must have 1 to 255 bytes"),
            ("model.a.queues", "names `vramq.dead.a`, which is reserved"),
            ("model.a.queues", "names `vramq.jobs.b`, which is reserved"),
            ("model.a.queues", "names `amq.gen`, which is reserved"),
            ("model.b.queues", "names `answers`, which is the reply queue of the model `b`"),
            ("model.c.queues", "names `both`, which is a queue of the model `b`"),
            ("model.d.queues", "names `twice` twice"),
            ("model.e.queues", "makes 9 queues"),
            ("model.f.queues", "it must be a table of queues with their weights"),
        ];
        for (key, what) in expected {
            let found = faults.iter().any(|fault| fault.starts_with(key) && fault.contains(what));
            assert!(found, "{key}: {what} is not in {faults:#?}");
        }
        assert_eq!(faults.len(), expected.len(), "{faults:#?}");
    }
}
