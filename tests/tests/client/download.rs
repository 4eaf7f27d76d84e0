//! `vramq download`: references of every kind, against real folders and servers. Needs no broker.

use std::io::Read as _;
use std::process::{Output, Stdio};

use tokio::process::Command;
use vramq_tests::named_pipe::named_pipe;
use vramq_tests::object_server::{BUCKET, KEY, ObjectServer};
use vramq_tests::web_server::{BODY, SHA256_OF_TEST, WebServer};

use crate::common::command::{Scratch, code, interrupt, stderr};
use crate::common::{in_time, until};

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(vramq_tests::programs::program("vramq").unwrap());
    command
        .arg("download")
        .args(args)
        .env("AWS_ACCESS_KEY_ID", KEY)
        .env("AWS_SECRET_ACCESS_KEY", KEY)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    command
}

async fn download(args: &[&str]) -> Output {
    in_time(command(args).output()).await.unwrap()
}

#[tokio::test]
async fn references_of_folders_become_files() {
    let scratch = Scratch::new();
    let url = format!("file://{}", scratch.file("in", "test"));
    let file = scratch.path("out");
    let right = format!("{url}#sha256={SHA256_OF_TEST}&type=text/plain");
    code(&download(&[&right, "-o", &file]).await, 0);
    assert_eq!(std::fs::read(&file).unwrap(), b"test");
    let wrong = format!("{url}#sha256={}", "0".repeat(64));
    let other = download(&[&wrong, "-o", &scratch.path("wrong")]).await;
    code(&other, 1);
    assert!(stderr(&other).contains(SHA256_OF_TEST), "{}", stderr(&other));
    let gone = download(&[&format!("{url}-gone"), "-o", &scratch.path("gone")]).await;
    code(&gone, 1);
    assert!(stderr(&gone).contains("there is no file"), "{}", stderr(&gone));
    let mut names = scratch.names();
    names.sort();
    assert_eq!(names, ["in", "out"], "nothing is left of what failed");
    for text in ["no reference", "ftp://h/a"] {
        code(&download(&[text]).await, 2);
    }
}

#[tokio::test]
async fn a_pipe_gets_the_bytes_and_stays_one() {
    let scratch = Scratch::new();
    let url = format!("file://{}", scratch.file("in", "test"));
    let pipe = scratch.path("pipe");
    named_pipe(pipe.as_ref()).unwrap();
    // Opened for both, so that neither side waits for the other.
    let mut reader = std::fs::File::options().read(true).write(true).open(&pipe).unwrap();
    code(&download(&[&format!("{url}#sha256={SHA256_OF_TEST}"), "-o", &pipe]).await, 0);
    assert!(!std::fs::metadata(&pipe).unwrap().is_file());
    let mut written = [0; 4];
    reader.read_exact(&mut written).unwrap();
    assert_eq!(&written, b"test");
}

#[tokio::test]
async fn nothing_is_left_of_a_download_that_is_interrupted() {
    let (scratch, server) = (Scratch::new(), WebServer::start().await.unwrap());
    let child =
        command(&[&server.url("/a/silent"), "--private", "-o", &scratch.path("out")]).spawn().unwrap();
    until("it waits for the server", || (server.asked("/a/silent") == 1).then_some(())).await;
    code(&interrupt(child).await, 130);
    assert_eq!(scratch.names(), Vec::<String>::new());
}

#[tokio::test]
async fn references_of_servers_and_buckets_are_printed() {
    let server = WebServer::start().await.unwrap();
    let object = server.url("/a/object");
    let inside = download(&[&object]).await;
    code(&inside, 1);
    assert!(
        stderr(&inside).contains("private address") && stderr(&inside).contains("--private"),
        "{}",
        stderr(&inside)
    );
    assert_eq!(server.asked("/a/object"), 0);
    let got = download(&[&object, "--private"]).await;
    code(&got, 0);
    assert_eq!(got.stdout, BODY);
    let large = download(&[&server.url("/a/large"), "--private", "--max-mib", "1"]).await;
    code(&large, 1);
    assert!(stderr(&large).contains("at most 1048576 are taken"), "{}", stderr(&large));
    let bucket = ObjectServer::start().unwrap();
    bucket.put("out/a%20b", b"test").await.unwrap();
    let reference = format!("s3://{BUCKET}/out/a%20b#sha256={SHA256_OF_TEST}");
    let got = download(&[&reference, "--endpoint", &bucket.endpoint()]).await;
    code(&got, 0);
    assert_eq!(got.stdout, b"test");
    let missing = format!("s3://{BUCKET}/out/none");
    let missing = download(&[&missing, "--endpoint", &bucket.endpoint()]).await;
    code(&missing, 1);
    assert!(stderr(&missing).contains("the store has no s3://jobs/out/none"), "{}", stderr(&missing));
}
