//! Flags that the programs with a configuration file share.

use clap::{Args, ValueEnum};

/// How to reach the broker.
#[derive(Clone, Debug, Args)]
pub struct BrokerOptions {
    /// The broker, amqp://USER:PASSWORD@HOST:5672/VHOST.
    #[arg(long, env = "VRAMQ_BROKER_URL", hide_env_values = true, value_name = "URL")]
    broker_url: Option<String>,
    /// PEM file with the certificates of a private authority, for amqps://.
    #[arg(long, env = "VRAMQ_BROKER_CA", value_name = "FILE")]
    broker_ca: Option<String>,
    /// PEM file with this program's certificate, for amqps://.
    #[arg(long, env = "VRAMQ_BROKER_CERTIFICATE", value_name = "FILE")]
    broker_certificate: Option<String>,
    /// PEM file with the private key of the certificate.
    #[arg(long, env = "VRAMQ_BROKER_KEY", value_name = "FILE")]
    broker_key: Option<String>,
    /// File with the password of the URL's user.
    #[arg(long, env = "VRAMQ_BROKER_PASSWORD_FILE", value_name = "FILE")]
    broker_password_file: Option<String>,
}

impl BrokerOptions {
    /// The keys of the configuration file that these flags override, each with its value if it is given.
    pub fn keys(&self) -> [(&'static str, &Option<String>); 5] {
        [
            ("broker.url", &self.broker_url),
            ("broker.ca", &self.broker_ca),
            ("broker.certificate", &self.broker_certificate),
            ("broker.key", &self.broker_key),
            ("broker.password_file", &self.broker_password_file),
        ]
    }
}

/// The form of a line of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    Text,
    Json,
}
