//! The resources that a snapshot of another user may use, and those that it may not.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};

use config::Size;
use serde_json::{Value, json};

use super::super::directory::caller;
use super::*;

/// A snapshot's directory and an image store.
struct Host {
    snapshot: tempfile::TempDir,
    images: tempfile::TempDir,
}

impl Host {
    fn new() -> Self {
        let new = || tempfile::tempdir().unwrap();
        Self {
            snapshot: new(),
            images: new(),
        }
    }

    fn write(&self, name: &str, text: &[u8]) -> String {
        let path = self.snapshot.path().join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        path.to_str().unwrap().to_owned()
    }

    fn grant(&self, spec: Value, allowed: &Allowed) -> Result<Granted, TrustError> {
        let directory = Directory::open(self.snapshot.path(), &[caller()]).unwrap();
        let places = Places {
            directory: &directory,
            images: Some(self.images.path()),
        };
        grant(&serde_json::from_value(spec).unwrap(), &places, allowed)
    }

    #[track_caller]
    fn refusal(&self, spec: Value) -> String {
        let error = self.grant(spec, &Allowed::default()).unwrap_err().to_string();
        assert!(!error.contains('\n'), "{error:?}");
        error
    }
}

#[test]
fn a_snapshot_of_an_image_alone_is_granted_without_ceremony() {
    let granted = Host::new()
        .grant(json!({ "image": "tiny" }), &Allowed::default())
        .unwrap();
    assert_eq!(granted.opens, ["the image tiny"]);
    assert_eq!(granted.withheld, [""; 0]);
}

#[test]
fn a_file_that_the_caller_did_not_name_is_refused() {
    let host = Host::new();
    let why = host.refusal(json!({ "image": "tiny", "disks": [{ "path": "/etc/shadow" }] }));
    assert!(why.contains("/etc/shadow as disk 0"), "{why}");
    assert!(why.contains("--disk 0=/etc/shadow"), "{why}");
    let kernel = json!({ "path": "/etc/shadow", "initrd": "/etc/gshadow" });
    let why = host.refusal(json!({ "kernel": kernel }));
    assert!(
        why.contains("--kernel /etc/shadow --initrd /etc/gshadow"),
        "{why}"
    );
    // A disk that is only read is as secret.
    host.refusal(json!({ "image": "tiny", "disks": [{ "path": "/dev/sda", "read_only": true }] }));
}

#[test]
fn a_file_that_the_caller_names_takes_the_place_of_the_manifest_s() {
    let spec = json!({ "image": "tiny", "disks": [{ "path": "/old/a" }, { "path": "/old/b" }] });
    let mut allowed = Allowed::default();
    allowed.disks.insert(0, "/new/a".into());
    allowed.disks.insert(1, "/new/b".into());
    let granted = Host::new().grant(spec.clone(), &allowed).unwrap();
    assert_eq!(granted.spec.disks[0].path, Path::new("/new/a"));
    assert_eq!(granted.spec.disks[1].path, Path::new("/new/b"));
    assert_eq!(granted.opens[1], "/new/a as disk 0");
    allowed.disks.insert(2, "/new/c".into());
    let error = Host::new().grant(spec, &allowed).unwrap_err();
    assert!(matches!(error, TrustError::NoDisk { number: 2, .. }), "{error}");
}

#[test]
fn a_disk_in_the_snapshot_is_granted_unless_it_leads_elsewhere() {
    let host = Host::new();
    let path = host.write("base.raw", &[7; 512]);
    let disk = |path: &str| json!({ "image": "tiny", "disks": [{ "path": path }] });
    // The test's directory for temporary files may be one that other users can replace: then the caller has
    // to name it.
    let directory = Directory::open(host.snapshot.path(), &[caller()]).unwrap();
    match host.grant(disk(&path), &Allowed::default()) {
        Ok(granted) => assert_eq!(granted.spec.disks[0].path, Path::new(&path)),
        Err(error) => assert!(!directory.stays_in_place(), "{error}"),
    }
    let mut header = [0_u8; 512];
    header[..4].copy_from_slice(b"QFI\xfb");
    header[15] = 0x70;
    let backed = host.write("backed.qcow2", &header);
    host.refusal(disk(&backed));
    symlink("/etc/shadow", host.snapshot.path().join("link")).unwrap();
    host.refusal(disk(host.snapshot.path().join("link").to_str().unwrap()));
    host.refusal(disk("link"));
    host.refusal(disk("../../etc/shadow"));
}

