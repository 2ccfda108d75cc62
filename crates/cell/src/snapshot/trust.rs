//! The files, devices and resources of the host that a snapshot may use: its manifest asks, and the person
//! who restores it decides.
//!
//! A snapshot holds a running guest beside its manifest. The author of the directory has code that uses a
//! disk as soon as the VM is resumed, so nothing in it is trusted: it gets images of the caller's store,
//! files of its own directory, and files that the caller names. [`Resources`] has the rules for resources of
//! the host.

mod resources;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use config::vm::{DiskFormatSpec, NetKind, NetSpec, SandboxSpec};
use config::{VmSpec, is_command_network};

use super::directory::{Directory, beneath};
use crate::frozen::{check_cloneable, check_disks_cloneable};

pub use self::resources::Resources;

/// The caller's permissions for a snapshot.
#[derive(Clone, Debug, Default)]
pub struct Allowed {
    /// Disks by their place in the manifest's list, from 0, and the file for each.
    pub disks: BTreeMap<usize, PathBuf>,
    /// The kernel's file.
    pub kernel: Option<PathBuf>,
    /// File of the initramfs.
    pub initrd: Option<PathBuf>,
    /// Minimum strictness of the sandbox.
    pub sandbox: SandboxSpec,
    /// Whether it gets the TAP devices, ports and nodes of the host that the manifest names.
    pub as_is: bool,
    /// Network of its cards of a subnet; with `as_is` the manifest's when absent, else one of the VM alone.
    pub network: Option<String>,
    /// Resources of the host.
    pub resources: Resources,
}

/// The folders of files that the caller did not name.
#[derive(Debug)]
pub struct Places<'a> {
    /// Directory of the snapshot.
    pub directory: &'a Directory,
    /// The folder of the caller's images, if there is one.
    pub images: Option<&'a Path>,
}

/// The decision about a snapshot.
#[derive(Clone, Debug)]
pub struct Granted {
    /// The spec of its VM.
    pub spec: VmSpec,
    /// Files and devices of the host that it opens, and shares of the host that it takes, one line each.
    pub opens: Vec<String>,
    /// Requests of its manifest that are refused, one line each.
    pub withheld: Vec<String>,
}

/// The reason why a snapshot is not restored.
#[derive(Debug, thiserror::Error)]
pub enum TrustError {
    /// The snapshot needs files, or a share group, that the caller did not allow.
    #[error(
        "{}; if it may have that, add {}",
        .0.iter().map(Wanted::text).collect::<Vec<_>>().join(", "),
        .0.iter().map(Wanted::flag).collect::<Vec<_>>().join(" ")
    )]
    Unnamed(Vec<Wanted>),
    /// The snapshot has fewer disks.
    #[error("--disk {number}: the snapshot has {there_are}; disks are counted from 0")]
    NoDisk {
        /// The disk that the caller names.
        number: usize,
        /// The number of its disks, in words.
        there_are: String,
    },
    /// The snapshot has no such file.
    #[error("{0}: the snapshot's VM was not started from a kernel's file; leave the flag out")]
    NoKernel(&'static str),
    /// The snapshot is in another share group, or in none.
    #[error("--share-group {named}: the snapshot's VM {}", in_group(there.as_deref()))]
    NoShareGroup {
        /// The group that the caller names.
        named: String,
        /// The group in the manifest, if it has one.
        there: Option<String>,
    },
    /// The snapshot has no card that can be on a network.
    #[error("--network {0}: the snapshot's VM has no card of a subnet; leave the flag out")]
    NoSubnetCard(String),
    /// The snapshot needs a card on a TAP device.
    #[error("its network card wants the TAP device {0} of this host; if it may have that, add --as-is")]
    Tap(String),
    /// The snapshot has a resource that only one VM can use.
    #[error("{0}")]
    NotCloneable(String),
    /// A VM that spans cells was never frozen.
    #[error(
        "its VM spans cells, of which no snapshot can be made; name a directory made by `mirrorball snapshot`"
    )]
    Spans,
}

/// A file or a share group that a snapshot needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// The file, or the name of the group, and its use in the VM.
    what: String,
    /// The flag that allows it, with its value.
    flag: String,
    why: &'static str,
}

impl Wanted {
    /// A file. `flag` ends before its value.
    fn file(path: &Path, what: &str, flag: &str, why: &'static str) -> Self {
        let path = shown(path);
        Self {
            what: format!("{path} as {what}"),
            flag: format!("{flag}{path}"),
            why,
        }
    }

    fn share_group(name: &str) -> Self {
        let name = name.escape_debug();
        Self {
            what: format!("the share group {name}"),
            flag: format!("--share-group {name}"),
            why: "whose VMs share memory with it",
        }
    }

    fn text(&self) -> String {
        format!("it wants {}, {}", self.what, self.why)
    }

    fn flag(&self) -> &str {
        &self.flag
    }
}

