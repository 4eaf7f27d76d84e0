//! The configuration of stores: where inputs are fetched from, and where large outputs go.

use std::sync::Arc;
use std::time::Duration;

use url::Url;
use vramq_stores::cloud::{CloudOptions, CloudStore};
use vramq_stores::folder_of;
use vramq_stores::reference::{self, FILE, is_cloud};

use super::read::at_least_one;
use super::section::Section;
use crate::stores::StoreConfig;
use crate::stores::outputs::{Destination, OutputConfig};

/// Enough for a large image, a minute of CD audio, or ten minutes of compressed audio.
const OBJECT_MIB_MAX_DEFAULT: u32 = 64;

/// Enough for an object of the largest size at 17 Mbit/s.
const TIMEOUT_S_DEFAULT: u32 = 30;

/// The part of the host memory for jobs that fetched inputs get by default. Jobs that refer to inputs have small bodies.
const PART_OF_HOST_MEMORY: u64 = 4;

/// The default limit for all inputs of a job, if there is so much memory.
const FETCH_MAX_DEFAULT: u64 = 64 << 20;

/// From this size on an output is worth a separate file.
const OUTPUT_ABOVE_KIB_DEFAULT: u32 = 256;

/// Reads the tables `[store.NAME]`.
pub(super) fn stores(root: &mut Section) -> Vec<StoreConfig> {
    let mut stores: Vec<StoreConfig> = Vec::new();
    for (name, mut section) in root.named_sections("store") {
        let Some(store) = store(&name, &mut section) else { continue };
        let same = stores.iter().find(|other| reference::is_same_place(&other.prefix, &store.prefix));
        if let Some(other) = same {
            section.fault("url", format!("is also the url of the store `{}`", other.name));
        }
        section.finish();
        stores.push(store);
    }
    stores
}

fn store(name: &str, section: &mut Section) -> Option<StoreConfig> {
    let prefix = section.take::<String>("url");
    if prefix.is_none() {
        section
            .fault("url", "is missing: a folder (file:///srv/in), the start of URLs (https://host/path) or a bucket (s3://bucket/prefix)");
    }
    let prefix = prefix.and_then(|text| match prefix_of(&text) {
        Ok(url) => Some(url),
        Err(what) => {
            section.fault("url", what);
            None
        }
    });
    let is_private = section.take::<bool>("private");
    match prefix.as_ref().map(Url::scheme) {
        Some("http" | "https") | None => {}
        Some(FILE) if is_private.is_some() => {
            section.fault("private", "is for http and https; a folder has no address");
        }
        Some(_) if is_private.is_some() => {
            section.fault("private", "is for http and https; a bucket is where `endpoint` says");
        }
        Some(_) => {}
    }
    let object_mib = at_least_one(section, "object_mib_max", OBJECT_MIB_MAX_DEFAULT);
    let timeout = at_least_one(section, "timeout_s", TIMEOUT_S_DEFAULT);
    let timeout = Duration::from_secs(timeout.into());
    let cloud = cloud(section, prefix.as_ref(), timeout);
    Some(StoreConfig {
        name: name.to_owned(),
        prefix: prefix?,
        is_private: is_private.unwrap_or(false),
        cloud,
        object_max: u64::from(object_mib) << 20,
        timeout,
    })
}

/// Keys for the access to an object store.
const CLOUD_KEYS: [&str; 6] = ["endpoint", "region", "account", "access_key_id", "secret_file", "anonymous"];

/// The client of an object store; `None` for a folder or a web server.
fn cloud(section: &mut Section, prefix: Option<&Url>, timeout: Duration) -> Option<Arc<CloudStore>> {
    let given: Vec<_> = CLOUD_KEYS.into_iter().filter(|key| section.has(key)).collect();
    let endpoint = section.take::<String>("endpoint").map(|text| Url::parse(&text));
    let options = CloudOptions {
        endpoint: endpoint.clone().and_then(Result::ok),
        region: section.take("region"),
        account: section.take("account"),
        access_key_id: section.take("access_key_id"),
        secret_file: section.take::<String>("secret_file").map(Into::into),
        is_anonymous: section.take::<bool>("anonymous").unwrap_or(false),
        timeout,
    };
    let prefix = prefix?;
    if !is_cloud(prefix) {
        for key in given {
            section.fault(key, format!("is for s3://, gs:// and az://, not for {}:", prefix.scheme()));
        }
        return None;
    }
    if let Some(Err(error)) = endpoint {
        section.fault("endpoint", format!("is not a URL: {error}"));
        return None;
    }
    match CloudStore::open(prefix, &options) {
        Ok(store) => Some(Arc::new(store)),
        Err(invalid)
            if invalid.key == "secret_file"
                && options.secret_file.as_ref().is_some_and(|file| !file.exists()) =>
        {
            section.absent(invalid.key, invalid.what);
            None
        }
        Err(invalid) => {
            section.fault(invalid.key, invalid.what);
            None
        }
    }
}

