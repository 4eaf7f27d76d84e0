//! One-shot programs: started for each item, by a template of arguments, and judged by their exit status and what they print.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until, timeout};
use vramq_schemas::Output;

use super::child::{Child, Fate, GONE_LIMIT};
use super::config::{Mode, Once, ProcessConfig};
use super::cost::{Costs, Unit};
use super::item::Item;
use super::keeper::{Death, OutputUse};
use super::oom::{Verdict, judge};
use super::outputs::{self, FILE_BYTES_MAX};
use super::pass::{PassEnd, PassJob, Stop};
use super::peak::Sampler;
use super::pool::PoolOptions;
use super::protocol::{FailureKind, OutputHeader, OutputKind};

/// An argument with places to fill in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Template(Vec<Piece>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Piece {
    Literal(String),
    /// The path of a file with the item.
    Input,
    /// The path of the file that the program writes.
    Output,
    /// A parameter of the job.
    Param(String),
}

impl Template {
    /// Reads `{input}`, `{output}`, `{params.NAME}`; `{{` and `}}` are braces.
    ///
    /// # Errors
    /// The template names an unknown placeholder.
    pub fn parse(text: &str) -> Result<Self, String> {
        let wrong = |what: &str| {
            Err(format!(
                "{text:?} has {what}; there are {{input}}, {{output}}, {{params.NAME}}, and {{{{ for a brace"
            ))
        };
        let mut pieces = Vec::new();
        let mut literal = String::new();
        let mut rest = text;
        while let Some(at) = rest.find(['{', '}']) {
            literal.push_str(&rest[..at]);
            let (brace, after) = rest[at..].split_at(1);
            if after.starts_with(brace) {
                literal.push_str(brace);
                rest = &after[1..];
                continue;
            }
            let (true, Some(end)) = (brace == "{", after.find('}')) else {
                return wrong("a brace that stands alone");
            };
            let piece = match &after[..end] {
                "input" => Piece::Input,
                "output" => Piece::Output,
                place => match place.strip_prefix("params.") {
                    Some(name) if !name.is_empty() => Piece::Param(name.to_owned()),
                    _ => return wrong(&format!("the place {{{place}}}")),
                },
            };
            if !literal.is_empty() {
                pieces.push(Piece::Literal(std::mem::take(&mut literal)));
            }
            pieces.push(piece);
            rest = &after[end + 1..];
        }
        literal.push_str(rest);
        if !literal.is_empty() {
            pieces.push(Piece::Literal(literal));
        }
        Ok(Self(pieces))
    }

    fn has_output(&self) -> bool {
        self.0.contains(&Piece::Output)
    }

    /// The argument for an item.
    ///
    /// # Errors
    /// A parameter is missing, or cannot be an argument: a value that would make an argument begin with `-` is refused,
    /// so that no job can add an option.
    pub fn fill(&self, input: &Path, output: &Path, params: &Map<String, Value>) -> Result<String, String> {
        let mut argument = String::new();
        for piece in &self.0 {
            match piece {
                Piece::Literal(text) => argument.push_str(text),
                Piece::Input => argument.push_str(&input.display().to_string()),
                Piece::Output => argument.push_str(&output.display().to_string()),
                Piece::Param(name) => {
                    let value = param(name, params)?;
                    // What comes before it may be another parameter, and empty.
                    if argument.is_empty() && value.starts_with('-') {
                        return Err(format!("params.{name} begins with '-'"));
                    }
                    argument.push_str(&value);
                }
            }
        }
        if argument.len() >= ARGUMENT_BYTES_MAX {
            return Err(format!(
                "the parameters make an argument of {} bytes, at most {ARGUMENT_BYTES_MAX} are passed",
                argument.len()
            ));
        }
        Ok(argument)
    }
}

/// What Linux takes as one argument (`MAX_ARG_STRLEN`).
const ARGUMENT_BYTES_MAX: usize = 128 << 10;

/// Names in the error of a missing output: enough to see how a program names its files.
const NAMES_MAX: usize = 8;

