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

/// Gateways for uploads and others for downloads: memory that one has taken would hide what another request takes.
#[test]
fn a_large_file_is_never_in_memory() {
    let mut setup = Setup::new();
    let folder = format!("files.folder={}", setup.folder.path().join("files").display());
    for _ in 0..4 {
        setup.gateway(&["--set", &folder]);
    }
    let (uploading, downloading) = setup.gateways.split_at(2);
    for (here, there) in uploading.iter().zip(downloading) {
        let mut id = String::new();
        let grown = peak_kib(here, || id = upload(here));
        assert!(grown < GROWN_KIB_MAX, "an upload takes {grown} KiB");
        let path = format!("/v1/files/{id}/content");
        let grown = peak_kib(there, || download(there, &path));
        assert!(grown < GROWN_KIB_MAX, "a download takes {grown} KiB");
        assert_eq!(setup.next().send("DELETE", &format!("/v1/files/{id}"), &[], None).status, 200);
    }
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
