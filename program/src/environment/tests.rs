use super::*;

fn vocabulary(prefix: &str, variables: &[&str], keys: &[&str]) -> Vocabulary {
    Vocabulary {
        variables: variables.iter().map(|name| format!("{PREFIX}{name}")).collect(),
        prefix: prefix.to_owned(),
        keys: keys.iter().map(|key| (*key).to_owned()).collect(),
    }
}

fn worker() -> Vocabulary {
    let keys = [
        "broker.queue_type",
        "device.kind",
        "device.cpu.memory_mib",
        "worker.drain_s",
        "model.NAME.slots_max",
        "model.NAME.path",
        "store.NAME.url",
    ];
    vocabulary("VRAMQ__", &["BROKER_URL", "BROKER_CA", "LOG", "LOG_FORMAT", "MEMORY_MIB"], &keys)
}

fn gateway() -> Vocabulary {
    vocabulary("VRAMQ_GATEWAY__", &["BROKER_URL", "GATEWAY_LISTEN"], &["http.listen", "http.request_s"])
}

/// The command has no configuration file, and leaves the variables for the worker's keys to the worker.
fn command() -> Vocabulary {
    vocabulary("VRAMQ__", &["BROKER_URL", "BROKER_PASSWORD_FILE", "LOG"], &[])
}

fn unknown_of(name: &str, vocabulary: &Vocabulary) -> UnknownVariables {
    UnknownVariables::of([(name.to_owned(), "5".to_owned())], vocabulary)
}

#[test]
fn a_misspelt_variable_is_found_with_what_was_meant() {
    for (name, meant) in [
        ("VRAMQ_BROKR_URL", "VRAMQ_BROKER_URL"),
        ("VRAMQ_BORKER_ULR", "VRAMQ_BROKER_URL"),
        ("VRAMQ_LOGS", "VRAMQ_LOG"),
        ("VRAMQ_MEMROY_MIB", "VRAMQ_MEMORY_MIB"),
        ("VRAMQ_DEVICE__CPU__MEMORY_MIB", "VRAMQ__DEVICE__CPU__MEMORY_MIB"),
        // One underscore between the words of a key.
        ("VRAMQ_DEVICE_KIND", "VRAMQ__DEVICE__KIND"),
        ("VRAMQ_BROKER_QUEUE_TYPE", "VRAMQ__BROKER__QUEUE_TYPE"),
        ("VRAMQ_WORKER_DRAIN_S", "VRAMQ__WORKER__DRAIN_S"),
        ("VRAMQ_DEVICE_CPU_MEMORY_MIB", "VRAMQ__DEVICE__CPU__MEMORY_MIB"),
        ("VRAMQ_MODEL_bge_Small_SLOTS_MAX", "VRAMQ__MODEL__bge_Small__SLOTS_MAX"),
        ("VRAMQ_MODEL_PATH", "VRAMQ__MODEL__NAME__PATH"),
        // Only a key's last words.
        ("VRAMQ_SLOTS_MAX", "VRAMQ__MODEL__NAME__SLOTS_MAX"),
        ("VRAMQ_DRAIN_S", "VRAMQ__WORKER__DRAIN_S"),
        // A key with an error in it.
        ("VRAMQ_DEVICE_KNID", "VRAMQ__DEVICE__KIND"),
        ("VRAMQ_WORKER_DRAIN", "VRAMQ__WORKER__DRAIN_S"),
    ] {
        assert_eq!(unknown_of(name, &worker()).misspelt, [(name.to_owned(), meant.to_owned())]);
    }
    for (name, meant) in [
        ("VRAMQ_GATEWAY_HTTP__REQUEST_S", "VRAMQ_GATEWAY__HTTP__REQUEST_S"),
        ("VRAMQ_GATEWAY_HTTP_LISTEN", "VRAMQ_GATEWAY__HTTP__LISTEN"),
        ("VRAMQ_GATEWAY_LISTN", "VRAMQ_GATEWAY_LISTEN"),
        ("VRAMQ_HTTP_REQUEST_S", "VRAMQ_GATEWAY__HTTP__REQUEST_S"),
    ] {
        assert_eq!(unknown_of(name, &gateway()).misspelt, [(name.to_owned(), meant.to_owned())]);
    }
}

#[test]
fn a_program_without_keys_names_only_its_variables() {
    for (name, meant) in [
        ("VRAMQ_BROKER__URL", "VRAMQ_BROKER_URL"),
        ("VRAMQ_BROKER__PASSWORD_FILE", "VRAMQ_BROKER_PASSWORD_FILE"),
        ("VRAMQ_BROKER__PASSWORD__FILE", "VRAMQ_BROKER_PASSWORD_FILE"),
    ] {
        assert_eq!(unknown_of(name, &command()).misspelt, [(name.to_owned(), meant.to_owned())]);
    }
    // A worker's, also if it is misspelt.
    assert_eq!(unknown_of("VRAMQ_DEVICE__KIND", &command()).unknown, ["VRAMQ_DEVICE__KIND"]);
}

