//! Checks of a VM's spec that hold on any host.

mod cells;
mod disks;
mod folders;
mod nets;
mod nodes;
mod paging;
mod promise;
mod shared;
mod sharing;
mod warm;

pub(crate) use self::nets::network_name_is_valid;
pub use self::nets::{Transport, forward, mac};
pub(crate) use self::sharing::asked_to_share;
use crate::fault::{Fault, fault};
use crate::labels;
use crate::span;
use crate::start_order;
use crate::vm::{DiskMode, RestartSpec, VmSpec};

/// Granularity of guest memory: x86-64's large page.
const MEMORY_STEP_BYTES: u64 = 2 << 20;
/// Minimum difference between a VM's memory limit and its guest memory: for its shards, page tables and
/// cards.
pub(crate) const MEMORY_BESIDE_BYTES: u64 = 64 << 20;
const MEMORY_MIN_BYTES: u64 = 64 << 20;

/// Minimum CPU limit; the kernel accepts no lower limit.
const CPU_LIMIT_MIN: f64 = 0.01;
const CPU_LIMIT_MAX: f64 = 1024.0;

/// Minimum limit of a temporary overlay: a guest's file system writes that much when it is mounted.
const SCRATCH_LIMIT_MIN: u64 = 1 << 20;

/// Maximum number of disks beside the image's, the paging disk included.
const DISKS_MAX: usize = 24;

/// Checks all properties that don't depend on the host.
pub fn check(spec: &VmSpec) -> Result<(), Fault> {
    if let Some(name) = &spec.name {
        check_name(name)?;
    }
    start_order::check(spec)?;
    labels::check(&spec.labels)?;
    sharing::check_group(spec)?;
    check_cpus(spec)?;
    check_restart(spec)?;
    check_scratch_limit(spec)?;
    if let Some(limit) = &spec.io_limit {
        limit.check()?;
    }
    check_memory(spec)?;
    check_boot_source(spec)?;
    check_root(spec)?;
    check_kernel(spec)?;
    check_command(spec)?;
    check_disks(spec)?;
    check_nets(spec)?;
    sharing::check(spec)?;
    shared::check(spec)?;
    folders::check(spec)?;
    paging::check(spec)?;
    promise::check(spec)?;
    span::check(spec)?;
    cells::check(spec)?;
    warm::check(spec)?;
    nodes::check(spec)
}

/// Checks the number, weight, limit and reservation of CPUs.
fn check_cpus(spec: &VmSpec) -> Result<(), Fault> {
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
    check_cpu_reservation(spec)
}

/// A reservation is at most the limit, and of one cell.
fn check_cpu_reservation(spec: &VmSpec) -> Result<(), Fault> {
    let Some(reserved) = spec.cpu_reservation else {
        return Ok(());
    };
    let at = &["cpu_reservation"];
    if !(CPU_LIMIT_MIN..=CPU_LIMIT_MAX).contains(&reserved) {
        return Err(fault(
            at,
            "no number of CPUs",
            "write a number from 0.01 to 1024, as 0.5",
        ));
    }
    if let Some(limit) = spec.cpu_limit.filter(|limit| reserved > *limit) {
        return Err(fault(
            at,
            format!("{reserved} CPUs are more than its `cpu_limit` of {limit}"),
            format!("reserve {limit} or less, or raise `cpu_limit`"),
        ));
    }
    if spec.span.is_some() {
        return Err(fault(
            at,
            "a VM that spans cells is scheduled by Linux, which reserves no CPU time",
            "leave out `cpu_reservation`, or `span`",
        )
        .or_by_flag("leave out `--cpu-reservation`, or `--span`"));
    }
    Ok(())
}

/// A VM with a command ends with it.
fn check_restart(spec: &VmSpec) -> Result<(), Fault> {
    if spec.restart != RestartSpec::No && spec.command.is_some() {
        return Err(fault(
            &["restart"],
            "a VM with a command ends when that is done",
            "leave out `restart` or `command`",
        )
        .or_by_flag("leave out --restart or the command"));
    }
    Ok(())
}

