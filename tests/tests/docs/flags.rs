//! A flag means the same in every command of every program, and a variable that a flag reads is one that all programs know.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, Result, ensure};
use vramq_tests::on_one_setup;
use vramq_tests::test_env::TestEnv;

use super::help::{RUN_MODEL, Said, commands, help};

on_one_setup!(
    a_flag_has_one_meaning_in_all_commands,
    a_letter_stands_for_one_flag,
    every_variable_is_in_the_list_of_all_programs,
);

/// Flags that commands describe in different words, with the meaning that all of these share, and the words. A new text needs a look: does
/// the flag still mean one thing?
const ONE_MEANING: [(&str, &str, &[&str]); 9] = [
    ("--all", "everything that the command can select", &["All workers", "All dead letters of the model"]),
    (
        "--anonymous",
        "do not say who asks",
        &[
            "Leave the URL's user out of the jobs, by which workers share passes. Needed where the broker knows the connection by another \
             name, as with OAuth 2",
            "The bucket is public: send no credentials",
        ],
    ),
    (
        "--json",
        "print JSON",
        &["Print JSON instead of tables", "Print JSON lines", "Print each answer as a JSON object on a line"],
    ),
    (
        "--model",
        "a model, by its name",
        &[
            "The model's name",
            "Show the queues of this model (or key) even if no worker serves it; may be repeated",
            "The model (or its key); a list, or repeated. Without it: the models that workers serve now, by their heartbeats, which takes \
             some seconds; with --broker-management-url, all models",
            "Serve a model from a folder; may be repeated",
        ],
    ),
    (
        "--output",
        "where to write",
        &[
            "Where outputs are written; `-` is standard output. A file gets its name when it is complete",
            "Where the bytes are written. `-` is standard output; it, a pipe and a device get the bytes before their sha256 is known. A \
             file gets its name when it is complete and its sha256 is right",
            "A new file; by default standard output",
        ],
    ),
    (
        "--params",
        "the parameters of the model",
        &["Engine settings, as a JSON object", "the parameters of all passes, as a JSON object"],
    ),
    (
        "--set",
        "a key of the configuration",
        &[
            "Set any key of the file, such as model.minilm.slots_max=8; may be repeated",
            "Set any key of the file, such as http.request_s=60; may be repeated",
        ],
    ),
    (
        "--timeout",
        "the most time that what was asked for may take",
        &[
            "The time limit of a job, from publishing to its last reply (30s, 5m; by default none)",
            "The time limit of the download",
        ],
    ),
    (
        "--worker",
        "a worker, by its name",
        &[
            "The name of a worker; may be repeated",
            "Only those that this worker dead-lettered; may be repeated",
        ],
    ),
];

/// Every program has these.
const OF_ALL: [&str; 2] = ["--help", "--version"];

/// A flag as a help text has it.
#[derive(Debug)]
struct Flag {
    long: String,
    letter: Option<String>,
    text: String,
}

/// The flags of a help text. A line that begins with a dash has a flag's names; what follows, further right, is its text.
fn flags(help: &str) -> Vec<Flag> {
    let mut found: Vec<Flag> = Vec::new();
    let mut in_text = false;
    for line in help.lines().filter(|line| !line.trim().is_empty()) {
        let words = line.trim_start();
        let indent = line.len() - words.len();
        if (1..=6).contains(&indent) && words.starts_with('-') {
            let (names, text) = words.split_once("  ").unwrap_or((words, ""));
            let mut names = names.split([' ', ',', '=']).filter(|name| name.starts_with('-'));
            let (letter, long) = match (names.next(), names.next()) {
                (Some(letter), Some(long)) => (Some(letter.to_owned()), long),
                (long, _) => (None, long.unwrap_or_default()),
            };
            found.push(Flag { long: long.to_owned(), letter, text: text.trim().to_owned() });
            in_text = true;
        } else if indent <= 6 {
            in_text = false;
        } else if in_text && let Some(flag) = found.last_mut() {
            flag.text = format!("{} {words}", flag.text).trim().to_owned();
        }
    }
    found
}

