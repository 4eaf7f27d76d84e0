//! Programs that cannot be started or loaded: each says why, and leaves nothing behind.

use std::time::Duration;

use serde_json::json;
use vramq_inference::process::keeper::Death;
use vramq_inference::process::warm::LoadError;

use crate::env::{Env, repository};

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

/// Such a model would fail each pass, or end the connection without an explanation.
#[tokio::test]
async fn models_that_the_sdk_cannot_serve_are_refused_when_loaded() {
    let env = Env::new();
    let folder = tempfile::tempdir().unwrap();
    for (body, what) in [
        (
            "  async def run(self, items, params): return []",
            "M.run is `async def`, and vramq calls it as a plain function",
        ),
        ("  async def run(self, items, params): yield 1", "M.run is `async def`"),
        (
            "  async def load(self, device): self.x = 1",
            "M.load is `async def`, and vramq calls it as a plain function",
        ),
        ("  async def weights(self): return 1", "M.weights is `async def`"),
        ("  async def trim(self): pass", "M.trim is `async def`"),
        ("  def load(self, device): self.run = later", "M.run is `async def`"),
        (
            "  accepts = 5",
            "accepts is 5; it must be a list of kinds and media types, such as ['text', 'image/*']",
        ),
        ("  accepts = [b'text']", "accepts has b'text', which is bytes, not a text"),
        ("  accepts = ['texts']", "`accepts` has \"texts\", which is none of text, bytes, json, uri"),
        (
            "  def weights(self): return 'a lot'",
            "M.weights returned 'a lot'; it must return a number of bytes, or None",
        ),
        (
            "  def weights(self): return -5",
            "M.weights returned -5; it must return a number of bytes, or None",
        ),
        (
            "  def weights(self): return float('nan')",
            "M.weights returned nan; it must return a number of bytes, or None",
        ),
    ] {
        let program = format!(
            "import vramq\nasync def later(items, params): return []\nclass M(vramq.Model):\n  def run(self, items, params): return []\n{body}\nvramq.serve(M)\n"
        );
        std::fs::write(folder.path().join("serve.py"), program).unwrap();
        let script = folder.path().join("serve.py");
        let error = env.start(env.config(script.to_str().unwrap(), "")).await.unwrap_err().to_string();
        assert!(error.contains(what), "{body}: {error}");
        env.assert_clean();
    }
    let fits = "import vramq\nclass M(vramq.Model):\n  accepts = ('text', 'image/*')\n  def weights(self): return 1 << 80\n  def run(self, items, params): return []\nvramq.serve(M)\n";
    std::fs::write(folder.path().join("serve.py"), fits).unwrap();
    let pool = env.start(env.config(folder.path().join("serve.py").to_str().unwrap(), "")).await.unwrap();
    env.close(pool).await;
    // Attributes that exist only after `load` are not read before.
    let late = "import vramq\nclass M(vramq.Model):\n  weights = property(lambda self: self.loaded['weights'])\n  def load(self, device): self.loaded = {'weights': 1}\n  def run(self, items, params): return []\nvramq.serve(M)\n";
    std::fs::write(folder.path().join("serve.py"), late).unwrap();
    let pool = env.start(env.config(folder.path().join("serve.py").to_str().unwrap(), "")).await.unwrap();
    env.close(pool).await;
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
    // The file disappears after the configuration was read, as when a virtual environment is created again.
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

/// With the oldest Python that the SDK supports. The example's imports are missing there, so only its revision is checked.
#[tokio::test]
async fn the_example_of_whisper_loads_on_the_oldest_python() {
    let env = Env::new();
    let folder = tempfile::tempdir().unwrap();
    let whisper = "class WhisperModel:\n  def __init__(self, *arguments, **options): self.model = self\n  compute_type = 'float32'\n";
    for (name, text) in
        [("av.py", ""), ("numpy.py", ""), ("faster_whisper.py", whisper), ("model.bin", "weights")]
    {
        std::fs::write(folder.path().join(name), text).unwrap();
    }
    let example = repository().join("docs/model-examples/whisper.py");
    let python =
        std::env::var("VRAMQ_TEST_PACKAGE_OLDEST").expect("VRAMQ_TEST_PACKAGE_OLDEST; see the Makefile");
    let mut config = env.config_of(&[&python, example.to_str().unwrap()], "");
    let modules = format!("{}:{}", repository().join("python").display(), folder.path().display());
    config.env.insert("PYTHONPATH".to_owned(), modules);
    config.env.insert("MODEL".to_owned(), folder.path().to_str().unwrap().to_owned());
    let pool = env.start(config).await.unwrap();
    // printf weights | sha256sum
    assert_eq!(pool.revision(), "whisper-9a129038d9a00aed-float32");
    env.close(pool).await;
}
