//! Where the broker of this run is, as `make test` says it.

use anyhow::{Context as _, Result};

/// The addresses of the test broker.
#[derive(Clone, Debug)]
pub struct Broker {
    /// Without a virtual host.
    amqp: String,
    pub management: String,
}

impl Broker {
    /// Reads `VRAMQ_TEST_AMQP_URL` and `VRAMQ_TEST_MANAGEMENT_URL`.
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
        let amqp = read("VRAMQ_TEST_AMQP_URL")?;
        let (amqp, _vhost) = amqp.rsplit_once('/').context("VRAMQ_TEST_AMQP_URL has no path")?;
        Ok(Self { amqp: amqp.to_owned(), management: read("VRAMQ_TEST_MANAGEMENT_URL")? })
    }

    /// The AMQP address of a virtual host.
    pub fn url(&self, vhost: &str) -> String {
        format!("{}/{vhost}", self.amqp)
    }
}
