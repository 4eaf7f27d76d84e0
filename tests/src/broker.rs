//! The address of the broker of this run, from the environment that `make test` sets.

use std::path::Path;

use anyhow::{Context as _, Result};

const AMQP: &str = "VRAMQ_TEST_AMQP_URL";
const MANAGEMENT: &str = "VRAMQ_TEST_MANAGEMENT_URL";
const METRICS: &str = "VRAMQ_TEST_METRICS_URL";

/// The addresses of the test broker.
#[derive(Clone, Debug)]
pub struct Broker {
    /// Without a virtual host.
    amqp: String,
    pub management: String,
    /// HOST:PORT of its metrics.
    pub metrics: String,
}

impl Broker {
    /// Reads `VRAMQ_TEST_AMQP_URL`, `VRAMQ_TEST_MANAGEMENT_URL` and `VRAMQ_TEST_METRICS_URL`.
    ///
    /// # Errors
    /// Says how to get a broker if they are unset.
    pub fn from_environment() -> Result<Self> {
        let read = |name: &str| {
            std::env::var(name).with_context(|| {
                format!(
                    "{name} is not set: these tests need a real RabbitMQ. `make test` starts one; by hand: \
                     scripts/rabbitmq start /tmp/vramq-broker && export $(cat /tmp/vramq-broker/env)"
                )
            })
        };
        Self::new(&read(AMQP)?, read(MANAGEMENT)?, &read(METRICS)?)
    }

    /// Reads the file `env` that `scripts/rabbitmq start` writes.
    ///
    /// # Errors
    /// It is not such a file.
    pub fn from_file(file: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(file).with_context(|| format!("read {}", file.display()))?;
        let read = |name: &str| {
            let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
            value.map(str::to_owned).with_context(|| format!("no {name} in {}", file.display()))
        };
        Self::new(&read(AMQP)?, read(MANAGEMENT)?, &read(METRICS)?)
    }

    fn new(amqp: &str, management: String, metrics: &str) -> Result<Self> {
        let (amqp, _vhost) = amqp.rsplit_once('/').with_context(|| format!("{amqp} has no path"))?;
        let metrics =
            metrics.strip_prefix("http://").with_context(|| format!("{metrics} is not http://HOST:PORT"))?;
        Ok(Self { amqp: amqp.to_owned(), management, metrics: metrics.to_owned() })
    }

    /// The AMQP address of a virtual host.
    pub fn url(&self, vhost: &str) -> String {
        format!("{}/{vhost}", self.amqp)
    }
}
