//! Models from the Hugging Face hub, through the cache that its other clients share.

use std::fmt;
use std::path::{Path, PathBuf};

use hf_hub::api::sync::{ApiBuilder, ApiError, ApiRepo};
use hf_hub::{Cache, Repo, RepoType};

use super::LoadError;
use super::config::{ADAPTER, CONVERT, MERGE};
use super::dense::DenseConfig;
use super::modules::{MODULES, Module, NORMALIZE, NORMALIZE_CONFIG};
use super::saved_config::PROMPTS;
use super::shards::{INDEX, Index, WEIGHTS};
use super::text_config::{CHAT_TEMPLATE, SENTENCE_FILES, TOKENIZER_CONFIG};
use super::token_keys::TOKEN_FILES;

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

/// Files of the transformer that must be there besides the weights. Others may.
const REQUIRED: [&str; 2] = ["config.json", "tokenizer.json"];

impl Source {
    /// The model's folder. From the hub, only files that the engine reads and the cache lacks are fetched. The hub's usual
    /// variables count: `HF_HOME`, `HF_ENDPOINT`, `HF_HUB_OFFLINE`, `HF_TOKEN`.
    ///
    /// # Errors
    /// When the hub cannot be reached and the cache does not have the model, or the repository lacks a file.
    pub fn folder(&self) -> Result<PathBuf, LoadError> {
        match self {
            Self::Folder(path) => Ok(path.clone()),
            Self::Hub { id, revision } => {
                let offline = std::env::var("HF_HUB_OFFLINE").is_ok_and(|v| !matches!(v.as_str(), "" | "0"));
                let token = std::env::var("HF_TOKEN").ok().map(|token| token.trim().to_owned());
                Hub {
                    cache: Cache::from_env(),
                    endpoint: std::env::var("HF_ENDPOINT").ok(),
                    offline,
                    token: token.filter(|token| !token.is_empty()),
                }
                .folder(id, revision.as_deref().unwrap_or("main"))
            }
        }
    }
}

struct Hub {
    cache: Cache,
    endpoint: Option<String>,
    offline: bool,
    /// Instead of the one that `hf auth login` has written beside the cache.
    token: Option<String>,
}

