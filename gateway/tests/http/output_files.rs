//! Large outputs that workers have written to a store, downloaded as files by the key that owns their job, and by no other.

use std::collections::HashMap;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use vramq_stores::reference::hex;

use crate::files::parts_are_sent;
use crate::foreign::python;
use crate::harness::{ECHO, Gateway, Setup, until};
use crate::jobs::set;
use crate::keys::{key_file, send, until_served};

/// A model of a worker without stores: it gives a reference back as it came.
const WITHOUT_STORES: &str = "echo-2";

/// More than replies carry here, and no text.
fn large() -> Vec<u8> {
    (0..2_000_000_u32).map(|n| (n % 251) as u8).collect()
}

/// A job whose first output goes with its reply, and whose others go to the store.
fn job() -> Value {
    json!({"model": ECHO, "inputs": ["small", {"bytes": BASE64.encode(large())}, "x".repeat(2000)]})
}

/// A download that came to its end.
struct Download {
    headers: HashMap<String, String>,
    bytes: Vec<u8>,
}

/// An `Err`: the connection broke before the end.
fn download(gateway: &Gateway, key: &str, path: &str) -> std::io::Result<Download> {
    let request = ureq::get(&format!("{}{path}", gateway.url)).set("authorization", key);
    let response = request.call().unwrap_or_else(|error| panic!("{path}: {error}"));
    let names = response.headers_names();
    let header = |name: String| Some((name.clone(), response.header(&name)?.to_owned()));
    let headers = names.into_iter().filter_map(header).collect();
    let mut bytes = Vec::new();
    response.into_reader().read_to_end(&mut bytes)?;
    Ok(Download { headers, bytes })
}

/// A worker that writes large outputs to a store, two gateways that read it, and two keys.
struct Stored {
    setup: Setup,
    keys: HashMap<String, String>,
    /// The settings of a gateway without outputs.
    without: Vec<String>,
}

impl Stored {
    fn new(mut setup: Setup, worker: &[String], gateway: &[String]) -> Self {
        let (path, keys) = key_file(setup.folder.path(), &[("a", ""), ("b", "")]);
        let results = setup.folder.path().join("results");
        let without =
            vec![format!("http.keys={}", path.display()), format!("results.folder={}", results.display())];
        let writes =
            ["store.out.object_mib_max=4", "model.echo.output_store=out", "model.echo.output_above_kib=1"];
        let worker = [worker, &writes.map(str::to_owned)].concat();
        setup.worker(&[ECHO], &set(&worker));
        for _ in 0..2 {
            setup.gateway(&set(&[&without[..], gateway].concat()));
        }
        until_served(&setup, &keys["a"], ECHO);
        Self { setup, keys, without }
    }

    fn in_folder(setup: Setup, out: &Path) -> Self {
        std::fs::create_dir_all(out).unwrap();
        let (worker, gateway) =
            (format!("store.out.url=file://{}", out.display()), format!("outputs.folder={}", out.display()));
        Self::new(setup, &[worker], &[gateway])
    }

    /// Runs the job at the first gateway.
    fn ran(&self, id: &str) -> Value {
        let job =
            send(&self.setup.gateways[0], &self.keys["a"], "PUT", &format!("/v1/jobs/{id}"), Some(&job()));
        let job = job.json();
        assert_eq!(job["state"], "done", "{job}");
        job
    }

    fn status(&self, gateway: &Gateway, key: &str, method: &str, path: &str) -> (u16, Value) {
        let answer = send(gateway, &self.keys[key], method, path, None);
        (answer.status, answer.json()["error"]["code"].clone())
    }
}

#[test]
fn an_output_in_a_folder_is_downloaded_by_its_key_from_every_gateway() {
    let setup = Setup::new();
    let out = setup.folder.path().join("out");
    let stored = Stored::in_folder(setup, &out);
    outputs_are_their_owners_files(&stored);
    assert_eq!(std::fs::read_dir(&out).unwrap().count(), 4, "nothing was removed");
}

