//! Runs a process model without a broker: items on standard input, outputs on standard output. For developing models.

// Nothing that a message, a peer or a device does may panic.
#![cfg_attr(not(test), warn(clippy::expect_used, clippy::panic, clippy::unreachable))]

use std::io::{IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use serde_json::{Map, Value};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use toml::Table;
use vramq_inference::process::cgroup::Cgroups;
use vramq_inference::process::launch::Launcher;
use vramq_inference::process::{
    DeviceBook, HostView, Item, Learned, PassEnd, PassEvent, PassRequest, Place, Pool, PoolOptions,
    ProcessConfig, Reading, keeper,
};
use vramq_inference::process::{DeviceView as _, Need};

const USAGE: &str = "usage: vramq-run-model [--batch N] [--params JSON] CONFIG [MODEL]

Starts MODEL of the worker's configuration file CONFIG (or its only process model), and runs each line of standard input as an item:
a JSON object {\"json\": …}, {\"uri\": \"…\"}, {\"file\": \"PATH\"} (its bytes), {\"text\": \"…\"}, or else the line as text. Outputs go to
standard output, one JSON object a line; progress, and what the program prints, to standard error. With --batch, N items that
follow each other are one pass, as those of several jobs are in a worker. --params has the parameters of all passes, as a JSON object.";

/// Keys of a model's section that are for the worker around it.
const OF_THE_WORKER: [&str; 13] = [
    "body_mib_max",
    "fetch_mib_max",
    "key",
    "larger",
    "name",
    "output_above_kib",
    "output_store",
    "output_url",
    "queues",
    "reply_mib_max",
    "reply_queue",
    "slots_max",
    "weight",
];

/// The worker's own exit codes.
const EXIT_USAGE: u8 = 2;
const EXIT_UNUSABLE: u8 = 4;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match &arguments[..] {
        [argument] if *argument == keeper::ARGUMENT => return keeper::keeper_main(),
        ["--help" | "-h"] => {
            println!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        _ => {}
    }
    let Arguments { trial, config, model } = match Arguments::read(&arguments) {
        Ok(arguments) => arguments,
        Err(fault) => {
            eprintln!("vramq-run-model: {fault}\n\n{USAGE}");
            return EXIT_USAGE.into();
        }
    };
    // What the program prints is logged.
    let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let is_coloured = !no_color && std::io::stderr().is_terminal();
    let lines = tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(is_coloured);
    lines.without_time().with_target(false).init();
    let config = match read(Path::new(config), model) {
        Ok(config) => config,
        Err(faults) => {
            faults.iter().for_each(|fault| eprintln!("vramq-run-model: {fault}"));
            return EXIT_USAGE.into();
        }
    };
    match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime.block_on(serve(config, trial)),
        Err(error) => {
            eprintln!("vramq-run-model: {error}");
            EXIT_UNUSABLE.into()
        }
    }
}

/// How to run the items.
struct Trial {
    /// Items of a pass.
    batch: usize,
    params: Map<String, Value>,
}

struct Arguments<'a> {
    trial: Trial,
    config: &'a str,
    model: Option<&'a str>,
}

