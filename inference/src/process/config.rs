//! The configuration of a process model: reads its table, and reports all faults at once.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use toml::{Table, Value};

use super::cost::Unit;
use super::need::Declared;
use super::program::{self, Unusable};
use super::protocol::PASS_ITEMS_MAX;
use super::reader::Reader;
use super::rule::{Consequence, Rule};
use super::shell;
use super::template::Template;

/// More processes on one device hardly ever have something to do: passes of one device share it.
pub const INSTANCES_MAX: usize = 64;

/// The default of `items_max`.
pub const ITEMS_MAX_DEFAULT: usize = 8;

const MIB: f64 = 1_048_576.0;

/// What a process model is.
#[derive(Clone, Debug, PartialEq)]
pub struct ProcessConfig {
    /// The model's name.
    pub name: String,
    /// Program and arguments; the program's path is absolute.
    pub command: Vec<String>,
    /// Where the program runs.
    pub folder: PathBuf,
    pub mode: Mode,
    pub instances: Instances,
    /// Added to the variables that every program gets.
    pub env: BTreeMap<String, String>,
    /// Files that the outputs depend on, such as weights: their content counts for the revision.
    pub revision_files: Vec<PathBuf>,
    /// A process that had nothing to do for so long is ended; `None`: never.
    pub idle: Option<Duration>,
    pub vram: Vram,
    pub items_max: usize,
    /// How long loading may take.
    pub load: Duration,
    /// How long an item may take.
    pub item: Duration,
    /// How long a process has to stop when asked, before it is killed.
    pub kill: Duration,
    /// How long memory of an ended process may be missing before the worker is to be restarted; `None`: for ever.
    pub withheld_max: Option<Duration>,
    /// A process is replaced after so many passes; `None`: never.
    pub recycle_after: Option<u64>,
    /// Resident memory of all its processes together.
    pub host_memory_bytes: Option<u64>,
    pub rules: Vec<Rule>,
    /// Where scratch folders are made.
    pub scratch: PathBuf,
}

/// How a program serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Kept alive; speaks the protocol.
    Warm,
    /// Started for each item; does not speak the protocol.
    Once(Once),
}

/// Placeholders for a one-shot program's files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Once {
    /// The ending of `{input}`, such as `.png`, by which programs recognise a format.
    pub input_suffix: String,
    /// The ending of `{output}`.
    pub output_suffix: String,
    /// What the output is; `application/json` is parsed.
    pub media_type: String,
}

/// How many processes serve a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Instances {
    /// As many as the device's memory admits.
    Auto,
    These(usize),
}

/// What the configuration declares of the model's device memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Vram {
    /// What a process takes by being loaded.
    pub base_bytes: Option<u64>,
    pub per: Unit,
    /// What a pass takes beyond that, for each unit of its cost.
    pub declared: Option<Declared>,
    /// Whether the worker learns from measured peaks.
    pub learn: bool,
}

impl Vram {
    /// Device bytes that a process and a pass of this cost take together, as far as they are declared.
    pub fn declared_bytes(&self, cost: f64) -> u64 {
        let of_pass = self.declared.map_or(0.0, |declared| cost * declared.bytes_per_unit);
        // The cast of a float saturates.
        self.base_bytes.unwrap_or(0).saturating_add(of_pass.ceil() as u64)
    }
}

/// Where the configuration is, and what it may use.
#[derive(Clone, Debug)]
pub struct Place {
    /// The configuration file's folder, in which programs run unless they say otherwise.
    pub folder: PathBuf,
    /// Where scratch folders are made unless the model says otherwise.
    pub scratch: PathBuf,
}

/// One thing that is wrong, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    pub key: String,
    pub what: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.key, self.what)
    }
}

impl ProcessConfig {
    /// Reads `[model.NAME]`; `engine` may be left in it.
    ///
    /// # Errors
    /// All faults. The program itself must exist and be executable, and so must the interpreter of a script.
    pub fn read(name: &str, table: Table, place: &Place) -> Result<Self, Vec<Fault>> {
        match Self::read_for_any_machine(name, table, place)? {
            (config, absent) if absent.is_empty() => Ok(config),
            (_, absent) => Err(absent),
        }
    }