/// The store is where the settings of worker and gateways say.
fn outputs_are_their_owners_files(stored: &Stored) {
    let job = stored.ran("one");
    let listed = |index: u32| {
        let id = format!("output-{index}-one");
        json!({"index": index, "href": format!("/v1/files/{id}/content"), "id": id})
    };
    assert_eq!(job["output_files"], json!([listed(1), listed(2)]), "{}", job["output_files"]);
    let text = serde_json::to_vec(&"x".repeat(2000)).unwrap();
    for gateway in &stored.setup.gateways {
        for (index, expected, media_type) in
            [(1_usize, large(), "application/octet-stream"), (2, text.clone(), "application/json")]
        {
            let file = format!("/v1/files/output-{index}-one");
            let view = send(gateway, &stored.keys["a"], "GET", &file, None).json();
            assert_eq!(
                (&view["bytes"], &view["media_type"], &view["purpose"], &view["object"]),
                (&json!(expected.len()), &json!(media_type), &json!("job_output"), &json!("file")),
            );
            let Download { headers, bytes } = download(
                gateway,
                &stored.keys["a"],
                job["output_files"][index - 1]["href"].as_str().unwrap(),
            )
            .unwrap();
            assert!(bytes == expected, "other bytes");
            let digest = format!("sha-256=:{}:", BASE64.encode(Sha256::digest(&expected)));
            let length = expected.len().to_string();
            for (name, value) in [
                ("content-type", media_type),
                ("content-length", length.as_str()),
                ("content-disposition", "attachment"),
                ("x-content-type-options", "nosniff"),
                ("repr-digest", digest.as_str()),
            ] {
                assert_eq!(headers.get(name).map(String::as_str), Some(value), "{name}: {headers:?}");
            }
            for path in [file.clone(), format!("{file}/content")] {
                assert_eq!(stored.status(gateway, "b", "GET", &path), (404, json!("not_found")), "{path}");
                let nobody = gateway.get(&path);
                assert_eq!(nobody.status, 401);
            }
            assert_eq!(stored.status(gateway, "a", "DELETE", &file), (409, json!("output")));
        }
        for none in ["output-0-one", "output-3-one", "output-1-two", "output-01-one", "output-1", "output-"] {
            let path = format!("/v1/files/{none}");
            assert_eq!(stored.status(gateway, "a", "GET", &path).0, 404, "{none}");
        }
    }
    let text = String::from_utf8(text).unwrap();
    parts_are_sent(&stored.setup, &stored.keys["a"], "/v1/files/output-2-one/content", &text);
    an_output_is_an_input_of_its_owners_jobs(stored);
}

fn an_output_is_an_input_of_its_owners_jobs(stored: &Stored) {
    // The same one twice.
    let next = json!({"model": ECHO, "inputs": [{"uri": "output-1-one"}, {"uri": "output-1-one"}]});
    let gateway = &stored.setup.gateways[1];
    assert_eq!(send(gateway, &stored.keys["b"], "PUT", "/v1/jobs/next", Some(&next)).status, 404);
    let ran = send(gateway, &stored.keys["a"], "PUT", "/v1/jobs/next", Some(&next)).json();
    for index in 0..2 {
        let id = format!("output-{index}-next");
        assert_eq!(ran["output_files"][index]["id"], id, "{}", ran["output_files"]);
        let again = download(gateway, &stored.keys["a"], &format!("/v1/files/{id}/content")).unwrap();
        assert!(again.bytes == large(), "other bytes");
    }
}

/// For [`outputs_are_their_owners_files`] in an object store.
pub fn outputs_of(setup: Setup, worker: &[String], gateway: &[String]) {
    outputs_are_their_owners_files(&Stored::new(setup, worker, gateway));
}

/// The names of outputs are no secret: whoever knows one has a model answer with a reference to it.
#[test]
fn a_reference_to_the_output_of_another_key_gives_no_file() {
    let setup = Setup::new();
    let out = setup.folder.path().join("out");
    let mut stored = Stored::in_folder(setup, &out);
    stored.setup.worker(&[WITHOUT_STORES], &[]);
    until_served(&stored.setup, &stored.keys["a"], WITHOUT_STORES);
    let theirs = stored.ran("one")["outputs"][1]["uri"].as_str().unwrap().to_owned();
    let forged = theirs.replace("file://", "https://files.example.com");
    let job = json!({"model": WITHOUT_STORES, "inputs": ["x", {"uri": forged}]});
    for gateway in &stored.setup.gateways {
        let path = format!("/v1/jobs/forged-{}", gateway.program.pid());
        let answer = send(gateway, &stored.keys["b"], "PUT", &path, Some(&job)).json();
        assert_eq!((&answer["outputs"][1]["uri"], &answer["output_files"]), (&json!(forged), &Value::Null));
        let file = format!("/v1/files/output-1-forged-{}/content", gateway.program.pid());
        for gateway in &stored.setup.gateways {
            assert_eq!(stored.status(gateway, "b", "GET", &file), (404, json!("not_found")));
        }
    }
}

