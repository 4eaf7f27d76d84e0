//! Large files pass through the gateway in pieces: its memory does not grow with them.

use std::io::Read;

use crate::files::{FORM_END, form_begin};
use crate::harness::{Answer, DEADLINE, Gateway, Setup};
use crate::memory::peak_kib;

/// A file, in bytes.
const FILE_BYTES: u64 = 256 << 20;

/// What the gateway's memory may grow by meanwhile: a quarter of the file. An upload has two parts of 5 MiB on their way to the store, and
/// the pieces of one that comes.
const GROWN_KIB_MAX: u64 = 64 << 10;

/// A gateway for uploads and one for downloads: memory that the first one has taken would hide what a download takes.
#[test]
fn a_large_file_is_never_in_memory() {
    let mut setup = Setup::new();
    let folder = format!("files.folder={}", setup.folder.path().join("files").display());
    for _ in 0..2 {
        setup.gateway(&["--set", &folder]);
    }
    let mut id = String::new();
    let grown = peak_kib(&setup.gateways[0], || id = upload(&setup.gateways[0]));
    assert!(grown < GROWN_KIB_MAX, "an upload takes {grown} KiB");
    let path = format!("/v1/files/{id}/content");
    let grown = peak_kib(&setup.gateways[1], || download(&setup.gateways[1], &path));
    assert!(grown < GROWN_KIB_MAX, "a download takes {grown} KiB");
}

/// Uploads a file of zeros, which is not in this process' memory either; its id.
fn upload(gateway: &Gateway) -> String {
    let begin = form_begin("zeros");
    let body = begin.as_bytes().chain(std::io::repeat(0).take(FILE_BYTES)).chain(FORM_END.as_bytes());
    let request = ureq::post(&format!("{}/v1/files", gateway.url)).timeout(DEADLINE);
    let request = request.set("content-type", "multipart/form-data; boundary=b");
    let stored = Answer::of(request.send(body));
    assert_eq!((stored.status, stored.json()["bytes"].as_u64()), (200, Some(FILE_BYTES)), "{stored:?}");
    stored.json()["id"].as_str().expect("an id").to_owned()
}

fn download(gateway: &Gateway, path: &str) {
    let sent = ureq::get(&format!("{}{path}", gateway.url)).timeout(DEADLINE).call().expect("the file");
    let mut content = sent.into_reader();
    let read = std::io::copy(&mut content, &mut std::io::sink()).expect("read it");
    assert_eq!(read, FILE_BYTES);
}
