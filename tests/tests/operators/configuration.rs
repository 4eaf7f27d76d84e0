//! The configuration: faults of it, and which of its sources count.

use anyhow::{Context as _, Result, ensure};
use vramq_tests::on_one_setup;
use vramq_tests::test_env::TestEnv;
use vramq_tests::worker::{command, has_all, run_to_end};

use crate::start::run;

on_one_setup!(
    all_faults_come_at_once,
    more_memory_than_the_machine_has_is_said,
    without_an_authority_no_object_store_is_reached_by_tls,
    flags_are_over_the_environment_and_that_is_over_the_file,
    misspelt_variables_are_refused_with_what_was_meant,
    variables_of_others_stop_no_program,
);

async fn all_faults_come_at_once(_: &mut TestEnv) -> Result<()> {
    let faulty = [
        "broker.url=http://me:hunter2@x",
        "broker.prefetch=3",
        "worker.drain_s=soon",
        "device.cpu.memory_mib=0",
        "device.cpu.reserve_mib=2048",
        "worker.host_memory_mib=1",
        "worker.state=/dev/null",
        "worker.name=a\nb",
        "model.echo.engine=magic",
        "typo=1",
    ];
    for subcommand in ["check-config", "run", "doctor"] {
        // A model without faults, whose bodies have no room.
        let ended = run(subcommand, &[&faulty[..], &["model.other.engine=echo"]].concat()).await?;
        ensure!(ended.code == Some(2), "{subcommand}: {ended:?}");
        let keys = faulty.map(|setting| setting.split('=').next().unwrap_or_default());
        has_all(&ended.stderr, &keys)?;
        ensure!(!ended.stderr.contains("hunter2"), "a password in: {}", ended.stderr);
    }
    let right = run("check-config", &["model.echo.engine=echo"]).await?;
    ensure!(right.code == Some(0) && right.stderr.is_empty(), "{right:?}");
    // The configuration may be for another machine.
    let elsewhere = run("check-config", &["model.m.path=/no/such/folder"]).await?;
    ensure!(elsewhere.code == Some(0), "{elsewhere:?}");
    has_all(
        &elsewhere.stderr,
        &["model.m.path: is \"/no/such/folder\", which is not a folder on this machine"],
    )?;
    let program = [
        "model.p.engine=process",
        "model.p.command=['/no/such/program']",
        "model.p.revision_files=['no-such.bin']",
        "broker.url=amqps://me@rabbit/v",
        "broker.ca=/no/such/ca.pem",
        "broker.password_file=/no/such/password",
    ];
    let elsewhere = run("check-config", &program).await?;
    ensure!(elsewhere.code == Some(0), "{elsewhere:?}");
    let keys = ["model.p.command", "model.p.revision_files", "broker.ca", "broker.password_file"];
    has_all(&elsewhere.stderr, &keys)?;
    for subcommand in ["run", "doctor"] {
        let ended = run(subcommand, &program).await?;
        ensure!(ended.code == Some(2), "{subcommand}: {ended:?}");
        has_all(&ended.stderr, &keys)?;
    }
    let nothing = run("check-config", &[]).await?;
    ensure!(nothing.code == Some(2), "{nothing:?}");
    let mut file = command("vramq-worker")?;
    file.args(["check-config", "--config", "/no/such/file.toml"]);
    let ended = run_to_end(file).await?;
    ensure!(ended.code == Some(2), "{ended:?}");
    has_all(&ended.stderr, &["/no/such/file.toml"])
}

async fn more_memory_than_the_machine_has_is_said(env: &mut TestEnv) -> Result<()> {
    let settings = ["model.echo.engine=echo", "device.cpu.memory_mib=4294967295"];
    let text =
        "device.cpu.memory_mib: is 4294967295, and this machine, or the control group of this process, has ";
    for subcommand in ["check-config", "doctor"] {
        let ended = run(subcommand, &settings).await?;
        ensure!(ended.code == Some(0), "{subcommand}: {ended:?}");
        has_all(&ended.stderr, &[text])?;
    }
    env.announce(text);
    env.worker(&settings[1..]).await?.log.wait_for(text).await?;
    Ok(())
}

async fn without_an_authority_no_object_store_is_reached_by_tls(_: &mut TestEnv) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let empty = folder.path().join("empty.pem");
    std::fs::write(&empty, "")?;
    let check = async |settings: &[&str]| {
        let mut command = command("vramq-worker")?;
        command.arg("check-config").env("SSL_CERT_FILE", &empty).env_remove("SSL_CERT_DIR");
        for setting in settings {
            command.args(["--set", setting]);
        }
        run_to_end(command).await
    };
    let store = ["model.echo.engine=echo", "store.in.url=s3://bucket/in", "store.in.anonymous=true"];
    let by_tls = check(&store).await?;
    ensure!(by_tls.code == Some(2), "{by_tls:?}");
    has_all(&by_tls.stderr, &["store.in.url", "SSL_CERT_FILE", &empty.display().to_string()])?;
    let plain = check(&[&store[..], &["store.in.endpoint=http://127.0.0.1:1"]].concat()).await?;
    ensure!(plain.code == Some(0), "{plain:?}");
    Ok(())
}

