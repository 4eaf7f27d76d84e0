//! Tests of reading a whole configuration.

use super::*;

fn pairs(overrides: &[(&str, &str)]) -> Vec<(String, String)> {
    overrides.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
}

#[test]
fn a_file_with_overrides_over_it() {
    let file = "
        [broker]
        url = 'amqp://a:secret@rabbit:5673/prod'
        queue_type = 'classic'
        [device.cpu]
        memory_mib = 512
        [model.minilm]
        path = 'models/x'
        slots_max = 7";
    let overrides = pairs(&[
        ("device.cpu.memory_mib", "1024"),
        ("model.bge-v1.5.engine", "echo"),
        ("model.minilm.slots_max", "9"),
    ]);
    let config = Config::read(Some(file), &overrides).unwrap();
    let DeviceKind::Cpu(cpu) = &config.device.kind else { panic!("{:?}", config.device) };
    assert_eq!(cpu.memory, 1024 << 20);
    assert_eq!(config.broker.queue_type, QueueType::Classic);
    let names: Vec<_> = config.models.iter().map(|m| (m.name.as_str(), m.slots_max.get())).collect();
    assert_eq!(names, [("bge-v1.5", 256), ("minilm", 9)]);
    assert_eq!(config.models[1].reply_queue, "vramq.replies.minilm");
}

#[test]
fn all_faults_come_at_once_with_their_paths() {
    let file = "
        typo = 1
        [broker]
        url = 'http://x'
        queue_length_max = 0
        prefetch = 3
        [device.cpu]
        memory_mib = 'plenty'
        [model.'sp ace']
        path = 'a'
        hub = 'b'
        [model.m]
        engine = 'magic'
        slots_max = 70000";
    let Invalid(faults) = Config::read(Some(file), &[]).unwrap_err();
    let mut keys: Vec<_> = faults.iter().map(|f| f.key.as_str()).collect();
    keys.sort_unstable();
    let expected = [
        "broker.prefetch",
        "broker.queue_length_max",
        "broker.url",
        "device.cpu.memory_mib",
        "model.m.engine",
        "model.m.slots_max",
        "model.sp ace.name",
        "model.sp ace.path",
        "typo",
    ];
    for key in expected {
        assert!(keys.contains(&key), "{key} not in {keys:?}");
    }
    // A missing folder is reported only together with other faults: the model may run on another machine.
    let lacking = Some("[model.m]\npath = '/no/such/folder'");
    let Invalid(faults) = Config::read(lacking, &pairs(&[("broker.connect_s", "many")])).unwrap_err();
    let mut texts: Vec<_> = faults.iter().map(ToString::to_string).collect();
    texts.sort_unstable();
    assert_eq!(
        texts,
        [
            "broker.connect_s: is a text and no number; it must be a whole number from 0 to 4294967295",
            "model.m.path: is \"/no/such/folder\", which is not a folder on this machine",
        ]
    );
    let config = Config::read(lacking, &[]).unwrap();
    assert!(config.models[0].engine.missing_folder().is_some());
    // The models exist, so only the faults of each are reported.
    assert!(!keys.contains(&"model"), "{keys:?}");
}

#[test]
fn names_that_differ_only_in_capitals_are_refused() {
    let file = Some("[model.MiniLM]\nengine = 'echo'");
    let same = Config::read(file, &pairs(&[("model.MiniLM.slots_max", "3")])).unwrap();
    assert_eq!(same.models.len(), 1);
    let Invalid(faults) = Config::read(file, &pairs(&[("model.minilm.engine", "echo")])).unwrap_err();
    assert!(faults.len() == 1 && faults[0].key == "model.minilm", "{faults:?}");
    assert!(faults[0].what.contains("differs from model.MiniLM only in capitals"), "{faults:?}");
}

