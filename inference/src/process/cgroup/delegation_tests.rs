//! Tests of the decision whether a group is delegated, against folders that imitate cgroupfs.

use std::time::SystemTime;

use super::*;

const MOUNTS: &str = "\
22 1 0:21 / /proc rw,nosuid - proc proc rw
30 22 0:26 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
41 31 0:38 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";

fn found(mountinfo: &str, cgroup: &str) -> Option<(String, bool, bool)> {
    let own = Own::find(mountinfo, cgroup).ok()?;
    Some((own.root.to_str().unwrap().to_owned(), own.is_in_leaf, own.is_top))
}

#[test]
fn a_process_finds_its_group() {
    let at = |root: &str, is_in_leaf, is_top| Some((root.to_owned(), is_in_leaf, is_top));
    let service = "0::/system.slice/vramq-worker.service";
    let folder = "/sys/fs/cgroup/system.slice/vramq-worker.service";
    assert_eq!(found(MOUNTS, service), at(folder, false, false));
    // As one that is started again, or by a process that moved already.
    assert_eq!(found(MOUNTS, &format!("{service}/vramq-worker\n")), at(folder, true, false));
    assert_eq!(found(MOUNTS, "0::/\n"), at("/sys/fs/cgroup", false, true));
    assert_eq!(found(MOUNTS, "0::/vramq-worker\n"), at("/sys/fs/cgroup", true, true));
    // Both versions at once.
    let both = MOUNTS.replace("/sys/fs/cgroup rw,nosuid", "/sys/fs/cgroup/unified rw,nosuid");
    let cgroups = "9:name=systemd:/a\n4:memory:/b\n0::/c\n";
    assert_eq!(found(&both, cgroups), at("/sys/fs/cgroup/unified/c", false, false));
    // A container without a namespace of its own, which sees its part of the tree.
    let part = MOUNTS.replace("0:38 / ", "0:38 /docker/12ab ");
    assert_eq!(found(&part, "0::/docker/12ab"), at("/sys/fs/cgroup", false, true));
    assert_eq!(found(&part, "0::/docker/12ab/x"), at("/sys/fs/cgroup/x", false, false));
    for (mountinfo, cgroup) in [
        (MOUNTS, "4:memory:/b\n"),
        ("", "0::/a"),
        (part.as_str(), "0::/elsewhere"),
        // Outside of the namespace.
        (MOUNTS, "0::/../a"),
    ] {
        assert_eq!(found(mountinfo, cgroup), None, "{cgroup}");
    }
}

