//! The program: its commands, its start, one session after the other, its end.

pub mod doctor;
pub mod exit;
pub mod open;
mod sessions;
mod start;
pub mod supervisor;

use std::io::Write as _;
use std::process::ExitCode;

use clap::Parser as _;

use crate::config::cli::{Cli, Command, Options};
use crate::config::{Config, EngineConfig, Gpu, Gpus};
use crate::observability::logs::{self, Logs};
use crate::state_file::StateFile;
use doctor::Report;
use doctor::cuda::CudaReport;
use exit::Exit;
use open::{OpenError, Opened};
use vramq_core::learned_limits::LearnedLimits;
use vramq_inference::process::cgroup::Cgroups;
use vramq_inference::process::keeper;

/// Watches over a program, if this process was started by a worker to do that. To be called before all else: a keeper has one thread
/// and no configuration.
pub fn keep() -> Option<ExitCode> {
    let mut arguments = std::env::args_os().skip(1);
    let is_keeper = arguments.next()? == keeper::ARGUMENT && arguments.next().is_none();
    is_keeper.then(keeper::keeper_main)
}

/// Runs the command that the arguments name, and ends the process.
pub fn main() -> ! {
    let result = match Cli::parse().command {
        Command::Run(options) => prepare(&options).map(|(config, logs)| match config.device.gpus.clone() {
            Some(gpus) => on_several(&config, &gpus, |gpus| supervisor::serve(config.drain, gpus)),
            None => start::run(config, logs, options.gpu.is_some()).unwrap_or_else(|exit| exit),
        }),
        Command::Doctor { options, json } => prepare(&options).map(|(config, _)| match &config.device.gpus {
            Some(gpus) => on_several(&config, gpus, supervisor::one_after_the_other),
            None => diagnose(&config, json),
        }),
        Command::CheckConfig(options) => prepare(&options).map(|(config, _)| {
            for model in &config.models {
                if let Some(what) = model.engine.missing_folder() {
                    eprintln!("vramq-worker: model.{}.path {what}: no worker can start there", model.name);
                }
            }
            let models = config.models.len();
            println!("the configuration is right: {models} model(s), broker {}", config.broker.url);
            Exit::Drained
        }),
        Command::Completions(completions) => {
            completions.write::<Cli>().map(|()| Exit::Drained).map_err(Into::into)
        }
        Command::Man(manual) => manual.write::<Cli>().map(|()| Exit::Drained).map_err(Into::into),
    };
    let exit = result.unwrap_or_else(|error| {
        eprintln!("vramq-worker: {error}");
        Exit::Usage
    });
    end(exit)
}

/// Ends the process at once, without what libraries do when a process ends: a driver waits for its device there, and a device that
/// is lost, or stuck in a pass, does not answer.
fn end(exit: Exit) -> ! {
    // The last of what is printed may still be buffered; logs go to standard error, which buffers nothing.
    let _ = std::io::stdout().flush();
    // SAFETY: any thread may call it at any time. Nothing of this process runs after it.
    unsafe { libc::_exit(exit as i32) }
}

fn prepare(options: &Options) -> Result<(Config, Logs), Box<dyn std::error::Error>> {
    let logs = logs::init(&options.log, options.log_format, options.gpu.as_ref())?;
    Ok((options.read()?, logs))
}

/// Does the same on each of several GPUs, in processes of their own.
fn on_several<F>(config: &Config, gpus: &Gpus, run: impl FnOnce(Vec<Gpu>) -> F) -> Exit
where
    F: Future<Output = std::io::Result<Exit>>,
{
    let gpus = match supervisor::gpus(gpus) {
        Ok(gpus) => gpus,
        Err(error) => {
            tracing::error!("cannot start: {error}");
            return if error.is_usage() { Exit::Usage } else { Exit::Unusable };
        }
    };
    if config.models.iter().any(|model| matches!(model.engine, EngineConfig::Process(_))) {
        // Before the processes start, which share this process's control group: it would be in their way there. They log what came
        // of it.
        let _ = Cgroups::prepare();
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.and_then(|runtime| runtime.block_on(run(gpus))).unwrap_or_else(|error| {
        tracing::error!("cannot run a process for each GPU: {error}");
        Exit::Unusable
    })
}

fn diagnose(config: &Config, json: bool) -> Exit {
    let runtime = match tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("vramq-worker: start a runtime: {error}");
            return Exit::Unusable;
        }
    };
    let tell = |text: &str| eprintln!("vramq-worker: {text}");
    let opened = match Opened::open(config, runtime.handle(), tell) {
        Ok(opened) => opened,
        Err(error) => {
            if matches!(error, OpenError::Cuda(_)) {
                // What is there explains what is not.
                print!("{}", CudaReport::new(None, config.device.libraries()));
            }
            error.in_words().iter().for_each(|text| tell(text));
            return Exit::Unusable;
        }
    };
    let limits = learned_limits(&StateFile::in_folder(config.state.as_deref()), &opened);
    let report = Report::new(&opened, &limits, config.device.reserve, config.device.libraries());
    if json {
        // Plain numbers and texts: cannot fail.
        println!("{}", serde_json::to_string_pretty(&report).unwrap_or_default());
    } else {
        print!("{report}");
    }
    runtime.block_on(opened.programs.close());
    if report.is_well() { Exit::Drained } else { Exit::Unusable }
}

/// What earlier processes learned of the device.
fn learned_limits(file: &StateFile, opened: &Opened) -> LearnedLimits {
    let device = opened.device.shared();
    LearnedLimits::new(device.name(), device.memory().total, file.read())
}