#[test]
fn an_output_that_is_not_what_its_worker_wrote_is_not_taken_for_it() {
    let setup = Setup::new();
    let out = setup.folder.path().join("out");
    let mut stored = Stored::in_folder(setup, &out);
    let written = stored.ran("one")["outputs"][1]["uri"].as_str().unwrap().to_owned();
    let file = PathBuf::from(written.strip_prefix("file://").unwrap().split('#').next().unwrap());
    assert!(written.contains(&hex(&Sha256::digest(std::fs::read(&file).unwrap()))));
    let path = "/v1/files/output-1-one/content";
    // A gateway that does not know the place says so, and one whose place has no such file any more does, too.
    stored.setup.gateway(&set(&stored.without));
    let without = &stored.setup.gateways[2];
    assert_eq!(stored.status(without, "a", "GET", path), (404, json!("no_outputs")));
    assert_eq!(stored.status(without, "b", "GET", path), (404, json!("not_found")));
    // The last byte is another one.
    let mut bytes = large();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&file, &bytes).unwrap();
    for gateway in &stored.setup.gateways[..2] {
        assert!(download(gateway, &stored.keys["a"], path).is_err(), "the download came to its end");
        until("the gateway says why", || {
            gateway.program.log().contains("an output has changed since its worker wrote it").then_some(())
        });
    }
    std::fs::remove_file(&file).unwrap();
    for gateway in &stored.setup.gateways[..2] {
        assert_eq!(stored.status(gateway, "a", "GET", path), (404, json!("not_found")));
        assert_eq!(stored.status(gateway, "a", "GET", "/v1/files/output-1-one"), (404, json!("not_found")));
    }
}

#[test]
fn a_job_that_has_not_ended_has_no_outputs_yet() {
    let setup = Setup::new();
    let out = setup.folder.path().join("out");
    let stored = Stored::in_folder(setup, &out);
    stored.setup.workers[0].signal("STOP");
    let gateway = &stored.setup.gateways[0];
    let put = |id: &str| {
        let headers = [("authorization", stored.keys["a"].as_str())];
        gateway.send("PUT", &format!("/v1/jobs/{id}"), &headers, Some(&job())).status
    };
    assert_eq!(put("waits"), 202);
    let path = "/v1/files/output-1-waits/content";
    assert_eq!(stored.status(gateway, "a", "GET", path), (409, json!("not_ended")));
    assert_eq!(stored.status(gateway, "b", "GET", path), (404, json!("not_found")));
    stored.setup.workers[0].signal("CONT");
    until("the job ends", || {
        let job = send(gateway, &stored.keys["a"], "GET", "/v1/jobs/waits", None).json();
        (job["state"] == "done").then_some(())
    });
    assert!(download(gateway, &stored.keys["a"], path).unwrap().bytes == large());
}

#[test]
fn openais_client_downloads_an_output() {
    let mut setup = Setup::new();
    let out = setup.folder.path().join("out");
    std::fs::create_dir(&out).unwrap();
    let place = |table: &str, what: &str| format!("{table}={what}{}", out.display());
    let worker = [place("store.out.url", "file://"), "model.echo.output_store=out".to_owned()];
    let above = "model.echo.output_above_kib=1".to_owned();
    setup.worker(&[ECHO], &set(&[&worker[..], &[above]].concat()));
    for _ in 0..2 {
        setup.gateway(&set(&[place("outputs.folder", "")]));
    }
    setup.wait_for_models(&[ECHO]);
    for gateway in &setup.gateways {
        let done = gateway.send("POST", "/v1/jobs", &[("prefer", "wait=60")], Some(&job())).json();
        let id = done["output_files"][0]["id"].as_str().unwrap_or_else(|| panic!("{done}"));
        let said: Value =
            serde_json::from_str(&python(&["openai_client.py", "file", &gateway.url, id])).unwrap();
        let expected = json!({"id": id, "bytes": 2_000_000, "sha256": hex(&Sha256::digest(large()))});
        assert_eq!(said, expected);
    }
}
