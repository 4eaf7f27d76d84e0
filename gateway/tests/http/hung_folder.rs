//! A folder that hangs costs its own requests some threads, and nobody else anything.

use std::io::Write as _;
use std::net::TcpStream;
use std::process::Command;

use serde_json::json;

use crate::files::upload;
use crate::harness::{ECHO, Setup, until};
use crate::jobs::set;

/// Requests for the folder: more than the threads that the gateway has for all that blocks.
const REQUESTS: usize = 600;

#[test]
fn a_folder_that_hangs_takes_no_threads_from_others() {
    let mut setup = Setup::new();
    setup.worker(&[ECHO], &[]);
    let [files, results] = ["files", "results"].map(|name| setup.folder.path().join(name));
    let settings =
        [format!("files.folder={}", files.display()), format!("results.folder={}", results.display())];
    for _ in 0..2 {
        setup.gateway(&set(&settings));
    }
    setup.wait_for_models(&[ECHO]);
    // Who opens a pipe that nobody writes to waits.
    let id = format!("file-{}", "0a".repeat(16));
    std::fs::create_dir_all(files.join("local")).unwrap();
    let pipe = files.join("local").join(format!("{id}.json"));
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let request = format!("GET /v1/files/{id} HTTP/1.1\r\nHost: localhost\r\n\r\n");
    for gateway in &setup.gateways {
        let waiting: Vec<_> = (0..REQUESTS)
            .map(|_| {
                let mut stream = TcpStream::connect(gateway.url.trim_start_matches("http://")).unwrap();
                stream.write_all(request.as_bytes()).unwrap();
                stream
            })
            .collect();
        until("the gateway knows that the folder hangs", || {
            gateway.program.log().contains("the folder does not answer").then_some(())
        });
        let refused = gateway.get(&format!("/v1/files/{id}"));
        assert_eq!((refused.status, &refused.json()["error"]["code"]), (503, &json!("store")), "{refused:?}");
        assert_eq!(refused.header("retry-after"), Some("10"));
        // The other folder works.
        let job = json!({"model": ECHO, "inputs": ["x"]});
        let path = format!("/v1/jobs/{}", gateway.program.name);
        let done = gateway.send("PUT", &path, &[("prefer", "wait=60")], Some(&job));
        assert_eq!((done.status, &done.json()["state"]), (200, &json!("done")), "{done:?}");
        assert!(results.join("local").join(format!("{}.json", gateway.program.name)).exists());
        assert_eq!(gateway.get("/v1/jobs/none").status, 404);
        // It answers again.
        let writer = std::fs::File::options().read(true).write(true).open(&pipe).unwrap();
        until("the folder works again", || (upload(gateway, "", b"x").status == 200).then_some(()));
        drop((writer, waiting));
    }
}

/// Far fewer operations than make the whole folder hang.
#[test]
fn a_content_that_the_folder_does_not_open_is_an_answer_in_time() {
    let mut setup = Setup::new();
    let files = setup.folder.path().join("files");
    setup.gateway(&set(&[format!("files.folder={}", files.display())]));
    let gateway = &setup.gateways[0];
    let file = upload(gateway, "", b"x").json();
    let id = file["id"].as_str().unwrap();
    // Who opens a pipe that nobody writes to waits.
    let content = files.join("local").join(id);
    std::fs::remove_file(&content).unwrap();
    assert!(Command::new("mkfifo").arg(&content).status().unwrap().success());
    let refused = gateway.get(&format!("/v1/files/{id}/content"));
    assert_eq!((refused.status, &refused.json()["error"]["code"]), (503, &json!("store")), "{refused:?}");
    assert_eq!(gateway.get(&format!("/v1/files/{id}")).json(), file);
    assert_eq!(upload(gateway, "", b"y").status, 200);
}
