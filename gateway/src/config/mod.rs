//! The configuration: the only reader of files, flags and environment at start. Reports all faults at once.

mod broker;
pub mod cli;
mod files;
mod limits;
mod operator;
mod place;
mod results;
mod table;
mod tls;

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio_rustls::rustls::ServerConfig;
use vramq_program::no_folder;
use vramq_schemas::topology::check_model_name;

pub use broker::Broker;
pub use files::Files;
pub use limits::Limits;
pub use operator::Operator;
pub use results::{ResultSettings, Results};
pub use table::Fault;
use table::Values;

use crate::keys::Keys;
use crate::storage::Place;
use crate::vocabulary::Vocabulary;

/// Longer than load balancers keep an idle connection (AWS 60 s, nginx 60 s), so that they end it, and never send on one that has just been
/// closed.
const IDLE_S: u32 = 75;

/// A slow client frees the send buffer in steps of up to 2 MB (`send_timeout.rs`): one step in this time is 56 kbit/s.
const SEND_TIMEOUT_S: u32 = 300;

/// Less than the 30 s that Kubernetes and spot instances leave between SIGTERM and SIGKILL.
const DRAIN_S: u32 = 25;

/// MiB of all uploads together, and of all stored results. Bounds the disk space that callers can use.
const FILES_MIB_MAX: u32 = 10 * 1024;

const MIB: usize = 1024 * 1024;

/// The configuration of a gateway.
#[derive(Clone, Debug)]
pub struct Config {
    pub broker: Broker,
    pub http: Http,
    pub limits: Limits,
    pub results: Results,
    /// `None`: no uploads.
    pub files: Option<Files>,
    /// The store to which workers write large outputs. `None`: callers cannot download them here.
    pub outputs: Option<Place>,
    /// `None`: dead letters can be read, but not retried or dropped.
    pub operator: Option<Operator>,
    pub tei: TeiModels,
    /// The vocabulary of the token ids that OpenAI's clients may send. `None`: token ids are refused.
    pub vocabulary: Option<Arc<Vocabulary>>,
    /// Models whose vectors may be cut to fewer dimensions.
    pub matryoshka: Vec<String>,
}

#[derive(Clone, Debug)]
pub struct Http {
    pub listen: SocketAddr,
    /// `None`: plain HTTP.
    pub tls: Option<Arc<ServerConfig>>,
    /// Without keys the gateway listens on loopback addresses only.
    pub keys: Arc<Keys>,
    /// Origins whose pages may call the gateway. Empty: only the gateway's own.
    pub cors_origins: Vec<String>,
    pub drain: Duration,
    /// How long a connection may wait for its next request.
    pub idle: Duration,
    /// How long a client may read nothing of its response before the connection is closed.
    pub send_timeout: Duration,
}

/// The models for routes that name none. `None`: the only model there is.
#[derive(Clone, Debug, Default)]
pub struct TeiModels {
    pub embed: Option<String>,
    pub embed_sparse: Option<String>,
    pub rerank: Option<String>,
    pub predict: Option<String>,
}

/// A configuration with faults.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Invalid(pub Vec<Fault>);

impl fmt::Display for Invalid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the configuration has {} fault(s):", self.0.len())?;
        self.0.iter().try_for_each(|fault| write!(f, "\n  {fault}"))
    }
}

impl std::error::Error for Invalid {}

impl Config {
    /// Reads a TOML text, and values by key that go over it.
    ///
    /// # Errors
    /// All faults of the configuration, and of the files that it names.
    pub fn read(text: &str, overrides: Vec<(String, String)>) -> Result<Self, Invalid> {
        Self::read_named("file", text, overrides)
    }

    /// The same for the text of a file, which faults call by this name.
    fn read_named(file: &str, text: &str, overrides: Vec<(String, String)>) -> Result<Self, Invalid> {
        let mut values = Values::of(file, text);
        for (key, value) in overrides {
            values.set(key, value);
        }
        let config = Self::take(&mut values);
        let faults = values.finish();
        match config {
            Some(config) if faults.is_empty() => Ok(config),
            _ => Err(Invalid(faults)),
        }
    }

    /// The dotted keys, with `NAME` for a model's name.
    pub fn keys() -> Vec<String> {
        let mut values = Values::default();
        Self::take(&mut values);
        values.keys()
    }