impl<'a> Arguments<'a> {
    fn read(mut rest: &[&'a str]) -> Result<Self, String> {
        let mut trial = Trial { batch: 1, params: Map::new() };
        loop {
            match rest {
                ["--batch", batch, more @ ..] => {
                    let items = batch.parse::<usize>().ok().filter(|items| *items > 0);
                    trial.batch =
                        items.ok_or_else(|| format!("--batch is `{batch}`; it must be a number from 1"))?;
                    rest = more;
                }
                ["--params", params, more @ ..] => {
                    trial.params = serde_json::from_str(params).map_err(|error| {
                        format!("--params is `{params}`, which is no JSON object: {error}")
                    })?;
                    rest = more;
                }
                [option, ..] if option.starts_with("--") => {
                    return Err(format!("`{option}` is not known, or has no value"));
                }
                [] => return Err("CONFIG is missing".to_owned()),
                [config] => return Ok(Self { trial, config: *config, model: None }),
                [config, model] => return Ok(Self { trial, config: *config, model: Some(*model) }),
                [_, _, more, ..] => return Err(format!("`{more}` is one argument too many")),
            }
        }
    }
}

/// The model's configuration, or all that is wrong.
fn read(path: &Path, model: Option<&str>) -> Result<ProcessConfig, Vec<String>> {
    let one = |fault: String| vec![fault];
    let shown = path.display();
    let text = std::fs::read_to_string(path).map_err(|error| one(format!("read {shown}: {error}")))?;
    let table: Table = text.parse().map_err(|error| one(format!("{shown}: {error}")))?;
    let (name, table) = choose(&table, model).map_err(|fault| one(format!("{shown} {fault}")))?;
    let folder = std::path::absolute(path).ok().and_then(|path| path.parent().map(Path::to_owned));
    let place = Place { folder: folder.unwrap_or_else(|| PathBuf::from("/")), scratch: std::env::temp_dir() };
    let mut table = table.clone();
    OF_THE_WORKER.iter().for_each(|key| drop(table.remove(*key)));
    ProcessConfig::read(name, table, &place)
        .map_err(|faults| faults.iter().map(|fault| format!("{shown}: {fault}")).collect())
}

/// The model of this name, or the only one; of those that are programs.
fn choose<'a>(config: &'a Table, model: Option<&str>) -> Result<(&'a String, &'a Table), String> {
    let is_process = |table: &Table| table.get("engine").and_then(toml::Value::as_str) == Some("process");
    let models = config.get("model").and_then(toml::Value::as_table).into_iter().flatten();
    let tables = models.filter_map(|(name, value)| Some((name, value.as_table()?)));
    let programs: Vec<(&String, &Table)> = tables.filter(|(_, table)| is_process(table)).collect();
    let names = programs.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(", ");
    match (model, &programs[..]) {
        (_, []) => Err("has no model with engine = \"process\"".to_owned()),
        (None, [only]) => Ok(*only),
        (None, _) => Err(format!("has several models with engine = \"process\"; name one of {names}")),
        (Some(model), programs) => {
            let found = programs.iter().find(|(name, _)| *name == model).copied();
            found.ok_or_else(|| format!("has no model `{model}` with engine = \"process\"; it has {names}"))
        }
    }
}

async fn serve(config: ProcessConfig, trial: Trial) -> ExitCode {
    let Reading { total, .. } = HostView.memory();
    let book = DeviceBook::new(std::sync::Arc::new(HostView));
    // As in a worker: on a developer's machine there are none, and the keeper watches the host's memory.
    let cgroups = Cgroups::prepare().inspect(|cgroups| eprintln!("{cgroups}")).ok();
    let launcher = Launcher { cgroups, ..Launcher::default() };
    let options =
        PoolOptions { launcher, book, budget: total, learned: Learned::default(), shares_device: false };
    let pool = match Pool::start(config, options).await {
        Ok(pool) => pool,
        Err(error) => {
            eprintln!("{}", error.stderr().trim_end());
            eprintln!("vramq-run-model: {error}");
            return EXIT_UNUSABLE.into();
        }
    };
    let resident_mib = pool.resident().unwrap_or(0) >> 20;
    eprintln!("loaded: {resident_mib} MiB, up to {} process(es)", pool.instances());
    let mut lines = BufReader::new(tokio::io::stdin()).lines();
    let mut failed = false;
    let mut items = Vec::new();
    let mut number = 0;
    while let Some(line) = lines.next_line().await.transpose() {
        number += 1;
        // After a line that is no UTF-8 the next one can be read; after another error nothing can.
        let is_last = line.as_ref().is_err_and(|error| error.kind() != std::io::ErrorKind::InvalidData);
        match line.map_err(|error| format!("read an item: {error}")).and_then(|line| item(&line)) {
            Ok(item) => items.push((number, item)),
            Err(error) => {
                eprintln!("vramq-run-model: line {number}: {error}");
                failed = true;
            }
        }
        if items.len() == trial.batch {
            failed |= !run(&pool, std::mem::take(&mut items), &trial.params).await;
        }
        if is_last {
            break;
        }
    }
    if !items.is_empty() {
        failed |= !run(&pool, items, &trial.params).await;
    }
    pool.close().await;
    u8::from(failed).into()
}

