//! The Python package, installed from its wheel, against real workers. `python/tests/scenarios.py` has the scenarios.

use std::os::unix::fs::symlink;
use std::process::Stdio;

use anyhow::{Context as _, Result, bail, ensure};
use tokio::io::AsyncWriteExt as _;
use tokio::process::Command;
use vramq_schemas::topology::jobs_queue;
use vramq_tests::authority::Authority;
use vramq_tests::bert::reference;
use vramq_tests::encoders::cosine;
use vramq_tests::named_pipe::named_pipe;
use vramq_tests::programs::{root, setting};
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::wait::until;
use vramq_tests::web_server::WebServer;
use vramq_tests::worker::run_to_end_within;
use vramq_tests::{on_one_setup, on_queue_types};

use crate::common::held::HeldWorker;
use crate::common::package::{
    DEADLINE, dead_letters_are_expected, succeeds, succeeds_when_cut_off, succeeds_when_permitted_later,
    succeeds_while_cut, unserved_model,
};

on_queue_types!(
    results_come_in_order_and_parts,
    jobs_may_be_message_pack,
    errors_say_what_a_caller_needs,
    a_broker_that_no_worker_has_used_is_named,
    jobs_that_nobody_answers_end,
    cut_connections_lose_no_result,
    a_lost_reply_queue_fails_its_jobs,
    reconnecting_ends_at_its_limit,
    call_sites_of_celery_go_on,
);
on_one_setup!(
    only_what_the_broker_refuses_is_a_refusal,
    a_refused_job_ends_no_other,
    a_caller_that_stops_waiting_gives_its_slot_back,
    jobs_of_callers_that_give_up_are_withdrawn,
    an_id_names_one_job,
    ids_of_the_caller_are_those_that_workers_take,
    all_revisions_of_a_result_are_named,
    what_was_not_sent_is_not_withdrawn,
    a_refused_withdrawal_is_tried_again,
    callbacks_that_fail_end_nothing,
    signal_handlers_may_use_the_clients,
    closing_ends_what_other_threads_wait_for,
    a_program_ends_although_its_destructors_use_clients,
    closing_ends_what_waits_for_the_broker,
    the_oldest_python_does_the_same,
    vectors_are_those_of_the_reference,
    references_are_read,
    certificates_are_checked,
    what_references_may_be,
    serving_a_model_needs_no_extra,
    types_say_what_there_is,
    errors_come_out_of_a_pool_of_processes,
    the_golden_bytes_are_read,
    a_task_of_celery_runs_before_it_moves,
    a_task_of_celery_moves_over,
);

pub fn scenario(name: &str, url: &str) -> Result<Command> {
    scenario_with("VRAMQ_TEST_PACKAGE", name, url)
}

pub fn scenario_with(python: &str, name: &str, url: &str) -> Result<Command> {
    let mut command = Command::new(setting(python)?);
    // Isolated: neither this folder nor the user's packages are looked into.
    command.arg("-I").arg(root().join("python/tests/scenarios.py")).args([name, url]);
    command.stdin(Stdio::null()).kill_on_drop(true);
    Ok(command)
}

async fn results_come_in_order_and_parts(env: &mut TestEnv) -> Result<()> {
    dead_letters_are_expected(env);
    env.worker(&[]).await?;
    succeeds(scenario("results", &env.url)?).await
}

async fn jobs_may_be_message_pack(env: &mut TestEnv) -> Result<()> {
    dead_letters_are_expected(env);
    env.worker(&[]).await?;
    succeeds(scenario("msgpack", &env.url)?).await
}

async fn errors_say_what_a_caller_needs(env: &mut TestEnv) -> Result<()> {
    dead_letters_are_expected(env);
    env.worker(&[]).await?;
    succeeds(scenario("failures", &env.url)?).await
}

async fn a_broker_that_no_worker_has_used_is_named(env: &mut TestEnv) -> Result<()> {
    succeeds(scenario("nothing_declared", &env.url)?).await
}

async fn jobs_that_nobody_answers_end(env: &mut TestEnv) -> Result<()> {
    env.leave(&jobs_queue(MODEL));
    env.worker(&["broker.queue_length_max=3"]).await?.drain().await?;
    succeeds(scenario("unanswered", &env.url)?).await
}

async fn cut_connections_lose_no_result(env: &mut TestEnv) -> Result<()> {
    succeeds_while_cut(env, |url| scenario("reconnect", url)).await
}