    /// The same for a configuration that may be for another machine. Also returns the files and folders that this one lacks.
    ///
    /// # Errors
    /// All faults, and with them what this machine lacks.
    pub fn read_for_any_machine(
        name: &str,
        table: Table,
        place: &Place,
    ) -> Result<(Self, Vec<Fault>), Vec<Fault>> {
        let mut reader = Reader::new(format!("model.{name}"), table);
        let _ = reader.text("engine");
        let folder = reader.path("folder").unwrap_or_else(|| place.folder.clone());
        let scratch = reader.path("scratch").unwrap_or_else(|| place.scratch.clone());
        let command = command(&mut reader);
        let config = Self {
            name: name.to_owned(),
            mode: mode(&mut reader, &command),
            instances: instances(&mut reader),
            env: env(&mut reader),
            revision_files: revision_files(&mut reader, &folder),
            idle: reader.seconds("idle_s", 600.0).filter(|idle| !idle.is_zero()),
            vram: vram(&mut reader),
            items_max: reader
                .whole("items_max", 1, PASS_ITEMS_MAX as u64)
                .map_or(ITEMS_MAX_DEFAULT, |items| items as usize),
            load: at_least_a_moment(&mut reader, "load_s", 300.0),
            item: at_least_a_moment(&mut reader, "item_s", 600.0),
            kill: reader.seconds("kill_s", 10.0).unwrap_or_default(),
            withheld_max: reader.seconds("withheld_s", 900.0).filter(|limit| !limit.is_zero()),
            recycle_after: reader.whole("recycle_after", 0, u64::MAX).filter(|passes| *passes > 0),
            host_memory_bytes: reader.whole("host_memory_mib", 1, 1 << 30).map(|mib| mib << 20),
            rules: rules(&mut reader),
            command,
            folder,
            scratch,
        };
        for (key, folder) in [("folder", &config.folder), ("scratch", &config.scratch)] {
            if !folder.is_absolute() {
                reader.fault(key, format!("is {folder:?}; it must be an absolute path"));
            } else if !folder.exists() {
                reader.absent(key, format!("is {folder:?}, which is not a folder"));
            } else if !folder.is_dir() {
                reader.fault(key, format!("is {folder:?}, which is not a folder"));
            }
        }
        reader.finish().map(|absent| (config, absent))
    }
}

fn command(reader: &mut Reader) -> Vec<String> {
    let Some(command) = reader.texts("command") else {
        reader.fault_if_absent(
            "command",
            "names the program and its arguments: [\"/opt/venv/bin/python\", \"serve.py\"]",
        );
        return Vec::new();
    };
    let Some(path) = command.first().map(Path::new) else {
        reader.fault("command", "is empty; it must name a program");
        return command;
    };
    if !path.is_absolute() {
        let what = "its program must be an absolute path: what PATH finds differs between machines";
        reader.fault("command", format!("starts with {path:?}; {what}"));
    } else if let Some(Unusable { what, is_absent }) = program::fault(path) {
        if is_absent { reader.absent("command", what) } else { reader.fault("command", what) }
    }
    if command.iter().any(|argument| argument.contains('\0')) {
        reader.fault("command", "has a NUL character");
    }
    command
}

fn mode(reader: &mut Reader, command: &[String]) -> Mode {
    let mode = reader.text("mode").unwrap_or_else(|| "warm".to_owned());
    let section = reader.section("once");
    match mode.as_str() {
        "once" => {
            let mut once = section.unwrap_or_else(|| reader.empty_section("once"));
            let mut text = |key, default: &str| once.text(key).unwrap_or_else(|| default.to_owned());
            let read = Once {
                input_suffix: text("input_suffix", ""),
                output_suffix: text("output_suffix", ""),
                media_type: text("media_type", "application/octet-stream"),
            };
            for (key, suffix) in
                [("input_suffix", &read.input_suffix), ("output_suffix", &read.output_suffix)]
            {
                if suffix.contains(['/', '\0']) || suffix.len() > 32 {
                    once.fault(
                        key,
                        format!("is {suffix:?}; it must be the ending of a file's name, such as \".png\""),
                    );
                }
            }
            reader.absorb(once);
            for argument in command {
                if let Err(what) = Template::parse(argument) {
                    reader.fault("command", what);
                }
            }
            if let Some(what) = shell::script_of_jobs(command) {
                reader.fault("command", what);
            }
            Mode::Once(read)
        }
        other => {
            if other != "warm" {
                reader.fault("mode", format!("is {other:?}; it must be \"warm\" or \"once\""));
            } else if section.is_some() {
                reader.fault("once", "is for mode = \"once\"");
            }
            Mode::Warm
        }
    }
}

