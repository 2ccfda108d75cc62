//! What must hold of a VM's spec whatever the host is.

use crate::vm::{
    DiskDevice, DiskFormatSpec, DiskMode, DiskSpec, NetKind, NetSpec, PagesSpec, ShareSpec, VmSpec,
};
use crate::{cpulist, span};

/// Something a spec may not say: where (keys and indices), what, and the mend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    pub(crate) path: Vec<String>,
    /// What is wrong, in one line.
    pub message: String,
    /// How to mend it.
    pub mend: String,
    /// How to mend it where the spec was made from flags, when that differs.
    pub(crate) flag_mend: Option<String>,
}

impl Fault {
    /// Says how to mend it with flags.
    pub(crate) fn or_by_flag(mut self, mend: impl Into<String>) -> Self {
        self.flag_mend = Some(mend.into());
        self
    }
}

/// Guest memory is given out in these: x86-64's large page.
const MEMORY_STEP_BYTES: u64 = 2 << 20;
const MEMORY_MIN_BYTES: u64 = 64 << 20;

pub(crate) fn fault(path: &[&str], message: impl Into<String>, mend: impl Into<String>) -> Fault {
    Fault {
        path: path.iter().map(|&step| step.to_owned()).collect(),
        message: message.into(),
        mend: mend.into(),
        flag_mend: None,
    }
}

/// CPUs that a VM may be limited to; below, the kernel takes no limit.
const CPU_LIMIT_MIN: f64 = 0.01;
const CPU_LIMIT_MAX: f64 = 1024.0;

/// Checks everything that can be told without looking at the host.
pub fn check(spec: &VmSpec) -> Result<(), Fault> {
    if let Some(name) = &spec.name {
        check_name(name)?;
    }
    check_share_group(spec)?;
    if spec.cpus == 0 || spec.cpus > 254 {
        return Err(fault(
            &["cpus"],
            format!("{} CPUs", spec.cpus),
            "write a number from 1 to 254",
        ));
    }
    if spec
        .cpu_weight
        .is_some_and(|weight| !(1..=10_000).contains(&weight))
    {
        return Err(fault(
            &["cpu_weight"],
            "no weight",
            "write a number from 1 to 10000; 100 is ordinary",
        ));
    }
    if spec
        .cpu_limit
        .is_some_and(|cpus| !(CPU_LIMIT_MIN..=CPU_LIMIT_MAX).contains(&cpus))
    {
        return Err(fault(
            &["cpu_limit"],
            "no number of CPUs",
            "write a number from 0.01 to 1024, as 1.5",
        ));
    }
    check_memory(spec)?;
    if spec.image.is_none() && spec.kernel_files().is_none() {
        // Who has a [kernel] without a path, or `--cmdline` alone, is shown that.
        let at = spec.kernel.as_ref().map(|_| &["kernel", "cmdline"][..]);
        return Err(fault(
            at.unwrap_or_default(),
            "neither an image nor a kernel to boot",
            "add `image = \"debian-12\"`, or a [kernel] with its path",
        )
        .or_by_flag("add `--image debian-12`, or `--kernel FILE`"));
    }
    if spec.root.persistent && spec.image.is_none() {
        return Err(fault(
            &["root"],
            "a root disk without an image",
            "add `image`, or list the disk under [[disks]]",
        ));
    }
    if spec.root.persistent && spec.name.is_none() {
        return Err(fault(
            &["root"],
            "a persistent root disk of a VM without a name",
            "add `name`: the disk is kept by it",
        ));
    }
    if let Some(kernel) = &spec.kernel
        && kernel.initrd.is_some()
        && kernel.path.is_none()
    {
        return Err(fault(
            &["kernel", "initrd"],
            "an initramfs without its kernel",
            "add the kernel's `path`, or leave it out: an image has its own",
        )
        .or_by_flag("add `--kernel FILE`, or leave it out: an image has its own"));
    }
    if spec.cmdline().contains(['\0', '\n']) || spec.cmdline().len() > 2000 {
        return Err(fault(
            &["kernel", "cmdline"],
            "not a kernel command line",
            "one line, 2,000 bytes at most",
        ));
    }
    if spec.command.as_ref().is_some_and(Vec::is_empty) {
        return Err(fault(
            &["command"],
            "an empty command",
            "give a program and its arguments, or leave it out",
        ));
    }
    if spec.disks.len() > 24 {
        return Err(fault(
            &["disks"],
            format!("{} disks", spec.disks.len()),
            "24 at most",
        ));
    }
    for (index, disk) in spec.disks.iter().enumerate() {
        check_disk(disk, &index.to_string())?;
        if disk.persistent && disk.mode == DiskMode::Private && spec.name.is_none() {
            return Err(fault(
                &["disks", &index.to_string(), "persistent"],
                "a private disk that keeps its writes, of a VM without a name",
                "add `name`: the writes are kept by it",
            )
            .or_by_flag("add `--name NAME`: the writes are kept by it"));
        }
    }
    let nets = spec.nets.as_deref().unwrap_or_default();
    if nets.len() > 4 {
        return Err(fault(
            &["nets"],
            format!("{} network cards", nets.len()),
            "4 at most",
        ));
    }
    for (index, net) in nets.iter().enumerate() {
        check_net(net, &index.to_string())?;
    }
    check_share(spec)?;
    span::check(spec)?;
    check_nodes(spec)
}

