//! How a program logs in at the broker: with a certificate, by the name in the certificate, or with a password from a file that is
//! replaced.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use tempfile::TempDir;
use vramq_schemas::ReplyKind;
use vramq_tests::authority::{Authority, CLIENT};
use vramq_tests::flow::announce_lost_sessions;
use vramq_tests::node::Node;
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::wait::until;
use vramq_tests::worker::{command, run_to_end};
use vramq_tests::{on_one_setup, on_own_node};

on_own_node!(a_broker_that_demands_certificates);
on_one_setup!(a_password_that_is_replaced, a_secret_that_is_exposed_or_missing);

/// A file that only its owner may read.
fn secret(folder: &TempDir, name: &str, text: &str) -> Result<PathBuf> {
    let path = folder.path().join(name);
    std::fs::write(&path, text)?;
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?;
    Ok(path)
}

fn setting(key: &str, file: &Path) -> String {
    format!("broker.{key}={}", file.display())
}

async fn a_broker_that_demands_certificates(env: &mut TestEnv, node: &Node) -> Result<()> {
    let authority = Authority::new()?;
    // With it the name in a certificate is that of a user.
    node.put("plugins", "[rabbitmq_management, rabbitmq_prometheus, rabbitmq_auth_mechanism_ssl].\n")?;
    let demands = "ssl_options.verify = verify_peer\nssl_options.fail_if_no_peer_cert = true\n\
                   ssl_cert_login_from = common_name\n\
                   auth_mechanisms.1 = PLAIN\nauth_mechanisms.2 = AMQPLAIN\nauth_mechanisms.3 = EXTERNAL\n";
    let port = authority.serve_tls(node, demands).await?;
    env.reconnect().await?;
    node.ctl(&["add_user", CLIENT, "not-used"]).await?;
    node.ctl(&["set_permissions", "-p", &env.vhost.name, CLIENT, ".*", ".*", ".*"]).await?;
    let folder = tempfile::tempdir()?;
    let ca = secret(&folder, "ca.pem", &authority.ca)?;
    let certificate = secret(&folder, "client.pem", &authority.client_certificate)?;
    let key = secret(&folder, "client.key", &authority.client_key)?;
    let password = secret(&folder, "password", "guest\n")?;

    let by_password = format!("amqps://guest@127.0.0.1:{port}/{}", env.vhost.name);
    let url = format!("broker.url={by_password}");
    env.announce("no session yet");
    env.announce("cannot start");
    let trusted = [url.as_str(), &setting("ca", &ca), &setting("password_file", &password)];
    let stranger = env.spawn_worker(&[&trusted[..], &["broker.connect_s=0"]].concat())?;
    ensure!(stranger.exited().await? == Some(3), "{}", stranger.log.text());

    let own = [setting("certificate", &certificate), setting("key", &key)];
    let known = [&trusted[..], &[own[0].as_str(), own[1].as_str()]].concat();
    let worker = env.spawn_worker(&known)?;
    worker.consuming().await?;
    let mut submit = command("vramq")?;
    submit.args(["submit", "--model", MODEL, "--broker-url", &by_password, "over TLS"]);
    for (flag, file) in [
        ("--broker-ca", &ca),
        ("--broker-certificate", &certificate),
        ("--broker-key", &key),
        ("--broker-password-file", &password),
    ] {
        submit.arg(flag).arg(file);
    }
    let ended = run_to_end(submit).await?;
    ensure!(ended.code == Some(0) && ended.stdout.contains("over TLS"), "{ended:?}");
    worker.drain().await?;

    // The certificate alone says who it is.
    let url = format!("broker.url=amqps://127.0.0.1:{port}/{}?auth_mechanism=external", env.vhost.name);
    let worker = env.spawn_worker(&[&url, trusted[1], &own[0], &own[1]])?;
    worker.consuming().await?;
    let users = node.ctl(&["list_connections", "--quiet", "user"]).await?;
    ensure!(users.lines().filter(|user| *user == CLIENT).count() >= 2, "{users}");
    worker.drain().await
}

async fn a_password_that_is_replaced(env: &mut TestEnv) -> Result<()> {
    announce_lost_sessions(env);
    let folder = tempfile::tempdir()?;
    let (user, with_password) = env.add_user("rotated", "worker").await?;
    let (_, host) = with_password.split_once('@').context("no user in the broker's address")?;
    let url = format!("amqp://{user}@{host}");
    let file = secret(&folder, "password", "wrong")?;
    let settings = [format!("broker.url={url}"), setting("password_file", &file)];
    let settings = [settings[0].as_str(), &settings[1]];

    env.announce("cannot start");
    let refused = env.spawn_worker(&settings)?;
    ensure!(refused.exited().await? == Some(3), "{}", refused.log.text());

    let (_, password) = with_password
        .rsplit_once('@')
        .map_or(("", ""), |(before, _)| before.rsplit_once(':').unwrap_or_default());
    secret(&folder, "password", password)?;
    let worker = env.spawn_worker(&settings)?;
    worker.consuming().await?;
    // The broker's and the file's: from here on the old one opens no session.
    env.vhost.set_password(&user, "changed-hunter2").await?;
    secret(&folder, "password", "changed-hunter2\n")?;
    until("its connections are cut", async || {
        Ok((env.vhost.cut_worker(&worker.name).await? > 0).then_some(()))
    })
    .await?;
    worker.sessions(2).await?;
    env.client.publish(MODEL, env.job("afterwards", ["x"])?).await?;
    ensure!(env.replies().await?.next().await?.kind()? == ReplyKind::Done);
    ensure!(worker.log.find("changed-hunter2").is_none(), "the password is in the log");
    worker.drain().await
}

async fn a_secret_that_is_exposed_or_missing(env: &mut TestEnv) -> Result<()> {
    env.announce("every user of this machine can read this secret file");
    let folder = tempfile::tempdir()?;
    let file = secret(&folder, "password", "guest")?;
    let (user, host) =
        env.url.split_once("//").and_then(|(_, rest)| rest.split_once('@')).context("no user")?;
    let url = format!("amqp://{}@{host}", user.split(':').next().unwrap_or_default());
    let settings = [format!("broker.url={url}"), setting("password_file", &file)];
    let settings = [settings[0].as_str(), &settings[1]];
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o644))?;
    let worker = env.spawn_worker(&settings)?;
    worker.consuming().await?;
    worker.log.counts("every user of this machine can read this secret file", 1).await?;
    worker.drain().await?;

    std::fs::remove_file(&file)?;
    for (subcommand, code) in [("check-config", 0), ("run", 2)] {
        let mut command = command("vramq-worker")?;
        let sets = [settings[0], settings[1], "model.echo.engine=echo"];
        command.arg(subcommand).args(sets.iter().flat_map(|set| ["--set", *set]));
        let ended = run_to_end(command).await?;
        ensure!(ended.code == Some(code), "{subcommand}: {ended:?}");
        ensure!(ended.stderr.contains("broker.password_file"), "{subcommand}: {ended:?}");
    }
    let mut status = command("vramq")?;
    status.args(["status", "--broker-url", &url, "--broker-password-file"]).arg(&file);
    let ended = run_to_end(status).await?;
    ensure!(ended.code == Some(2) && ended.stderr.contains("--broker-password-file is"), "{ended:?}");
    Ok(())
}