    /// Takes every value; `None` without what it takes to serve anything.
    fn take(values: &mut Values) -> Option<Self> {
        let broker = broker::broker(values);
        let has_keys = values.has("http.keys");
        let http = http(values);
        let limits = limits::limits(values, has_keys);
        let results = results::results(values, has_keys);
        let kept = results.store.as_ref().map(|store| &store.place);
        let files = files::files(values, kept, has_keys);
        let outputs = place::apart(values, &place::OUTPUTS, kept);
        if let Some(place) = &outputs {
            place::check_folder(values, &place::OUTPUTS, place, no_folder);
        }
        let operator = operator::operator(values, broker.as_ref(), http.as_ref());
        let tei = TeiModels {
            embed: model(values, "tei.embed"),
            embed_sparse: model(values, "tei.embed_sparse"),
            rerank: model(values, "tei.rerank"),
            predict: model(values, "tei.predict"),
        };
        let vocabulary = vocabulary(values);
        let matryoshka: BTreeMap<_, _> = values.flags_by_name("model", "matryoshka");
        Some(Self {
            broker: broker?,
            http: http?,
            limits,
            results,
            files,
            outputs,
            operator,
            tei,
            vocabulary,
            matryoshka: matryoshka.into_iter().filter_map(|(name, may)| may.then_some(name)).collect(),
        })
    }
}

/// The default share of one caller in something that all callers use: a quarter, so that it takes four keys to use all of it. Without keys
/// there is only one caller, so its share is all.
fn share_of_key(most: u32, has_keys: bool) -> u32 {
    if has_keys { most / 4 } else { most }
}

fn http(values: &mut Values) -> Option<Http> {
    let listen = values.text("http.listen").unwrap_or_else(|| "127.0.0.1:8080".to_owned());
    let listen = listen
        .parse::<SocketAddr>()
        .map_err(|_| values.fault("http.listen", format!("is `{listen}`; it must be IP:PORT")))
        .ok();
    let tls = tls::tls(values);
    let has_keys = values.has("http.keys");
    let keys = keys(values);
    let cors_origins = values.list("http.cors_origins");
    for origin in &cors_origins {
        if !origin.starts_with("http://") && !origin.starts_with("https://") || origin.ends_with('/') {
            values.fault(
                "http.cors_origins",
                format!("`{origin}` is not an origin, such as https://example.org"),
            );
        }
    }
    let drain = seconds(values.number("http.drain_s", DRAIN_S, 0));
    let idle = seconds(values.number("http.idle_s", IDLE_S, 1));
    let send_timeout = seconds(values.number("http.send_timeout_s", SEND_TIMEOUT_S, 1));
    let listen = listen?;
    if !has_keys && !listen.ip().is_loopback() {
        values.fault(
            "http.listen",
            format!("is {listen}, which others can reach: set http.keys, or listen on 127.0.0.1"),
        );
    }
    Some(Http { listen, tls, keys: keys?, cors_origins, drain, idle, send_timeout })
}

/// Reads the file of API keys, if one is named. `None` after faults.
fn keys(values: &mut Values) -> Option<Arc<Keys>> {
    let is_set = values.has("http.keys");
    let file = values.text("http.keys");
    if is_set && file.is_none() {
        return None;
    }
    match Keys::open(file.as_deref().map(Path::new)) {
        Ok(keys) => Some(Arc::new(keys)),
        Err(faults) => {
            faults.into_iter().for_each(|fault| values.fault("http.keys", format!("is {fault}")));
            None
        }
    }
}

fn vocabulary(values: &mut Values) -> Option<Arc<Vocabulary>> {
    let file = values.text("openai.vocabulary")?;
    let read = Vocabulary::read(Path::new(&file));
    read.map_err(|what| values.fault("openai.vocabulary", format!("is {file}, {what}"))).ok().map(Arc::new)
}

fn model(values: &mut Values, key: &'static str) -> Option<String> {
    let name = values.text(key)?;
    if let Err(e) = check_model_name(&name) {
        values.fault(key, e.to_string());
    }
    Some(name)
}