fn wanted(share: ShareSpec) -> bool {
    share != ShareSpec::Never
}

/// The first place where a spec asks to share memory.
pub(crate) fn asked_to_share(spec: &VmSpec) -> Option<Vec<String>> {
    let places = [
        (vec!["share".to_owned()], spec.share),
        (vec!["root".into(), "share".into()], spec.root.share),
    ];
    let disks = spec.disks.iter().enumerate().map(|(index, disk)| {
        let at = vec!["disks".into(), index.to_string(), "share".into()];
        (at, disk.share)
    });
    let mut all = places.into_iter().chain(disks);
    all.find_map(|(path, share)| share.is_some_and(wanted).then_some(path))
}

/// Sharing works on 4 KiB pages of files that nobody writes.
fn check_share(spec: &VmSpec) -> Result<(), Fault> {
    let pool = matches!(spec.pages, PagesSpec::Huge2M | PagesSpec::Huge1G);
    if let Some(path) = asked_to_share(spec).filter(|_| pool) {
        let path: Vec<_> = path.iter().map(String::as_str).collect();
        return Err(fault(
            &path,
            "memory made of the pool's huge pages can't share 4 KiB pages",
            "use `pages = \"thp\"` or `\"4K\"`, `share = \"never\"`, or a disk `as = \"pmem\"`",
        )
        .or_by_flag("use `--pages thp` or `4K`, or `--share never`"));
    }
    for (index, disk) in spec.disks.iter().enumerate() {
        let at = ["disks", &index.to_string(), "share"];
        if disk.share.is_some() && disk.device == DiskDevice::Pmem {
            return Err(fault(
                &at,
                "a pmem disk is mapped: it always shares",
                "drop `share`, or use `as = \"block\"`",
            ));
        }
        let in_place = disk.mode == DiskMode::Exclusive && disk.persistent;
        if disk.share.is_some_and(wanted) && in_place {
            return Err(fault(
                &at,
                "a disk that is written in place has nobody to share with",
                "drop `share`, or use `mode = \"private\"`",
            ));
        }
    }
    Ok(())
}

/// A group has copies of the images of its own, so nothing that outlives a VM may stand on them.
fn check_share_group(spec: &VmSpec) -> Result<(), Fault> {
    let Some(group) = &spec.share_group else {
        return Ok(());
    };
    if !is_name(group) {
        return Err(fault(
            &["share_group"],
            format!("{group:?} can't name a group"),
            "letters, digits, `-`, `_` and `.`, 63 at most, not starting with `-` or `.`",
        ));
    }
    let kept = |disk: &DiskSpec| disk.persistent && disk.mode == DiskMode::Private;
    if spec.root.persistent || spec.disks.iter().any(kept) {
        return Err(fault(
            &["share_group"],
            "a share group, and a private disk that keeps its writes: they would stand on the group's copy of the image",
            "leave out `persistent`, or give the VM an exclusive disk",
        ));
    }
    Ok(())
}

fn is_name(name: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    !name.is_empty() && name.len() <= 63 && name.chars().all(allowed) && !name.starts_with(['.', '-'])
}

fn check_name(name: &str) -> Result<(), Fault> {
    if !is_name(name) {
        return Err(fault(
            &["name"],
            format!("{name:?} can't name a VM"),
            "letters, digits, `-`, `_` and `.`, 63 at most, not starting with `-` or `.`",
        ));
    }
    Ok(())
}

fn check_memory(spec: &VmSpec) -> Result<(), Fault> {
    let bytes = spec.memory.0;
    if bytes < MEMORY_MIN_BYTES {
        return Err(fault(
            &["memory"],
            format!("{} of memory is too little", spec.memory),
            "give it 64M or more",
        ));
    }
    if !bytes.is_multiple_of(MEMORY_STEP_BYTES) {
        let down = crate::Size(bytes - bytes % MEMORY_STEP_BYTES);
        return Err(fault(
            &["memory"],
            format!("{} is not a multiple of 2M", spec.memory),
            format!("use {down}"),
        ));
    }
    if bytes > 1 << 42 {
        return Err(fault(
            &["memory"],
            format!("{} of memory is too much", spec.memory),
            "give it 4T at most",
        ));
    }
    Ok(())
}

