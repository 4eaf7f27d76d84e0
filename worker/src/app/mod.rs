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
use crate::state_file::StateFile;
use doctor::Report;
use doctor::cuda::CudaReport;
use exit::Exit;
use open::{OpenError, Opened};
use vramq_core::learned_limits::LearnedLimits;
use vramq_inference::process::cgroup::Cgroups;
use vramq_inference::process::keeper;
use vramq_program::{Logs, close_log, start_log, write_error_line, write_output};

/// Runs the keeper of a program's process, if a worker started this process for that. Must be called before anything else: a keeper has one
/// thread and no configuration.
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
        Command::CheckConfig(options) => read(&options).and_then(|(config, _)| {
            for lacking in config.lacking() {
                tell(&lacking.to_string());
            }
            let (models, broker) = (config.models.len(), &config.broker.url);
            write_output(&format!("the configuration is right: {models} model(s), broker {broker}\n"))?;
            Ok(Exit::Drained)
        }),
        Command::Completions(completions) => {
            completions.write::<Cli>().map(|()| Exit::Drained).map_err(Into::into)
        }
        Command::Man(manual) => manual.write::<Cli>().map(|()| Exit::Drained).map_err(Into::into),
    };
    match result {
        Ok(exit) => end(exit, None),
        Err(error) => end(Exit::Usage, Some(format!("vramq-worker: {error}"))),
    }
}

/// Ends the process at once, without the exit handlers of libraries. A driver's handler waits for its device, and a device that is lost or
/// stuck in a pass never answers. `failure` is printed.
fn end(exit: Exit, failure: Option<String>) -> ! {
    // Standard output may still be buffered.
    let _ = std::io::stdout().flush();
    close_log(failure);
    // SAFETY: `_exit` may be called by any thread at any time, and nothing of this process runs after it.
    unsafe { libc::_exit(exit as i32) }
}

/// Reads a configuration that is used on this machine.
fn prepare(options: &Options) -> Result<(Config, Logs), Box<dyn std::error::Error>> {
    let (config, logs) = read(options)?;
    Ok((config.on_this_machine()?, logs))
}

/// Reads a configuration, which may be for another machine, and starts the log.
fn read(options: &Options) -> Result<(Config, Logs), Box<dyn std::error::Error>> {
    let gpu = options.gpu.as_ref().map(|gpu| gpu.ordinal);
    let logs = start_log(&options.log, options.log_format, gpu)
        .map_err(|error| format!("--log (VRAMQ_LOG): {error}"))?;
    Ok((options.read()?, logs))
}

/// Runs the same command on each of several GPUs, in separate processes.
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
        // Must come before the processes start: they share this process's control group, and would block the preparation. They log the
        // result.
        let _ = Cgroups::prepare();
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.and_then(|runtime| runtime.block_on(run(gpus))).unwrap_or_else(|error| {
        tracing::error!("cannot run a process for each GPU: {error}");
        Exit::Unusable
    })
}

/// Says something to the person who runs a command.
fn tell(text: &str) {
    write_error_line(format_args!("vramq-worker: {text}"));
}

fn diagnose(config: &Config, json: bool) -> Exit {
    let runtime = match tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            tell(&format!("start a runtime: {error}"));
            return Exit::Unusable;
        }
    };
    if let Some(fault) = config.device.more_than_machine() {
        tell(&fault.to_string());
    }
    let opened = match Opened::open(config, runtime.handle(), tell) {
        Ok(opened) => opened,
        Err(error) => {
            if matches!(error, OpenError::Cuda(_)) {
                // The report shows what was found, which helps to explain what is missing.
                let found = CudaReport::new(None, config.device.libraries());
                // The device's fault is what the command ends with, whether this can be printed or not.
                let _ = write_output(&found.to_string());
            }
            error.in_words().iter().for_each(|text| tell(text));
            return Exit::Unusable;
        }
    };
    let limits = learned_limits(&StateFile::in_folder(config.state.as_deref()), &opened);
    let report = Report::new(&opened, &limits, config.device.reserve, config.device.libraries());
    let text = match json {
        // Cannot fail: only plain numbers and texts.
        true => serde_json::to_string_pretty(&report).unwrap_or_default() + "\n",
        false => report.to_string(),
    };
    let written = write_output(&text);
    runtime.block_on(opened.programs.close());
    match written {
        Err(error) => {
            tell(&error);
            Exit::Usage
        }
        Ok(()) if report.is_well() => Exit::Drained,
        Ok(()) => Exit::Unusable,
    }
}

/// Learned limits of this device from earlier processes.
fn learned_limits(file: &StateFile, opened: &Opened) -> LearnedLimits {
    let device = opened.device.shared();
    LearnedLimits::new(device.name(), device.memory().total, file.read())
}