/// What a text says of the flag. Defaults and variables are not part of its meaning.
fn meaning(text: &str) -> &str {
    let ends = ["[env:", "[default:", "[possible values:", "Possible values:"];
    let end = ends.iter().filter_map(|end| text.find(end)).min();
    text[..end.unwrap_or(text.len())].trim_end().trim_end_matches('.')
}

/// Every command, as one types it, with its flags.
async fn all_flags() -> Result<Vec<(String, Flag)>> {
    let own = help(&[RUN_MODEL.to_owned()]).await?;
    let run_model = Said { words: vec![RUN_MODEL.to_owned()], own, above: String::new() };
    let mut all = Vec::new();
    for Said { words, own, .. } in commands().await?.into_iter().chain([run_model]) {
        let flags = flags(&own);
        // A group of `completions`, say, has no other flag; but that one each has.
        ensure!(flags.iter().any(|flag| flag.long == "--help"), "no flags are found in {words:?}:\n{own}");
        all.extend(flags.into_iter().map(|flag| (words.join(" "), flag)));
    }
    Ok(all)
}

async fn a_flag_has_one_meaning_in_all_commands(_: &mut TestEnv) -> Result<()> {
    let mut texts: BTreeMap<String, BTreeMap<String, Vec<String>>> = BTreeMap::new();
    for (command, flag) in all_flags().await? {
        ensure!(!meaning(&flag.text).is_empty(), "{command} does not say what {} does", flag.long);
        let of_flag = texts.entry(flag.long).or_default();
        of_flag.entry(meaning(&flag.text).to_owned()).or_default().push(command);
    }
    ensure!(texts.len() > 60, "only {} flags are found: {:?}", texts.len(), texts.keys());
    for (flag, of_flag) in &texts {
        if of_flag.len() == 1 || OF_ALL.contains(&flag.as_str()) {
            continue;
        }
        let reviewed = ONE_MEANING.iter().find(|(name, ..)| name == flag);
        let known: BTreeSet<&str> =
            reviewed.into_iter().flat_map(|(.., texts)| texts.iter().copied()).collect();
        let found: BTreeSet<&str> = of_flag.keys().map(String::as_str).collect();
        ensure!(
            found == known,
            "{flag} is described in several ways. If it means one thing in all of them, use one text, or name the texts in \
             ONE_MEANING; if not, one of the flags needs another name:\n{of_flag:#?}\nin ONE_MEANING: {known:#?}"
        );
    }
    for (flag, ..) in ONE_MEANING {
        let of_flag = texts.get(flag).with_context(|| format!("no command has {flag} of ONE_MEANING"))?;
        ensure!(of_flag.len() > 1, "{flag} has one text in all commands: take it out of ONE_MEANING");
    }
    Ok(())
}

async fn a_letter_stands_for_one_flag(_: &mut TestEnv) -> Result<()> {
    let mut letters: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (_, flag) in all_flags().await? {
        if let Some(letter) = flag.letter {
            letters.entry(letter).or_default().insert(flag.long);
        }
    }
    ensure!(letters.len() > 5, "{letters:?}");
    for (letter, flags) in letters {
        ensure!(flags.len() == 1, "{letter} stands for {flags:?}");
    }
    Ok(())
}

/// A program refuses or warns of a variable that looks like vramq's and that it does not know.
async fn every_variable_is_in_the_list_of_all_programs(_: &mut TestEnv) -> Result<()> {
    let mut variables = BTreeSet::new();
    for (_, flag) in all_flags().await? {
        let named = flag.text.split("[env: ").skip(1).filter_map(|rest| rest.split(['=', ']']).next());
        variables.extend(named.map(str::to_owned));
    }
    ensure!(variables.len() > 10, "{variables:?}");
    let unlisted: Vec<_> = variables.iter().filter(|name| !vramq_program::is_known_variable(name)).collect();
    ensure!(unlisted.is_empty(), "OF_PROGRAMS of program/src/environment.rs lacks {unlisted:?}");
    Ok(())
}
