//! The options that the places of results, uploads and outputs have in common: `folder`, `url`, and those of an object store.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use url::Url;
use vramq_stores::cloud::{CloudOptions, CloudStore};
use vramq_stores::reference::is_cloud;

use super::table::Values;
use crate::storage::Place;

/// How long an object store may send nothing before a request is given up, and how long its retries may take.
const SILENCE_MAX: Duration = Duration::from_secs(30);

/// The dotted keys of a place.
pub struct Keys {
    section: &'static str,
    folder: &'static str,
    url: &'static str,
    endpoint: &'static str,
    region: &'static str,
    account: &'static str,
    access_key_id: &'static str,
    secret_file: &'static str,
    anonymous: &'static str,
}

macro_rules! keys {
    ($section:literal) => {
        Keys {
            section: $section,
            folder: concat!($section, ".folder"),
            url: concat!($section, ".url"),
            endpoint: concat!($section, ".endpoint"),
            region: concat!($section, ".region"),
            account: concat!($section, ".account"),
            access_key_id: concat!($section, ".access_key_id"),
            secret_file: concat!($section, ".secret_file"),
            anonymous: concat!($section, ".anonymous"),
        }
    };
}

pub const RESULTS: Keys = keys!("results");
pub const FILES: Keys = keys!("files");
pub const OUTPUTS: Keys = keys!("outputs");

/// Reads a place; `None` if none is configured, or after a fault.
pub fn place(values: &mut Values, keys: &Keys) -> Option<Place> {
    let folder = values.text(keys.folder).map(PathBuf::from);
    let url = values.text(keys.url);
    let endpoint = url_of(values, keys.endpoint);
    let options = CloudOptions {
        endpoint,
        region: values.text(keys.region),
        account: values.text(keys.account),
        access_key_id: values.text(keys.access_key_id),
        secret_file: values.text(keys.secret_file).map(PathBuf::from),
        is_anonymous: values.flag(keys.anonymous),
        timeout: SILENCE_MAX,
    };
    let (folder, url) = match (folder, url) {
        (Some(_), Some(_)) => {
            values.fault(keys.url, format!("and {} are both set: only one of them may be", keys.folder));
            return None;
        }
        places => places,
    };
    let Some(url) = url else {
        let is_empty = CloudOptions { timeout: SILENCE_MAX, ..CloudOptions::default() } == options;
        if !is_empty {
            values.fault(keys.url, "is missing, to which an endpoint, a region, an account and keys belong");
        }
        return folder.map(Place::Folder);
    };
    let url = match Url::parse(&url) {
        Ok(url) if is_cloud(&url) => url,
        _ => {
            values.fault(keys.url, format!("is {url}; it must be s3://, gs:// or az://BUCKET/PREFIX"));
            return None;
        }
    };
    match CloudStore::open(&url, &options) {
        Ok(cloud) => Some(Place::Cloud(Arc::new(cloud))),
        Err(invalid) => {
            values.fault(format!("{}.{}", keys.section, invalid.key), invalid.what);
            None
        }
    }
}

/// Reads a place that workers also use as a store. It must not overlap the place of results: everybody who may publish jobs can read the
/// workers' stores.
pub fn apart(values: &mut Values, keys: &Keys, results: Option<&Place>) -> Option<Place> {
    let found = place(values, keys)?;
    check_apart(values, keys, &found, results);
    Some(found)
}

/// A place that overlaps the one of results is a fault.
pub fn check_apart(values: &mut Values, keys: &Keys, found: &Place, results: Option<&Place>) {
    if let Some(results) = results.filter(|results| found.overlaps(results)) {
        let key = match found {
            Place::Folder(_) => keys.folder,
            Place::Cloud(_) => keys.url,
        };
        values.fault(key, format!("is {found}, and results are kept in {results}: one is inside the other"));
    }
}

/// A place whose folder cannot be one is a fault. `fault` says why it cannot.
pub fn check_folder(values: &mut Values, keys: &Keys, place: &Place, fault: fn(&Path) -> Option<String>) {
    if let Place::Folder(folder) = place
        && let Some(what) = fault(folder)
    {
        values.fault(keys.folder, format!("is {}, which {what}", folder.display()));
    }
}

fn url_of(values: &mut Values, key: &'static str) -> Option<Url> {
    let text = values.text(key)?;
    Url::parse(&text)
        .map_err(|error| values.fault(key, format!("is {text}, which is not a URL: {error}")))
        .ok()
}

#[cfg(test)]
mod tests {
    use super::super::Config;
    use super::*;

    fn faults_of(text: &str) -> Vec<String> {
        Config::read(text, Vec::new()).unwrap_err().0.into_iter().map(|fault| fault.key).collect()
    }

    #[test]
    fn results_and_uploads_are_kept_in_a_folder_or_an_object_store() {
        let text = "
            [results]
            folder = 'r'
            [files]
            url = 's3://bucket/uploads'
            endpoint = 'http://minio:9000'
            anonymous = true";
        let config = Config::read(text, Vec::new()).unwrap();
        assert!(matches!(config.results.store.unwrap().place, Place::Folder(_)));
        assert!(matches!(config.files.unwrap().place, Place::Cloud(_)));
        let mut found = faults_of(
            "
            [results]
            folder = 'r'
            url = 's3://bucket/results'
            anonymous = 'perhaps'
            [files]
            url = 's3://bucket/uploads'
            access_key_id = 'id'",
        );
        found.sort();
        assert_eq!(found, ["files.access_key_id", "results.anonymous", "results.url"]);
        assert_eq!(faults_of("[files]\nregion = 'r'"), ["files.url"]);
        assert_eq!(faults_of("[files]\nurl = 'https://h/a'"), ["files.url"]);
    }

    #[test]
    fn results_are_kept_apart_from_what_workers_read() {
        let with = |results: &str, files: &str| format!("[results]\n{results}\n[files]\n{files}");
        let s3 = |url: &str| format!("url = '{url}'\nanonymous = true");
        assert_eq!(faults_of(&with("folder = '/no/a'", "folder = '/no/a/b'")), ["files.folder"]);
        assert_eq!(faults_of(&with("folder = 'same'", "folder = 'same'")), ["files.folder"]);
        assert_eq!(faults_of(&with(&s3("s3://jobs/out"), &s3("s3://jobs"))), ["files.url"]);
        let outputs = with("folder = '/no/a/b'", "folder = '/no/up'\n[outputs]\nfolder = '/no/a'");
        assert_eq!(faults_of(&outputs), ["outputs.folder"]);
        for apart in [
            with("folder = '/no/a'", "folder = '/no/ab'"),
            with("folder = 'a'", &s3("s3://jobs")),
            "[files]\nfolder = 'same'\n[outputs]\nfolder = 'same'".to_owned(),
            with(&s3("s3://jobs/out"), &s3("s3://jobs/in")),
        ] {
            assert!(Config::read(&apart, Vec::new()).is_ok(), "{apart}");
        }
    }
}