fn check_disk(disk: &DiskSpec, index: &str) -> Result<(), Fault> {
    if disk.path.as_os_str().is_empty() {
        return Err(fault(
            &["disks", index, "path"],
            "an empty path",
            "name the disk's file",
        ));
    }
    if disk.read_only && disk.persistent {
        return Err(fault(
            &["disks", index, "persistent"],
            "a read-only disk has no writes to keep",
            "drop `persistent` or `read_only`",
        ));
    }
    if disk.device == DiskDevice::Pmem {
        check_pmem(disk, index)?;
    }
    if disk.queues.is_some_and(|queues| queues == 0 || queues > 16) {
        return Err(fault(
            &["disks", index, "queues"],
            "not a number of queues",
            "write a number from 1 to 16",
        ));
    }
    Ok(())
}

/// A pmem disk is its file, mapped into the guest: there are no requests that an overlay could take.
fn check_pmem(disk: &DiskSpec, index: &str) -> Result<(), Fault> {
    let at = |key| ["disks", index, key];
    if disk.format == Some(DiskFormatSpec::Qcow2) {
        return Err(fault(
            &at("format"),
            "a qcow2 disk can't be mapped as pmem",
            "use a raw file, or `as = \"block\"`",
        ));
    }
    if disk.persistent && disk.mode == DiskMode::Private {
        return Err(fault(
            &at("persistent"),
            "pmem keeps writes only when exclusive",
            "add `mode = \"exclusive\"`, or use `as = \"block\"`",
        ));
    }
    if disk.queues.is_some() {
        return Err(fault(
            &at("queues"),
            "a pmem disk has no request queues",
            "drop `queues`, or use `as = \"block\"`",
        ));
    }
    Ok(())
}

fn check_net(net: &NetSpec, index: &str) -> Result<(), Fault> {
    match (net.kind, &net.tap) {
        (NetKind::Tap, None) => {
            return Err(fault(
                &["nets", index, "kind"],
                "which TAP device?",
                "add `tap = \"NAME\"`",
            ));
        }
        (NetKind::User, Some(_)) => {
            return Err(fault(
                &["nets", index, "tap"],
                "user networking has no TAP device",
                "drop `tap`, or use `kind = \"tap\"`",
            ));
        }
        (NetKind::Tap, Some(tap)) if !tap_name_is_valid(tap) => {
            return Err(fault(
                &["nets", index, "tap"],
                format!("{tap:?} can't name a TAP device"),
                "1 to 15 characters, no `/` or space",
            ));
        }
        _ => {}
    }
    if net.kind == NetKind::Tap && !net.forward.is_empty() {
        return Err(fault(
            &["nets", index, "forward"],
            "a TAP device forwards no ports",
            "drop `forward`, or use `kind = \"user\"`",
        )
        .or_by_flag("drop `forward=`, or use `user`"));
    }
    let mut host_ports = Vec::new();
    for (place, text) in net.forward.iter().enumerate() {
        let at = ["nets", index, "forward", &place.to_string()];
        let Some((transport, host_port, _)) = forward(text) else {
            return Err(fault(
                &at,
                format!("{text:?} is not a port forward"),
                "write HOST:GUEST, as \"8080:80\", or udp:HOST:GUEST, ports from 1 to 65535",
            ));
        };
        if host_ports.contains(&(transport, host_port)) {
            return Err(fault(
                &at,
                format!("port {host_port} of the host is forwarded twice"),
                "forward it once",
            ));
        }
        host_ports.push((transport, host_port));
    }
    if let Some(text) = &net.mac
        && mac(text).is_none()
    {
        return Err(fault(
            &["nets", index, "mac"],
            format!("{text:?} is not a card's address"),
            "write six bytes, not all zero and not a group's, as \"02:00:00:00:00:01\"",
        ));
    }
    if net.queues.is_some_and(|queues| queues == 0 || queues > 8) {
        return Err(fault(
            &["nets", index, "queues"],
            "not a number of queue pairs",
            "write a number from 1 to 8",
        ));
    }
    if net.kind == NetKind::User && net.queues.is_some_and(|queues| queues > 1) {
        return Err(fault(
            &["nets", index, "queues"],
            "user networking has one queue pair",
            "drop `queues`",
        ));
    }
    Ok(())
}

