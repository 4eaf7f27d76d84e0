//! The configuration of programs: valid ones, and faults, which are all reported at once.

use std::path::Path;
use std::time::Duration;

use vramq_inference::process::config::{Instances, Mode};
use vramq_inference::process::cost::Unit;
use vramq_inference::process::rule::Consequence;
use vramq_inference::process::{Place, ProcessConfig};

use crate::env::repository;

fn read(text: &str) -> Result<ProcessConfig, Vec<String>> {
    let place = Place { folder: "/tmp".into(), scratch: "/tmp".into() };
    ProcessConfig::read("m", text.parse().unwrap(), &place)
        .map_err(|faults| faults.iter().map(ToString::to_string).collect())
}

#[test]
fn everything_is_read() {
    let config = read(
        r#"
        engine = "process"
        command = ["/bin/cat", "serve.py"]
        mode = "warm"
        instances = "auto"
        env = { HF_HOME = "/models" }
        idle_s = 600
        vram = { base_mib = 3000, per = "pixels", mib_per_unit = 0.5, learn = true }
        items_max = 8
        load_s = 300
        item_s = 0.5
        kill_s = 10
        recycle_after = 1000
        host_memory_mib = 16000
        [[rule]]
        when = "pixels > 4e6"
        exclusive = true
        [[rule]]
        when = "pixels > 1e8"
        refuse = "images above 100 megapixels"
        "#,
    )
    .unwrap();
    assert_eq!((config.mode, config.instances), (Mode::Warm, Instances::Auto));
    assert_eq!((config.folder.as_path(), config.items_max), (Path::new("/tmp"), 8));
    assert_eq!((config.vram.base_bytes, config.vram.per), (Some(3000 << 20), Unit::Pixels));
    assert_eq!(config.vram.declared.unwrap().bytes_per_unit, f64::from(1 << 19));
    assert_eq!((config.item, config.recycle_after), (Duration::from_millis(500), Some(1000)));
    assert_eq!(config.host_memory_bytes, Some(16000 << 20));
    assert_eq!(config.rules[0].then, Consequence::Exclusive);
    assert_eq!(config.rules[1].then, Consequence::Refuse("images above 100 megapixels".to_owned()));
    let least = read("command = [\"/bin/cat\"]\nidle_s = 0").unwrap();
    assert_eq!((least.idle, least.vram.per, least.items_max), (None, Unit::Items, 8));
}

#[test]
fn all_faults_are_reported_at_once() {
    let faults = read(
        r#"
        command = ["python3", "serve.py"]
        mode = "often"
        instances = 0
        env = { LD_PRELOAD = "x", N = 7 }
        idle_s = -1
        vram = { per = "tokens", mib_per_unit = "much", lern = true }
        items_max = 0
        load_s = 0
        item_s = "long"
        kill_s = 1e99
        recycle_after = -3
        host_memory_mib = 0.5
        folder = "here"
        scratch = "/no/such/folder"
        colour = "red"
        rule = [{ when = "pixels", exclusive = true }, { when = "pixels > 4", to = "a", refuse = "b" }, { to = "a" }]
        "#,
    )
    .unwrap_err();
    for (key, what) in [
        ("command", "an absolute path"),
        ("mode", "must be \"warm\" or \"once\""),
        ("instances", "must be \"auto\" or a whole number from 1 to 64"),
        ("env.LD_PRELOAD", "may not be set here"),
        ("env.N", "must be a name and a text"),
        ("idle_s", "must be a number from 0"),
        ("vram.per", "must be one of items, bytes, characters, pixels, seconds"),
        ("vram.mib_per_unit", "must be a number from 0"),
        ("vram.lern", "is not a known key; there are base_mib, per, mib_per_unit, learn"),
        ("items_max", "a whole number from 1 to 4096"),
        ("load_s", "is 0"),
        ("item_s", "must be a number from 0"),
        ("kill_s", "longer than a year"),
        ("recycle_after", "a whole number from 0"),
        ("host_memory_mib", "a whole number from 1"),
        ("folder", "must be an absolute path"),
        ("scratch", "is not a folder"),
        ("colour", "is not a known key"),
        ("rule[0].when", "one comparison"),
        ("rule[1].when", "needs one of"),
        ("rule[2].when", "is missing"),
    ] {
        let said = faults
            .iter()
            .filter(|fault| fault.starts_with(&format!("model.m.{key}: ")) && fault.contains(what));
        assert_eq!(said.count(), 1, "{key}: {faults:#?}");
    }
    assert_eq!(faults.len(), 21, "{faults:#?}");
}

#[test]
fn the_program_must_be_there() {
    for (command, what) in [
        ("", "model.m.command: is missing"),
        ("command = []", "is empty"),
        ("command = \"/bin/cat\"", "must be a list of texts"),
        ("command = [\"/no/such/program\"]", "cannot be used: No such file"),
        ("command = [\"/etc\"]", "is not an executable file"),
        ("command = [\"/etc/passwd\"]", "is not an executable file"),
        ("command = [\"/bin/cat\", \"a\\u0000b\"]", "NUL"),
        ("command = [\"/bin/cat\", \"{prompt}\"]\nmode = \"once\"", "the place {prompt}"),
        ("command = [\"/bin/cat\"]\nonce = {}", "is for mode = \"once\""),
        (
            "command = [\"/bin/cat\"]\nmode = \"once\"\nonce = { input_suffix = \"/../x\" }",
            "the ending of a file's name",
        ),
        ("command = [\"/bin/cat\"]\nvram = { learn = false }", "nothing tells what a pass needs"),
        (
            "command = [\"/bin/cat\"]\nrevision_files = [\"no-such.bin\"]",
            "names \"/tmp/no-such.bin\", which is not a file",
        ),
    ] {
        let faults = read(command).unwrap_err();
        assert!(faults.len() == 1 && faults[0].contains(what), "{command}: {faults:?}");
    }
}