#[test]
fn a_workers_variable_for_what_the_command_reads_elsewhere_is_ignored() {
    let set = |names: &[&str]| -> Vec<_> {
        names.iter().map(|name| ((*name).to_owned(), "amqp://a".to_owned())).collect()
    };
    let pair = ("VRAMQ__BROKER__URL".to_owned(), "VRAMQ_BROKER_URL".to_owned());
    assert_eq!(command().ignored(&set(&["VRAMQ__BROKER__URL", "VRAMQ__DEVICE__KIND"])), [pair]);
    // It has its own.
    assert!(command().ignored(&set(&["VRAMQ__BROKER__URL", "VRAMQ_BROKER_URL"])).is_empty());
}

#[test]
fn variables_that_other_programs_read_are_left_alone() {
    let left = UnknownVariables::default();
    for name in [
        "VRAMQ_BROKER_URL",
        "VRAMQ__BROKER__URL",
        "VRAMQ_WORKER_NAME",
        "VRAMQ_USER",
        "VRAMQ_HTTP_PORT",
        "VRAMQ_MODEL",
        "VRAMQ_READ_ONLY",
        "VRAMQ_FD",
        "VRAMQ_TEST_AMQP_URL",
        "VRAMQ_RABBITMQ_FOLDERS",
        "VRAMQ_BENCH_PYTHON",
        "XVRAMQ_LOGS",
    ] {
        assert_eq!(
            (unknown_of(name, &worker()), unknown_of(name, &gateway())),
            (left.clone(), left.clone()),
            "{name}"
        );
    }
    // Only the gateway knows which of these are right.
    for name in ["VRAMQ_GATEWAY__HTTP__LISTEN", "VRAMQ_GATEWAY_HTTP_LISTEN", "VRAMQ_GATEWAY_ANYTHING"] {
        assert_eq!(unknown_of(name, &worker()), left, "{name}");
    }
}

#[test]
fn variables_that_kubernetes_makes_for_services_are_left_alone() {
    for service in ["VRAMQ", "VRAMQ_GATEWAY", "VRAMQ_WORKER", "VRAMQ_DEVICE_KIND"] {
        for (end, value) in [
            ("SERVICE_HOST", "10.0.0.7"),
            ("SERVICE_PORT", "80"),
            ("SERVICE_PORT_HTTP", "80"),
            ("PORT", "tcp://10.0.0.7:80"),
            ("PORT_80_TCP", "tcp://10.0.0.7:80"),
            ("PORT_80_TCP_PROTO", "tcp"),
            ("PORT_80_TCP_PORT", "80"),
            ("PORT_80_TCP_ADDR", "10.0.0.7"),
        ] {
            let name = format!("{service}_{end}");
            for program in [worker(), gateway()] {
                let found = UnknownVariables::of([(name.clone(), value.to_owned())], &program);
                assert_eq!(found, UnknownVariables::default(), "{name}");
            }
        }
    }
    // A person's.
    assert_eq!(unknown_of("VRAMQ_GATEWAY_PORT", &gateway()).unknown, ["VRAMQ_GATEWAY_PORT"]);
}

#[test]
fn a_name_like_nothing_is_unknown_but_may_be_a_strangers() {
    for name in ["VRAMQ_FOO", "VRAMQ_URL", "VRAMQ_TENANT"] {
        let unknown = UnknownVariables { unknown: vec![name.to_owned()], ..UnknownVariables::default() };
        assert_eq!(
            (unknown_of(name, &worker()), unknown_of(name, &gateway())),
            (unknown.clone(), unknown),
            "{name}"
        );
    }
    // A key of the worker is nothing to the gateway.
    assert_eq!(unknown_of("VRAMQ_DEVICE_KIND", &gateway()).unknown, ["VRAMQ_DEVICE_KIND"]);
}

/// A user who sets them for docker compose may have them exported in the shell that starts a worker.
#[test]
fn the_variables_of_compose_are_left_alone() {
    let file =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docker-compose.yml")).unwrap();
    let names = file.split("${").skip(1).filter_map(|rest| rest.split_once(":-"));
    let names: Vec<_> = names.filter_map(|(name, _)| name.strip_prefix(PREFIX)).collect();
    assert!(names.contains(&"GRAFANA_PORT"), "{names:?}");
    for name in names {
        let unknown = unknown_of(&format!("{PREFIX}{name}"), &worker());
        assert!(unknown.misspelt.is_empty() && unknown.unknown.is_empty(), "{unknown:?}");
    }
    for name in OF_COMPOSE {
        assert!(file.contains(&format!("${{{PREFIX}{name}:-")), "{name} is not in docker-compose.yml");
    }
}
