//! The files and devices of the host that a snapshot may use: its manifest asks, and the person who restores it decides.
//!
//! A snapshot holds a running guest beside its manifest. The author of the directory has code that uses a disk as soon as the
//! VM goes on, so nothing in it is believed: it gets images of the caller's store, files of its own directory, and files that
//! the caller names.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use config::VmSpec;
use config::vm::{DiskFormatSpec, NetKind, NetSpec, SandboxSpec};

use super::directory::{Directory, beneath};
use crate::frozen::{disk_obstacle, obstacle};

/// The caller's permissions for a snapshot.
#[derive(Clone, Debug, Default)]
pub struct Allowed {
    /// Disks by their place in the manifest's list, from 0, and the file that each is to be.
    pub disks: BTreeMap<usize, PathBuf>,
    /// The kernel's file.
    pub kernel: Option<PathBuf>,
    /// The initramfs.
    pub initrd: Option<PathBuf>,
    /// How strict the sandbox is at least.
    pub sandbox: SandboxSpec,
    /// TAP devices and ports of the host, as the manifest has them.
    pub as_is: bool,
}

/// Where files may be that the caller did not name.
#[derive(Debug)]
pub struct Places<'a> {
    /// The snapshot.
    pub directory: &'a Directory,
    /// The folder of the caller's images, if there is one.
    pub images: Option<&'a Path>,
}

/// The decision about a snapshot.
#[derive(Clone, Debug)]
pub struct Granted {
    /// Its VM.
    pub spec: VmSpec,
    /// Files and devices of the host that it opens, one line each.
    pub opens: Vec<String>,
    /// Requests of its manifest that are refused, one line each.
    pub withheld: Vec<String>,
}

/// Why a snapshot is not restored.
#[derive(Debug, thiserror::Error)]
pub enum TrustError {
    /// It wants files that the caller did not allow.
    #[error("{}; if it may have that, add {}", .0.iter().map(Wanted::text).collect::<Vec<_>>().join(", "), .0.iter().map(Wanted::flag).collect::<Vec<_>>().join(" "))]
    Unnamed(Vec<Wanted>),
    /// It has fewer disks.
    #[error("--disk {number}: the snapshot has {there_are}; disks are counted from 0")]
    NoDisk {
        /// The disk that the caller names.
        number: usize,
        /// How many there are, in words.
        there_are: String,
    },
    /// It has no such file.
    #[error("{0}: the snapshot's VM was not started from a kernel's file; leave the flag out")]
    NoKernel(&'static str),
    /// A card on a TAP device.
    #[error("its network card wants the TAP device {0} of this host; if it may have that, add --as-is")]
    Tap(String),
    /// Only one VM can have it.
    #[error("{0}")]
    Obstacle(String),
    /// It was never frozen.
    #[error(
        "its VM spans cells, of which no snapshot can be made; name a directory made by `mirrorball snapshot`"
    )]
    Spans,
}

/// A file that a snapshot wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Its use in the VM.
    what: String,
    /// The flag that allows it, up to its value.
    flag: String,
    path: PathBuf,
    why: &'static str,
}

impl Wanted {
    fn text(&self) -> String {
        format!("it wants {} as {}, {}", shown(&self.path), self.what, self.why)
    }

    fn flag(&self) -> String {
        format!("{}{}", self.flag, shown(&self.path))
    }
}

/// A path without anything that a terminal would obey.
fn shown(path: &Path) -> String {
    path.display().to_string().escape_debug().to_string()
}

/// Decides which files and devices of the host the VM of `spec` gets.
pub fn grant(spec: &VmSpec, places: &Places<'_>, allowed: &Allowed) -> Result<Granted, TrustError> {
    let mut spec = spec.clone();
    if spec.span.is_some() {
        return Err(TrustError::Spans);
    }
    let mut withheld = Vec::new();
    let sandbox = stronger(spec.sandbox, allowed.sandbox);
    if sandbox != spec.sandbox {
        withheld.push(format!(
            "the sandbox is `{}`, stronger than the snapshot's",
            word(sandbox)
        ));
    }
    spec.sandbox = sandbox;
    let cards = spec.nets.iter_mut().flatten();
    if allowed.as_is {
        if let Some(why) = disk_obstacle(&spec) {
            return Err(TrustError::Obstacle(why));
        }
    } else {
        for card in cards {
            if card.kind == NetKind::Tap {
                return Err(TrustError::Tap(card.tap.clone().unwrap_or_default()));
            }
            withheld.extend(drop_card_settings(card));
        }
        if let Some(why) = obstacle(&spec) {
            return Err(TrustError::Obstacle(why));
        }
    }
    let opens = files(&mut spec, places, allowed)?;
    Ok(Granted {
        opens: opens.into_iter().chain(host_doors(&spec)).collect(),
        spec,
        withheld,
    })
}

/// Takes away the settings by which a card of a foreign snapshot would reach the host, and lists them.
///
/// **Every setting of [`NetSpec`] by which a guest reaches the host, or is reached through it, belongs here**, and into
/// [`host_doors`], which lists those that are left.
fn drop_card_settings(card: &mut NetSpec) -> Vec<String> {
    let mut withheld = Vec::new();
    let ports = std::mem::take(&mut card.forward);
    if !ports.is_empty() {
        let ports = ports.join(", ").escape_debug().to_string();
        withheld.push(format!(
            "the ports of the host ({ports}) do not lead to it; --as-is forwards them"
        ));
    }
    if std::mem::take(&mut card.host) {
        withheld.push("its card does not lead to the host; --as-is lets it".to_owned());
    }
    withheld
}