/// A line as an item.
fn item(line: &str) -> Result<Item, String> {
    let Ok(Value::Object(object)) = serde_json::from_str(line) else {
        return Ok(Item::Text(line.to_owned()));
    };
    let text = |key: &str| object.get(key).and_then(Value::as_str).map(str::to_owned);
    if let Some(value) = object.get("json") {
        Ok(Item::Json(value.into()))
    } else if let Some(uri) = text("uri") {
        Ok(Item::Uri(uri))
    } else if let Some(text) = text("text") {
        Ok(Item::Text(text))
    } else if let Some(path) = text("file") {
        let bytes = std::fs::read(&path).map_err(|error| format!("read {path}: {error}"))?;
        Ok(Item::bytes(bytes))
    } else {
        Err("an object has one of the keys json, uri, text, file".to_owned())
    }
}

/// Runs items, each with the number of its line, in one pass; whether it was done.
async fn run(pool: &Pool, items: Vec<(usize, Item)>, params: &Map<String, Value>) -> bool {
    let (lines, items): (Vec<usize>, Vec<Item>) = items.into_iter().unzip();
    let costs: Vec<_> = items.iter().map(vramq_inference::process::Costs::new).collect();
    let need = match pool.need(&costs) {
        Need::Bytes(bytes) => format!("{} MiB", bytes >> 20),
        Need::Unknown => "unknown".to_owned(),
    };
    let mut pass = match pool.run(PassRequest { items, params: params.clone(), ..PassRequest::default() }) {
        Ok(pass) => pass,
        Err(error) => {
            eprintln!("vramq-run-model: {}: {error}", of_lines(&lines));
            return false;
        }
    };
    let mut is_done = false;
    while let Some(event) = pass.next().await {
        match event {
            PassEvent::Output { output, .. } => match serde_json::to_string(&output) {
                Ok(text) => {
                    println!("{text}");
                    let _ = std::io::stdout().flush();
                }
                Err(error) => eprintln!("vramq-run-model: {error}"),
            },
            PassEvent::Progress { fraction, note, .. } => eprintln!("{:3.0} % {note}", fraction * 100.0),
            PassEvent::End(PassEnd::Done { peak }) => {
                is_done = true;
                let peak = peak.map_or("unknown".to_owned(), |peak| format!("{} MiB", peak >> 20));
                eprintln!("done; need {need}, peak {peak}");
            }
            PassEvent::End(end) => eprintln!("vramq-run-model: {}", told(&end, &lines)),
        }
    }
    is_done
}

/// The lines of a pass, which need not follow each other.
fn of_lines(lines: &[usize]) -> String {
    match lines {
        [line] => format!("line {line}"),
        lines => format!("lines {}", lines.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")),
    }
}

/// Why a pass was not done, for a person who has seen what the program printed.
fn told(end: &PassEnd, lines: &[usize]) -> String {
    let item = match end {
        PassEnd::OutOfMemory { item, .. } | PassEnd::Failed { item, .. } => *item,
        _ => None,
    };
    let of = item.and_then(|item| lines.get(item)).map_or_else(|| of_lines(lines), |line| of_lines(&[*line]));
    let voided = if end.voids_outputs() { "; none of the outputs of this pass counts" } else { "" };
    format!("{of}: {}{voided}", what_ended(end))
}

fn what_ended(end: &PassEnd) -> String {
    match end {
        PassEnd::Done { .. } => "done".to_owned(),
        PassEnd::OutOfMemory { report, .. } => format!("out of device memory: {}", report.detail),
        PassEnd::Failed { detail, .. } => format!("failed: {detail}"),
        PassEnd::Protocol { fault, .. } => fault.clone(),
        PassEnd::Crashed { death, .. } => format!("the process {death}"),
        PassEnd::TimedOut { limit, .. } => {
            format!("took longer than {} s (item_s for each item)", limit.as_secs_f64())
        }
        PassEnd::Cancelled { .. } => "cancelled".to_owned(),
        PassEnd::NotRun { reason } => format!("not run: {reason}"),
        PassEnd::DiskFull { detail, .. } => detail.clone(),
    }
}