fn tap_name_is_valid(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= 15
        && name != "."
        && name != ".."
        && name
            .bytes()
            .all(|byte| byte.is_ascii_graphic() && byte != b'/' && byte != b':' && byte != b'%')
}

fn check_nodes(spec: &VmSpec) -> Result<(), Fault> {
    if spec.nodes.is_empty() {
        return Ok(());
    }
    if spec.nodes.len() > 64 {
        return Err(fault(
            &["nodes"],
            format!("{} nodes", spec.nodes.len()),
            "64 at most",
        ));
    }
    let mut home = vec![None; usize::from(spec.cpus)];
    for (index, node) in spec.nodes.iter().enumerate() {
        let place = index.to_string();
        let Some(cpus) = cpulist::parse(&node.cpus) else {
            return Err(fault(
                &["nodes", &place, "cpus"],
                format!("{:?} is not a list of CPUs", node.cpus),
                "write it as \"0-1,4\"",
            ));
        };
        for cpu in cpus {
            match home.get_mut(usize::from(cpu)) {
                None => {
                    return Err(fault(
                        &["nodes", &place, "cpus"],
                        format!("CPU {cpu} of a VM with {} CPUs", spec.cpus),
                        format!("CPUs are 0 to {}", spec.cpus - 1),
                    ));
                }
                Some(Some(_)) => {
                    return Err(fault(
                        &["nodes", &place, "cpus"],
                        format!("CPU {cpu} is in two nodes"),
                        "list it once",
                    ));
                }
                Some(empty) => *empty = Some(index),
            }
        }
        if !node.memory.0.is_multiple_of(MEMORY_STEP_BYTES) || node.memory.0 == 0 {
            return Err(fault(
                &["nodes", &place, "memory"],
                format!("{} is not 2M or a multiple of it", node.memory),
                "give the node a multiple of 2M",
            ));
        }
        if let Some(distances) = &node.distances {
            if distances.len() != spec.nodes.len() {
                return Err(fault(
                    &["nodes", &place, "distances"],
                    format!("{} distances for {} nodes", distances.len(), spec.nodes.len()),
                    "write one for each node, in order",
                ));
            }
            if distances
                .iter()
                .enumerate()
                .any(|(to, &far)| (to == index) != (far == 10) || far < 10)
            {
                return Err(fault(
                    &["nodes", &place, "distances"],
                    format!("{distances:?} are not node {index}'s distances"),
                    "write 10 for the node itself, more than 10 for the others",
                ));
            }
        }
    }
    if let Some(cpu) = home.iter().position(Option::is_none) {
        return Err(fault(
            &["nodes"],
            format!("CPU {cpu} is in no node"),
            "list each CPU in one node",
        ));
    }
    let sum = spec
        .nodes
        .iter()
        .try_fold(0u64, |sum, node| sum.checked_add(node.memory.0));
    if sum != Some(spec.memory.0) {
        let message = format!("the nodes' memory does not add up to the VM's {}", spec.memory);
        let mend = match sum {
            Some(sum) => format!(
                "the nodes have {0}: write `memory = \"{0}\"`, or change theirs",
                crate::Size(sum)
            ),
            None => "give the nodes less".to_owned(),
        };
        return Err(fault(&["nodes"], message, mend));
    }
    Ok(())
}

/// What a port forward carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// TCP, also when nothing is said.
    Tcp,
    /// UDP.
    Udp,
}

/// Reads a port forward `[tcp:|udp:]HOST:GUEST`: transport, the host's port, the guest's.
pub fn forward(text: &str) -> Option<(Transport, u16, u16)> {
    let (transport, ports) = match text.split_once(':')? {
        ("tcp", ports) => (Transport::Tcp, ports),
        ("udp", ports) => (Transport::Udp, ports),
        _ => (Transport::Tcp, text),
    };
    let (host, guest) = ports.split_once(':')?;
    let port = |text: &str| {
        let digits = text.bytes().all(|byte| byte.is_ascii_digit());
        text.parse::<u16>().ok().filter(|&port| digits && port != 0)
    };
    Some((transport, port(host)?, port(guest)?))
}

/// Reads a card's address. Group addresses and zero are refused: no card may have one.
pub fn mac(text: &str) -> Option<[u8; 6]> {
    let mut bytes = [0; 6];
    let mut parts = text.split(':');
    for byte in &mut bytes {
        let part = parts.next()?;
        if part.len() != 2 || !part.bytes().all(|b| b.is_ascii_hexdigit()) {
            return None;
        }
        *byte = u8::from_str_radix(part, 16).ok()?;
    }
    (parts.next().is_none() && bytes[0] & 1 == 0 && bytes != [0; 6]).then_some(bytes)
}
