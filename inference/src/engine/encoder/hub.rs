//! Models from the Hugging Face hub, through the cache that its other clients share.

use std::fmt;
use std::path::{Path, PathBuf};

use hf_hub::api::sync::{ApiBuilder, ApiError, ApiRepo};
use hf_hub::{Cache, Repo, RepoType};

use super::LoadError;
use super::config::{MODULES, Module, PROMPTS, optional};

/// Where a model comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A folder in the Sentence-Transformers layout.
    Folder(PathBuf),
    /// A repository of the hub, such as `sentence-transformers/all-MiniLM-L6-v2`.
    Hub {
        id: String,
        /// A branch, tag or commit; `main` if absent.
        revision: Option<String>,
    },
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Folder(path) => path.display().fmt(f),
            Self::Hub { id, revision: None } => f.write_str(id),
            Self::Hub { id, revision: Some(revision) } => write!(f, "{id}@{revision}"),
        }
    }
}

/// Files of the transformer that must be there, and those that may.
const REQUIRED: [&str; 3] = ["config.json", "tokenizer.json", "model.safetensors"];
const OPTIONAL: [&str; 2] = ["sentence_bert_config.json", "tokenizer_config.json"];

impl Source {
    /// The model's folder; from the hub only those files are fetched that the engine reads, and only those that the
    /// cache does not have. The hub's usual variables count: `HF_HOME`, `HF_ENDPOINT`, `HF_HUB_OFFLINE`.
    ///
    /// # Errors
    /// When the hub cannot be reached and the cache does not have the model, or the repository lacks a file.
    pub fn folder(&self) -> Result<PathBuf, LoadError> {
        match self {
            Self::Folder(path) => Ok(path.clone()),
            Self::Hub { id, revision } => {
                let offline = std::env::var("HF_HUB_OFFLINE").is_ok_and(|v| !matches!(v.as_str(), "" | "0"));
                Hub { cache: Cache::from_env(), endpoint: std::env::var("HF_ENDPOINT").ok(), offline }
                    .folder(id, revision.as_deref().unwrap_or("main"))
            }
        }
    }
}

struct Hub {
    cache: Cache,
    endpoint: Option<String>,
    offline: bool,
}

impl Hub {
    fn folder(&self, id: &str, revision: &str) -> Result<PathBuf, LoadError> {
        let failed = |reason: String| LoadError::Hub {
            id: id.to_owned(),
            revision: revision.to_owned(),
            reason,
            cache: self.cache.path().clone(),
        };
        if self.offline {
            return self.cached(id, revision).ok_or_else(|| {
                failed("HF_HUB_OFFLINE is set, and the cache does not have all of it".into())
            });
        }
        match self.fetched(id, revision) {
            Ok(folder) => Ok(folder),
            Err(Fetch::Lacks(file)) => {
                Err(failed(format!("the repository has no {file}, which this engine reads")))
            }
            // The hub being away is no reason not to serve a model that is here.
            Err(Fetch::Failed(reason)) => self.cached(id, revision).ok_or_else(|| failed(reason)),
        }
    }

    /// The snapshot in the cache, if it is whole.
    fn cached(&self, id: &str, revision: &str) -> Option<PathBuf> {
        let repo = self.cache.repo(repo(id, revision));
        let config = repo.get(MODULES).or_else(|| repo.get("config.json"))?;
        let folder = config.parent()?.to_owned();
        let modules = optional::<Vec<Module>>(&folder.join(MODULES)).ok()?;
        let whole =
            wanted(modules.as_deref()).iter().all(|(file, required)| !required || folder.join(file).exists());
        whole.then_some(folder)
    }

    fn fetched(&self, id: &str, revision: &str) -> Result<PathBuf, Fetch> {
        let mut builder = ApiBuilder::from_cache(self.cache.clone()).with_progress(false);
        if let Some(endpoint) = &self.endpoint {
            builder = builder.with_endpoint(endpoint.clone());
        }
        let api = builder.build()?;
        let info = api.repo(repo(id, revision)).info()?;
        // By commit from here on: a branch may move between two files.
        let repository = api.repo(repo(id, &info.sha));
        let has = |file: &str| info.siblings.iter().any(|sibling| sibling.rfilename == file);
        let modules = match has(MODULES) {
            false => None,
            true => {
                let path = repository.get(MODULES)?;
                optional::<Vec<Module>>(&path).map_err(|e| Fetch::Failed(e.to_string()))?
            }
        };
        let mut folder = None;
        for (file, required) in wanted(modules.as_deref()) {
            if has(&file) {
                folder = Some(root(&repository, &file)?);
            } else if required {
                return Err(Fetch::Lacks(file));
            }
        }
        // So that a start without the hub finds the commit by the branch's name.
        let named = self.cache.repo(repo(id, revision));
        named.create_ref(&info.sha).map_err(|e| Fetch::Failed(e.to_string()))?;
        folder.ok_or_else(|| Fetch::Lacks("config.json".into()))
    }
}

/// Fetches a file and tells the snapshot's folder.
fn root(repository: &ApiRepo, file: &str) -> Result<PathBuf, Fetch> {
    let path = repository.get(file)?;
    let depth = Path::new(file).components().count();
    path.ancestors()
        .nth(depth)
        .map(Path::to_owned)
        .ok_or_else(|| Fetch::Failed(format!("the cache put {file} at {}", path.display())))
}

