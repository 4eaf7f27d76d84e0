//! Host memory for the bodies of unacknowledged jobs: how much there is, and how many jobs each model may hold in it.

use std::fmt;
use std::num::NonZeroU16;

use vramq_core::units::{FreeMib, Mib};

/// The default part of the machine's memory for bodies, after the CPU device has its own. A decoded job takes about as much again as its
/// body, and so do its replies.
const PART_OF_MACHINE: u64 = 3;

/// At least one part in so many of the machine's memory counts as free for jobs, however much the CPU device may take. The device's memory
/// is only a limit, which small models do not reach.
const PART_FOR_JOBS: u64 = 4;

/// The limits of control groups, version 2 and version 1.
const CGROUP: &str = "/sys/fs/cgroup";
const CGROUP_V1_LIMIT: &str = "/sys/fs/cgroup/memory/memory.limit_in_bytes";

/// The assumed memory of a machine that does not report it.
const MACHINE_UNKNOWN: u64 = 4 << 30;

/// What a model's jobs may take at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Want {
    /// The largest body, in bytes.
    pub body_max: u64,
    pub slots_max: NonZeroU16,
}

impl Want {
    fn bytes(&self) -> u64 {
        self.body_max.saturating_mul(self.slots_max.get().into())
    }
}

/// Not every model could hold one job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub struct TooLittle {
    pub host_memory: u64,
    /// The largest bodies of all models together.
    pub one_each: u64,
}

impl fmt::Display for TooLittle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host_memory, one_each } = *self;
        write!(
            f,
            "leaves {} for jobs, and one job of each model may take {}: raise it, or lower body_mib_max",
            FreeMib(host_memory),
            Mib(one_each)
        )
    }
}

/// The most jobs of each model, so that all bodies together fit `host_memory` bytes. A model that wants less than an equal part leaves the
/// rest to others.
///
/// # Errors
/// [`TooLittle`].
pub fn slots(host_memory: u64, wants: &[Want]) -> Result<Vec<NonZeroU16>, TooLittle> {
    let one_each = wants.iter().fold(0_u64, |sum, want| sum.saturating_add(want.body_max));
    let Some(mut left) = host_memory.checked_sub(one_each) else {
        return Err(TooLittle { host_memory, one_each });
    };
    let mut slots = vec![NonZeroU16::MIN; wants.len()];
    let mut order: Vec<_> = (0..wants.len()).collect();
    order.sort_by_key(|at| wants[*at].bytes());
    for (done, at) in order.into_iter().enumerate() {
        let Want { body_max, slots_max } = wants[at];
        let part = left / (wants.len() - done) as u64;
        let more = u16::try_from(part / body_max.max(1)).unwrap_or(u16::MAX).min(slots_max.get() - 1);
        slots[at] = slots[at].saturating_add(more);
        left -= u64::from(more) * body_max;
    }
    Ok(slots)
}

/// The default memory for bodies: a third of what the CPU device leaves of the machine's memory. `cpu_device`: bytes of that device, 0 with
/// a GPU.
pub fn default_bytes(cpu_device: u64) -> u64 {
    part_for_bodies(machine_bytes().unwrap_or(MACHINE_UNKNOWN), cpu_device)
}

/// The machine's memory, or the limit of the process's control group, if that is less.
pub fn machine_bytes() -> Option<u64> {
    let read = |file: &str| std::fs::read_to_string(file).unwrap_or_default();
    let group = group_of(&read("/proc/self/cgroup")).unwrap_or_default();
    let of_groups = groups_above(&group).map(|group| limit_of(&read(&format!("{CGROUP}{group}/memory.max"))));
    let of_machine = [total_of(&read("/proc/meminfo")), limit_of(&read(CGROUP_V1_LIMIT))];
    of_machine.into_iter().chain(of_groups).flatten().min()
}

/// A group and its parents, whose limits also apply to it. The last is the root that is visible in a container.
fn groups_above(group: &str) -> impl Iterator<Item = &str> {
    let own = group.trim_end_matches('/');
    std::iter::successors(Some(own), |group| Some(&group[..group.rfind('/')?]))
}

fn part_for_bodies(machine: u64, cpu_device: u64) -> u64 {
    machine.saturating_sub(cpu_device).max(machine / PART_FOR_JOBS) / PART_OF_MACHINE
}

