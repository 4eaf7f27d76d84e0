//! Speech becomes text: the example of docs/process-models.md with PocketSphinx, on a recording. `make test-programs`.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use tempfile::TempDir;
use vramq_schemas::fields::as_text;
use vramq_schemas::headers::MODEL_REVISION;
use vramq_schemas::topology::dead_queue;
use vramq_schemas::{Failure, Input, ItemProgress, Job, Output, Params, Reason, ReplyKind, codec};
use vramq_tests::client::Mailbox;
use vramq_tests::job::Message;
use vramq_tests::on_one_setup;
use vramq_tests::programs::root;
use vramq_tests::test_env::{MODEL, TestEnv};

use crate::example::Example;
use crate::process::consuming;

on_one_setup!(
    #[ignore = "needs PocketSphinx: make test-programs"]
    a_recording_becomes_text_while_its_caller_follows
);

/// What is read aloud in `tests/speech/dashwood.wav`.
pub(crate) const SPOKEN: &str = "and mister john dashwood had then leisure to consider how much there might be prudently in his \
                      power to do for them";

/// How many of the 22 spoken words have to be understood, in their order. A model of this size takes some for others.
const WORDS_MIN: usize = 14;

/// Seconds that the configuration takes of one recording.
const SECONDS_MAX: usize = 30;

/// Samples a second, of 16 bits each, in one channel.
pub(crate) const RATE: usize = 16_000;

/// Bytes before the samples.
pub(crate) const WAV_HEADER: usize = 44;

/// A worker's configuration with [`MODEL`] as `docs/model-examples/speech.py`.
fn configured(env: &mut TestEnv) -> Result<TempDir> {
    let settings = format!(
        "vram = {{ per = \"seconds\", mib_per_unit = 1 }}\n\
         rule = [{{ when = \"seconds > {SECONDS_MAX}\", refuse = \"a long recording\" }}]"
    );
    let python = "VRAMQ_TEST_PROGRAMS_PYTHON";
    Example { python, program: "speech.py", settings: &settings, variables: "" }.configure(env)
}

/// A job for recordings, that asks for progress.
pub(crate) fn job(env: &TestEnv, id: &str, recordings: Vec<Vec<u8>>) -> Result<Message> {
    let mut params = Params::default();
    params.ask_for_progress();
    let inputs: Vec<Input> = recordings.into_iter().map(Input::Bytes).collect();
    let body = codec::encode(&Job { model: MODEL.to_owned(), inputs, params }, env.setup.encoding)?;
    Ok(env.job(id, ["x"])?.with_body(body))
}

/// The recording, as a WAV file.
pub(crate) fn recording() -> Result<Vec<u8>> {
    Ok(std::fs::read(root().join("tests/speech/dashwood.wav"))?)
}

/// Silence as a WAV file.
pub(crate) fn silence(seconds: usize) -> Vec<u8> {
    wav(&vec![0; seconds * RATE * 2])
}

/// Samples as a WAV file, with a header of [`WAV_HEADER`] bytes.
pub(crate) fn wav(samples: &[u8]) -> Vec<u8> {
    let bytes = samples.len();
    let number = |number: usize| u32::try_from(number).unwrap_or(u32::MAX).to_le_bytes();
    let mut wav = [&b"RIFF"[..], &number(36 + bytes), b"WAVEfmt ", &number(16), &[1, 0, 1, 0]].concat();
    wav.extend([&number(RATE)[..], &number(RATE * 2), &[2, 0, 16, 0], b"data", &number(bytes)].concat());
    wav.extend(samples);
    wav
}

/// How many words two texts have in common, in the same order: their longest common subsequence.
pub(crate) fn common(one: &str, other: &str) -> usize {
    let others: Vec<&str> = other.split(' ').collect();
    let mut row = vec![0; others.len() + 1];
    for word in one.split(' ') {
        let mut diagonal = 0;
        for (at, other) in others.iter().enumerate() {
            let above = row[at + 1];
            row[at + 1] = if word == *other { diagonal + 1 } else { above.max(row[at]) };
            diagonal = above;
        }
    }
    row.last().copied().unwrap_or(0)
}

/// What came of a job.
#[derive(Debug, Default)]
pub(crate) struct Heard {
    pub(crate) outputs: Vec<Value>,
    pub(crate) reports: Vec<ItemProgress>,
    pub(crate) failure: Option<Failure>,
    pub(crate) revision: Option<String>,
    pub(crate) is_done: bool,
}