async fn a_lost_reply_queue_fails_its_jobs(env: &mut TestEnv) -> Result<()> {
    env.worker(&[]).await?;
    unserved_model(env).await?;
    succeeds(scenario("reply_queue_lost", &env.url)?).await
}

async fn reconnecting_ends_at_its_limit(env: &mut TestEnv) -> Result<()> {
    succeeds_when_cut_off(env, |url| scenario("gives_up", url)).await
}

async fn only_what_the_broker_refuses_is_a_refusal(env: &mut TestEnv) -> Result<()> {
    succeeds(scenario("refusals", &env.url)?).await
}

async fn a_refused_job_ends_no_other(env: &mut TestEnv) -> Result<()> {
    // A job that was published twice may be answered after the client has gone, with its reply queue.
    dead_letters_are_expected(env);
    env.worker(&[]).await?;
    succeeds(scenario("refused", &env.url)?).await
}

async fn a_caller_that_stops_waiting_gives_its_slot_back(env: &mut TestEnv) -> Result<()> {
    env.worker(&[]).await?;
    unserved_model(env).await?;
    succeeds(scenario("slots", &env.url)?).await
}

async fn jobs_of_callers_that_give_up_are_withdrawn(env: &mut TestEnv) -> Result<()> {
    let held = HeldWorker::start(env).await?;
    succeeds(scenario("withdrawn", &env.url)?).await?;
    held.all_are_withdrawn(env, 6).await
}

async fn an_id_names_one_job(env: &mut TestEnv) -> Result<()> {
    env.worker(&[]).await?;
    unserved_model(env).await?;
    succeeds(scenario("ids", &env.url)?).await
}

async fn ids_of_the_caller_are_those_that_workers_take(env: &mut TestEnv) -> Result<()> {
    succeeds(scenario("given_ids", &env.url)?).await
}

async fn all_revisions_of_a_result_are_named(env: &mut TestEnv) -> Result<()> {
    succeeds(scenario("revisions", &env.url)?).await
}

async fn what_was_not_sent_is_not_withdrawn(env: &mut TestEnv) -> Result<()> {
    // A job that was sent may be answered after the client has gone, with its reply queue.
    dead_letters_are_expected(env);
    env.worker(&[]).await?;
    succeeds(scenario("unsent", &env.url)?).await
}

async fn a_refused_withdrawal_is_tried_again(env: &mut TestEnv) -> Result<()> {
    succeeds_when_permitted_later(env, |url| scenario("withdrawn_once_permitted", url)).await
}

async fn callbacks_that_fail_end_nothing(env: &mut TestEnv) -> Result<()> {
    env.worker(&[]).await?;
    unserved_model(env).await?;
    succeeds(scenario("callbacks", &env.url)?).await
}

async fn signal_handlers_may_use_the_clients(env: &mut TestEnv) -> Result<()> {
    // Jobs of a closed client are answered after its reply queue was deleted.
    dead_letters_are_expected(env);
    env.worker(&[]).await?;
    unserved_model(env).await?;
    succeeds(scenario("signals", &env.url)?).await
}

async fn closing_ends_what_other_threads_wait_for(env: &mut TestEnv) -> Result<()> {
    // Jobs of a closed client are answered after its reply queue was deleted.
    dead_letters_are_expected(env);
    env.worker(&[]).await?;
    succeeds(scenario("closed_by_another_thread", &env.url)?).await
}

async fn a_program_ends_although_its_destructors_use_clients(env: &mut TestEnv) -> Result<()> {
    env.worker(&[]).await?;
    unserved_model(env).await?;
    for python in ["VRAMQ_TEST_PACKAGE", "VRAMQ_TEST_PACKAGE_OLDEST"] {
        succeeds(scenario_with(python, "left_open", &env.url)?).await?;
    }
    Ok(())
}

async fn closing_ends_what_waits_for_the_broker(env: &mut TestEnv) -> Result<()> {
    succeeds_when_cut_off(env, |url| scenario("closed_while_away", url)).await
}

/// asyncio's exceptions and the versions of aio-pika differ with the version of Python.
async fn the_oldest_python_does_the_same(env: &mut TestEnv) -> Result<()> {
    dead_letters_are_expected(env);
    env.worker(&[]).await?;
    unserved_model(env).await?;
    for name in ["failures", "slots", "refusals", "refused", "reply_queue_lost", "celery", "unsent"] {
        succeeds(scenario_with("VRAMQ_TEST_PACKAGE_OLDEST", name, &env.url)?).await?;
    }
    Ok(())
}