#[test]
fn a_file_of_the_image_store_is_granted_but_no_link_there() {
    let host = Host::new();
    let folder = host.images.path().join("tiny");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("vmlinux"), "kernel").unwrap();
    symlink("/etc/shadow", folder.join("link")).unwrap();
    let kernel = |name: &str| json!({ "kernel": { "path": folder.join(name) } });
    let granted = host.grant(kernel("vmlinux"), &Allowed::default()).unwrap();
    assert_eq!(granted.spec.kernel.unwrap().path.unwrap(), folder.join("vmlinux"));
    host.refusal(kernel("link"));
    host.refusal(kernel("../../etc/shadow"));
}

#[test]
fn a_disk_that_stands_on_another_file_has_a_name_for_it_at_its_start() {
    let file = |bytes: &[u8]| {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(bytes, 0).unwrap();
        file
    };
    let mut header = [0_u8; 104];
    header[..4].copy_from_slice(b"QFI\xfb");
    assert!(stands_alone(&file(&header)).unwrap());
    header[15] = 0x68;
    assert!(!stands_alone(&file(&header)).unwrap());
    header[0] = b'R';
    assert!(stands_alone(&file(&header)).unwrap());
    assert!(stands_alone(&file(b"QFI")).unwrap());
}

#[test]
fn resource_that_only_one_vm_can_use_is_refused_even_when_it_is_named() {
    let host = Host::new();
    let mut allowed = Allowed {
        as_is: true,
        ..Allowed::default()
    };
    allowed.disks.insert(0, "/dev/sda".into());
    for more in [json!({ "mode": "exclusive" }), json!({ "persistent": true })] {
        let mut disk = json!({ "path": "/dev/sda" });
        disk.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        let spec = json!({ "name": "x", "image": "tiny", "disks": [disk] });
        let error = host.grant(spec, &allowed).unwrap_err();
        assert!(matches!(error, TrustError::NotCloneable(_)), "{error}");
    }
    let root = json!({ "name": "x", "image": "tiny", "root": { "persistent": true } });
    host.refusal(root);
    host.refusal(json!({ "image": "tiny", "span": { "cells": [0, 1] } }));
}

#[test]
fn a_tap_device_and_ports_of_the_host_need_as_is() {
    let host = Host::new();
    let tap = json!({ "image": "tiny", "nets": [{ "kind": "tap", "tap": "tap0" }] });
    let ports =
        json!({ "image": "tiny", "nets": [{ "kind": "user", "forward": ["8080:80"], "host": true }] });
    let why = host.refusal(tap.clone());
    assert!(why.contains("tap0") && why.contains("--as-is"), "{why}");
    let granted = host.grant(ports.clone(), &Allowed::default()).unwrap();
    let card = &granted.spec.nets.unwrap()[0];
    assert!(card.forward.is_empty() && !card.host, "{card:?}");
    assert!(granted.withheld[0].contains("8080:80"), "{:?}", granted.withheld);
    assert!(
        granted.withheld[1].contains("lead to the host"),
        "{:?}",
        granted.withheld
    );
    let allowed = Allowed {
        as_is: true,
        ..Allowed::default()
    };
    let granted = host.grant(tap, &allowed).unwrap();
    assert!(
        granted.opens.contains(&"the TAP device tap0".to_owned()),
        "{granted:?}"
    );
    let granted = host.grant(ports, &allowed).unwrap();
    for opened in ["the host's port 8080:80", "the host's own addresses"] {
        assert!(granted.opens.contains(&opened.to_owned()), "{granted:?}");
    }
}