fn param(name: &str, params: &Map<String, Value>) -> Result<String, String> {
    let value = match params.get(name) {
        None => return Err(format!("params.{name} is missing")),
        Some(Value::String(text)) => text.clone(),
        Some(value @ (Value::Number(_) | Value::Bool(_))) => value.to_string(),
        Some(_) => return Err(format!("params.{name} is not a text, number or boolean")),
    };
    if value.contains('\0') { Err(format!("params.{name} has a NUL character")) } else { Ok(value) }
}

/// How a pass of a one-shot program ended.
pub(super) struct Ended {
    pub end: PassEnd,
    pub learnt: Learnt,
    /// The last program, if it does not end although it was killed.
    pub ending: Option<JoinHandle<()>>,
}

/// Runs a pass, item by item. It ends with the first program that does not end.
pub(super) async fn run(
    config: &ProcessConfig,
    options: &PoolOptions,
    job: &mut PassJob,
    closing: &mut watch::Receiver<bool>,
) -> Ended {
    let mut learnt = Vec::new();
    let Mode::Once(once) = &config.mode else {
        let end = PassEnd::NotRun { reason: "the model is not one-shot".to_owned() };
        return Ended { end, learnt, ending: None };
    };
    for index in 0..job.request.items.len() {
        let runner = Runner { config, options, once, index };
        let (end, peak, ending) = runner.run(job, closing).await;
        match end {
            Ok(output) => job.events.output(index, output),
            Err(end) => return Ended { end, learnt, ending },
        }
        let cost = Costs::new(&job.request.items[index]).of(config.vram.per);
        learnt.extend(cost.zip(peak));
    }
    Ended { end: PassEnd::Done { peak: None }, learnt, ending: None }
}

/// What items cost, and what their programs took of the device.
pub(super) type Learnt = Vec<(f64, u64)>;

/// The cost of a pass of a one-shot program: that of its largest item, since they run one after the other.
pub(super) fn pass_cost(items: &[Costs], unit: Unit) -> Option<f64> {
    items.iter().map(|costs| costs.of(unit)).try_fold(0.0, |most: f64, cost| Some(most.max(cost?)))
}

struct Runner<'a> {
    config: &'a ProcessConfig,
    options: &'a PoolOptions,
    once: &'a Once,
    index: usize,
}

