//! Tests of fetching, from a server that answers as the hub does.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};

use super::*;

const SHA: &str = "0123456789012345678901234567890123456789";

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// Answers as the hub does for one repository: its list of files, and ranges of them.
fn serve(folder: PathBuf, files: &'static [&'static str]) -> String {
    serve_to(folder, files, None)
}

/// The same, but only callers with this token get files.
fn serve_to(folder: PathBuf, files: &'static [&'static str], token: Option<&'static str>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            answer(stream, &folder, files, token);
        }
    });
    endpoint
}

fn answer(mut stream: TcpStream, folder: &Path, files: &[&str], token: Option<&str>) {
    let lines: Vec<String> = BufReader::new(stream.try_clone().unwrap())
        .lines()
        .map_while(Result::ok)
        .take_while(|line| !line.is_empty())
        .collect();
    let Some(path) = lines.first().and_then(|line| line.split(' ').nth(1)) else {
        return;
    };
    let is_bearer = |token: &str| {
        let header = format!("authorization: bearer {token}");
        lines.iter().any(|line| line.eq_ignore_ascii_case(&header))
    };
    let (head, body) = match path.split_once(&format!("/resolve/{SHA}/")) {
        Some(_) if !token.is_none_or(is_bearer) => ("401 Unauthorized\r\n".to_owned(), Vec::new()),
        Some((_, file)) => {
            let all = fs::read(folder.join(file)).unwrap();
            let first_byte = lines.iter().any(|line| line.ends_with("bytes=0-0"));
            let body = if first_byte { all[..1].to_vec() } else { all.clone() };
            let (etag, total) = (file.replace('/', "-"), all.len());
            let range = format!("content-range: bytes 0-{}/{total}\r\n", body.len() - 1);
            (format!("206 Partial Content\r\nx-repo-commit: {SHA}\r\netag: \"{etag}\"\r\n{range}"), body)
        }
        None => {
            let siblings: Vec<_> = files.iter().map(|file| serde_json::json!({"rfilename": file})).collect();
            let info = serde_json::json!({"sha": SHA, "siblings": siblings});
            ("200 OK\r\n".to_owned(), info.to_string().into_bytes())
        }
    };
    write!(stream, "HTTP/1.1 {head}content-length: {}\r\nconnection: close\r\n\r\n", body.len()).unwrap();
    stream.write_all(&body).unwrap();
}

fn hub(cache: &Path, endpoint: String, offline: bool) -> Hub {
    Hub { cache: Cache::new(cache.to_owned()), endpoint: Some(endpoint), offline, token: None }
}

#[test]
fn a_model_is_fetched_once_and_then_found_without_the_hub() {
    let cache = tempfile::tempdir().unwrap();
    let files = &[
        "README.md",
        "modules.json",
        "config.json",
        "tokenizer.json",
        "model.safetensors",
        "sentence_bert_config.json",
        "tokenizer_config.json",
        "1_Pooling/config.json",
        "pytorch_model.bin",
    ];
    let endpoint = serve(fixture("tiny-mean"), files);
    let nowhere = || "http://127.0.0.1:9".to_owned();
    let unreachable = hub(cache.path(), nowhere(), false).folder("a/b", "main").unwrap_err();
    assert!(unreachable.to_string().contains("HF_HOME"), "{unreachable}");
    assert!(hub(cache.path(), nowhere(), true).folder("a/b", "main").is_err());

    let folder = hub(cache.path(), endpoint, false).folder("a/b", "main").unwrap();
    for file in ["model.safetensors", "1_Pooling/config.json", "modules.json"] {
        assert_eq!(fs::read(folder.join(file)).unwrap(), fs::read(fixture("tiny-mean").join(file)).unwrap());
    }
    assert!(!folder.join("README.md").exists() && !folder.join("pytorch_model.bin").exists());
    for offline in [false, true] {
        let found = hub(cache.path(), nowhere(), offline).folder("a/b", "main").unwrap();
        assert_eq!(found, folder);
    }
}

#[test]
fn a_model_in_several_files_is_fetched_whole() {
    let cache = tempfile::tempdir().unwrap();
    let all = &[
        "modules.json",
        "config.json",
        "tokenizer.json",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "1_Pooling/config.json",
        "2_Dense/config.json",
        "2_Dense/model.safetensors",
        "3_Dense/config.json",
        "3_Dense/model.safetensors",
        "model-00002-of-00002.safetensors",
    ];
    let from = fixture("tiny-gemma");
    let folder = hub(cache.path(), serve(from.clone(), all), false).folder("a/b", "main").unwrap();
    for file in all {
        assert_eq!(fs::read(folder.join(file)).unwrap(), fs::read(from.join(file)).unwrap());
    }
    let offline = || hub(cache.path(), "http://127.0.0.1:9".to_owned(), true).folder("a/b", "main");
    assert_eq!(offline().unwrap(), folder);
    fs::remove_file(folder.join("model-00002-of-00002.safetensors")).unwrap();
    assert!(offline().is_err(), "half of the weights is not a model");
    let endpoint = serve(from, &all[..all.len() - 1]);
    let another = tempfile::tempdir().unwrap();
    let error = hub(another.path(), endpoint, false).folder("a/b", "main").unwrap_err().to_string();
    assert!(error.contains("has no model-00002-of-00002.safetensors"), "{error}");
}

#[test]
fn what_a_normalize_module_says_is_fetched_if_it_is_there() {
    let class = "sentence_transformers.models.Normalize".to_owned();
    let files = wanted(Some(&[Module { class, path: "2_Normalize".to_owned() }]));
    assert!(files.contains(&("2_Normalize/config.json".to_owned(), false)), "{files:?}");
}

#[test]
fn a_gated_model_needs_the_token() {
    let files =
        &["modules.json", "config.json", "tokenizer.json", "model.safetensors", "1_Pooling/config.json"];
    let endpoint = serve_to(fixture("tiny-mean"), files, Some("hf_one"));
    let with = |token: Option<&str>| {
        let cache = tempfile::tempdir().unwrap();
        let token = token.map(str::to_owned);
        Hub { token, ..hub(cache.path(), endpoint.clone(), false) }.folder("a/b", "main")
    };
    for token in [None, Some("hf_other")] {
        let error = with(token).unwrap_err().to_string();
        assert!(error.contains("status code 401. Gated and private models need a token"), "{error}");
        assert!(!error.contains("hf_other"), "{error}");
    }
    with(Some("hf_one")).unwrap();
}

#[test]
fn a_repository_with_an_adapter_is_an_error() {
    let cache = tempfile::tempdir().unwrap();
    let endpoint = serve(fixture("tiny-mean"), &["adapter_config.json", "tokenizer.json"]);
    let error = hub(cache.path(), endpoint, false).folder("a/b", "main").unwrap_err().to_string();
    assert!(error.contains("has adapter_config.json; this engine takes weights in which"), "{error}");
}

#[test]
fn a_repository_without_safetensors_is_an_error() {
    let cache = tempfile::tempdir().unwrap();
    let endpoint = serve(fixture("tiny-mean"), &["config.json", "tokenizer.json", "pytorch_model.bin"]);
    let error = hub(cache.path(), endpoint, false).folder("a/b", "main").unwrap_err();
    assert!(error.to_string().contains("has no model.safetensors; this engine takes"), "{error}");
    assert!(error.to_string().contains("Convert it once"), "{error}");
}