/// A shell would run what a job writes into its script.
#[test]
fn parameters_of_jobs_are_no_part_of_a_shells_script() {
    let read_command = |command: &[&str]| read(&format!("command = {command:?}\nmode = \"once\""));
    for command in [
        &["/bin/sh", "-c", "convert -resize {params.width} {input} {output}"][..],
        &["/bin/sh", "-ec", "echo {params.width}"],
        &["/bin/sh", "-o", "errexit", "-c", "echo {params.width}"],
        &["/bin/sh", "-c", "-e", "echo {params.width}"],
        &["/usr/bin/env", "bash", "--norc", "-c", "echo \"{params.width}\""],
        &["/bin/bash", "-O", "extglob", "--rcfile", "rc", "-c", "echo {params.width}"],
    ] {
        let faults = read_command(command).unwrap_err();
        assert!(faults.len() == 1, "{command:?}: {faults:?}");
        assert!(faults[0].contains("jobs could run any command"), "{command:?}: {faults:?}");
    }
    for command in [
        &["/bin/sh", "-c", "convert -resize \"$1\" {input} {output}", "sh", "{params.width}"][..],
        &["/bin/sh", "-c", "exec ffmpeg -i {input} \"$@\" {output}", "sh", "-ac", "{params.channels}"],
        &["/bin/sh", "-c", "echo {{params.width}}"],
        &["/bin/sh", "script.sh", "-c", "{params.width}"],
        &["/bin/cat", "-c", "{params.width}"],
    ] {
        assert!(read_command(command).is_ok(), "{command:?}");
    }
}

/// The program may be there on the machine that the configuration is for.
#[test]
fn what_this_machine_lacks_is_told_from_what_is_wrong() {
    let read = |text: &str| {
        let place = Place { folder: "/tmp".into(), scratch: "/tmp".into() };
        let read = ProcessConfig::read_for_any_machine("m", text.parse().unwrap(), &place);
        read.map(|(_, absent)| absent.into_iter().map(|fault| fault.key).collect::<Vec<_>>())
    };
    let absent = read(
        r#"
        command = ["/no/such/program"]
        folder = "/no/such/folder"
        scratch = "/no/such/scratch"
        revision_files = ["no-such.bin"]
        "#,
    );
    let keys = ["command", "revision_files", "folder", "scratch"].map(|key| format!("model.m.{key}"));
    assert_eq!(absent.unwrap(), keys);
    assert_eq!(read("command = [\"/bin/cat\"]").unwrap(), [""; 0]);
    // With a fault all of them are faults.
    let faults = read("command = [\"/no/such/program\"]\nfolder = \"/etc/passwd\"").unwrap_err();
    assert_eq!(faults.len(), 2, "{faults:?}");
}

#[test]
fn the_page_says_what_may_be_set() {
    let page = std::fs::read_to_string(repository().join("docs/process-models.md")).unwrap();
    let row = |key: &str| {
        let row = page.lines().find(|line| line.starts_with(&format!("| `{key}` |")));
        row.unwrap_or_else(|| panic!("docs/process-models.md has no row {key}"))
    };
    let once = |keys: &str| read(&format!("command = [\"/bin/cat\"]\nmode = \"once\"\n{keys}"));
    for name in
        ["HOME", "TMPDIR", "CUDA_VISIBLE_DEVICES", "VRAMQ_FD", "VRAMQ_SCRATCH", "LD_PRELOAD", "LD_AUDIT"]
    {
        let faults = once(&format!("env = {{ {name} = \"x\" }}")).unwrap_err();
        assert_eq!(faults, [format!("model.m.env.{name}: may not be set here")]);
        assert!(row("env").contains(&format!("`{name}`")), "{name}");
    }
    assert!(once("env = { PATH = \"/x\", LANG = \"C\", LD_LIBRARY_PATH = \"/x\" }").is_ok());
    for (key, range, most) in [
        ("instances", "1 to 64", 64),
        ("items_max", "1 to 4096", 4096),
        ("host_memory_mib", "1 to 1073741824", 1 << 30),
        ("kill_s", "", 365 * 24 * 3600),
    ] {
        assert!(row(key).contains(range), "{key}");
        assert!(once(&format!("{key} = {most}")).is_ok(), "{key}");
        assert!(once(&format!("{key} = {}", most + 1)).is_err(), "{key}");
    }
    let suffix = |key: &str, length: usize| once(&format!("once = {{ {key} = \"{}\" }}", "x".repeat(length)));
    for key in ["input_suffix", "output_suffix"] {
        assert!(suffix(key, 32).is_ok() && suffix(key, 33).is_err(), "{key}");
    }
    assert!(row("once.input_suffix").contains("at most 32 bytes"));
    assert!(
        once("once = { media_type = \"a/b\" }").is_ok() && row("once.media_type").contains("octet-stream")
    );
    let faults = once("rule = [{ when = \"bytes > 1\" }]").unwrap_err();
    let said = "needs one of: exclusive = true, refuse = \"REASON\", to = \"KEY\"";
    assert!(
        faults.len() == 1 && faults[0].ends_with(said) && page.contains("or: to = \"KEY\""),
        "{faults:?}"
    );
}