/// Reads a prefix of URLs; the error says what is wrong.
fn prefix_of(text: &str) -> Result<Url, String> {
    let url = Url::parse(text).map_err(|error| format!("is not a URL: {error}"))?;
    match url.scheme() {
        FILE if url.host_str().is_some_and(|host| !host.is_empty()) => {
            return Err("names a host; a folder is file:///PATH".to_owned());
        }
        FILE | "http" | "https" => {}
        _ if is_cloud(&url) => {}
        other => {
            return Err(format!("is of {other}:; it must be of file:, http:, https:, s3:, gs: or az:"));
        }
    }
    if url.query().is_some() || url.fragment().is_some() || !url.username().is_empty() {
        return Err("has more than a scheme, a host and a path".to_owned());
    }
    Ok(url)
}

/// The bytes of host memory for fetched inputs, and the rest for bodies.
pub(super) fn memory(worker: &mut Section, host_memory: u64, has_stores: bool) -> (u64, u64) {
    let given = worker.number("fetch_mib", 0..=u32::MAX).map(|mib| u64::from(mib) << 20);
    if given.is_some() && !has_stores {
        worker.fault("fetch_mib", "has no effect without a table [store.NAME]");
    }
    if !has_stores {
        return (0, host_memory);
    }
    // Whole MiB, so that fetches can divide it into their units.
    let fetch = given.unwrap_or((host_memory / PART_OF_HOST_MEMORY) >> 20 << 20);
    if fetch == 0 || fetch >= host_memory {
        let (fetch, host) = (fetch >> 20, host_memory >> 20);
        worker.fault(
            "fetch_mib",
            format!("is {fetch}; it must be from 1 to less than host_memory_mib, {host}"),
        );
        // That no job has room beside it is no fault of its own.
        return (fetch << 20, host_memory);
    }
    (fetch, host_memory.saturating_sub(fetch))
}

/// The most bytes of all inputs that a job of the model refers to.
pub(super) fn fetch_max(section: &mut Section, fetch_memory: u64) -> u64 {
    let Some(mib) = section.number("fetch_mib_max", 0..=u32::MAX) else {
        return FETCH_MAX_DEFAULT.min(fetch_memory);
    };
    let bytes = u64::from(mib) << 20;
    if bytes == 0 || bytes > fetch_memory {
        let most = fetch_memory >> 20;
        section.fault("fetch_mib_max", format!("is {mib}; it must be from 1 to worker.fetch_mib, {most}"));
    }
    bytes
}

/// Where the large outputs of a model go.
pub(super) fn outputs(section: &mut Section, stores: &[StoreConfig]) -> Option<OutputConfig> {
    let has_others = section.has("output_above_kib") || section.has("output_url");
    let name = section.take::<String>("output_store");
    let above = at_least_one(section, "output_above_kib", OUTPUT_ABOVE_KIB_DEFAULT);
    let url = section.take::<String>("output_url");
    let Some(name) = name else {
        if has_others {
            section.fault("output_store", "is missing: output_above_kib and output_url belong to it");
        }
        return None;
    };
    let Some(store) = stores.iter().find(|store| store.name == name) else {
        section.fault("output_store", format!("is `{name}`; there is no usable table [store.{name}]"));
        return None;
    };
    let destination = match &store.cloud {
        Some(cloud) => Destination::Cloud(Arc::clone(cloud)),
        None if store.prefix.scheme() == FILE => {
            Destination::Folder(folder_of(&reference::segments(&store.prefix)))
        }
        // A store with wrong options was already reported.
        None if is_cloud(&store.prefix) => return None,
        None => {
            let what = format!("is `{name}`, a web server; outputs go to folders and object stores only");
            section.fault("output_store", what);
            return None;
        }
    };
    let url = match url.as_deref().map(prefix_of) {
        None => store.prefix.clone(),
        Some(Ok(url)) => url,
        Some(Err(what)) => {
            section.fault("output_url", what);
            return None;
        }
    };
    Some(OutputConfig { destination, url, above: u64::from(above) << 10, write_max: store.timeout })
}

#[cfg(test)]
mod tests {
    use super::super::{Config, Invalid};
    use super::Destination;