/// `MemTotal` of `/proc/meminfo`, in bytes.
fn total_of(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The path of the process's control group (version 2).
fn group_of(cgroup: &str) -> Option<String> {
    cgroup.lines().find_map(|line| line.strip_prefix("0::")).map(str::to_owned)
}

/// A limit in bytes; `max` is none.
fn limit_of(text: &str) -> Option<u64> {
    text.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn want(body_mib: u64, slots: u16) -> Want {
        Want { body_max: body_mib * MIB, slots_max: NonZeroU16::new(slots).unwrap() }
    }

    fn given(host_mib: u64, wants: &[Want]) -> Vec<u16> {
        slots(host_mib * MIB, wants).unwrap().into_iter().map(NonZeroU16::get).collect()
    }

    #[test]
    fn all_bodies_together_fit() {
        assert_eq!(given(1024, &[want(16, 256)]), [64]);
        assert_eq!(given(1024, &[want(1, 256)]), [256]);
        assert_eq!(given(1024, &[want(16, 256), want(16, 256)]), [32, 32]);
        // The small one needs 8 of them, and the other gets the rest.
        assert_eq!(given(1024, &[want(16, 256), want(1, 8)]), [63, 8]);
        assert_eq!(given(16, &[want(16, 256)]), [1]);
        assert_eq!(given(u64::MAX >> 20, &[want(16, u16::MAX)]), [u16::MAX]);
    }

    #[test]
    fn one_job_of_each_model_must_fit() {
        let error = slots(31 * MIB, &[want(16, 4), want(16, 4)]).unwrap_err();
        assert_eq!(error, TooLittle { host_memory: 31 * MIB, one_each: 32 * MIB });
        assert!(error.to_string().contains("31.0 MiB") && error.to_string().contains("32.0 MiB"), "{error}");
    }

    proptest::proptest! {
        #[test]
        fn the_bodies_never_exceed_the_host_memory(
            host_mib in 1_u64..5000,
            wants in proptest::collection::vec((1_u64..=16, 1_u16..=500), 1..6),
        ) {
            let wants: Vec<_> = wants.into_iter().map(|(body, slots)| want(body, slots)).collect();
            match slots(host_mib * MIB, &wants) {
                Ok(slots) => {
                    let held = wants.iter().zip(&slots).map(|(want, slots)| want.body_max * u64::from(slots.get()));
                    proptest::prop_assert!(held.sum::<u64>() <= host_mib * MIB);
                    proptest::prop_assert!(wants.iter().zip(&slots).all(|(want, slots)| *slots <= want.slots_max));
                }
                Err(TooLittle { one_each, .. }) => proptest::prop_assert!(one_each > host_mib * MIB),
            }
        }
    }

    #[test]
    fn what_the_system_says() {
        assert_eq!(total_of("MemTotal:       24684720 kB\nMemFree: 1 kB\n"), Some(24_684_720 * 1024));
        assert_eq!(total_of(""), None);
        assert_eq!(
            group_of("1:memory:/x\n0::/system.slice/w.service\n").as_deref(),
            Some("/system.slice/w.service")
        );
        let above = |group| groups_above(group).collect::<Vec<_>>();
        assert_eq!(above("/system.slice/w.service"), ["/system.slice/w.service", "/system.slice", ""]);
        assert_eq!((above("/"), above("")), (vec![""], vec![""]));
        assert_eq!((limit_of("max\n"), limit_of("3221225472\n"), limit_of("")), (None, Some(3 << 30), None));
        assert!(default_bytes(0) > 64 * MIB);
    }

    #[test]
    fn a_cpu_device_takes_its_memory_from_the_same_machine() {
        assert_eq!(part_for_bodies(24 << 30, 0), 8 << 30);
        assert_eq!(part_for_bodies(3 << 30, 2 << 30), (1 << 30) / 3);
        // A device that may take all of it: a quarter is left for jobs.
        assert_eq!(part_for_bodies(2 << 30, 2 << 30), (512 << 20) / 3);
    }

    /// A container's limit must cover the worker: the device's memory, three times the bodies, and the process itself.
    #[test]
    fn the_pods_of_the_manifests_stay_below_their_limit() {
        const PROCESS_MIB: u64 = 64;
        let manifests = [
            (
                include_str!("../../deploy/kubernetes/base/worker.toml"),
                include_str!("../../deploy/kubernetes/base/deployment.yaml"),
            ),
            (
                include_str!("../../deploy/helm/vramq/values.yaml"),
                include_str!("../../deploy/helm/vramq/values.yaml"),
            ),
        ];
        for (config, resources) in manifests {
            let number = |text: &str, key: &str| {
                let (_, rest) = text.split_once(key).unwrap_or_else(|| panic!("no {key}"));
                let digits: String = rest.trim_start().chars().take_while(char::is_ascii_digit).collect();
                digits.parse::<u64>().unwrap()
            };
            let device = number(config.split_once("[device.cpu]").unwrap().1, "memory_mib =");
            let bodies = number(config, "host_memory_mib =");
            let (_, limits) = resources.split_once("limits:").unwrap();
            let limit = number(limits, "memory:") * 1024;
            assert!(limits.contains(&format!("memory: {}Gi", limit / 1024)), "the limit is in GiB");
            assert!(
                device + PART_OF_MACHINE * bodies + PROCESS_MIB <= limit,
                "{device} + 3 x {bodies} > {limit} MiB"
            );
        }
    }
}