#[test]
fn limits_of_jobs_have_defaults_and_bounds() {
    let plain = Config::read(Some("[model.m]\nengine = 'echo'"), &[]).unwrap();
    let model = &plain.models[0];
    assert_eq!((model.body_max, model.reply_max, model.weight.get()), (16 << 20, 1 << 30, 1));
    assert!(plain.broker.control && plain.host_memory > 0);
    let file = "
        [worker]
        host_memory_mib = 512
        control = false
        [model.m]
        engine = 'echo'
        body_mib_max = 2
        reply_mib_max = 64
        weight = 3";
    let config = Config::read(Some(file), &[]).unwrap();
    let model = &config.models[0];
    assert_eq!((model.body_max, model.reply_max, model.weight.get()), (2 << 20, 64 << 20, 3));
    assert!(!config.broker.control);
    assert_eq!(config.host_memory, 512 << 20);
    let wrong = [
        ("worker.host_memory_mib", "0"),
        ("model.m.body_mib_max", "17"),
        ("model.m.body_mib_max", "0"),
        ("model.m.reply_mib_max", "0"),
        ("model.m.weight", "0"),
        ("model.m.weight", "1001"),
    ];
    for (key, value) in wrong {
        let Invalid(faults) = Config::read(Some(file), &pairs(&[(key, value)])).unwrap_err();
        assert!(faults.len() == 1 && faults[0].key == key, "{key} = {value}: {faults:?}");
    }
}

#[test]
fn numbers_out_of_range_are_shown_with_their_range() {
    let rows = [
        (
            "worker.heartbeat_s",
            "99999999999",
            "is 99999999999; it must be a whole number from 1 to 4294967295",
        ),
        ("worker.heartbeat_s", "0", "is 0; it must be a whole number from 1 to 4294967295"),
        ("worker.pressure_percent", "101", "is 101; it must be a whole number from 1 to 100"),
        ("model.m.slots_max", "-1", "is -1; it must be a whole number from 1 to 65535"),
        (
            "metrics.callers_max",
            "hunter2",
            "is a text and no number; it must be a whole number from 0 to 10000",
        ),
    ];
    for (key, value, what) in rows {
        let given = pairs(&[("model.m.engine", "echo"), (key, value)]);
        let Invalid(faults) = Config::read(None, &given).unwrap_err();
        assert!(faults.len() == 1 && faults[0].key == key && faults[0].what == what, "{faults:?}");
    }
}

#[test]
fn what_no_worker_could_start_with_is_a_fault_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    let below = file.join("below").display().to_string();
    let file = file.display().to_string();
    let rows = [
        // Two models with bodies of up to 16 MiB, and less than that beside the fetched inputs.
        (
            "worker.host_memory_mib",
            "31",
            "leaves 31.0 MiB for jobs, and one job of each model may take 32.0 MiB",
        ),
        ("worker.state", &file, "cannot be a folder, because"),
        ("worker.state", &below, "cannot be a folder, because"),
        ("worker.name", "a\n\u{1b}[31m", "control character"),
    ];
    for (key, value, words) in rows {
        let given = pairs(&[("model.a.engine", "echo"), ("model.b.engine", "echo"), (key, value)]);
        let Invalid(faults) = Config::read(None, &given).unwrap_err();
        assert!(faults.len() == 1 && faults[0].key == key && faults[0].what.contains(words), "{faults:?}");
    }
    let given = pairs(&[("model.a.engine", "echo"), ("worker.host_memory_mib", "16")]);
    assert_eq!(Config::read(None, &given).unwrap().host_slots, [NonZeroU16::MIN]);
}

#[test]
fn host_memory_that_is_enough_limits_no_model() {
    let limited = |mib: &str| {
        let given = [
            ("model.a.engine", "echo"),
            ("model.a.slots_max", "2"),
            ("model.b.engine", "echo"),
            ("model.b.slots_max", "9"),
            ("worker.host_memory_mib", mib),
        ];
        let config = Config::read(None, &pairs(&given)).unwrap();
        let limited = config.limited_by_host().map(|(model, slots)| (model.name.clone(), slots.get()));
        limited.collect::<Vec<_>>()
    };
    // Bodies of up to 16 MiB.
    assert_eq!(limited("176"), []);
    assert_eq!(limited("160"), [("b".to_owned(), 8)]);
    assert_eq!(limited("32"), [("a".to_owned(), 1), ("b".to_owned(), 1)]);
}

#[test]
fn a_device_of_more_memory_than_the_machine_has_is_no_fault_but_said() {
    let config = |mib: &str| {
        let given = pairs(&[("model.m.engine", "echo"), ("device.cpu.memory_mib", mib)]);
        Config::read(None, &given).unwrap()
    };
    assert_eq!(config("128").lacking(), []);
    let lacking = config("4294967295").lacking();
    assert!(lacking.len() == 1 && lacking[0].key == "device.cpu.memory_mib", "{lacking:?}");
    assert!(lacking[0].what.starts_with("is 4294967295"), "{lacking:?}");
}