/// What to do about a hub that refuses (401, 403).
const GATED: &str =
    "Gated and private models need a token: accept the model's terms on the hub, and set HF_TOKEN";

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
            Err(Fetch::Lacks(file)) if file.ends_with(WEIGHTS) => {
                Err(failed(format!("the repository has no {file}; this engine takes {CONVERT}")))
            }
            Err(Fetch::Lacks(file)) => {
                Err(failed(format!("the repository has no {file}, which this engine reads")))
            }
            // The hub cannot be reached, but a model in the cache can still serve.
            Err(Fetch::Failed(reason)) => self.cached(id, revision).ok_or_else(|| failed(reason)),
        }
    }

    /// The snapshot in the cache, if it is whole.
    fn cached(&self, id: &str, revision: &str) -> Option<PathBuf> {
        let repo = self.cache.repo(repo(id, revision));
        let config = repo.get(MODULES).or_else(|| repo.get("config.json"))?;
        let folder = config.parent()?.to_owned();
        let modules = Module::list(&folder.join(MODULES)).ok()?;
        let is_there = |file: &str| folder.join(file).exists();
        let weights =
            weights(modules.as_deref(), is_there, |file| Ok::<_, LoadError>(folder.join(file))).ok()?;
        let files = wanted(modules.as_deref());
        let mut required =
            files.iter().filter(|(_, required)| *required).map(|(file, _)| file).chain(&weights);
        required.all(|file| is_there(file)).then_some(folder)
    }

    fn fetched(&self, id: &str, revision: &str) -> Result<PathBuf, Fetch> {
        let mut builder = ApiBuilder::from_cache(self.cache.clone()).with_progress(false);
        if let Some(endpoint) = &self.endpoint {
            builder = builder.with_endpoint(endpoint.clone());
        }
        if let Some(token) = &self.token {
            builder = builder.with_token(Some(token.clone()));
        }
        let api = builder.build()?;
        let info = api.repo(repo(id, revision)).info()?;
        // By commit from here on, because a branch may move between two files.
        let repository = api.repo(repo(id, &info.sha));
        let has = |file: &str| info.siblings.iter().any(|sibling| sibling.rfilename == file);
        let modules = match has(MODULES) {
            false => None,
            true => {
                let path = repository.get(MODULES)?;
                Module::list(&path)?
            }
        };
        let adapter = within(transformer(modules.as_deref()), ADAPTER);
        if has(&adapter) {
            return Err(Fetch::Failed(format!("the repository has {adapter}; this engine takes {MERGE}")));
        }
        let weights = weights(modules.as_deref(), has, |file| Ok::<_, Fetch>(repository.get(file)?))?;
        let weights = weights.into_iter().map(|file| (file, true));
        let mut folder = None;
        for (file, required) in wanted(modules.as_deref()).into_iter().chain(weights) {
            if has(&file) {
                folder = Some(root(&repository, &file)?);
            } else if required {
                return Err(Fetch::Lacks(file));
            }
        }
        // Records the branch's commit, so that a start without the hub finds it.
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

/// The files that [`ModelConfig::read`](super::config::ModelConfig::read) and the rest of loading open besides the weights, and
/// whether they must be there.
fn wanted(modules: Option<&[Module]>) -> Vec<(String, bool)> {
    let mut files = vec![(MODULES.to_owned(), false), (PROMPTS.to_owned(), false)];
    let transformer = transformer(modules);
    files.extend(REQUIRED.map(|file| (within(transformer, file), true)));
    let optional = SENTENCE_FILES.into_iter().chain([TOKENIZER_CONFIG, CHAT_TEMPLATE]).chain(TOKEN_FILES);
    files.extend(optional.map(|file| (within(transformer, file), false)));
    for module in modules.unwrap_or_default() {
        match module.kind() {
            _ if module.is_pooling() => files.push((within(&module.path, "config.json"), true)),
            NORMALIZE => files.push((within(&module.path, NORMALIZE_CONFIG), false)),
            "Dense" => files.extend(DenseConfig::FILES.map(|file| (within(&module.path, file), true))),
            _ => {}
        }
    }
    files
}

/// The files of the transformer's weights: one, or an index and the files that it lists. `get` fetches a file that is there.
fn weights<E: From<LoadError>>(
    modules: Option<&[Module]>,
    is_there: impl Fn(&str) -> bool,
    get: impl FnOnce(&str) -> Result<PathBuf, E>,
) -> Result<Vec<String>, E> {
    let transformer = transformer(modules);
    let (one, index) = (within(transformer, WEIGHTS), within(transformer, INDEX));
    if is_there(&one) || !is_there(&index) {
        return Ok(vec![one]);
    }
    let listed = Index::read(&get(&index)?)?;
    let files = listed.iter().flat_map(Index::files).map(|file| within(transformer, file));
    Ok(files.chain([index.clone()]).collect())
}

/// The transformer's folder.
fn transformer(modules: Option<&[Module]>) -> &str {
    let transformer = modules.and_then(|modules| modules.iter().find(|module| module.is_transformer()));
    transformer.map_or("", |module| module.path.as_str())
}

fn within(folder: &str, file: &str) -> String {
    if folder.is_empty() { file.to_owned() } else { format!("{folder}/{file}") }
}

enum Fetch {
    Lacks(String),
    Failed(String),
}

impl From<LoadError> for Fetch {
    fn from(error: LoadError) -> Self {
        Self::Failed(error.to_string())
    }
}

impl From<ApiError> for Fetch {
    fn from(error: ApiError) -> Self {
        let error = error.to_string();
        // The status is in a type of a library that this crate does not depend on, so the text is searched.
        let is_refused = ["status code 401", "status code 403"].iter().any(|status| error.contains(status));
        Self::Failed(if is_refused { format!("{error}. {GATED}") } else { error })
    }
}

fn repo(id: &str, revision: &str) -> Repo {
    Repo::with_revision(id.to_owned(), RepoType::Model, revision.to_owned())
}

#[cfg(test)]
#[path = "hub_tests.rs"]
mod tests;