    #[test]
    fn stores_have_defaults_and_take_their_part_of_the_host_memory() {
        let file = "
            [worker]
            host_memory_mib = 1024
            [store.in]
            url = 'file:///srv/in/'
            [store.web]
            url = 'https://files.example.com/a'
            private = true
            object_mib_max = 3
            timeout_s = 7
            [model.m]
            engine = 'echo'
            output_store = 'in'
            [model.p]
            engine = 'process'
            command = ['/bin/true']
            fetch_mib_max = 100
            output_store = 'in'
            output_above_kib = 1
            output_url = 'https://files.example.com/out'";
        let config = Config::read(Some(file), &[]).unwrap();
        assert_eq!((config.fetch_memory, config.host_memory), (256 << 20, 768 << 20));
        let stores: Vec<_> = config
            .stores
            .iter()
            .map(|s| (s.name.as_str(), s.is_private, s.object_max, s.timeout.as_secs()))
            .collect();
        assert_eq!(stores, [("in", false, 64 << 20, 30), ("web", true, 3 << 20, 7)]);
        let [echo, program] = &config.models[..] else { panic!("{:?}", config.models) };
        assert_eq!((echo.fetch_max, program.fetch_max), (64 << 20, 100 << 20));
        let outputs = echo.outputs.as_ref().unwrap();
        assert!(
            matches!(&outputs.destination, Destination::Folder(folder) if folder.as_os_str() == "/srv/in")
        );
        assert_eq!((outputs.above, outputs.write_max.as_secs()), (256 << 10, 30));
        assert_eq!(outputs.url.as_str(), "file:///srv/in/");
        let outputs = program.outputs.as_ref().unwrap();
        assert_eq!((outputs.url.as_str(), outputs.above), ("https://files.example.com/out", 1 << 10));
        let none =
            Config::read(Some("[worker]\nhost_memory_mib = 16\n[model.m]\nengine = 'echo'"), &[]).unwrap();
        assert_eq!(
            (none.fetch_memory, none.host_memory, none.models[0].outputs.is_none()),
            (0, 16 << 20, true)
        );
    }

    #[test]
    fn outputs_go_to_object_stores_too() {
        let secret = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&secret, "hunter2").unwrap();
        let file = format!(
            "
            [store.bucket]
            url = 's3://bucket/prefix'
            endpoint = 'http://minio:9000'
            region = 'eu-central-1'
            access_key_id = 'id'
            secret_file = '{}'
            timeout_s = 7
            [model.m]
            engine = 'echo'
            output_store = 'bucket'",
            secret.path().display()
        );
        let config = Config::read(Some(&file), &[]).unwrap();
        let outputs = config.models[0].outputs.as_ref().unwrap();
        assert!(matches!(&outputs.destination, Destination::Cloud(_)), "{outputs:?}");
        assert_eq!((outputs.url.as_str(), outputs.write_max.as_secs()), ("s3://bucket/prefix", 7));
        assert!(!format!("{config:?}").contains("hunter2"));
    }

    #[test]
    fn faults_of_stores_come_with_all_others() {
        let file = "
            [worker]
            host_memory_mib = 64
            fetch_mib = 64
            [store.none]
            [store.cloud]
            url = 's3://bucket/prefix'
            private = true
            secret_file = '/nowhere/secret'
            [store.elsewhere]
            url = 'gs://bucket'
            endpoint = 'nowhere'
            [store.ftp]
            url = 'ftp://h/a'
            [store.host]
            url = 'file://server/in'
            [store.query]
            url = 'https://h/a?b=c'
            [store.folder]
            url = 'file:///srv/in'
            private = true
            region = 'r'
            secret = 'x'
            [store.same]
            url = 'file:///srv/./in/'
            [store.web]
            url = 'https://h/a'
            object_mib_max = 0
            [model.a]
            engine = 'echo'
            output_store = 'web'
            fetch_mib_max = 1000
            [model.b]
            engine = 'echo'
            output_store = 'gone'
            [model.c]
            engine = 'echo'
            output_above_kib = 3
            [model.d]
            engine = 'echo'
            output_store = 'folder'
            output_url = 'gopher://h'";
        let Invalid(faults) = Config::read(Some(file), &[]).unwrap_err();
        let mut keys: Vec<_> = faults.iter().map(|fault| fault.key.as_str()).collect();
        keys.sort_unstable();
        let expected = [
            "model.a.fetch_mib_max",
            "model.a.output_store",
            "model.b.output_store",
            "model.c.output_store",
            "model.d.output_url",
            "store.cloud.private",
            "store.cloud.secret_file",
            "store.elsewhere.endpoint",
            "store.folder.private",
            "store.folder.region",
            "store.folder.secret",
            "store.ftp.url",
            "store.host.url",
            "store.none.url",
            "store.query.url",
            "store.same.url",
            "store.web.object_mib_max",
            "worker.fetch_mib",
        ];
        assert_eq!(keys, expected, "{faults:#?}");
    }

    #[test]
    fn memory_for_fetches_is_a_fault_without_a_store() {
        let alone =
            Config::read(Some("[worker]\nfetch_mib = 3\n[model.m]\nengine = 'echo'"), &[]).unwrap_err();
        assert!(alone.to_string().contains("worker.fetch_mib: has no effect"), "{alone}");
    }

    /// Jobs that refer to inputs would wait for memory for ever.
    #[test]
    fn host_memory_of_which_fetches_get_nothing_is_a_fault() {
        let file = "[worker]\nhost_memory_mib = 3\n[store.in]\nurl = 'file:///srv/in'\n[model.m]\nengine = 'echo'\nbody_mib_max = 1";
        let Invalid(faults) = Config::read(Some(file), &[]).unwrap_err();
        assert!(faults.len() == 1 && faults[0].key == "worker.fetch_mib", "{faults:?}");
        let given = [("worker.fetch_mib".to_owned(), "1".to_owned())];
        assert_eq!(Config::read(Some(file), &given).unwrap().fetch_memory, 1 << 20);
    }
}