/// Checks the limit of temporary overlays.
fn check_scratch_limit(spec: &VmSpec) -> Result<(), Fault> {
    if spec
        .scratch_limit
        .is_some_and(|limit| limit.0 < SCRATCH_LIMIT_MIN)
    {
        return Err(fault(
            &["scratch_limit"],
            "too little for a disk",
            "write 1M or more, as 4G, or leave it out",
        ));
    }
    Ok(())
}

/// A VM boots an image or a kernel.
fn check_boot_source(spec: &VmSpec) -> Result<(), Fault> {
    if spec.image.is_none() && spec.kernel_files().is_none() {
        // The error is at a [kernel] without a path, or at `--cmdline` alone.
        let at = spec.kernel.as_ref().map(|_| &["kernel", "cmdline"][..]);
        return Err(fault(
            at.unwrap_or_default(),
            "neither an image nor a kernel to boot",
            "add `image = \"debian-12\"`, or a [kernel] with its path",
        )
        .or_by_flag("add `--image debian-12`, or `--kernel FILE`"));
    }
    Ok(())
}

/// Checks the root disk, which is the image's.
fn check_root(spec: &VmSpec) -> Result<(), Fault> {
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
    let (bandwidth, operations) = (spec.root.bandwidth, spec.root.operations);
    if spec.image.is_none() && (bandwidth.is_some() || operations.is_some()) {
        return Err(fault(
            &["root"],
            "limits of a root disk without an image",
            "add `image`, or limit a disk under [[disks]]",
        ));
    }
    disks::check_limits(bandwidth, operations, &["root"])
}

/// Checks the initramfs and the command line.
fn check_kernel(spec: &VmSpec) -> Result<(), Fault> {
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
    Ok(())
}

fn check_command(spec: &VmSpec) -> Result<(), Fault> {
    if spec.command.as_ref().is_some_and(Vec::is_empty) {
        return Err(fault(
            &["command"],
            "an empty command",
            "give a program and its arguments, or leave it out",
        ));
    }
    Ok(())
}

/// Checks the number of disks, and each.
fn check_disks(spec: &VmSpec) -> Result<(), Fault> {
    let paging_disks = usize::from(spec.paging_disk.is_some());
    if spec.disks.len() + paging_disks > DISKS_MAX {
        let (count, at_most) = match paging_disks {
            0 => (format!("{} disks", spec.disks.len()), "24 at most"),
            _ => (
                format!("{} disks, and the paging disk", spec.disks.len()),
                "24 together at most",
            ),
        };
        return Err(fault(&["disks"], count, at_most));
    }
    for (index, disk) in spec.disks.iter().enumerate() {
        disks::check(disk, &index.to_string())?;
        if disk.persistent && disk.mode == DiskMode::Private && spec.name.is_none() {
            return Err(fault(
                &["disks", &index.to_string(), "persistent"],
                "a private disk that keeps its writes, of a VM without a name",
                "add `name`: the writes are kept by it",
            )
            .or_by_flag("add `--name NAME`: the writes are kept by it"));
        }
    }
    Ok(())
}

/// Checks the number of network cards, and each.
fn check_nets(spec: &VmSpec) -> Result<(), Fault> {
    let nets = spec.nets.as_deref().unwrap_or_default();
    if nets.len() > 4 {
        return Err(fault(
            &["nets"],
            format!("{} network cards", nets.len()),
            "4 at most",
        ));
    }
    for (index, net) in nets.iter().enumerate() {
        nets::check(net, &index.to_string())?;
    }
    Ok(())
}

/// Whether a VM can have this name: files and control groups have it too.
pub fn is_name(name: &str) -> bool {
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
    // Pages in the paging file count to no limit of memory, but their states do.
    let bytes = spec.resident_max().0;
    let worst = spec.worst();
    if let Some(limit) = spec.memory_limit
        && limit < worst
    {
        return Err(fault(
            &["memory_limit"],
            format!(
                "a guest with {} of memory would be ended when it uses it",
                crate::Size(bytes)
            ),
            format!("use {worst} or more"),
        ));
    }
    Ok(())
}
