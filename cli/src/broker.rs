//! The flags that name the broker, and connecting to it.

use std::path::PathBuf;
use std::sync::Once;
use std::time::Duration;

use lapin::{Connection, ErrorKind};
use vramq_amqp::reply_code::NOT_ALLOWED;
use vramq_amqp::{Address, Credentials, InvalidAddress, InvalidCredentials};
use vramq_producer::Options;

use crate::exit;
use crate::output::text::safe;

/// How long a command tries to reconnect: a restart of RabbitMQ takes less.
const RECONNECT_FOR: Duration = Duration::from_secs(60);

/// How long closing a connection may take before the command ends without waiting for it.
pub(crate) const CLOSE_MAX: Duration = Duration::from_secs(3);

/// Keeps these flags together in every help text: clap would otherwise sort them among the command's own flags.
pub(crate) const HEADING: &str = "Broker";

/// Where the broker is.
#[derive(Debug, clap::Args)]
pub(crate) struct Broker {
    /// The broker, amqp://USER:PASSWORD@HOST:5672/VHOST.
    // Its value has credentials: `--help` must not show it.
    #[arg(
        long = "broker-url",
        env = "VRAMQ_BROKER_URL",
        hide_env_values = true,
        default_value = "amqp://guest:guest@localhost:5672/%2f",
        value_name = "URL",
        global = true,
        help_heading = HEADING
    )]
    url: Secret,
    /// Certificates of a private authority, in PEM, for amqps://.
    #[arg(long = "broker-ca", env = "VRAMQ_BROKER_CA", value_parser = certificates, value_name = "FILE", global = true, help_heading = HEADING)]
    ca_pem: Option<Pem>,
    /// This program's certificate, in PEM, for amqps://.
    #[arg(long = "broker-certificate", env = "VRAMQ_BROKER_CERTIFICATE", value_name = "FILE", global = true, help_heading = HEADING)]
    certificate: Option<PathBuf>,
    /// The private key of the certificate, in PEM.
    #[arg(long = "broker-key", env = "VRAMQ_BROKER_KEY", value_name = "FILE", global = true, help_heading = HEADING)]
    key: Option<PathBuf>,
    /// File with the password of the URL's user.
    #[arg(
        long = "broker-password-file",
        env = "VRAMQ_BROKER_PASSWORD_FILE",
        value_name = "FILE",
        global = true,
        help_heading = HEADING
    )]
    password_file: Option<PathBuf>,
}

/// The text of a file with certificates.
#[derive(Clone, Debug)]
struct Pem(String);

fn certificates(file: &str) -> Result<Pem, String> {
    let pem = std::fs::read_to_string(file).map_err(|error| error.to_string())?;
    if pem.contains("-----BEGIN CERTIFICATE-----") {
        Ok(Pem(pem))
    } else {
        Err("no certificate in PEM".to_owned())
    }
}

/// A text that `Debug` does not show.
#[derive(Clone)]
pub(crate) struct Secret(pub(crate) String);

impl From<String> for Secret {
    fn from(text: String) -> Self {
        Self(text)
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("…")
    }
}

/// What is wrong with the flags. Safe to print.
#[derive(Debug, thiserror::Error)]
pub(crate) enum InvalidBroker {
    #[error("the broker URL {0}")]
    Url(#[from] InvalidAddress),
    #[error("{}", .0.iter().map(with_flag).collect::<Vec<_>>().join("; "))]
    Credentials(Vec<InvalidCredentials>),
}

fn with_flag(InvalidCredentials { field, what, .. }: &InvalidCredentials) -> String {
    format!("--broker-{} {}", field.replace('_', "-"), safe(what))
}

/// Why a command has no connection. Safe to print.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConnectError {
    #[error(transparent)]
    Invalid(#[from] InvalidBroker),
    #[error("connect to {0}")]
    Unreachable(String),
    #[error("connect to {0}")]
    Refused(String),
}

impl ConnectError {
    pub(crate) fn code(&self) -> u8 {
        match self {
            Self::Invalid(_) => exit::USAGE,
            Self::Unreachable(_) => exit::UNREACHABLE,
            Self::Refused(_) => exit::REFUSED,
        }
    }
}

impl Broker {
    /// For commands that use the client library.
    pub(crate) fn options(&self, command: &str) -> Options {
        let options = Options::new(&self.url.0);
        let options = self.ca_pem.iter().fold(options, |options, Pem(pem)| options.trusting(pem));
        let mut options = options.with_credentials(self.credentials());
        options.connection_name = connection_name(command);
        options.reconnect_for = Some(RECONNECT_FOR);
        // Files may be replaced meanwhile: they are read for each connection.
        options.give_up_when_refused = self.password_file.is_none() && self.certificate.is_none();
        // Jobs of a bulk run may wait for hours. --timeout limits a job.
        options.timeout = None;
        options
    }

    /// For commands that speak AMQP themselves.
    pub(crate) fn address(&self) -> Result<Address, InvalidBroker> {
        let address = self.url.0.parse::<Address>()?;
        let address = self.ca_pem.iter().fold(address, |address, Pem(pem)| address.trusting(pem.clone()));
        address.with_credentials(self.credentials()).map_err(InvalidBroker::Credentials)
    }

    /// The certificates of a private authority, in PEM.
    pub(crate) fn ca_pem(&self) -> Option<String> {
        self.ca_pem.as_ref().map(|Pem(pem)| pem.clone())
    }

    /// Says once if others may read a secret, or if this program lacks a patch.
    fn credentials(&self) -> Credentials {
        static WARNING: Once = Once::new();
        let Self { certificate, key, password_file, .. } = self;
        let (certificate, key, password_file) = (certificate.clone(), key.clone(), password_file.clone());
        let credentials = Credentials { certificate, key, password_file };
        WARNING.call_once(|| {
            for file in credentials.exposed() {
                let file = safe(&file.to_string_lossy());
                eprintln!("warning: every user of this machine may read {file}: chmod o-r");
            }
            for patch in vramq_amqp::missing_patches() {
                eprintln!("warning: {patch}");
            }
        });
        credentials
    }

    pub(crate) async fn connect(&self, command: &str) -> Result<Connection, ConnectError> {
        self.address()?.connect(&connection_name(command)).await.map_err(|error| {
            let text = safe(&error.to_string());
            if error.is_refusal() { ConnectError::Refused(text) } else { ConnectError::Unreachable(text) }
        })
    }
}

/// Whether the broker said no, rather than went away.
pub(crate) fn is_refusal(error: &lapin::Error) -> bool {
    match error.kind() {
        ErrorKind::ProtocolError(answer) => error.is_amqp_soft_error() || answer.get_id() == NOT_ALLOWED,
        ErrorKind::ChannelsLimitReached => true,
        _ => false,
    }
}

/// What the broker's list of connections shows.
pub(crate) fn connection_name(command: &str) -> String {
    format!("vramq {command} {}", std::process::id())
}

/// Closes a connection properly, so that the broker logs no warning. Best effort: the command ends anyway.
pub(crate) async fn close(connection: &Connection) {
    let _ = tokio::time::timeout(CLOSE_MAX, connection.close(200, "OK".into())).await;
}