/// A folder that imitates a group, without the mark of a delegated one.
fn imitated(files: &[(&str, &str)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in files {
        fs::write(folder.path().join(name), text).unwrap();
    }
    folder
}

fn own(folder: &tempfile::TempDir) -> Own {
    Own { root: folder.path().to_owned(), is_in_leaf: false, is_top: false, is_of_session: false }
}

#[test]
fn only_a_delegated_group_is_used() {
    let group = imitated(&[("cgroup.type", "domain\n")]);
    let user = fs::metadata(group.path()).unwrap().uid();
    let (other, somebody) = (user + 1, user.max(1000));
    assert!(matches!(own(&group).check(other), Err(NotDelegated::NotMarked(_))));
    let top = Own { is_top: true, ..own(&group) };
    assert!(top.check(other).is_ok());
    // Everything belongs to root.
    assert!(matches!(own(&group).check(0), Err(NotDelegated::NotMarked(_))));
    std::os::unix::fs::chown(group.path(), Some(somebody), None).unwrap_or_default();
    if fs::metadata(group.path()).unwrap().uid() == somebody {
        assert!(own(&group).check(somebody).is_ok());
        let session = Own { is_of_session: true, ..own(&group) };
        assert!(matches!(session.check(somebody), Err(NotDelegated::NotMarked(_))));
    }
    let machine = imitated(&[]);
    let machine = Own { is_top: true, ..own(&machine) };
    assert!(matches!(machine.check(other), Err(NotDelegated::MachineRoot)));
    let hidden = Own { root: "/no/such/group".into(), is_top: true, ..own(&group) };
    assert!(matches!(hidden.check(other), Err(NotDelegated::NotRead { .. })));
}

#[test]
fn the_groups_of_a_session_are_its_managers() {
    let of = |path: &str| Own::find(MOUNTS, &format!("0::{path}")).unwrap().is_of_session;
    assert!(of("/user.slice/user-1000.slice/user@1000.service/app.slice/vte-spawn-7.scope"));
    assert!(!of("/system.slice/vramq-worker.service"));
}

#[test]
fn the_leaf_is_entered() {
    let group = imitated(&[]);
    enter_leaf(group.path()).unwrap();
    let procs = group.path().join(LEAF).join("cgroup.procs");
    assert_eq!(fs::read_to_string(&procs).unwrap(), "0");
    enter_leaf(group.path()).unwrap();
    // It is a file: nothing can be made or moved there.
    let file = group.path().join("file");
    fs::write(&file, "").unwrap();
    assert!(matches!(enter_leaf(&file), Err(NotDelegated::NotMade { .. })));
    fs::remove_file(&procs).unwrap();
    fs::create_dir(&procs).unwrap();
    assert!(matches!(enter_leaf(group.path()), Err(NotDelegated::NotMoved { .. })));
}

#[test]
fn memory_is_handed_on_where_it_is_there() {
    let group = imitated(&[("cgroup.controllers", "cpu memory pids\n"), ("cgroup.subtree_control", "\n")]);
    let cgroups = Cgroups::below(group.path().to_owned());
    assert!(cgroups.has_memory());
    assert_eq!(fs::read_to_string(group.path().join("cgroup.subtree_control")).unwrap(), "+memory");
    assert!(cgroups.to_string().ends_with("which bounds its host memory"), "{cgroups}");

    let done =
        imitated(&[("cgroup.controllers", "cpu memory\n"), ("cgroup.subtree_control", "cpu memory\n")]);
    assert!(Cgroups::below(done.path().to_owned()).has_memory());
    assert_eq!(fs::read_to_string(done.path().join("cgroup.subtree_control")).unwrap(), "cpu memory\n");

    let without = imitated(&[("cgroup.controllers", "hugetlb\n"), ("cgroup.subtree_control", "")]);
    let cgroups = Cgroups::below(without.path().to_owned());
    assert!(!cgroups.has_memory());
    assert!(cgroups.to_string().contains("the memory controller is not available"), "{cgroups}");
    assert_eq!(
        cgroups.folder(Path::new("/tmp/vramq-model-1-2-3")),
        Some(without.path().join("vramq-model-1-2-3"))
    );
}

#[test]
fn processes_of_dead_workers_are_ended() {
    let root = imitated(&[]);
    let mut dead = std::process::Command::new("/bin/true").spawn().unwrap();
    dead.wait().unwrap();
    let name = |worker: u32| format!("vramq-model-{worker}-1-0");
    let (left, living) = (name(dead.id()), name(std::process::id()));
    let of_the_dead = |number: u32| format!("vramq-model-{}-{number}-0", dead.id());
    // The keepers of `held` and `young` run in another container, where this process cannot see them. That of `young` is about to
    // hold its group.
    let (held, young, running) = (of_the_dead(2), of_the_dead(3), of_the_dead(4));
    let others = [living.as_str(), held.as_str(), young.as_str(), LEAF, "vramq-model-x"];
    let made = |name: &str| {
        fs::create_dir(root.path().join(name)).unwrap();
        fs::File::open(root.path().join(name)).unwrap()
    };
    for name in others.iter().chain([&left.as_str()]) {
        let folder = made(name);
        if *name != young {
            folder.set_modified(SystemTime::now() - scratch::SETTLED * 2).unwrap();
        }
    }
    // A worker that died soon after it had started the program.
    made(&running);
    fs::write(root.path().join(&running).join("cgroup.events"), "populated 1\n").unwrap();
    let lock = Group::at(root.path().join(&held)).hold().unwrap();
    sweep(root.path());
    // cgroupfs would remove it, too; here the file keeps it.
    for name in [left, running] {
        assert_eq!(fs::read_to_string(root.path().join(name).join("cgroup.kill")).unwrap(), "1");
    }
    for name in others {
        assert_eq!(fs::read_dir(root.path().join(name)).unwrap().count(), 0, "{name} is no dead worker's");
    }
    drop(lock);
    sweep(root.path());
    assert_eq!(fs::read_to_string(root.path().join(held).join("cgroup.kill")).unwrap(), "1");
}