/// Gives each file its place, and lists the files that are opened.
fn files(spec: &mut VmSpec, places: &Places<'_>, allowed: &Allowed) -> Result<Vec<String>, TrustError> {
    let (mut opens, mut unnamed) = (Vec::new(), Vec::new());
    if let Some(image) = &spec.image {
        opens.push(format!("the image {}", image.escape_debug()));
    }
    if let Some(number) = allowed
        .disks
        .keys()
        .copied()
        .find(|number| *number >= spec.disks.len())
    {
        let there_are = match spec.disks.len() {
            0 => "no disks beside its image's".to_owned(),
            1 => "one disk beside its image's".to_owned(),
            count => format!("{count} disks beside its image's"),
        };
        return Err(TrustError::NoDisk { number, there_are });
    }
    let mut place = |path: &mut PathBuf, named: Option<&PathBuf>, is_raw, what: String, flag: String| {
        match named {
            Some(named) => *path = named.clone(),
            None => match places.find(path, is_raw) {
                Ok(found) => *path = found,
                Err(why) => {
                    let path = path.clone();
                    return unnamed.push(Wanted {
                        what,
                        flag,
                        path,
                        why,
                    });
                }
            },
        }
        opens.push(format!("{} as {what}", shown(path)));
    };
    let mut kernel = spec.kernel.as_mut();
    let kernel_path = kernel.as_mut().and_then(|kernel| kernel.path.as_mut());
    match (kernel_path, &allowed.kernel) {
        (Some(path), named) => place(
            path,
            named.as_ref(),
            true,
            "its kernel".into(),
            "--kernel ".into(),
        ),
        (None, Some(_)) => return Err(TrustError::NoKernel("--kernel")),
        (None, None) => {}
    }
    let initrd_path = kernel.as_mut().and_then(|kernel| kernel.initrd.as_mut());
    match (initrd_path, &allowed.initrd) {
        (Some(path), named) => place(
            path,
            named.as_ref(),
            true,
            "its initramfs".into(),
            "--initrd ".into(),
        ),
        (None, Some(_)) => return Err(TrustError::NoKernel("--initrd")),
        (None, None) => {}
    }
    for (number, disk) in spec.disks.iter_mut().enumerate() {
        let is_raw = disk.format == Some(DiskFormatSpec::Raw);
        let (what, flag) = (format!("disk {number}"), format!("--disk {number}="));
        place(&mut disk.path, allowed.disks.get(&number), is_raw, what, flag);
    }
    if unnamed.is_empty() {
        Ok(opens)
    } else {
        Err(TrustError::Unnamed(unnamed))
    }
}

/// Devices, ports and addresses of the host that its cards use.
fn host_doors(spec: &VmSpec) -> Vec<String> {
    let cards = spec.nets.iter().flatten();
    cards
        .flat_map(|card| {
            let tap = card
                .tap
                .iter()
                .map(|tap| format!("the TAP device {}", tap.escape_debug()));
            let ports = card.forward.iter();
            let host = card.host.then(|| "the host's own addresses".to_owned());
            tap.chain(ports.map(|ports| format!("the host's port {}", ports.escape_debug())))
                .chain(host)
        })
        .collect()
}

impl Places<'_> {
    /// The file at `path` where a snapshot may have one without being asked, or why it may not.
    fn find(&self, path: &Path, is_raw: bool) -> Result<PathBuf, &'static str> {
        const OUTSIDE: &str = "which is neither in the image store nor in the snapshot";
        let (file, found) = if let Some(name) = self.directory.name_of(path) {
            let file = self.directory.file(name);
            let file = file.map_err(|_| "which is no file that only you can change")?;
            if !self.directory.stays_in_place() {
                return Err("and others can replace a directory above the snapshot");
            }
            (file, self.directory.path().join(name))
        } else {
            let images = self.images.ok_or(OUTSIDE)?;
            let below = path.strip_prefix(images).map_err(|_| OUTSIDE)?;
            let file = File::open(images)
                .ok()
                .and_then(|images| beneath(&images, below).ok());
            (file.ok_or(OUTSIDE)?, images.join(below))
        };
        if !file.metadata().is_ok_and(|about| about.is_file()) {
            return Err("which is no regular file");
        }
        match is_raw || stands_alone(&file).map_err(|_| "which can't be read")? {
            true => Ok(found),
            false => Err("which stands on another file"),
        }
    }
}

/// Whether a disk file names no other: a qcow2 file may have one below it, anywhere.
fn stands_alone(file: &File) -> io::Result<bool> {
    const MAGIC: &[u8] = b"QFI\xfb";
    let mut start = [0; 16];
    let read = file.read_at(&mut start, 0)?;
    let (magic, backing) = (&start[..4], &start[8..]);
    Ok(read < start.len() || magic != MAGIC || backing == [0; 8])
}

/// The stricter of two.
fn stronger(one: SandboxSpec, other: SandboxSpec) -> SandboxSpec {
    let strength = |sandbox: &SandboxSpec| match sandbox {
        SandboxSpec::Off => 0,
        SandboxSpec::Auto => 1,
        SandboxSpec::Require => 2,
    };
    std::cmp::max_by_key(one, other, strength)
}

fn word(sandbox: SandboxSpec) -> &'static str {
    match sandbox {
        SandboxSpec::Off => "off",
        SandboxSpec::Auto => "auto",
        SandboxSpec::Require => "require",
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, symlink};

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
        // Read-only, it is as secret.
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
        // The test's directory for temporary files may be one that others can replace: then the caller has to name it.
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
    fn what_only_one_vm_can_have_is_refused_even_when_it_is_named() {
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
            assert!(matches!(error, TrustError::Obstacle(_)), "{error}");
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
}