impl Runner<'_> {
    async fn run(
        &self,
        job: &mut PassJob,
        closing: &mut watch::Receiver<bool>,
    ) -> (Result<Output, PassEnd>, Option<u64>, Option<JoinHandle<()>>) {
        let item = &job.request.items[self.index];
        let prepared = match self.prepare(item, &job.request.params) {
            Ok(prepared) => prepared,
            Err(end) => return (Err(end), None, None),
        };
        let started = Child::start(&self.options.launcher.keeper, &prepared.spec, &self.config.name).await;
        let (mut child, stdout) = match started {
            Ok(started) => started,
            Err(error) => return (Err(PassEnd::NotRun { reason: error.to_string() }), None, None),
        };
        let entry = self.options.book.enter(child.keeper_pid());
        let sampler = match self.config.vram.learn {
            true => Sampler::start(&self.options.book, child.keeper_pid(), 0).await,
            false => None,
        };
        let end = self.watch(&mut child, stdout, job, closing).await;
        let peak = match sampler {
            Some(sampler) => sampler.stop().await,
            None => None,
        };
        let end = end.and_then(|printed| self.output(&child, &prepared, printed));
        child.finish().await;
        let name = self.config.name.clone();
        // What does not end although it was killed does not hold up the pass.
        let mut gone = tokio::spawn(async move {
            child.all_gone(&name).await;
            drop(entry);
        });
        let is_gone = timeout(GONE_LIMIT, &mut gone).await.is_ok();
        (end, peak.filter(|peak| *peak > 0), (!is_gone).then_some(gone))
    }

    /// Writes the item to the scratch folder and fills in the arguments.
    fn prepare(&self, item: &Item, params: &Map<String, Value>) -> Result<Prepared, PassEnd> {
        let failed = |kind, detail: String| self.failed(kind, detail, String::new());
        let view = self.options.book.view();
        let launcher = &self.options.launcher;
        let mut spec = launcher
            .spec(self.config, view, Vec::new(), OutputUse::Stdout)
            .map_err(|error| PassEnd::NotRun { reason: format!("make the scratch folder: {error}") })?;
        let input = spec.scratch.join(format!("input{}", self.once.input_suffix));
        let output = spec.scratch.join(format!("output{}", self.once.output_suffix));
        let templates: Result<Vec<_>, _> =
            self.config.command.iter().map(|argument| Template::parse(argument)).collect();
        let prepared = templates.map_err(|what| failed(FailureKind::Model, what)).and_then(|templates| {
            let arguments: Result<Vec<_>, _> =
                templates.iter().map(|template| template.fill(&input, &output, params)).collect();
            spec.command = arguments.map_err(|what| failed(FailureKind::Input, what))?;
            std::fs::write(&input, item.payload()).map_err(|error| {
                // What was written of it counts as free.
                let _ = std::fs::remove_file(&input);
                PassEnd::not_written(&error, std::slice::from_ref(item), &spec.scratch)
            })?;
            let file = templates.iter().any(Template::has_output).then_some(output);
            Ok(Prepared { spec: spec.clone(), file })
        });
        if prepared.is_err() {
            let _ = std::fs::remove_dir_all(&spec.scratch);
        }
        prepared
    }

    /// Waits for the program's end; what it printed to standard output, if it succeeded.
    async fn watch(
        &self,
        child: &mut Child,
        stdout: UnixStream,
        job: &mut PassJob,
        closing: &mut watch::Receiver<bool>,
    ) -> Result<Vec<u8>, PassEnd> {
        let deadline = Instant::now() + self.config.item;
        let mut stdout = tokio::spawn(read_capped(stdout));
        let stop = tokio::select! {
            () = until_ended(child) => None,
            () = sleep_until(deadline) => Some(Stop::TimedOut),
            why = job.cancellation.wait() => Some(why),
            _ = closing.wait_for(|closing| *closing) => Some(Stop::Cancelled),
        };
        if let Some(stop) = stop {
            child.end_program(self.config.kill).await;
            stdout.abort();
            return Err(match stop {
                Stop::TimedOut => {
                    PassEnd::TimedOut { limit: self.config.item, killed: true, stderr: child.stderr_tail() }
                }
                Stop::Cancelled => PassEnd::Cancelled { killed: true },
            });
        }
        // Nothing of it is left, so nobody holds the other end.
        let printed = (&mut stdout).await.ok().flatten();
        let (death, stderr) = (child.death().unwrap_or(Death::KeeperLost), child.stderr_tail());
        match (judge(death, &stderr), death) {
            (Verdict::Device(report), _) => {
                Err(PassEnd::OutOfMemory { item: Some(self.index), report, stderr })
            }
            (Verdict::Host, death) => {
                Err(self.failed(FailureKind::HostMemory, format!("the program {death}"), stderr))
            }
            (Verdict::Other, Death::Exited(0)) => printed.ok_or_else(|| {
                let detail = format!("the program printed more than {FILE_BYTES_MAX} bytes");
                self.failed(FailureKind::Output, detail, stderr)
            }),
            (Verdict::Other, Death::Exited(_)) => {
                Err(self.failed(FailureKind::Model, format!("the program {death}"), stderr))
            }
            (Verdict::Other, death) => Err(PassEnd::Crashed { death, stderr }),
        }
    }

    /// What the program wrote, as an output.
    fn output(&self, child: &Child, prepared: &Prepared, printed: Vec<u8>) -> Result<Output, PassEnd> {
        let is_json = self.once.media_type == "application/json";
        let kind = if is_json { OutputKind::Json } else { OutputKind::Bytes };
        let name = prepared
            .file
            .as_ref()
            .and_then(|file| file.file_name())
            .map(|name| name.to_string_lossy().into_owned());
        let blobs = if name.is_some() { Vec::new() } else { vec![printed] };
        let header =
            OutputHeader { kind, dtype: None, media_type: Some(self.once.media_type.clone()), file: name };
        outputs::read(&header, blobs, child.scratch()).map_err(|what| {
            let is_missing = prepared.file.as_ref().is_some_and(|file| !file.exists());
            let what = if is_missing { format!("{what}; {}", there(child.scratch())) } else { what };
            self.failed(FailureKind::Output, what, child.stderr_tail())
        })
    }

    fn failed(&self, kind: FailureKind, detail: String, stderr: String) -> PassEnd {
        PassEnd::Failed { kind, item: Some(self.index), detail, stderr }
    }
}