async fn call_sites_of_celery_go_on(env: &mut TestEnv) -> Result<()> {
    dead_letters_are_expected(env);
    env.worker(&[]).await?;
    unserved_model(env).await?;
    succeeds(scenario("celery", &env.url)?).await
}

async fn the_golden_bytes_are_read(_: &mut TestEnv) -> Result<()> {
    let folder = root().join("schemas/golden");
    succeeds(scenario("golden", &folder.to_string_lossy())?).await
}

/// What a worker wrote to its folder, and what a web server has.
async fn references_are_read(env: &mut TestEnv) -> Result<()> {
    let folder = tempfile::tempdir()?;
    // The folder's name without links: the client compares references with it.
    let place = folder.path().canonicalize()?;
    let out = place.join("out");
    std::fs::create_dir_all(out.join("folder"))?;
    std::fs::create_dir(place.join("outside"))?;
    std::fs::write(place.join("secret"), "secret")?;
    symlink(place.join("secret"), out.join("link"))?;
    symlink(place.join("outside"), out.join("way-out"))?;
    named_pipe(&out.join("pipe"))?;
    let store = format!("store.out.url=file://{}", out.display());
    let output_store = format!("model.{MODEL}.output_store=out");
    env.worker(&[&store, &output_store, &format!("model.{MODEL}.output_above_kib=1")]).await?;
    let server = WebServer::start().await?;
    let mut program = scenario("references", &env.url)?;
    program.args([out.as_os_str(), server.url("").as_ref()]);
    succeeds(program).await?;
    // Only one of three references counts for this path: the private address is refused without a request, and one path has a query.
    ensure!(server.asked("/a/object") == 1, "asked {} times", server.asked("/a/object"));
    ensure!(server.asked("/a/behind") == 0, "a redirect was followed");
    Ok(())
}

async fn certificates_are_checked(_: &mut TestEnv) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let Authority { ca, certificate, key, .. } = Authority::new()?;
    for (name, text) in [("ca.pem", ca), ("certificate.pem", certificate), ("key.pem", key)] {
        std::fs::write(folder.path().join(name), text)?;
    }
    succeeds(scenario("https", &folder.path().to_string_lossy())?).await
}

async fn what_references_may_be(_: &mut TestEnv) -> Result<()> {
    succeeds(scenario("what_references_may_be", "")?).await
}

async fn vectors_are_those_of_the_reference(env: &mut TestEnv) -> Result<()> {
    let folder = setting("VRAMQ_TEST_MODEL")?;
    env.worker(&[&format!("model.minilm.path={}", folder.display())]).await?;
    let (texts, expected) = reference("minilm")?;
    let mut client = scenario("embed", &env.url)?
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let mut input = client.stdin.take().context("no standard input")?;
    input.write_all(&serde_json::to_vec(&texts)?).await?;
    drop(input);
    let ended = tokio::time::timeout(DEADLINE, client.wait_with_output()).await??;
    ensure!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    let found: Vec<Vec<f32>> = serde_json::from_slice(&ended.stdout)?;
    ensure!(found.len() == expected.len(), "{} vectors of {} texts", found.len(), expected.len());
    for (at, (found, expected)) in found.iter().zip(&expected).enumerate() {
        let cosine = cosine(found, expected);
        ensure!(cosine >= 0.99999, "text {at}: cosine {cosine}");
    }
    Ok(())
}

async fn serving_a_model_needs_no_extra(env: &mut TestEnv) -> Result<()> {
    succeeds(scenario("without_the_extra", &env.url)?).await
}

async fn types_say_what_there_is(_: &mut TestEnv) -> Result<()> {
    let program = root().canonicalize()?.join("python/tests/typed.py");
    succeeds(scenario("types", &program.to_string_lossy())?).await
}

async fn errors_come_out_of_a_pool_of_processes(_: &mut TestEnv) -> Result<()> {
    succeeds(scenario("processes", "")?).await
}