/// The share group of a snapshot's VM, and the help for a flag that names another.
fn in_group(there: Option<&str>) -> String {
    match there {
        Some(group) => format!("was in the group {}; name that one", group.escape_debug()),
        None => "was in no named group; leave the flag out".to_owned(),
    }
}

/// A path without characters that a terminal would obey.
fn shown(path: &Path) -> String {
    path.display().to_string().escape_debug().to_string()
}

/// Decides which files, devices and resources of the host the VM of `spec` gets.
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
    for card in spec.nets.iter_mut().flatten() {
        // A command chose it for its VMs, which may still run there.
        card.network.take_if(|network| is_command_network(network));
    }
    let cards = spec.nets.iter_mut().flatten();
    if allowed.as_is {
        if let Some(why) = check_disks_cloneable(&spec) {
            return Err(TrustError::NotCloneable(why));
        }
    } else {
        for card in cards {
            if card.kind == NetKind::Tap {
                return Err(TrustError::Tap(card.tap.clone().unwrap_or_default()));
            }
            withheld.extend(drop_card_settings(card, allowed.network.as_deref()));
        }
        if let Some(why) = check_cloneable(&spec) {
            return Err(TrustError::NotCloneable(why));
        }
    }
    if let Some(network) = &allowed.network {
        join_network(&mut spec, network)?;
    }
    let applied = allowed.resources.apply(&mut spec, allowed.as_is)?;
    withheld.extend(applied.withheld);
    let opens = files(&mut spec, places, allowed)?.into_iter();
    Ok(Granted {
        opens: opens.chain(host_doors(&spec)).chain(applied.takes).collect(),
        spec,
        withheld,
    })
}

/// Removes the settings by which a card of a foreign snapshot would reach the host, and lists them.
///
/// **Every setting of [`NetSpec`] by which a guest reaches the host, or is reached through it, belongs
/// here**, and into [`host_doors`], which lists those that remain. `chosen` is the network that the caller
/// chose.
fn drop_card_settings(card: &mut NetSpec, chosen: Option<&str>) -> Vec<String> {
    let NetSpec {
        // Without `--as-is` there is no TAP device.
        kind: _,
        tap: _,
        forward,
        host,
        // The setting is the guest's own.
        mac: _,
        address: _,
        queues: _,
        bandwidth: _,
        packets: _,
        network,
    } = card;
    let mut withheld = Vec::new();
    let ports = std::mem::take(forward);
    if !ports.is_empty() {
        let ports = ports.join(", ").escape_debug().to_string();
        withheld.push(format!(
            "the ports of the host ({ports}) do not lead to it; --as-is forwards them"
        ));
    }
    if std::mem::take(host) {
        withheld.push("its card does not lead to the host; --as-is lets it".to_owned());
    }
    if let Some(network) = network.take()
        && chosen != Some(network.as_str())
    {
        let network = network.escape_debug();
        withheld.push(match chosen {
            Some(chosen) => format!(
                "its card is on the network {}, not on {network}",
                chosen.escape_debug()
            ),
            None => format!("its card is not on the network {network}; --network {network} puts it there"),
        });
    }
    withheld
}

/// Puts the cards of a subnet on the network that the caller chose.
fn join_network(spec: &mut VmSpec, network: &str) -> Result<(), TrustError> {
    let cards = spec.nets.iter_mut().flatten();
    let mut on_subnet = cards.filter(|card| card.kind == NetKind::Subnet).peekable();
    if on_subnet.peek().is_none() {
        return Err(TrustError::NoSubnetCard(network.to_owned()));
    }
    for card in on_subnet {
        card.network = Some(network.to_owned());
    }
    Ok(())
}

/// Chooses the file of each disk and of the kernel, and lists the files that are opened.
///
/// # Errors
/// All files, and the share group, that the caller must name and has not.
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
                Err(why) => return unnamed.push(Wanted::file(path, &what, &flag, why)),
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
    if let Some(group) = &spec.share_group
        && allowed.resources.share_group.is_none()
    {
        unnamed.push(Wanted::share_group(group));
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
            let network = card.network.iter();
            tap.chain(ports.map(|ports| format!("the host's port {}", ports.escape_debug())))
                .chain(host)
                .chain(network.map(|network| format!("the network {}", network.escape_debug())))
        })
        .collect()
}

impl Places<'_> {
    /// The file at `path` where a snapshot may have one without permission, or the reason why it may not.
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

/// Whether a disk file names no other: a qcow2 file may have a backing file anywhere.
fn stands_alone(file: &File) -> io::Result<bool> {
    const MAGIC: &[u8] = b"QFI\xfb";
    let mut start = [0; 16];
    let read = file.read_at(&mut start, 0)?;
    let (magic, backing) = (&start[..4], &start[8..]);
    Ok(read < start.len() || magic != MAGIC || backing == [0; 8])
}

/// The stricter of two sandboxes.
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