/// What a program left in its folder: some number their outputs, or choose another ending.
fn there(folder: &Path) -> String {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten().take(NAMES_MAX);
    let names: Vec<_> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    format!("the folder has {}", names.join(", "))
}

/// A program that is ready to start.
struct Prepared {
    spec: super::keeper::Spec,
    /// The file that it writes; otherwise what it prints is its output.
    file: Option<PathBuf>,
}

/// Waits until the program and all its descendants are dead.
async fn until_ended(child: &mut Child) {
    while !matches!(child.fate().await, Fate::Ended | Fate::Gone) {}
}

/// All of it, or nothing, if it is too much; it is read to the end even so.
async fn read_capped(mut from: impl AsyncRead + Unpin) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    let _ = (&mut from).take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).await;
    let is_whole = bytes.len() as u64 <= FILE_BYTES_MAX;
    let _ = tokio::io::copy(&mut from, &mut tokio::io::sink()).await;
    is_whole.then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn fill(template: &str, params: Value) -> Result<String, String> {
        let Value::Object(params) = params else { panic!("no object") };
        Template::parse(template)?.fill(Path::new("/s/input.png"), Path::new("/s/output.jpg"), &params)
    }

    #[test]
    fn places_are_filled_in() {
        assert_eq!(fill("{input}", json!({})), Ok("/s/input.png".to_owned()));
        assert_eq!(fill("jpg:{output}", json!({})), Ok("jpg:/s/output.jpg".to_owned()));
        assert_eq!(
            fill("--size={params.w}x{params.h}", json!({"w": 64, "h": "48"})),
            Ok("--size=64x48".to_owned())
        );
        assert_eq!(fill("{{{params.a}}}", json!({"a": true})), Ok("{true}".to_owned()));
        assert_eq!(fill("plain", json!({})), Ok("plain".to_owned()));
    }

    #[test]
    fn a_parameter_is_never_an_option_and_never_a_shell() {
        for (template, params) in [
            ("{params.name}", json!({"name": "-delete"})),
            ("{params.folder}{params.name}", json!({"folder": "", "name": "-delete"})),
            ("{params.name}", json!({"name": -1})),
        ] {
            let error = fill(template, params).unwrap_err();
            assert!(error.contains("params.name begins with '-'"), "{error}");
        }
        assert_eq!(fill("{params.a}{params.b}", json!({"a": "x", "b": "-y"})), Ok("x-y".to_owned()));
        assert_eq!(fill("{params.name}", json!({"name": "$(reboot); `x`"})), Ok("$(reboot); `x`".to_owned()));
        assert_eq!(fill("-n{params.name}", json!({"name": "-1"})), Ok("-n-1".to_owned()));
        for params in [json!({}), json!({"name": [1]}), json!({"name": null}), json!({"name": "a\0b"})] {
            assert!(fill("{params.name}", params.clone()).is_err(), "{params}");
        }
    }

    #[test]
    fn unknown_places_are_faults() {
        for text in ["{", "}", "{x}", "{params.}", "a{b", "{}"] {
            assert!(Template::parse(text).is_err(), "{text}");
        }
    }
}