/// The page's task and call site with Celery itself. What computes the vectors, and PyTorch's error, are stand-ins: PyTorch is several
/// GB. `make test-pytorch` runs the same with both.
async fn a_task_of_celery_runs_before_it_moves(env: &mut TestEnv) -> Result<()> {
    // Celery acknowledges after it has sent the result, and may be killed in between.
    env.leave("celery");
    let page = root().join("docs/celery");
    let folder = tempfile::tempdir()?;
    std::fs::copy(page.join("before.py"), folder.path().join("tasks.py"))?;
    std::fs::copy(page.join("search.py"), folder.path().join("search.py"))?;
    std::fs::write(folder.path().join("sentence_transformers.py"), STAND_IN)?;
    std::fs::write(folder.path().join("torch.py"), TORCH_STAND_IN)?;
    let python = |arguments: &[&str]| -> Result<Command> {
        let mut command = Command::new(setting("VRAMQ_TEST_PYTHON")?);
        command.args(arguments).current_dir(folder.path()).env("BROKER_URL", &env.url);
        command.stdin(Stdio::null()).kill_on_drop(true);
        Ok(command)
    };
    let mut worker = python(&["-m", "celery", "-A", "tasks", "worker", "--pool", "solo"])?
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    until("Celery's worker to consume", async || {
        if let Some(status) = worker.try_wait()? {
            bail!("Celery's worker ended: {status}");
        }
        Ok((env.vhost.consumers_of("celery").await? > 0).then_some(()))
    })
    .await?;
    let ended = run_to_end_within(python(&["search.py"])?, DEADLINE).await?;
    ensure!(ended.code == Some(0) && ended.stdout == "Someone has a meal.\n", "{ended:?}");
    worker.kill().await?;
    Ok(())
}

/// The call site of docs/celery.md, unchanged, with both of the page's ways to move its task over.
async fn a_task_of_celery_moves_over(env: &mut TestEnv) -> Result<()> {
    let page = root().join("docs/celery").canonicalize()?;
    let shown = std::fs::read_to_string(root().join("docs/celery.md"))?;
    for name in ["before.py", "after.py", "search.py", "model.py"] {
        let source = std::fs::read_to_string(page.join(name))?;
        ensure!(shown.contains(&format!("```python\n{source}```")), "the page shows another {name}");
    }
    let folder = tempfile::tempdir()?;
    std::fs::copy(page.join("after.py"), folder.path().join("tasks.py"))?;
    std::fs::copy(page.join("search.py"), folder.path().join("search.py"))?;
    let search = async |env: &TestEnv| {
        let mut command = Command::new(setting("VRAMQ_TEST_PACKAGE")?);
        command.arg("search.py").current_dir(folder.path()).env("BROKER_URL", &env.url);
        command.stdin(Stdio::null()).kill_on_drop(true);
        let ended = run_to_end_within(command, DEADLINE).await?;
        ensure!(ended.code == Some(0), "{ended:?}");
        Ok(ended.stdout)
    };
    let model = setting("VRAMQ_TEST_MODEL")?;
    let worker = env.worker(&[&format!("model.minilm.path={}", model.display())]).await?;
    ensure!(search(env).await? == "Someone has a meal.\n");
    worker.drain().await?;

    // The task's own code as a model: a stand-in for sentence-transformers, which is several GB, computes the vectors.
    std::fs::write(folder.path().join("sentence_transformers.py"), STAND_IN)?;
    let python = setting("VRAMQ_TEST_PACKAGE")?;
    let config = folder.path().join("worker.toml");
    let command = format!("[{python:?}, {:?}]", page.join("model.py"));
    let text = format!(
        "[model.minilm]\nengine = \"process\"\ncommand = {command}\n[model.minilm.env]\nPYTHONPATH = {:?}\n",
        folder.path()
    );
    std::fs::write(&config, text)?;
    env.set_environment("VRAMQ_CONFIG", config);
    env.worker(&[]).await?;
    ensure!(search(env).await? == "Someone has a meal.\n");
    Ok(())
}

/// The error that the page's task catches.
const TORCH_STAND_IN: &str = "\
class cuda:
    class OutOfMemoryError(RuntimeError):
        pass
";

/// Counts letters: enough to tell these sentences apart, and nothing else is asked of it.
const STAND_IN: &str = "\
import numpy


class SentenceTransformer:
    def __init__(self, name, device=None):
        pass

    def encode(self, texts, **options):
        words = ['eating', 'food', 'meal', 'Someone', 'man', 'violin', 'river']
        related = {'eating': 'food', 'meal': 'food', 'Someone': 'man'}
        rows = [[sum(related.get(word, word) == axis for word in text.strip('.').split()) for axis in words] for text in texts]
        rows = numpy.array(rows, dtype=numpy.float32)
        return rows / numpy.maximum(numpy.linalg.norm(rows, axis=1, keepdims=True), 1e-9)
";
