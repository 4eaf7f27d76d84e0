//! What every program of a model is started with: environment, folders, limits.

use std::collections::BTreeMap;
use std::path::Path;

use super::cgroup::Cgroups;
use super::child::{KeeperProgram, SCRATCH_VARIABLE};
use super::config::ProcessConfig;
use super::device_view::DeviceView;
use super::keeper::{Limits, OutputUse, Spec};
use super::protocol::{FD, FD_VARIABLE};
use super::scratch;

/// The variables of the worker's environment that programs get. They must not get others, such as a broker's password.
const INHERITED: [&str; 3] = ["PATH", "LANG", "LD_LIBRARY_PATH"];

/// How programs of this worker are started.
#[derive(Clone, Debug, Default)]
pub struct Launcher {
    pub keeper: KeeperProgram,
    /// Where each program has a control group, if the worker may make any.
    pub cgroups: Option<Cgroups>,
}

impl Launcher {
    /// What to start for a model: its command, or one made of it. Its scratch folder exists.
    ///
    /// # Errors
    /// The scratch folder cannot be made.
    pub fn spec(
        &self,
        config: &ProcessConfig,
        device: &dyn DeviceView,
        command: Vec<String>,
        output: OutputUse,
    ) -> std::io::Result<Spec> {
        let scratch = scratch::create(&config.scratch)?;
        let mut env = environment(&config.env, device, &scratch);
        if output == OutputUse::Protocol {
            env.insert(FD_VARIABLE.to_owned(), FD.to_string());
        }
        Ok(Spec {
            command,
            folder: config.folder.clone(),
            env,
            cgroup: self.cgroups.as_ref().and_then(|cgroups| cgroups.folder(&scratch)),
            scratch,
            output,
            limits: Limits { host_memory_bytes: config.host_memory_bytes, ..Limits::default() },
        })
    }
}

fn environment(
    configured: &BTreeMap<String, String>,
    device: &dyn DeviceView,
    scratch: &Path,
) -> BTreeMap<String, String> {
    let inherited =
        INHERITED.into_iter().filter_map(|name| Some((name.to_owned(), std::env::var(name).ok()?)));
    let own =
        ["HOME", "TMPDIR", SCRATCH_VARIABLE].map(|name| (name.to_owned(), scratch.display().to_string()));
    let mut env: BTreeMap<_, _> = inherited.collect();
    env.extend(device.env());
    env.extend(configured.clone());
    env.extend(own);
    env
}
