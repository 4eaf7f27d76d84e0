//! Heartbeats and commands: frozen texts, and how those of other versions are read.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use serde_json::json;
use vramq_schemas::control::{Answer, Command, Outcome};
use vramq_schemas::status::{Heartbeat, WorkerState};

#[test]
fn commands_are_written_as_frozen() {
    for (command, frozen) in [
        (Command::Pause, json!({"command": "pause"})),
        (Command::Resume, json!({"command": "resume"})),
        (Command::Drain, json!({"command": "drain"})),
        (Command::Cancel { job: "a".to_owned() }, json!({"command": "cancel", "job": "a"})),
        (Command::Set { log: "debug".to_owned() }, json!({"command": "set", "log": "debug"})),
    ] {
        assert_eq!(serde_json::to_value(&command).unwrap(), frozen);
        assert_eq!(frozen["command"], command.name());
        let mut later = frozen;
        later["since-version-9"] = json!([1]);
        assert_eq!(serde_json::from_value::<Command>(later).unwrap(), command);
    }
    for unknown in ["{}", r#"{"command": "explode"}"#, r#"{"command": "cancel"}"#, "[]", ""] {
        assert!(serde_json::from_str::<Command>(unknown).is_err(), "{unknown}");
    }
}

#[test]
fn answers_are_written_as_frozen() {
    let answer = Answer {
        worker: "w".to_owned(),
        at_ms: 7,
        outcome: Outcome::MemoryBack { device: "cpu".to_owned(), free_bytes: 9 },
        text: "gone".to_owned(),
        last: true,
        state: WorkerState::Consuming,
    };
    let frozen = json!({
        "worker": "w", "at_ms": 7, "outcome": "memory-back", "device": "cpu", "free_bytes": 9, "text": "gone",
        "last": true, "state": "consuming"
    });
    assert_eq!(serde_json::to_value(&answer).unwrap(), frozen);
    assert_eq!(serde_json::from_value::<Answer>(frozen).unwrap(), answer);
    let later = r#"{"worker": "w", "at_ms": 7, "outcome": "delegated", "to": "x", "text": "", "last": true}"#;
    let answer: Answer = serde_json::from_str(later).unwrap();
    assert_eq!((answer.outcome, answer.state), (Outcome::Unknown, WorkerState::Unknown));
}

#[test]
fn heartbeats_of_other_versions_are_read() {
    let later =
        r#"{"worker": "w", "state": "dreaming", "models": [{"model": "m", "weight": 3}], "mood": "good"}"#;
    let heartbeat: Heartbeat = serde_json::from_str(later).unwrap();
    assert_eq!((heartbeat.state, heartbeat.models[0].model.as_str()), (WorkerState::Unknown, "m"));
    assert_eq!(heartbeat.models[0].counters.answered, 0);
}

#[test]
fn every_state_has_the_name_that_it_travels_under() {
    for state in WorkerState::ALL {
        assert_eq!(serde_json::to_value(state).unwrap(), state.as_str());
    }
}
