//! The protocols of Azure, against Azurite, and of Google, against a server of this repository: `make test-stores`. That of S3 is in the
//! end-to-end tests, which `make test` runs.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{BufRead as _, BufReader, Read as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::TryStreamExt as _;
use object_store::{Error, ObjectStoreExt as _, PutMode, WriteMultipart};
use vramq_stores::Fault;
use vramq_stores::cloud::{CloudOptions, CloudStore};
use vramq_stores::reference::Reference;

/// The account that Azurite documents.
const ACCOUNT: &str = "devstoreaccount1";
const ACCOUNT_KEY: &str =
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==";

/// The container.
const CONTAINER: &str = "jobs";

/// A running server. Ends when it is dropped.
struct Server(Child);

impl Server {
    /// Starts the server. Returns it and the port that it prints.
    fn start(command: &mut Command) -> (Self, u16) {
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut server = Self(child.unwrap_or_else(|error| panic!("start {command:?}: {error}")));
        let mut port = String::new();
        BufReader::new(server.0.stdout.take().unwrap()).read_line(&mut port).unwrap();
        (server, port.trim().parse().unwrap_or_else(|_| panic!("{command:?} printed {port:?}")))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The server, and all that it has started, ends when its standard input is closed.
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

fn setting(name: &str) -> PathBuf {
    PathBuf::from(std::env::var_os(name).unwrap_or_else(|| panic!("{name}: make test-stores sets it")))
}

fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/foreign").join(name)
}

fn options(endpoint: String) -> CloudOptions {
    let timeout = Duration::from_secs(60);
    CloudOptions { endpoint: Some(endpoint.parse().unwrap()), timeout, ..CloudOptions::default() }
}

/// Writes an object twice, and reads it and one that is not there.
async fn write_and_read(url: &str, options: &CloudOptions) {
    let store = Arc::new(CloudStore::open(&url.parse().unwrap(), options).unwrap());
    for text in ["first", "second"] {
        store.put("a b", text.into(), "text/plain").await.unwrap();
    }
    let get = |name: &str| {
        let (store, reference) = (Arc::clone(&store), Reference::parse(&format!("{url}/{name}")).unwrap());
        tokio::task::spawn_blocking(move || {
            let (mut body, length) = store.get(&reference)?;
            let mut bytes = Vec::new();
            body.read_to_end(&mut bytes).unwrap();
            assert_eq!(bytes.len() as u64, length);
            Ok::<_, Fault>(bytes)
        })
    };
    assert_eq!(get("a%20b").await.unwrap().unwrap(), b"second");
    assert!(matches!(get("none").await.unwrap(), Err(Fault::Missing(_))));
}

/// Writes an object once only, and one in parts; lists, reads and removes them.
async fn write_as_a_gateway(url: &str, options: &CloudOptions) {
    let objects = CloudStore::open(&url.parse().unwrap(), options).unwrap().objects();
    let claim = async || objects.put_opts(&"claim".into(), "first".into(), PutMode::Create.into()).await;
    claim().await.unwrap();
    assert!(matches!(claim().await, Err(Error::AlreadyExists { .. })));
    let large = vec![b'x'; 11 << 20];
    let mut upload = WriteMultipart::new(objects.put_multipart(&"parts/large".into()).await.unwrap());
    large.chunks(1 << 20).for_each(|piece| upload.write(piece));
    upload.finish().await.unwrap();
    // An upload that is given up leaves nothing.
    let upload = WriteMultipart::new(objects.put_multipart(&"parts/none".into()).await.unwrap());
    upload.abort().await.unwrap();
    let names = async || {
        let found = objects.list(None).map_ok(|found| found.location.to_string());
        let mut found: Vec<_> = found.try_collect().await.unwrap();
        found.sort();
        found
    };
    assert_eq!(names().await, ["claim", "deep/a b", "parts/large"]);
    let read = objects.get(&"parts/large".into()).await.unwrap().bytes().await.unwrap();
    assert!(read == large, "{} bytes", read.len());
    for name in names().await {
        objects.delete(&name.into()).await.unwrap();
    }
    assert!(names().await.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Azurite: make test-stores"]
async fn azure() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(setting("VRAMQ_TEST_NODE"));
    let (_server, port) =
        Server::start(command.arg(script("azure_server.mjs")).arg(folder.path()).arg(CONTAINER));
    let key = folder.path().join("key");
    std::fs::write(&key, ACCOUNT_KEY).unwrap();
    let options = CloudOptions {
        account: Some(ACCOUNT.to_owned()),
        secret_file: Some(key.clone()),
        ..options(format!("http://127.0.0.1:{port}/{ACCOUNT}"))
    };
    write_and_read("az://jobs/in/deep", &options).await;
    std::fs::write(&key, "d3Jvbmc=").unwrap();
    let store = CloudStore::open(&"az://jobs/in".parse().unwrap(), &options).unwrap();
    let refused = store.put("a", "text".into(), "text/plain").await.unwrap_err();
    assert!(refused.contains("403"), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Node.js: make test-stores"]
async fn google() {
    let folder = tempfile::tempdir().unwrap();
    let account = folder.path().join("account");
    let mut command = Command::new(setting("VRAMQ_TEST_NODE"));
    let (_server, port) = Server::start(command.arg(script("gcs_server.mjs")).arg(CONTAINER).arg(&account));
    let endpoint = format!("http://127.0.0.1:{port}");
    let options = CloudOptions { secret_file: Some(account.clone()), ..options(endpoint) };
    write_and_read("gs://jobs/in/deep", &options).await;
    write_as_a_gateway("gs://jobs/in", &options).await;
    // Another key with the same name.
    let other = folder.path().join("other");
    let mut command = Command::new(setting("VRAMQ_TEST_NODE"));
    let _other = Server::start(command.arg(script("gcs_server.mjs")).arg(CONTAINER).arg(&other));
    let options = CloudOptions { secret_file: Some(other), ..options };
    let store = CloudStore::open(&"gs://jobs/in".parse().unwrap(), &options).unwrap();
    let refused = store.put("a", "text".into(), "text/plain").await.unwrap_err();
    assert!(refused.contains("401"), "{refused}");
    // Without a key. Such a store is for reading.
    let options = CloudOptions { secret_file: None, is_anonymous: true, ..options };
    let store = CloudStore::open(&"gs://jobs/in".parse().unwrap(), &options).unwrap();
    let get = move || store.get(&Reference::parse("gs://jobs/in/a").unwrap()).err();
    let refused = tokio::task::spawn_blocking(get).await.unwrap();
    assert!(matches!(&refused, Some(Fault::Unavailable(why)) if why.contains("401")), "{refused:?}");
}