#[test]
fn files_that_only_another_machine_may_have_are_notes_for_a_check_and_stop_a_worker() {
    let rows = [
        ("broker.ca", "/no/such/ca.pem"),
        ("broker.certificate", "/no/such/worker.pem"),
        ("broker.key", "/no/such/worker.key"),
        ("broker.password_file", "/no/such/password"),
        ("model.p.command", "['/no/such/program']"),
        ("model.p.folder", "/no/such/folder"),
        ("model.p.scratch", "/no/such/scratch"),
        ("model.p.revision_files", "['no-such.bin']"),
        ("store.s.secret_file", "/no/such/secret"),
    ];
    let others = [
        ("broker.url", "amqps://me@rabbit/v"),
        ("model.p.engine", "process"),
        ("store.s.url", "s3://bucket"),
        ("store.s.endpoint", "http://minio:9000"),
        ("store.s.region", "eu-central-1"),
        ("store.s.access_key_id", "id"),
    ];
    let given = pairs(&[&others[..], &rows].concat());
    let config = Config::read(None, &given).unwrap();
    let mut noted: Vec<_> = config.lacking().into_iter().map(|fault| fault.key).collect();
    noted.sort_unstable();
    let mut expected = rows.map(|(key, _)| key);
    expected.sort_unstable();
    assert_eq!(noted, expected);
    let Invalid(faults) = config.on_this_machine().unwrap_err();
    assert_eq!(faults.len(), rows.len(), "{faults:?}");
    // With a fault, all come at once.
    let Invalid(faults) =
        Config::read(None, &[&given[..], &pairs(&[("typo", "1")])[..]].concat()).unwrap_err();
    assert_eq!(faults.len(), rows.len() + 1, "{faults:?}");
}

#[test]
fn what_is_there_but_wrong_is_a_fault_of_every_check() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let path = file.path().to_str().unwrap();
    for key in ["broker.ca", "broker.key", "broker.certificate", "model.p.folder"] {
        let given = pairs(&[
            ("broker.url", "amqps://me@rabbit/v"),
            ("broker.key", "/no/such/key"),
            ("broker.certificate", "/no/such/certificate"),
            ("model.p.engine", "process"),
            ("model.p.command", "['/bin/sh']"),
            (key, path),
        ]);
        let Invalid(faults) = Config::read(None, &given).unwrap_err();
        assert!(faults.iter().any(|fault| fault.key == key), "{key}: {faults:?}");
    }
    let without_tls = pairs(&[("broker.ca", "/no/such/ca.pem"), ("model.m.engine", "echo")]);
    let Invalid(faults) = Config::read(None, &without_tls).unwrap_err();
    assert!(faults[0].key == "broker.ca" && faults[0].what.contains("amqps://"), "{faults:?}");
}

#[test]
fn a_broken_file_and_an_empty_one_are_explained() {
    let broken = Config::read(Some("[broker"), &[]).unwrap_err().to_string();
    assert!(broken.contains("file:") && broken.contains("line 1"), "{broken}");
    assert!(!broken.contains("[model.NAME]"), "{broken}");
    for empty in [None, Some("[model]")] {
        let empty = Config::read(empty, &[]).unwrap_err().to_string();
        assert!(empty.contains("[model.NAME]"), "{empty}");
    }
    // Only the wrong value is reported, not that no model was found as well.
    for (file, key) in [("model = 'models/x'", "model"), ("[model]\nminilm = 'models/x'", "model.minilm")] {
        let Invalid(faults) = Config::read(Some(file), &[]).unwrap_err();
        assert!(faults.len() == 1 && faults[0].key == key, "{faults:?}");
        assert!(faults[0].what.contains("must be a table"), "{faults:?}");
    }
}

#[test]
fn credentials_are_never_shown() {
    let overrides = pairs(&[("broker.url", "amqp://me:hunter2@rabbit/v"), ("model.m.engine", "echo")]);
    let config = Config::read(None, &overrides).unwrap();
    assert_eq!(config.broker.url.to_string(), "amqp://rabbit:5672/v");
    assert!(!format!("{config:?}").contains("hunter2"));
    let wrong = Config::read(None, &pairs(&[("broker.url", "amqq://me:hunter2@rabbit/v")])).unwrap_err();
    assert!(!wrong.to_string().contains("hunter2"), "{wrong}");
    let broken = Config::read(Some("[broker]\nurl = \"amqp://me:hunter2@rabbit/v"), &[]).unwrap_err();
    let broken = broken.to_string();
    assert!(!broken.contains("hunter2") && broken.contains("line 2, column "), "{broken}");
}