/// The files that [`ModelConfig::read`](super::config::ModelConfig::read) and the rest of loading open, and whether
/// they must be there.
fn wanted(modules: Option<&[Module]>) -> Vec<(String, bool)> {
    let within = |folder: &str, file: &str| match folder {
        "" => file.to_owned(),
        folder => format!("{folder}/{file}"),
    };
    let mut files = vec![(MODULES.to_owned(), false), (PROMPTS.to_owned(), false)];
    let transformer = modules
        .and_then(|modules| modules.iter().find(|module| module.kind() == "Transformer"))
        .map_or("", |module| module.path.as_str());
    files.extend(REQUIRED.map(|file| (within(transformer, file), true)));
    files.extend(OPTIONAL.map(|file| (within(transformer, file), false)));
    if let Some(pooling) =
        modules.and_then(|modules| modules.iter().find(|module| module.kind() == "Pooling"))
    {
        files.push((within(&pooling.path, "config.json"), true));
    }
    files
}

enum Fetch {
    Lacks(String),
    Failed(String),
}

impl From<ApiError> for Fetch {
    fn from(error: ApiError) -> Self {
        Self::Failed(error.to_string())
    }
}

fn repo(id: &str, revision: &str) -> Repo {
    Repo::with_revision(id.to_owned(), RepoType::Model, revision.to_owned())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::{BufRead, BufReader, Write};
    use std::net::{TcpListener, TcpStream};

    use super::*;

    const SHA: &str = "0123456789012345678901234567890123456789";

    fn fixture() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny-mean")
    }

    /// Answers as the hub does for one repository: its list of files, and ranges of them.
    fn serve(files: &'static [&'static str]) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                answer(stream, files);
            }
        });
        endpoint
    }

    fn answer(mut stream: TcpStream, files: &[&str]) {
        let lines: Vec<String> = BufReader::new(stream.try_clone().unwrap())
            .lines()
            .map_while(Result::ok)
            .take_while(|line| !line.is_empty())
            .collect();
        let Some(path) = lines.first().and_then(|line| line.split(' ').nth(1)) else {
            return;
        };
        let (head, body) = match path.split_once(&format!("/resolve/{SHA}/")) {
            Some((_, file)) => {
                let all = fs::read(fixture().join(file)).unwrap();
                let first_byte = lines.iter().any(|line| line.ends_with("bytes=0-0"));
                let body = if first_byte { all[..1].to_vec() } else { all.clone() };
                let (etag, total) = (file.replace('/', "-"), all.len());
                let range = format!("content-range: bytes 0-{}/{total}\r\n", body.len() - 1);
                (format!("206 Partial Content\r\nx-repo-commit: {SHA}\r\netag: \"{etag}\"\r\n{range}"), body)
            }
            None => {
                let siblings: Vec<_> =
                    files.iter().map(|file| serde_json::json!({"rfilename": file})).collect();
                let info = serde_json::json!({"sha": SHA, "siblings": siblings});
                ("200 OK\r\n".to_owned(), info.to_string().into_bytes())
            }
        };
        write!(stream, "HTTP/1.1 {head}content-length: {}\r\nconnection: close\r\n\r\n", body.len()).unwrap();
        stream.write_all(&body).unwrap();
    }

    fn hub(cache: &Path, endpoint: String, offline: bool) -> Hub {
        Hub { cache: Cache::new(cache.to_owned()), endpoint: Some(endpoint), offline }
    }

    #[test]
    fn a_model_is_fetched_once_and_then_found_without_the_hub() {
        let cache = tempfile::tempdir().unwrap();
        let endpoint = serve(&[
            "README.md",
            "modules.json",
            "config.json",
            "tokenizer.json",
            "model.safetensors",
            "sentence_bert_config.json",
            "1_Pooling/config.json",
            "pytorch_model.bin",
        ]);
        let nowhere = || "http://127.0.0.1:9".to_owned();
        let unreachable = hub(cache.path(), nowhere(), false).folder("a/b", "main").unwrap_err();
        assert!(unreachable.to_string().contains("HF_HOME"), "{unreachable}");
        assert!(hub(cache.path(), nowhere(), true).folder("a/b", "main").is_err());

        let folder = hub(cache.path(), endpoint, false).folder("a/b", "main").unwrap();
        for file in ["model.safetensors", "1_Pooling/config.json", "modules.json"] {
            assert_eq!(fs::read(folder.join(file)).unwrap(), fs::read(fixture().join(file)).unwrap());
        }
        assert!(!folder.join("README.md").exists() && !folder.join("pytorch_model.bin").exists());
        for offline in [false, true] {
            let found = hub(cache.path(), nowhere(), offline).folder("a/b", "main").unwrap();
            assert_eq!(found, folder);
        }
    }

    #[test]
    fn a_repository_without_safetensors_is_told_so() {
        let cache = tempfile::tempdir().unwrap();
        let endpoint = serve(&["config.json", "tokenizer.json", "pytorch_model.bin"]);
        let error = hub(cache.path(), endpoint, false).folder("a/b", "main").unwrap_err();
        assert!(error.to_string().contains("has no model.safetensors"), "{error}");
    }
}