fn instances(reader: &mut Reader) -> Instances {
    let expected = || format!("must be \"auto\" or a whole number from 1 to {INSTANCES_MAX}");
    match reader.value("instances") {
        None => Instances::Auto,
        Some(Value::String(text)) if text == "auto" => Instances::Auto,
        Some(Value::Integer(count)) if (1..=INSTANCES_MAX as i64).contains(&count) => {
            Instances::These(count as usize)
        }
        Some(other) => {
            reader.fault("instances", format!("is {other}; it {}", expected()));
            Instances::Auto
        }
    }
}

/// What the worker sets itself.
const RESERVED: [&str; 7] =
    ["VRAMQ_FD", "VRAMQ_SCRATCH", "HOME", "TMPDIR", "CUDA_VISIBLE_DEVICES", "LD_PRELOAD", "LD_AUDIT"];

fn env(reader: &mut Reader) -> BTreeMap<String, String> {
    let mut env = BTreeMap::new();
    for (name, value) in reader.table("env") {
        let is_name = !name.is_empty() && !name.contains(['=', '\0']);
        match value {
            Value::String(value) if is_name && !value.contains('\0') => {
                if RESERVED.contains(&name.as_str()) {
                    reader.fault(&format!("env.{name}"), "may not be set here");
                }
                env.insert(name, value);
            }
            other => {
                reader.fault(&format!("env.{name}"), format!("is {other}; it must be a name and a text"));
            }
        }
    }
    env
}

/// As paths in the program's folder, unless they are absolute.
fn revision_files(reader: &mut Reader, folder: &Path) -> Vec<PathBuf> {
    let named = reader.texts("revision_files").unwrap_or_default();
    let files: Vec<PathBuf> = named.iter().map(|file| folder.join(file)).collect();
    for file in files.iter().filter(|file| !file.is_file()) {
        let what = format!("names {file:?}, which is not a file");
        if file.exists() {
            reader.fault("revision_files", what);
        } else {
            reader.absent("revision_files", what);
        }
    }
    files
}

fn vram(reader: &mut Reader) -> Vram {
    let mut section = reader.section("vram").unwrap_or_else(|| reader.empty_section("vram"));
    let base_bytes = section.number("base_mib", 0.0).map(|mib| (mib * MIB) as u64);
    let per = section.text("per").map(|per| per.parse::<Unit>());
    let declared = section.number("mib_per_unit", 0.0);
    let learn = section.flag("learn").unwrap_or(true);
    if let Some(Err(what)) = &per {
        section.fault("per", what.clone());
    }
    if declared.is_none() && !learn {
        section.fault("mib_per_unit", "is missing, and learn is off: nothing tells what a pass needs");
    }
    reader.absorb(section);
    Vram {
        base_bytes,
        per: per.and_then(Result::ok).unwrap_or(Unit::Items),
        declared: declared.map(|mib| Declared { bytes_per_unit: mib * MIB }),
        learn,
    }
}

/// A limit of 0 would end everything at once.
fn at_least_a_moment(reader: &mut Reader, key: &'static str, default: f64) -> Duration {
    let limit = reader.seconds(key, default).unwrap_or_default();
    if limit.is_zero() {
        reader.fault(key, "is 0; it must be a time");
    }
    limit
}

fn rules(reader: &mut Reader) -> Vec<Rule> {
    let mut rules = Vec::new();
    for mut section in reader.sections("rule") {
        let when = section.text("when").map(|when| when.parse());
        let exclusive = section.flag("exclusive").filter(|exclusive| *exclusive);
        let (refuse, to) = (section.text("refuse"), section.text("to"));
        let then = match (exclusive, refuse, to) {
            (Some(_), None, None) => Some(Consequence::Exclusive),
            (None, Some(reason), None) => Some(Consequence::Refuse(reason)),
            (None, None, Some(key)) => Some(Consequence::To(key)),
            _ => {
                section.fault("when", "needs one of: exclusive = true, refuse = \"REASON\", to = \"KEY\"");
                None
            }
        };
        match (when, then) {
            (Some(Ok(when)), Some(then)) => rules.push(Rule { when, then }),
            (Some(Err(what)), _) => section.fault("when", what),
            (None, _) => section.fault_if_absent("when", "is a comparison such as \"pixels > 4e6\""),
            _ => {}
        }
        reader.absorb(section);
    }
    rules
}