fn seconds(s: u32) -> Duration {
    Duration::from_secs(s.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file of keys.
    pub(super) const KEYS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/gateway-keys.toml");

    fn faults(text: &str) -> Vec<String> {
        Config::read(text, Vec::new()).unwrap_err().0.into_iter().map(|fault| fault.key).collect()
    }

    #[test]
    fn nothing_given_is_a_gateway_on_loopback() {
        let config = Config::read("", Vec::new()).unwrap();
        assert_eq!(config.http.listen, "127.0.0.1:8080".parse().unwrap());
        assert!(!config.http.keys.required() && config.outputs.is_none());
    }

    #[test]
    fn all_faults_are_reported_at_once() {
        let text = r#"
            [broker]
            url = "http://user:hunter2@host"
            [http]
            listen = "here"
            in_flight_max = 0
            tls_key = "/nowhere.pem"
            keys = "/nowhere.toml"
            cors_origins = ["example.org"]
            colour = "red"
            [model.minilm]
            matryoshka = "perhaps"
        "#;
        let mut found = faults(text);
        found.sort();
        assert_eq!(
            found,
            [
                "broker.url",
                "http.colour",
                "http.cors_origins",
                "http.in_flight_max",
                "http.keys",
                "http.listen",
                "http.tls_certificate",
                "http.tls_key",
                "model.minilm.matryoshka"
            ]
        );
        assert!(!Config::read(text, Vec::new()).unwrap_err().to_string().contains("hunter2"));
    }

    #[test]
    fn a_key_of_a_model_without_the_name_of_one_is_a_fault() {
        assert_eq!(faults("[model]\nmatryoshka = true"), ["model.matryoshka"]);
        assert_eq!(faults("[model.\"\"]\nmatryoshka = true"), ["model..matryoshka"]);
    }

    #[test]
    fn without_keys_only_loopback_is_listened_on() {
        assert_eq!(faults("[http]\nlisten = \"0.0.0.0:80\""), ["http.listen"]);
        let keyed = format!("[http]\nlisten = \"0.0.0.0:80\"\nkeys = \"{KEYS}\"");
        assert!(Config::read(&keyed, Vec::new()).is_ok());
        assert!(Config::read("[http]\nlisten = \"[::1]:80\"", Vec::new()).is_ok());
    }

    #[test]
    fn a_value_given_later_is_over_the_file() {
        let over = vec![
            ("http.request_s".to_owned(), "7".to_owned()),
            ("model.a.b.matryoshka".to_owned(), "true".to_owned()),
        ];
        let config = Config::read("[http]\nrequest_s = 5", over).unwrap();
        assert_eq!((config.limits.request, config.matryoshka), (seconds(7), vec!["a.b".to_owned()]));
    }

    #[test]
    fn a_vocabulary_is_read_at_the_start() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let with = || format!("[openai]\nvocabulary = '{}'", file.path().display());
        assert_eq!(faults(&with()), ["openai.vocabulary"], "it is empty");
        std::fs::write(file.path(), "IQ== 0\n").unwrap();
        assert!(Config::read(&with(), Vec::new()).unwrap().vocabulary.is_some());
    }

    #[test]
    fn operators_act_as_a_user_of_their_own_with_keys_and_a_folder() {
        let with = |url: &str, more: &str| {
            format!("[http]\nkeys = \"{KEYS}\"\n[operator]\nbroker_url = \"{url}\"\n{more}")
        };
        let folder = "folder = \"f\"";
        let config = Config::read(&with("amqp://operator:secret@h", folder), Vec::new()).unwrap();
        assert_eq!(config.operator.unwrap().address.user(), Some("operator"));
        assert_eq!(faults(&with("amqp://operator:secret@h", "")), ["operator.folder"]);
        assert_eq!(faults(&with("amqp://guest:guest@h", folder)), ["operator.broker_url"]);
        assert_eq!(faults("[operator]\nfolder = \"f\""), ["operator.broker_url"]);
        let keyless = with("amqp://operator:secret@h", folder).replace(&format!("keys = \"{KEYS}\""), "");
        assert_eq!(faults(&keyless), ["operator.broker_url"]);
    }

    #[test]
    fn a_text_that_is_no_toml_is_not_repeated() {
        let invalid =
            Config::read("[broker]\nurl = amqp://user:hunter2@host", Vec::new()).unwrap_err().to_string();
        assert!(invalid.contains("line 2") && !invalid.contains("hunter2"), "{invalid}");
    }
}