#[test]
fn card_of_a_subnet_is_on_no_network_but_the_callers() {
    let host = Host::new();
    let card = json!({ "kind": "subnet", "network": "back", "forward": ["8080:80"] });
    let spec = json!({ "image": "tiny", "nets": [card] });
    let granted = host.grant(spec.clone(), &Allowed::default()).unwrap();
    assert_eq!(granted.spec.nets.as_ref().unwrap()[0].network, None);
    let line = "its card is not on the network back; --network back puts it there";
    assert!(granted.withheld.contains(&line.to_owned()), "{granted:?}");
    for (named, lines) in [("back", 1), ("front", 2)] {
        let allowed = Allowed {
            network: Some(named.to_owned()),
            ..Allowed::default()
        };
        let granted = host.grant(spec.clone(), &allowed).unwrap();
        assert_eq!(
            granted.spec.nets.as_ref().unwrap()[0].network.as_deref(),
            Some(named)
        );
        assert!(
            granted.opens.contains(&format!("the network {named}")),
            "{granted:?}"
        );
        // The ports are one, and the manifest's network is another.
        assert_eq!(granted.withheld.len(), lines, "{granted:?}");
        let user = json!({ "image": "tiny", "nets": [{ "kind": "user" }] });
        let error = host.grant(user, &allowed).unwrap_err();
        assert!(
            error.to_string().starts_with(&format!("--network {named}: ")),
            "{error}"
        );
    }
    let as_is = Allowed {
        as_is: true,
        ..Allowed::default()
    };
    let granted = host.grant(spec, &as_is).unwrap();
    assert_eq!(granted.spec.nets.unwrap()[0].network.as_deref(), Some("back"));
}

#[test]
fn network_of_a_command_is_not_the_snapshots() {
    let host = Host::new();
    let card = json!({ "kind": "subnet", "network": config::command_network(7) });
    let spec = json!({ "image": "tiny", "nets": [card] });
    for as_is in [false, true] {
        let allowed = Allowed {
            as_is,
            ..Allowed::default()
        };
        let granted = host.grant(spec.clone(), &allowed).unwrap();
        assert_eq!(granted.spec.nets.as_ref().unwrap()[0].network, None);
        assert!(granted.withheld.is_empty(), "{granted:?}");
    }
}

#[test]
fn the_stronger_sandbox_wins() {
    use SandboxSpec::{Auto, Off, Require};
    for (snapshot, caller, wins) in [
        ("off", Auto, Auto),
        ("off", Require, Require),
        ("off", Off, Off),
        ("auto", Off, Auto),
        ("require", Off, Require),
        ("require", Auto, Require),
        ("auto", Require, Require),
    ] {
        let allowed = Allowed {
            sandbox: caller,
            ..Allowed::default()
        };
        let spec = json!({ "image": "tiny", "sandbox": snapshot });
        let granted = Host::new().grant(spec, &allowed).unwrap();
        assert_eq!(granted.spec.sandbox, wins, "{snapshot} and {caller:?}");
        assert_eq!(granted.withheld.is_empty(), snapshot == word(wins));
    }
}

#[test]
fn a_path_can_not_write_to_the_terminal() {
    let spec = json!({ "image": "tiny", "disks": [{ "path": "/\u{1b}[2J\n/x" }] });
    let why = Host::new().refusal(spec);
    assert!(!why.contains('\u{1b}'), "{why:?}");
}

/// A caller who gives these resources.
fn giving(resources: Resources) -> Allowed {
    Allowed {
        resources,
        ..Allowed::default()
    }
}

#[test]
fn cpu_time_that_the_snapshots_vm_had_reserved_is_left_out_and_reported() {
    let reserving = json!({ "image": "tiny", "cpu_reservation": 0.5, "gang": false });
    let granted = Host::new().grant(reserving, &Allowed::default()).unwrap();
    assert_eq!((granted.spec.cpu_reservation, granted.spec.gang), (None, false));
    assert_eq!(granted.withheld.len(), 1, "{:?}", granted.withheld);
    assert!(
        granted.withheld[0].contains("update --cpu-reservation"),
        "{:?}",
        granted.withheld
    );
}