async fn flags_are_over_the_environment_and_that_is_over_the_file(_: &mut TestEnv) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("vramq.toml");
    std::fs::write(
        &file,
        "[model.echo]\nengine = \"echo\"\nslots_max = 5\n[device.cpu]\nmemory_mib = 164\n",
    )?;
    let output = async |environment: &[(&str, &str)], flags: &[&str]| {
        let mut doctor = command("vramq-worker")?;
        doctor.args(["doctor", "--json", "--config"]).arg(&file).args(flags);
        doctor.envs(environment.iter().copied());
        let ended = run_to_end(doctor).await?;
        ensure!(ended.code == Some(0), "{ended:?}");
        let report: serde_json::Value = serde_json::from_str(&ended.stdout)?;
        let mib = report["device"]["total"].as_u64().context("no total")? >> 20;
        Ok((mib, report["models"][0]["slots"].as_u64().context("no slots")?))
    };
    let any_key = [("VRAMQ__DEVICE__CPU__MEMORY_MIB", "196"), ("VRAMQ__MODEL__ECHO__SLOTS_MAX", "3")];
    let named = [&any_key[..], &[("VRAMQ_MEMORY_MIB", "228")]].concat();
    ensure!(output(&[], &[]).await? == (164, 5));
    ensure!(output(&any_key, &[]).await? == (196, 3));
    ensure!(output(&named, &[]).await? == (228, 3));
    ensure!(output(&named, &["--memory-mib", "260"]).await? == (260, 3));
    ensure!(output(&named, &["--set", "model.echo.slots_max=2", "--memory-mib", "260"]).await? == (260, 2));
    let mut mistyped = command("vramq-worker")?;
    mistyped.args(["check-config", "--config"]).arg(&file).env("VRAMQ__DEVICE__CPU__MEMROY_MIB", "96");
    let ended = run_to_end(mistyped).await?;
    ensure!(ended.code == Some(2), "{ended:?}");
    has_all(&ended.stderr, &["device.cpu.memroy_mib"])
}

async fn misspelt_variables_are_refused_with_what_was_meant(_: &mut TestEnv) -> Result<()> {
    let runs: [(&str, &[&str]); 3] = [
        ("vramq-worker", &["check-config", "--set", "model.echo.engine=echo"]),
        ("vramq-gateway", &["check-config"]),
        ("vramq", &["status"]),
    ];
    for (program, arguments) in runs {
        let mut mistyped = command(program)?;
        mistyped.args(arguments).env("VRAMQ_BORKER_URL", "amqp://nowhere");
        let ended = run_to_end(mistyped).await?;
        ensure!(ended.code == Some(2), "{program}: {ended:?}");
        has_all(&ended.stderr, &["VRAMQ_BORKER_URL", "VRAMQ_BROKER_URL"])?;
    }
    let [worker, gateway, status] = runs;
    for ((program, arguments), name, meant) in [
        (worker, "VRAMQ_DEVICE_KIND", "VRAMQ__DEVICE__KIND"),
        (worker, "VRAMQ_BROKER_QUEUE_TYPE", "VRAMQ__BROKER__QUEUE_TYPE"),
        (worker, "VRAMQ_WORKER_DRAIN_S", "VRAMQ__WORKER__DRAIN_S"),
        (worker, "VRAMQ_SLOTS_MAX", "VRAMQ__MODEL__NAME__SLOTS_MAX"),
        (gateway, "VRAMQ_GATEWAY_HTTP_LISTEN", "VRAMQ_GATEWAY__HTTP__LISTEN"),
        (gateway, "VRAMQ_HTTP_REQUEST_S", "VRAMQ_GATEWAY__HTTP__REQUEST_S"),
        (status, "VRAMQ_BROKER__URL", "VRAMQ_BROKER_URL"),
    ] {
        let mut mistyped = command(program)?;
        mistyped.args(arguments).env(name, "5");
        let ended = run_to_end(mistyped).await?;
        ensure!(ended.code == Some(2), "{name}: {ended:?}");
        has_all(&ended.stderr, &[name, &format!("did you mean {meant}?")])?;
    }
    // A worker's variable, which may be there for a worker.
    let mut of_worker = command("vramq")?;
    of_worker
        .args(["status", "--broker-url", "amqp://127.0.0.1:1/"])
        .env("VRAMQ__BROKER__URL", "amqp://nowhere");
    let ended = run_to_end(of_worker).await?;
    ensure!(ended.code == Some(3), "{ended:?}");
    has_all(&ended.stderr, &["VRAMQ__BROKER__URL is for workers; this program reads VRAMQ_BROKER_URL"])
}

async fn variables_of_others_stop_no_program(_: &mut TestEnv) -> Result<()> {
    let runs: [(&str, &[&str]); 2] = [
        ("vramq-worker", &["check-config", "--set", "model.echo.engine=echo"]),
        ("vramq-gateway", &["check-config"]),
    ];
    let of_others = [
        ("VRAMQ_GATEWAY_SERVICE_HOST", "10.0.0.7"),
        ("VRAMQ_GATEWAY_SERVICE_PORT", "80"),
        ("VRAMQ_GATEWAY_PORT", "tcp://10.0.0.7:80"),
        ("VRAMQ_GATEWAY_PORT_80_TCP_ADDR", "10.0.0.7"),
        ("VRAMQ_MEMORY_MIB", "512"),
        ("VRAMQ_MODEL", "echo"),
        ("VRAMQ_USER", "vramq"),
        ("VRAMQ_AMQP_PORT", "5672"),
        ("VRAMQ_TEST_AMQP_URL", "amqp://nowhere"),
    ];
    for (program, arguments) in runs {
        let mut plain = command(program)?;
        plain.args(arguments).envs(of_others);
        let ended = run_to_end(plain).await?;
        ensure!(ended.code == Some(0) && ended.stderr.is_empty(), "{program}: {ended:?}");
        // One that is like nothing of vramq's is a stranger's, or a setting that there is not: the log has it.
        let mut unknown = command(program)?;
        unknown.args(arguments).env("VRAMQ_FOO", "1");
        let ended = run_to_end(unknown).await?;
        ensure!(ended.code == Some(0), "{program}: {ended:?}");
        has_all(&ended.stderr, &["WARN", "VRAMQ_FOO"])?;
    }
    Ok(())
}
