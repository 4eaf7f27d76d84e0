//! Reads which GPUs a worker uses: an index, a UUID, a list, or all.

use std::fmt;
use std::str::FromStr;

use toml::Value;

use super::section::{FromValue, Section, whole};
use super::{Config, DeviceKind};
use crate::device::cuda::{Found, Lock, Which};

/// GPUs that each get their own worker process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Gpus {
    /// All that the driver lists.
    All,
    /// At least two.
    These(Vec<Which>),
}

/// The GPU of a process that is one of several. Identified by its UUID, because indices may change when a GPU fails.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// Its index in the driver's order when the first process was started.
    pub ordinal: usize,
    pub uuid: String,
}

impl From<&Found> for Gpu {
    fn from(found: &Found) -> Self {
        Self { ordinal: found.ordinal, uuid: found.uuid.clone() }
    }
}

impl fmt::Display for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.ordinal, self.uuid)
    }
}

impl FromStr for Gpu {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.split_once(':').and_then(|(ordinal, uuid)| Some((ordinal.parse().ok()?, uuid)));
        let (ordinal, uuid) = parts.ok_or("is not ORDINAL:UUID")?;
        Ok(Self { ordinal, uuid: uuid.to_owned() })
    }
}

impl Config {
    /// The configuration of the worker on one of its GPUs, which has its own name.
    #[must_use]
    pub fn on(mut self, gpu: &Gpu) -> Self {
        self.name = format!("{}-{}", self.name, gpu.ordinal);
        self.device.gpus = None;
        if let DeviceKind::Cuda(options) = &mut self.device.kind {
            options.which = Which::Uuid(gpu.uuid.clone());
            if let Lock::File(file) = &mut options.lock {
                file.as_mut_os_string().push(format!(".{}", gpu.uuid));
            }
        }
        self
    }
}

/// Reads the keys `index` and `uuid` of `device.cuda`. Returns the first GPU, and all of them if there are several.
pub(super) fn gpus(section: &mut Section) -> (Which, Option<Gpus>) {
    let indices = section.take::<Indices>("index").map(|Indices(gpus)| ("index", gpus));
    let uuids = section.take::<Uuids>("uuid").map(|Uuids(gpus)| ("uuid", gpus));
    if indices.is_some() && uuids.is_some() {
        section.fault("uuid", "is given besides `index`: one of them is enough");
    }
    let (key, gpus) = uuids.or(indices).unwrap_or(("index", Gpus::These(vec![Which::Index(0)])));
    let Gpus::These(these) = &gpus else { return (Which::Index(0), Some(gpus)) };
    if let Some(twice) =
        these.iter().enumerate().find_map(|(at, gpu)| these[..at].contains(gpu).then_some(gpu))
    {
        section.fault(key, format!("names device {twice} twice"));
    }
    let first = these[0].clone();
    let several = these.len() > 1;
    (first, several.then_some(gpus))
}

/// Indices in the driver's order.
struct Indices(Gpus);

impl FromValue for Indices {
    const EXPECTED: &'static str = "the number of a device, a list of numbers, or \"all\"";

    fn from_value(value: Value) -> Option<Self> {
        if value.as_str() == Some("all") {
            return Some(Self(Gpus::All));
        }
        each(value, |value| Some(Which::Index(whole(&value)?))).map(Self)
    }
}

/// UUIDs or prefixes of UUIDs.
struct Uuids(Gpus);

impl FromValue for Uuids {
    const EXPECTED: &'static str = "the UUID of a device as `nvidia-smi -L` shows it, or a list of them";

    fn from_value(value: Value) -> Option<Self> {
        let uuid = |value| {
            let text = String::from_value(value)?;
            let bare = text.strip_prefix("GPU-").or(text.strip_prefix("MIG-")).unwrap_or(&text);
            let is_right = !bare.is_empty() && bare.chars().all(|c| c.is_ascii_hexdigit() || c == '-');
            is_right.then_some(Which::Uuid(text))
        };
        each(value, uuid).map(Self)
    }
}