#[test]
fn a_weight_a_cell_and_a_node_of_the_host_come_from_the_caller_alone() {
    let nodes = json!([{ "cpus": "0", "memory": "512M", "host_node": 1 }]);
    let greedy = json!({ "image": "tiny", "cpu_weight": 10_000, "cell": 3, "nodes": nodes });
    let host = Host::new();
    let granted = host.grant(greedy.clone(), &Allowed::default()).unwrap();
    assert_eq!((granted.spec.cpu_weight, granted.spec.cell), (None, None));
    assert_eq!(granted.spec.nodes[0].host_node, None);
    assert_eq!(granted.opens, ["the image tiny"]);
    for flag in ["--cpu-weight", "--cell", "--as-is"] {
        let mut lines = granted.withheld.iter();
        assert!(lines.any(|line| line.contains(flag)), "{:?}", granted.withheld);
    }
    let given = Resources {
        cpu_weight: Some(50),
        cell: Some(1),
        ..Resources::default()
    };
    let allowed = Allowed {
        as_is: true,
        ..giving(given.clone())
    };
    let granted = host.grant(greedy, &allowed).unwrap();
    assert_eq!((granted.spec.cpu_weight, granted.spec.cell), (Some(50), Some(1)));
    assert_eq!(granted.spec.nodes[0].host_node, Some(1));
    assert_eq!(granted.opens, ["the image tiny", "memory of the host's node 1"]);
    assert_eq!(granted.withheld.len(), 2, "{:?}", granted.withheld);
    // Nothing is reported where the manifest requests nothing, or the same.
    for asked in [json!({}), json!({ "cpu_weight": 50, "cell": 1 })] {
        let mut spec = json!({ "image": "tiny" });
        spec.as_object_mut()
            .unwrap()
            .extend(asked.as_object().unwrap().clone());
        let granted = host.grant(spec, &giving(given.clone())).unwrap();
        assert_eq!((granted.spec.cpu_weight, granted.spec.cell), (Some(50), Some(1)));
        assert_eq!(granted.withheld, [""; 0]);
    }
}

#[test]
fn a_limit_is_the_callers_and_the_snapshots_when_the_caller_sets_none() {
    let limited = json!({
        "image": "tiny", "cpu_limit": 0.5, "memory_limit": "1G", "io_limit": { "reads": 100 },
        "scratch_limit": "1M",
    });
    let limits = |spec: &VmSpec| {
        let io = spec.io_limit.and_then(|limit| limit.reads);
        (spec.cpu_limit, spec.memory_limit, io, spec.scratch_limit)
    };
    let granted = Host::new().grant(limited.clone(), &Allowed::default()).unwrap();
    let own = (Some(0.5), Some(Size(1 << 30)), Some(100), Some(Size(1 << 20)));
    assert_eq!(limits(&granted.spec), own);
    let allowed = giving(Resources {
        cpu_limit: Some(2.0),
        memory_limit: Some(Size(2 << 30)),
        io_limit: Some("reads=500".parse().unwrap()),
        scratch_limit: Some(Size(8 << 20)),
        ..Resources::default()
    });
    let callers = (Some(2.0), Some(Size(2 << 30)), Some(500), Some(Size(8 << 20)));
    for spec in [limited, json!({ "image": "tiny" })] {
        let granted = Host::new().grant(spec, &allowed).unwrap();
        assert_eq!(limits(&granted.spec), callers);
        assert_eq!(granted.withheld, [""; 0]);
    }
}

/// Opening a paging file destroys its content, and no VM with one is ever in a snapshot.
#[test]
fn forged_snapshot_opens_no_paging_file() {
    let forged = json!({
        "image": "tiny", "resident": "64M", "paging_file": "/dev/sda", "paging_disk": "64M",
    });
    for as_is in [false, true] {
        let allowed = Allowed {
            as_is,
            ..Allowed::default()
        };
        match Host::new().grant(forged.clone(), &allowed) {
            Ok(granted) => {
                let spec = granted.spec;
                let paging = (spec.resident, spec.paging_file, spec.paging_disk);
                assert_eq!(paging, (None, None, None));
                assert_eq!(granted.opens, ["the image tiny"]);
            }
            Err(error) => assert!(error.to_string().contains("`resident`"), "{error}"),
        }
    }
}

