//! What workers learn of a program's memory is known to the next worker, for the same program only.

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use tempfile::TempDir;
use vramq_tests::on_one_setup;
use vramq_tests::programs::root;
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::worker::{Ended, command, run_to_end};

use crate::process::{Served, consuming, outputs};

on_one_setup!(
    learned_needs_of_a_program_outlive_the_worker,
    nothing_is_known_of_a_program_that_takes_the_place_of_another,
);

/// A program, and the folder for the state of its workers.
struct Learning {
    served: Served,
    state: TempDir,
}

impl Learning {
    fn new(env: &mut TestEnv) -> Result<Self> {
        let served = Served::new(env, "instances = 1\nitems_max = 1", &[])?;
        Ok(Self { served, state: tempfile::tempdir()? })
    }

    /// A worker runs three passes of the program: a size is believed when it was measured three times. `meanwhile` comes before the worker
    /// saves what it learned.
    async fn learn(&self, env: &mut TestEnv, meanwhile: impl FnOnce() -> Result<()>) -> Result<()> {
        let worker = consuming(env, &[&format!("worker.state={}", self.state.path().display())]).await?;
        env.client.publish(MODEL, env.job("measured", ["echo it"; 3])?).await?;
        outputs(&mut env.replies().await?, "measured").await?;
        meanwhile()?;
        worker.drain().await
    }

    async fn examine(&self, arguments: &[&str]) -> Result<Ended> {
        let mut doctor = command("vramq-worker")?;
        doctor.arg("doctor").args(arguments).arg("--config").arg(self.served.config());
        doctor.env("VRAMQ__WORKER__STATE", self.state.path());
        run_to_end(doctor).await
    }

    /// What the next worker would know of the program.
    async fn known(&self) -> Result<Value> {
        let output = self.examine(&["--json"]).await?;
        let report: Value = serde_json::from_str(&output.stdout).with_context(|| format!("{output:?}"))?;
        Ok(report["models"][0]["program"].clone())
    }
}

async fn learned_needs_of_a_program_outlive_the_worker(env: &mut TestEnv) -> Result<()> {
    let learning = Learning::new(env)?;
    let unknown = learning.known().await?;
    ensure!(
        unknown["per_item"].is_null() && unknown["learned"] == json!([]),
        "nobody has measured it: {unknown}"
    );
    learning.learn(env, || Ok(())).await?;
    let known = learning.known().await?;
    ensure!(known["per_item"].is_u64() && known["learned"][0]["cost"] == json!(1.0), "{known}");
    let report = learning.examine(&[]).await?.stdout;
    ensure!(report.contains("as measured, a pass of up to 1 items takes "), "{report}");
    Ok(())
}

/// The script is exchanged while a process runs. The worker saves what it learned of that process afterwards.
async fn nothing_is_known_of_a_program_that_takes_the_place_of_another(env: &mut TestEnv) -> Result<()> {
    let learning = Learning::new(env)?;
    let script = learning.served.path("script.py");
    let original = root().canonicalize()?.join("tests/models/served.py");
    let text = format!(
        "import runpy\nrunpy.run_path({:?}, run_name=\"__main__\")\n",
        original.display().to_string()
    );
    std::fs::write(&script, &text)?;
    let config = std::fs::read_to_string(learning.served.config())?;
    let with_script = config.replace("\"served.py\"", &format!("{:?}", script.display().to_string()));
    std::fs::write(learning.served.config(), with_script)?;
    learning.learn(env, || Ok(std::fs::write(&script, text.clone() + "# another one\n")?)).await?;
    let known = learning.known().await?;
    ensure!(known["learned"] == json!([]), "of another program: {known}");
    std::fs::write(&script, text)?;
    let known = learning.known().await?;
    ensure!(known["learned"] != json!([]), "of the one that ran: {known}");
    Ok(())
}
