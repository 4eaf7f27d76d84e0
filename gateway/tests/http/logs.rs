//! Logs: one that nobody reads stops nothing.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::Stdio;

use serde_json::Value;

use crate::harness::{Setup, gateway_command, until};

#[test]
fn a_log_that_nobody_reads_stops_nothing() {
    let setup = Setup::new();
    let mut command = gateway_command();
    command.args(["run", "--listen", "127.0.0.1:0", "--broker-url", &setup.amqp_url()]);
    // Many lines for each request.
    command.args(["--log", "trace,lapin=debug"]);
    // As with `2>&1`: what is printed to standard output can stop it, too.
    let (log, pipe) = std::io::pipe().expect("a pipe");
    command.env("XDG_STATE_HOME", &setup.state).stdin(Stdio::null());
    command.stdout(pipe.try_clone().expect("a pipe")).stderr(pipe);
    let mut gateway = command.spawn().expect("start the gateway");
    let mut log = BufReader::new(log).lines();
    let url = log.by_ref().map(|line| line.expect("a line")).find_map(|line| {
        let line: Value = serde_json::from_str(&line).ok()?;
        (line["message"] == "serving").then(|| format!("http://{}", line["address"].as_str().unwrap()))
    });
    let url = url.expect("an address in the log");

    let get = |path| {
        let answer = ureq::get(&format!("{url}{path}")).call().expect("an answer");
        answer.into_string().expect("a text")
    };
    let dropped = || -> u64 {
        let metrics = get("/metrics");
        let name = "vramq_gateway_log_lines_dropped_total ";
        let value = metrics.lines().find_map(|line| line.strip_prefix(name)).expect("the metric");
        value.parse().expect("a number")
    };
    // Nobody reads the pipe meanwhile.
    let drop_more_than = |lines| {
        until("lines are dropped", || {
            for _ in 0..100 {
                get("/livez");
            }
            (dropped() > lines).then_some(())
        });
    };
    drop_more_than(0);
    let lost = dropped();
    // The log goes on, and reports all of them.
    let reported = log.by_ref().map(|line| line.expect("a line")).find_map(|line| {
        let line: Value = serde_json::from_str(&line).ok()?;
        let is_report = line["message"].as_str()?.starts_with("lines of the log were dropped");
        is_report.then(|| line["lines"].as_u64().expect("a number"))
    });
    assert!(reported.is_some_and(|lines| lines >= lost), "{reported:?} of {lost}");

    drop_more_than(dropped());
    let pid = i32::try_from(gateway.id()).ok().and_then(rustix::process::Pid::from_raw).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let status = until("the gateway's end", || gateway.try_wait().unwrap());
    assert!(status.success(), "{status}");
}

#[test]
fn a_fault_of_the_configuration_ends_a_gateway_that_nobody_reads() {
    let (_unread, mut pipe) = std::io::pipe().expect("a pipe");
    let mut command = gateway_command();
    command.args(["run", "--set", "http.request_s=soon"]).stdin(Stdio::null());
    command.stdout(pipe.try_clone().expect("a pipe")).stderr(pipe.try_clone().expect("a pipe"));
    // Fills the pipe, and fails when nobody can read it any more.
    std::thread::spawn(move || while pipe.write_all(&[b'\n'; 4096]).is_ok() {});
    let mut gateway = command.spawn().expect("start the gateway");
    let status = until("the gateway's end", || gateway.try_wait().unwrap());
    assert_eq!(status.code(), Some(2));
}