impl Heard {
    /// The job has failed, or it is done and its last item was reported as finished: that report may come after `done`.
    fn is_over(&self) -> bool {
        let is_last = |report: &ItemProgress| report.item as usize + 1 == self.outputs.len();
        let is_end = |report: &ItemProgress| is_last(report) && report.fraction >= 1.0;
        self.failure.is_some() || self.is_done && self.reports.iter().any(is_end)
    }
}

/// Follows jobs until each of them is over.
pub(crate) async fn follow(
    replies: &mut Mailbox,
    env: &TestEnv,
    ids: &[&str],
) -> Result<BTreeMap<String, Heard>> {
    let mut all: BTreeMap<String, Heard> =
        ids.iter().map(|id| ((*id).to_owned(), Heard::default())).collect();
    while !all.values().all(Heard::is_over) {
        let reply = replies.next().await?;
        let heard = all.get_mut(reply.id()).with_context(|| format!("a reply to {}", reply.id()))?;
        match reply.kind()? {
            ReplyKind::Progress => heard.reports.push(codec::decode(&reply.body, env.setup.encoding)?),
            ReplyKind::Failed => heard.failure = Some(reply.failure()?),
            kind @ (ReplyKind::Part | ReplyKind::Done) => {
                heard.is_done = kind == ReplyKind::Done;
                for output in reply.outputs()?.outputs {
                    let Output::Json(value) = output else { anyhow::bail!("no JSON: {output:?}") };
                    heard.outputs.push(value);
                }
                heard.revision = reply.headers().inner().get(MODEL_REVISION).and_then(as_text);
            }
        }
    }
    Ok(all)
}

async fn a_recording_becomes_text_while_its_caller_follows(env: &mut TestEnv) -> Result<()> {
    let _folder = configured(env)?;
    let worker = consuming(env, &[]).await?;
    let mut replies = env.replies().await?;
    let recording = recording()?;
    let seconds = (recording.len() - WAV_HEADER) as f64 / (2 * RATE) as f64;

    env.client.publish(MODEL, job(env, "spoken", vec![recording; 3])?).await?;
    let Heard { outputs, reports, failure, .. } =
        follow(&mut replies, env, &["spoken"]).await?.remove("spoken").unwrap_or_default();
    ensure!(outputs.len() == 3, "{outputs:?} {failure:?}");
    let text = outputs[0]["text"].as_str().context("no text")?;
    ensure!(common(text, SPOKEN) >= WORDS_MIN, "{text}");
    ensure!(
        outputs.iter().all(|output| *output == outputs[0]),
        "an item depends on those before it: {outputs:?}"
    );
    let words = outputs[0]["words"].as_array().context("no words")?;
    ensure!(words.len() >= WORDS_MIN, "{words:?}");
    let times: Vec<f64> =
        words.iter().flat_map(|word| [&word["from_s"], &word["to_s"]]).filter_map(Value::as_f64).collect();
    ensure!(times.len() == 2 * words.len() && times.is_sorted(), "{words:?}");
    ensure!(times.last().is_some_and(|last| *last <= seconds), "{words:?} within {seconds} s");

    // The first says that the job has begun. Those of the model come while it listens, with what it has understood.
    let (begin, heard) = reports.split_first().context("no progress")?;
    ensure!((begin.item, begin.fraction, begin.note.as_str()) == (0, 0.0, ""), "{begin:?}");
    ensure!(heard.len() >= 2, "{reports:?}");
    ensure!(heard.is_sorted_by_key(|report| (report.item, report.fraction)), "{reports:?}");
    ensure!(heard.iter().any(|report| !report.note.is_empty()), "{reports:?}");
    ensure!(heard.last().is_some_and(|last| (last.item, last.fraction) == (2, 1.0)), "{reports:?}");

    env.announce("pass failed");
    env.announce("job dead-lettered");
    env.leave(&dead_queue(MODEL));
    let cases = [
        // By its header alone: nobody has listened to it.
        ("long", silence(SECONDS_MAX + 1), "a long recording"),
        ("text", b"no recording".to_vec(), "inputs[0]: no WAV file"),
    ];
    for (id, recording, why) in cases {
        env.client.publish(MODEL, job(env, id, vec![recording])?).await?;
        let failure = follow(&mut replies, env, &[id]).await?.remove(id).and_then(|heard| heard.failure);
        let failure = failure.with_context(|| format!("{id} is done"))?;
        ensure!(failure.reason == Reason::InvalidInput && failure.error.contains(why), "{failure:?}");
    }
    worker.drain().await
}
