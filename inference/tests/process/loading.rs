//! Programs that cannot be started or loaded: each says why, and leaves nothing behind.

use std::time::Duration;

use serde_json::json;
use vramq_inference::process::keeper::Death;
use vramq_inference::process::warm::LoadError;

use crate::env::Env;

#[tokio::test]
async fn a_model_that_does_not_load_says_why() {
    let env = Env::new();
    let start = async |script: &str, more: &str| {
        let error = env.start(env.config(script, more)).await.unwrap_err();
        env.assert_clean();
        error
    };
    let error = start("probe.py", "load_s = 0.5\nenv = { LOAD = \"hang\" }").await;
    assert!(matches!(error, LoadError::TimedOut { .. }), "{error:?}");
    let error = start("probe.py", "env = { LOAD = \"fail\" }").await;
    assert!(
        matches!(&error, LoadError::Failed { detail, stderr } if detail == "ValueError: no weights here" && stderr.contains("Traceback")),
        "{error:?}"
    );
    let error = start("probe.py", "env = { LOAD = \"crash\" }").await;
    assert!(
        matches!(&error, LoadError::Crashed { death: Death::Killed(9), stderr } if stderr.contains("loading crash")),
        "{error:?}"
    );
    let error = start("probe.py", "env = { LOAD = \"oom\" }").await;
    assert!(matches!(&error, LoadError::OutOfMemory { report, .. } if report.asked == Some(7)), "{error:?}");
    let error = start("no-such-file.py", "").await;
    assert!(
        matches!(&error, LoadError::Crashed { death: Death::Exited(2), stderr } if stderr.contains("No such file")),
        "{error:?}"
    );
    for (wish, what) in [
        (json!({"die": 0, "cut": 10}), "was killed by signal 9: probably the host's memory ran out"),
        (
            json!({"instead": 0, "header": {"type": "ready", "version": 2}}),
            "version 2 of the protocol, the worker 1",
        ),
        (
            json!({"instead": 0, "header": {"type": "ready", "version": 1, "revision": "r".repeat(2049)}}),
            "a revision of 2049 bytes; the limit is 2048",
        ),
        (json!({"instead": 0, "header": {"type": "pong", "number": 1}}), "`pong` before `ready`"),
        (json!({"instead": 0, "bytes": "ffffffff"}), "header of 4294967295 bytes"),
    ] {
        let error = start("raw.py", &format!("env = {{ WISH = '{wish}' }}")).await.to_string();
        assert!(error.contains(what), "{error}");
    }
}

#[tokio::test]
async fn a_missing_or_broken_interpreter_is_reported() {
    let env = Env::new();
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("program");
    let make = |text: &str| {
        use std::os::unix::fs::PermissionsExt as _;
        std::fs::write(&program, text).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o700)).unwrap();
    };
    make("#!/bin/sh\n");
    let config = env.config_of(&[program.to_str().unwrap()], "");
    // It goes away after the configuration was read, as with a virtual environment that is made anew.
    make("#!/no/such/interpreter\n");
    let error = env.start(config.clone()).await.unwrap_err().to_string();
    let named = "/program\" needs the interpreter \"/no/such/interpreter\", which cannot be used: No such file or directory";
    assert!(error.contains(named), "{error}");
    make("\x7fELF nonsense");
    let error = env.start(config).await.unwrap_err().to_string();
    assert!(error.contains("Exec format error"), "{error}");
    env.assert_clean();
}

#[tokio::test]
async fn a_pool_that_is_dropped_or_closed_while_loading_leaves_nothing() {
    let env = Env::new();
    let config = env.config("probe.py", "env = { LOAD = \"hang\" }");
    let start = env.start(config);
    assert!(tokio::time::timeout(Duration::from_secs(2), start).await.is_err());
    env.cleaned().await;
}