/// Reads one value or a list; in text form, commas separate a list. `None` if it is empty or a value is wrong.
fn each(value: Value, read: impl Fn(Value) -> Option<Which>) -> Option<Gpus> {
    let values = match value {
        Value::Array(values) => values,
        Value::String(text) => {
            let text = text.trim().trim_start_matches('[').trim_end_matches(']');
            text.split(',').map(|part| Value::String(part.trim().to_owned())).collect()
        }
        one => vec![one],
    };
    let these: Vec<_> = values.into_iter().map(read).collect::<Option<_>>()?;
    (!these.is_empty()).then_some(Gpus::These(these))
}

#[cfg(test)]
mod tests {
    use super::super::Invalid;
    use super::*;

    fn config(cuda: &str, overrides: &[(&str, &str)]) -> Result<Config, Invalid> {
        let file = format!("[worker]\nname = 'w'\n[model.m]\nengine = 'echo'\n[device.cuda]\n{cuda}");
        let pairs: Vec<_> = overrides.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        Config::read(Some(&file), &pairs)
    }

    fn indices(these: &[u32]) -> Option<Gpus> {
        Some(Gpus::These(these.iter().map(|index| Which::Index(*index)).collect()))
    }

    #[test]
    fn several_gpus_are_a_list_or_all() {
        let read = |cuda| config(cuda, &[]).unwrap().device.gpus;
        assert_eq!(read("index = [0, 3]"), indices(&[0, 3]));
        assert_eq!(read("index = 'all'"), Some(Gpus::All));
        assert_eq!(read("uuid = ['GPU-1d', 'GPU-2e']").map(|gpus| gpus != Gpus::All), Some(true));
        assert_eq!(read("index = [2]"), None);
        assert_eq!(read("index = 2"), None);
        let set = |text| config("", &[("device.cuda.index", text)]).unwrap().device.gpus;
        assert_eq!(set("0,3"), indices(&[0, 3]));
        assert_eq!(set("[0, 3]"), indices(&[0, 3]));
        assert_eq!(set("all"), Some(Gpus::All));
        assert_eq!(set("3"), None);
    }

    #[test]
    fn the_worker_on_one_of_them_has_its_name_and_its_file() {
        let gpu: Gpu = "3:GPU-1d5a00ff".parse().unwrap();
        assert_eq!(gpu.to_string(), "3:GPU-1d5a00ff");
        let config = config("index = 'all'\nfile = '/dev/shm/gpu'", &[]).unwrap().on(&gpu);
        assert_eq!((config.name.as_str(), config.device.gpus), ("w-3", None));
        let DeviceKind::Cuda(options) = config.device.kind else { panic!("no CUDA device") };
        assert_eq!(options.which, Which::Uuid("GPU-1d5a00ff".to_owned()));
        assert_eq!(options.lock, Lock::File("/dev/shm/gpu.GPU-1d5a00ff".into()));
        for wrong in ["", "3", "GPU-1d5a00ff", "x:GPU-1"] {
            assert!(wrong.parse::<Gpu>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn settings_that_several_gpus_cannot_share_are_refused() {
        let rows = [
            ("index = [0, 0]", "device.cuda.index", "twice"),
            ("index = []", "device.cuda.index", "\"all\""),
            ("index = [0, 'x']", "device.cuda.index", "\"all\""),
            ("uuid = ['GPU-1d', '']", "device.cuda.uuid", "nvidia-smi -L"),
            ("index = [0, 1]\n[http]\nlisten = '127.0.0.1:9464'", "http.listen", "range"),
        ];
        for (cuda, key, words) in rows {
            let Invalid(faults) = config(cuda, &[]).unwrap_err();
            let [fault] = &faults[..] else { panic!("{cuda}: {faults:?}") };
            assert!(fault.key == key && fault.what.contains(words), "{cuda}: {fault}");
        }
        config("index = [0, 1]\n[http]\nlisten = '127.0.0.1:0'", &[]).unwrap();
    }
}
