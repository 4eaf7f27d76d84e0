//! The operators' page in a real browser: every view and every action, with their effects checked at the broker and the workers.
//! `make test-page` runs these tests, because they need a browser, which is large.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::dead_letters::{DEAD, Operated};
use crate::foreign::node;
use crate::harness::{ECHO, Gateway, MINILM, Setup, until};
use crate::jobs::set;
use crate::keys::{key_file, until_served, with_keys};
use crate::program_model::{self, SERVED};

/// A visit to the page of a gateway; what it found.
fn visit(gateway: &Gateway, step: &str, key: &str, more: &[&str]) -> Value {
    let chromium =
        std::env::var("VRAMQ_TEST_CHROMIUM").expect("VRAMQ_TEST_CHROMIUM: `make test-page` sets it");
    let page = format!("{}/", gateway.url);
    let arguments = [&[chromium.as_str(), step, &page, key][..], more].concat();
    serde_json::from_str(&node("page.mjs", &arguments)).unwrap()
}

/// Where pictures go: into `docs/images` if the environment says so, else beside the programs.
fn pictures() -> PathBuf {
    let folder = std::env::var_os("VRAMQ_TEST_PICTURES")
        .map_or_else(|| Path::new(env!("CARGO_TARGET_TMPDIR")).join("page"), PathBuf::from);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// A job of several passes.
fn many_sentences() -> Value {
    let texts: Vec<_> = (0..64).map(|n| format!("sentence {n} of a job that has some")).collect();
    json!({"model": MINILM, "inputs": texts})
}

/// A worker of the real model whose first pass runs out of memory, and a dead letter.
fn busy() -> Setup {
    let mut setup = Setup::new();
    setup.worker(&[MINILM, ECHO], &["--set", "device.cpu.fault=skip=4,fail=1"]);
    setup.gateway(&[]);
    setup.gateway(&[]);
    setup.wait_for_models(&[MINILM, ECHO]);
    for _ in 0..8 {
        setup.next().send("POST", "/v1/jobs", &[("prefer", "wait=60")], Some(&many_sentences()));
    }
    let wrong = json!({"model": ECHO, "inputs": ["x"], "params": {"colour": "red"}});
    setup.next().send("POST", "/v1/jobs", &[("prefer", "wait=60")], Some(&wrong));
    until("the dead letter is there", || setup.messages("vramq.dead.echo").filter(|n| *n == 1));
    setup
}

#[test]
#[ignore = "needs Chromium: make test-page"]
fn it_shows_models_workers_and_dead_letters() {
    let mut setup = busy();
    // A worker that runs out of nothing.
    setup.worker(&["quiet"], &[]);
    setup.wait_for_models(&["quiet"]);
    for gateway in &setup.gateways {
        let out_of_memory =
            until("the gateway knows of the pass that ran out of memory", || ran_out(gateway, "worker-0"));
        let seen = visit(gateway, "views", "", &[ECHO]);
        assert!(seen["models"].as_array().unwrap().iter().any(|row| row.as_str().unwrap().contains(MINILM)));
        let mut cards = seen["workers"].as_array().unwrap().iter().filter_map(Value::as_str);
        let card = cards.find(|card| card.contains("worker-0")).unwrap();
        assert!(card.contains("worker-0") && card.contains("consuming") && card.contains("slots"), "{card}");
        assert_eq!(seen["drawn"], true, "the timeline is empty");
        for (worker, samples) in [("worker-0", out_of_memory), ("worker-1", Vec::new())] {
            let charts = seen["charts"].as_array().unwrap();
            let chart = charts.iter().find(|chart| chart["worker"] == format!("Worker {worker}")).unwrap();
            let passes = samples.iter().sum::<u64>();
            let said = format!("{passes} {} ran out of memory.", if passes == 1 { "pass" } else { "passes" });
            assert!(chart["says"].as_str().unwrap().ends_with(&format!("; {said}")), "{chart}");
            assert_eq!(chart["marks"], samples.len(), "{chart}");
        }
        let letters = seen["letters"].as_str().unwrap();
        assert!(letters.contains("invalid-input") && letters.contains("colour"), "{letters}");
    }
    // Looking takes nothing away.
    assert_eq!(setup.messages("vramq.dead.echo"), Some(1));
}

/// On one axis of time: memory above, and below it slots and jobs, by the same scale.
#[test]
#[ignore = "needs Chromium: make test-page"]
fn the_timeline_shows_slots_and_unacknowledged_jobs_below_memory() {
    let setup = Setup::with(&[ECHO]);
    for gateway in &setup.gateways {
        assert_is_drawn(&visit(gateway, "timeline", "", &[]));
    }
}

fn assert_is_drawn(seen: &Value) {
    let says = seen["says"].as_str().unwrap();
    assert!(
        says.ends_with(
            "Slots: 4 now, 2 at least, 8 at most. Unacknowledged jobs: 1 now, 4 at most; 1 pass ran out of memory."
        ),
        "{says}"
    );
    // Rows count from the top. Each line has one column in each minute, and the rows there that have its colour.
    let last_row = |line: &str, minute: usize| {
        seen[line][minute][1].as_u64().unwrap_or_else(|| panic!("no {line} in minute {minute}: {seen}"))
    };
    let [none, four, one] = [0, 1, 2].map(|minute| last_row("jobs", minute));
    let [eight, still_eight, two] = [0, 1, 2].map(|minute| last_row("slots", minute));
    let height = none - eight;
    assert!(height >= 30 && still_eight == eight, "{seen}");
    for (row, eighths) in [(four, 4), (two, 2), (one, 1)] {
        assert!((none - row).abs_diff(height * eighths / 8) <= 1, "{eighths} of 8: {seen}");
    }
    let memory = (0..3).map(|minute| last_row("used", minute)).max().unwrap();
    assert!(memory < eight, "{seen}");
    assert_eq!(seen["mark"], json!([0, 179]));
}

/// The passes of a worker that ran out of memory, by sample of its timeline; `None` before there are some.
fn ran_out(gateway: &Gateway, worker: &str) -> Option<Vec<u64>> {
    let status = gateway.get("/v1/status").json();
    let worker = status["workers"].as_array()?.iter().find(|found| found["worker"] == worker)?;
    let samples = worker["timeline"].as_array()?.iter().filter_map(|sample| sample["out_of_memory"].as_u64());
    let passes: Vec<_> = samples.filter(|passes| *passes > 0).collect();
    (!passes.is_empty()).then_some(passes)
}

/// Jobs of the echo model that the worker has answered.
fn answered(setup: &Setup) -> Option<u64> {
    let status = setup.gateways[0].get("/v1/status").json();
    let models = status["workers"][0]["models"].as_array()?.clone();
    models.iter().find(|model| model["model"] == ECHO)?["counters"]["answered"].as_u64()
}

#[test]
#[ignore = "needs Chromium: make test-page"]
fn it_tries_a_model_with_texts_and_with_a_file() {
    let setup = busy();
    let gateway = setup.next();
    let before = answered(&setup).unwrap();
    let shown = visit(gateway, "text", "", &[ECHO, "<b>one</b>"]);
    assert_eq!((&shown["state"], &shown["outputs"]), (&json!("done"), &json!([{"json": "<b>one</b>"}])));
    let file = setup.folder.path().join("upload.txt");
    std::fs::write(&file, "content").unwrap();
    let shown = visit(gateway, "file", "", &[ECHO, &file.display().to_string()]);
    // The base64 of it, by `printf content | base64`: neither gateway nor worker was told of a place for uploads.
    let bytes = json!({"bytes": "Y29udGVudA==", "media_type": "application/octet-stream"});
    assert_eq!(shown["outputs"], json!([bytes]), "{shown}");
    let shown = visit(gateway, "keyboard", "", &[ECHO]);
    assert_eq!(shown["state"], "done");
    for gateway in &setup.gateways {
        let seen = visit(gateway, "eventSource", "", &[ECHO]);
        let names: Vec<_> = seen.as_array().unwrap().iter().filter_map(Value::as_str).collect();
        assert_eq!((names.first(), names.last()), (Some(&"queued"), Some(&"done")), "{seen}");
        // A browser that begins again gets them again.
        let once: BTreeSet<_> = names.iter().collect();
        assert_eq!(once.len(), names.len(), "{seen}");
    }
    until("the worker has answered five jobs", || (answered(&setup) == Some(before + 5)).then_some(()));
}

#[test]
#[ignore = "needs Chromium: make test-page"]
fn it_shows_how_far_a_model_is() {
    let mut setup = Setup::new();
    program_model::start(&mut setup);
    setup.gateway(&[]);
    setup.gateway(&[]);
    setup.wait_for_models(&[SERVED]);
    for gateway in &setup.gateways {
        // Some four seconds, in which a caller gets two reports each.
        let shown = visit(gateway, "progress", "", &[SERVED, "steps 200"]);
        let seen: Vec<_> = shown["seen"].as_array().unwrap().iter().map(report).collect();
        assert!(seen[0].0 > 0 && seen[0].0 < 200 && seen[1].0 >= 100 && seen[1].0 < 200, "{shown}");
        for (step, bar) in seen {
            assert!((bar - f64::from(step) / 200.0).abs() < 1e-6, "{shown}");
        }
        let events: Vec<_> = shown["events"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
        let is = |name: &str| events.iter().filter(|event| event.starts_with(&format!("{name}:"))).count();
        assert_eq!((is("started"), is("progress"), is("done")), (1, 1, 1), "{shown}");
        assert_eq!((&shown["bar"], &shown["job"]["state"]), (&json!(1), &json!("done")));
        assert_eq!(shown["said"], "", "the job is over");
    }
}

/// Step and bar of what the page showed at a moment: `item 1 of 1: 25 %, step 50 of 200`.
fn report(shown: &Value) -> (u32, f64) {
    let said = shown["said"].as_str().unwrap();
    let (at, note) = said.split_once(", step ").unwrap_or_else(|| panic!("{shown}"));
    let step: u32 = note.strip_suffix(" of 200").unwrap().parse().unwrap();
    let percent: u32 = at.strip_prefix("item 1 of 1: ").unwrap().strip_suffix(" %").unwrap().parse().unwrap();
    assert!((2 * percent).abs_diff(step) <= 1, "{shown}");
    assert_eq!(shown["over"], false, "{shown}");
    (step, shown["bar"].as_f64().unwrap())
}

/// A large output, which its worker wrote to a store, is saved by a button: with the key, which a link could not send.
#[test]
#[ignore = "needs Chromium: make test-page"]
fn it_saves_an_output_that_is_in_a_store() {
    let mut setup = Setup::new();
    let folder = |name: &str| {
        let folder = setup.folder.path().join(name);
        std::fs::create_dir(&folder).unwrap();
        folder.display().to_string()
    };
    let (out, saved) = (folder("out"), folder("saved"));
    let (path, keys) = key_file(setup.folder.path(), &[("boss", "operator = true")]);
    let worker = [
        format!("store.out.url=file://{out}"),
        "model.echo.output_store=out".to_owned(),
        "model.echo.output_above_kib=1".to_owned(),
    ];
    setup.worker(&[ECHO], &set(&worker));
    let settings = [format!("http.keys={}", path.display()), format!("outputs.folder={out}")];
    setup.gateway(&set(&settings));
    // It does not know the store.
    setup.gateway(&set(&settings[..1]));
    until_served(&setup, &keys["boss"], ECHO);
    let (key, text) = (keys["boss"].trim_start_matches("Bearer "), "x".repeat(2000));
    let seen = visit(&setup.gateways[0], "outputs", key, &[ECHO, &text, &saved]);
    assert!(seen["said"].as_str().unwrap().ends_with("application/json"), "{seen}");
    let file = Path::new(&saved).join(seen["file"].as_str().unwrap());
    assert_eq!(std::fs::read_to_string(file).unwrap(), format!("\"{text}\""));
    let seen = visit(&setup.gateways[1], "outputs", key, &[ECHO, &text, &saved]);
    assert!(seen["said"].as_str().unwrap().contains("outputs.folder"), "{seen}");
}

#[test]
#[ignore = "needs Chromium: make test-page"]
fn an_operator_retries_and_drops_dead_letters() {
    let operated = Operated::new();
    let key = operated.keys["boss"].trim_start_matches("Bearer ").to_owned();
    let seen = visit(&operated.setup.gateways[2], "readOnly", &key, &[ECHO]);
    assert!(seen["hint"].as_str().unwrap().contains("operator.broker_url") && seen["buttons"] == 0, "{seen}");
    let seen = visit(&operated.setup.gateways[0], "operate", &key, &[ECHO]);
    assert_eq!(seen["plan"], "3 jobs will run again.");
    let archive = seen["dropped"].as_str().unwrap().split("Archive: ").nth(1).unwrap();
    assert!(Path::new(archive).is_file(), "{seen}");
    assert!(seen["retried"].as_str().unwrap().starts_with("2 of 2 dead letters retried"), "{seen}");
    assert_eq!(operated.archived().len(), 1);
    // The worker had the two jobs again, and gave them up again.
    operated.until_retried(2);
    operated.until_holds(DEAD, 2);
}

#[test]
#[ignore = "needs Chromium: make test-page"]
fn it_withdraws_a_job() {
    let mut setup = Setup::new();
    let file = setup.folder.path().join("held");
    std::fs::write(&file, "").unwrap();
    setup.worker(&[ECHO], &["--set", &format!("worker.drill=pass=hang,while={}", file.display())]);
    setup.gateway(&[]);
    setup.gateway(&[]);
    setup.wait_for_models(&[ECHO]);
    let shown = visit(setup.next(), "withdraw", "", &[ECHO]);
    assert_eq!(shown["state"], "withdrawn");
    std::fs::remove_file(&file).unwrap();
    setup.until_counter("withdrawn", 1);
    assert_eq!(setup.counter("answered"), Some(0));
    until("the queue is empty", || (setup.messages("vramq.jobs.echo") == Some(0)).then_some(()));
    assert_eq!(setup.messages("vramq.dead.echo"), Some(0));
}

#[test]
#[ignore = "needs Chromium: make test-page"]
fn it_shows_workers_to_operators_alone() {
    let (setup, keys) = with_keys(&[("reader", ""), ("boss", "operator = true")]);
    for gateway in &setup.gateways {
        until("the model is served", || {
            let headers = [("authorization", keys["boss"].as_str())];
            let listed = gateway.send("GET", "/v1/models", &headers, None).json();
            (listed["data"][0]["id"] == ECHO).then_some(())
        });
    }
    let key = |name: &str| keys[name].trim_start_matches("Bearer ").to_owned();
    let hint = visit(&setup.gateways[0], "refused", &key("reader"), &[]);
    assert!(hint.as_str().unwrap().contains("operator"), "{hint}");
    let shown = visit(&setup.gateways[1], "text", &key("boss"), &[ECHO, "one"]);
    assert_eq!(shown["outputs"], json!([{"json": "one"}]));
}

#[test]
#[ignore = "needs Chromium: make test-page"]
fn it_is_legible_in_light_in_dark_and_on_a_narrow_screen() {
    // The slots of the echo model are few, so that those of the other one are not a small part of them.
    let options = ["device.cpu.memory_mib=384", "device.cpu.fault=skip=12,fail=1", "model.echo.slots_max=4"];
    let options = options.map(|option| ["--set", option]).concat();
    let operated = Operated::with(&[MINILM, ECHO], &options);
    let gateway = &operated.setup.gateways[0];
    // More and more at a time, so that the timeline has something to show.
    for callers in [1, 3, 8, 20, 4] {
        std::thread::scope(|scope| {
            for _ in 0..callers {
                scope.spawn(|| {
                    for _ in 0..2 {
                        operated.send(gateway, "boss", "POST", "/v1/jobs", Some(&many_sentences()));
                    }
                });
            }
        });
    }
    let folder = pictures();
    let key = operated.keys["boss"].trim_start_matches("Bearer ");
    visit(gateway, "looks", key, &[ECHO, &folder.display().to_string()]);
    for name in ["light", "dark", "narrow"] {
        let bytes = std::fs::metadata(folder.join(format!("page-{name}.png"))).unwrap().len();
        assert!(bytes > 10_000, "{name}: {bytes} bytes");
    }
}
