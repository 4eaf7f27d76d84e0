//! The table `[broker]`: where the broker is, as which user the worker connects, and what it declares.

use std::path::Path;
use std::time::Duration;

use vramq_amqp::{Address, Credentials, InvalidCredentials};
use vramq_program::read_text;

use super::read::at_least_one;
use super::section::Section;

/// How to reach the broker, and what to declare there.
#[derive(Clone, Debug)]
pub struct BrokerConfig {
    pub url: Address,
    /// How long to try at start before giving up.
    pub connect: Duration,
    /// Whether queues are declared, or only checked.
    pub declare: bool,
    pub queue_type: QueueType,
    pub queue_length_max: u32,
    /// Seconds that the broker has to confirm a publish.
    pub confirm_s: u32,
    /// Whether operators' commands are received.
    pub control: bool,
}

/// The kind of the declared queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueType {
    Quorum,
    Classic,
}

impl QueueType {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Quorum => "quorum",
            Self::Classic => "classic",
        }
    }
}

/// Jobs that may wait in a queue before publishes are rejected.
const QUEUE_LENGTH_MAX_DEFAULT: u32 = 100_000;

/// A broker that starts together with its workers is ready within this time.
const CONNECT_S_DEFAULT: u32 = 30;

/// Enough for 16 MiB, the largest reply, at half a megabyte a second, and for several leader elections of a quorum queue.
const CONFIRM_S_DEFAULT: u32 = 30;

pub(super) fn broker(mut section: Section) -> Option<BrokerConfig> {
    let url =
        section.take::<String>("url").unwrap_or_else(|| "amqp://guest:guest@localhost:5672/%2f".to_owned());
    let url = url.parse::<Address>().map_err(|e| section.fault("url", e.to_string())).ok();
    let has_ca = section.has("ca");
    let ca = certificates(&mut section);
    if has_ca && url.as_ref().is_some_and(|url| !url.is_tls()) {
        section.fault("ca", "has no effect without an amqps:// URL");
    }
    let credentials = Credentials {
        certificate: section.take::<String>("certificate").map(Into::into),
        key: section.take::<String>("key").map(Into::into),
        password_file: section.take::<String>("password_file").map(Into::into),
    };
    let url = url.map(|url| ca.into_iter().fold(url, Address::trusting));
    let url = url.and_then(|url| {
        let faults = match url.clone().with_credentials(credentials) {
            Ok(url) => return Some(url),
            Err(faults) => faults,
        };
        let is_usable = faults.iter().all(|fault| fault.is_absent);
        for InvalidCredentials { field, what, is_absent } in faults {
            if is_absent { section.absent(field, what) } else { section.fault(field, what) }
        }
        is_usable.then_some(url)
    });
    let queue_type = match section.take::<String>("queue_type").as_deref() {
        None | Some("quorum") => QueueType::Quorum,
        Some("classic") => QueueType::Classic,
        Some(other) => {
            section.fault("queue_type", format!("is `{other}`; it must be `quorum` or `classic`"));
            QueueType::Quorum
        }
    };
    let connect =
        Duration::from_secs(section.number("connect_s", 0..=u32::MAX).unwrap_or(CONNECT_S_DEFAULT).into());
    let declare = section.take("declare").unwrap_or(true);
    let queue_length_max = at_least_one(&mut section, "queue_length_max", QUEUE_LENGTH_MAX_DEFAULT);
    let confirm_s = at_least_one(&mut section, "confirm_s", CONFIRM_S_DEFAULT);
    section.finish();
    let control = true;
    Some(BrokerConfig { url: url?, connect, declare, queue_type, queue_length_max, confirm_s, control })
}

/// The text of the file with a private authority's certificates.
fn certificates(section: &mut Section) -> Option<String> {
    let file = section.take::<String>("ca")?;
    match read_text(Path::new(&file)) {
        Ok(pem) if pem.contains("-----BEGIN CERTIFICATE-----") => return Some(pem),
        Ok(_) => section.fault("ca", format!("is {file}, which holds no certificate in PEM")),
        Err(what) if !Path::new(&file).exists() => section.absent("ca", format!("is {file}, which {what}")),
        Err(what) => section.fault("ca", format!("is {file}, which {what}")),
    }
    None
}

#[cfg(test)]
mod tests {
    use super::super::{Config, Invalid};

    fn read(given: &[(&str, &str)]) -> Result<Config, Invalid> {
        let pairs = given.iter().chain(&[("model.m.engine", "echo")]);
        let pairs: Vec<_> = pairs.map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        Config::read(None, &pairs)
    }

    #[test]
    fn a_certificate_and_a_password_file_are_checked_with_the_url() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("password");
        std::fs::write(&path, "hunter2\n").unwrap();
        let path = path.to_str().unwrap();
        let url = ("broker.url", "amqp://me@rabbit/v");
        let config = read(&[url, ("broker.password_file", path)]).unwrap();
        assert!(!format!("{config:?}").contains("hunter2"));
        let wrong = read(&[
            ("broker.url", "amqp://me:hunter2@rabbit/v"),
            ("broker.certificate", "/nowhere/client.pem"),
            ("broker.password_file", path),
        ]);
        let Invalid(faults) = wrong.unwrap_err();
        let keys: Vec<_> = faults.iter().map(|fault| fault.key.as_str()).collect();
        assert_eq!(keys, ["broker.key", "broker.password_file", "broker.certificate"], "{faults:?}");
        assert!(faults.iter().all(|fault| !fault.what.contains("hunter2")), "{faults:?}");
    }
}