#[test]
fn core_scheduling_is_on_when_the_snapshot_or_the_caller_asks_for_it() {
    for (snapshot, caller) in [(false, false), (false, true), (true, false), (true, true)] {
        let allowed = giving(Resources {
            core_scheduling: caller,
            ..Resources::default()
        });
        let spec = json!({ "image": "tiny", "core_scheduling": snapshot });
        let granted = Host::new().grant(spec, &allowed).unwrap();
        let on = snapshot || caller;
        assert_eq!(granted.spec.core_scheduling, on, "{snapshot} and {caller}");
        let takes = granted
            .opens
            .iter()
            .any(|line| line.starts_with("cores of the host"));
        assert_eq!(takes, on, "{:?}", granted.opens);
        assert_eq!(
            granted.withheld.is_empty(),
            snapshot == on,
            "{:?}",
            granted.withheld
        );
    }
}

#[test]
fn a_snapshot_joins_no_share_group_that_the_caller_does_not_name_again() {
    let host = Host::new();
    let grouped = json!({ "image": "tiny", "share_group": "lessons", "disks": [{ "path": "/srv/x" }] });
    let why = host.refusal(grouped.clone());
    assert!(
        why.contains("the share group lessons, whose VMs share memory with it"),
        "{why}"
    );
    // One line names all that is missing.
    assert!(why.contains("add --disk 0=/srv/x --share-group lessons"), "{why}");
    let named = |group: &str| {
        let mut allowed = giving(Resources {
            share_group: Some(group.to_owned()),
            ..Resources::default()
        });
        allowed.disks.insert(0, "/srv/x".into());
        allowed
    };
    let granted = host.grant(grouped.clone(), &named("lessons")).unwrap();
    assert_eq!(granted.spec.share_group.as_deref(), Some("lessons"));
    assert!(
        granted
            .opens
            .contains(&"memory of the share group lessons".to_owned()),
        "{:?}",
        granted.opens
    );
    // Its memory stands for the files of one group: another one has other files.
    let error = host.grant(grouped, &named("exams")).unwrap_err().to_string();
    assert!(
        error.contains("--share-group exams") && error.contains("in the group lessons"),
        "{error}"
    );
    let alone = json!({ "image": "tiny", "disks": [{ "path": "/srv/x" }] });
    let error = host.grant(alone, &named("exams")).unwrap_err().to_string();
    assert!(error.contains("leave the flag out"), "{error}");
}

#[test]
fn nodes_of_the_host_for_all_memory_are_bound_with_as_is_only() {
    let bound = json!({ "image": "tiny", "memory_nodes": [0, 1] });
    let host = Host::new();
    let granted = host.grant(bound.clone(), &Allowed::default()).unwrap();
    assert_eq!(granted.spec.memory_nodes, [0_u32; 0]);
    let [line] = &granted.withheld[..] else {
        panic!("{:?}", granted.withheld);
    };
    assert!(line.contains("nodes 0, 1; --as-is"), "{line}");
    let allowed = Allowed {
        as_is: true,
        ..Allowed::default()
    };
    let granted = host.grant(bound, &allowed).unwrap();
    assert_eq!(granted.spec.memory_nodes, [0, 1]);
    assert_eq!(
        granted.opens,
        ["the image tiny", "memory of the host's nodes 0, 1"]
    );
}

#[test]
fn cells_that_a_snapshot_may_depend_on_are_kept_as_is_only() {
    let host = Host::new();
    let listed = json!({ "image": "tiny", "cells": [3, 2] });
    let granted = host.grant(listed.clone(), &Allowed::default()).unwrap();
    assert!(granted.spec.cells.is_empty());
    let why = "its memory may come from any cell, not only from cells 3, 2; --as-is keeps it to them";
    assert_eq!(granted.withheld, [why]);
    let as_is = |cell| Allowed {
        as_is: true,
        ..giving(Resources {
            cell,
            ..Resources::default()
        })
    };
    let granted = host.grant(listed.clone(), &as_is(None)).unwrap();
    assert_eq!((granted.spec.cells, granted.withheld.len()), (vec![3, 2], 0));
    // The chosen cell counts as listed, or the VM could not run there.
    let granted = host.grant(listed, &as_is(Some(1))).unwrap();
    assert_eq!(granted.spec.cells, [3, 2, 1]);
}
