//! The command line: one file or folder per subcommand, and what they share.

mod control;
mod dlq;
mod duration;
mod exit;
mod progress;
mod screen;
mod shell;
mod signals;
mod status;
mod submit;

use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};
use tracing_subscriber::EnvFilter;
use vramq_amqp::{Address, InvalidAddress};
use vramq_producer::{Client, ConnectError, Options};

/// How long a command goes on trying when it loses the broker: a restart of RabbitMQ takes less.
const RECONNECT_FOR: Duration = Duration::from_secs(60);

/// Publish jobs to vramq workers, and look after them.
#[derive(Debug, Parser)]
#[command(name = "vramq", version, propagate_version = true)]
#[command(after_help = "\
Example:
  vramq submit --model minilm 'a text'

Exit codes are the same everywhere:
  0 done · 1 not all of it · 2 usage or input · 3 broker unreachable · 4 the broker says no
  130 interrupted · 143 told to end")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Submit(Box<submit::Args>),
    Status(status::Args),
    Control(control::Args),
    Dlq(Box<dlq::Args>),
    Completions(shell::CompletionsArgs),
    Man(shell::ManArgs),
}

/// Where the broker is.
#[derive(Debug, clap::Args)]
struct Broker {
    /// The broker's URL.
    // Its value has credentials: `--help` must not show it.
    #[arg(
        long = "broker-url",
        env = "VRAMQ_BROKER_URL",
        hide_env_values = true,
        default_value = "amqp://guest:guest@localhost:5672/%2f",
        value_name = "URL",
        global = true
    )]
    url: Secret,
    /// Certificates of a private authority, in PEM, for amqps://.
    #[arg(long = "broker-ca", env = "VRAMQ_BROKER_CA", value_parser = certificates, value_name = "FILE", global = true)]
    ca_pem: Option<Pem>,
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
struct Secret(String);

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

impl Broker {
    fn options(&self, command: &str) -> Options {
        let options = Options::new(&self.url.0);
        let mut options = self.ca_pem.iter().fold(options, |options, Pem(pem)| options.trusting(pem));
        options.connection_name = format!("vramq {command} {}", std::process::id());
        options.reconnect_for = Some(RECONNECT_FOR);
        options
    }

    /// For commands that speak to the broker themselves.
    fn address(&self) -> Result<Address, InvalidAddress> {
        let address = self.url.0.parse::<Address>()?;
        Ok(self.ca_pem.iter().fold(address, |address, Pem(pem)| address.trusting(pem.clone())))
    }

    async fn connect(options: Options) -> Result<Client, ConnectError> {
        Client::connect(options).await
    }
}

/// Runs the command that the arguments name.
pub(crate) fn main() -> ExitCode {
    let cli = Cli::parse();
    // lapin reports every lost connection as errors of its own; the client says it once.
    let filter = EnvFilter::try_from_env("VRAMQ_LOG").unwrap_or_else(|_| EnvFilter::new("warn,lapin=off"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .without_time()
        .with_target(false)
        .init();
    let runtime = match tokio::runtime::Runtime::new() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("error: start the runtime: {error}");
            return exit::FAILED.into();
        }
    };
    let code = runtime.block_on(async {
        match cli.command {
            Command::Submit(args) => submit::run(*args).await,
            Command::Status(args) => status::run(args).await,
            Command::Control(args) => control::run(args).await,
            Command::Dlq(args) => dlq::run(*args).await,
            Command::Completions(args) => shell::completions(&args),
            Command::Man(args) => shell::manual(&args),
        }
    });
    // Not to wait for a thread that reads a terminal.
    runtime.shutdown_background();
    code.into()
}
