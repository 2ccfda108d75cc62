//! Policy for VMs of the API group's members: rules over VM specs.

use std::path::{Component, Path, PathBuf};

use serde::Deserialize;

use crate::fault::{Fault, fault};
use crate::size::Size;
use crate::vm::{
    DiskDevice, DiskFormatSpec, DiskMode, DiskSpec, KernelSpec, NetKind, NetSpec, PagesSpec, RootSpec,
    SandboxSpec, VmSpec,
};

/// Policy for a member's VMs.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemberPolicy {
    /// Images of the image store that members may name; all when absent.
    pub images: Option<Vec<String>>,
    /// Directories that may contain the disks and kernels of members.
    #[serde(default)]
    pub paths: Vec<PathBuf>,
    /// Weakest sandbox that members may request: `require`, or `auto`.
    #[serde(default = "required")]
    pub sandbox: SandboxSpec,
    /// Maximum memory of all running VMs of one member together.
    pub memory: Size,
    /// Maximum vCPUs of all running VMs of one member together.
    pub cpus: u32,
    /// Share groups that members may name.
    #[serde(default)]
    pub share_groups: Vec<String>,
}

/// Resources of the running VMs of one member.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Sum of their guest memory, bytes.
    pub memory_bytes: u64,
    /// Number of vCPUs.
    pub cpus: u32,
}

fn required() -> SandboxSpec {
    SandboxSpec::Require
}

impl Usage {
    /// Returns the sum over VMs of these specs.
    pub fn of<'a>(specs: impl IntoIterator<Item = &'a VmSpec>) -> Self {
        specs.into_iter().fold(Self::default(), |sum, spec| Self {
            memory_bytes: sum.memory_bytes.saturating_add(spec.memory.0),
            cpus: sum.cpus.saturating_add(u32::from(spec.cpus)),
        })
    }
}

impl MemberPolicy {
    /// Checks the policy itself.
    pub(crate) fn check(&self) -> Result<(), Fault> {
        for (index, path) in self.paths.iter().enumerate() {
            if !is_plain(path) {
                return Err(fault(
                    &["members", "paths", &index.to_string()],
                    format!("{path:?} is not an absolute path without `..`"),
                    "write the directory as \"/srv/vms\"",
                ));
            }
        }
        if self.sandbox == SandboxSpec::Off {
            return Err(fault(
                &["members", "sandbox"],
                "members can't have VMs with the sandbox off",
                "write \"require\" or \"auto\"",
            ));
        }
        if self.cpus == 0 {
            return Err(fault(
                &["members", "cpus"],
                "with 0 CPUs members can start nothing",
                "write 1 or more, or drop the table `[members]`: members may look then",
            ));
        }
        Ok(())
    }

    /// Decides whether a member may start a VM of `spec` in addition to VMs that use `used`. Every key of a
    /// spec has a rule here: the patterns name all of them, so a new key does not compile until it has one.
    ///
    /// # Errors
    /// The first key that the policy refuses.
    pub fn admit(&self, spec: &VmSpec, used: Usage) -> Result<(), Fault> {
        let VmSpec {
            // A taken name is refused when the VM starts. Overlays, which are found by name, are refused
            // below.
            name: _,
            // It applies only to defined VMs, which the API does not create.
            after: _,
            // They select VMs in commands, and change nothing on the host.
            labels: _,
            image,
            warm,
            cpus,
            cpu_weight,
            cpu_reservation,
            // It says which of the VM's own vCPUs run together.
            gang: _,
            // These three can only restrict the VM itself.
            cpu_limit: _,
            memory_limit: _,
            io_limit: _,
            core_scheduling,
            // Each start is within the limits, and `kill` ends the VM.
            restart: _,
            memory,
            memory_nodes,
            // It can only restrict the VM itself.
            resident: _,
            paging_file,
            // It is within four times the memory, which is within the limit, and in the paging file.
            paging_disk: _,
            memory_min,
            memory_weight,
            kernel,
            root,
            disks,
            nets,
            nodes,
            pages,
            // The memory is within the limit.
            prefault: _,
            // It can only restrict the VM itself.
            scratch_limit: _,
            balloon: _,
            command: _,
            sandbox,
            // Only the group's pages are shared.
            share: _,
            share_group,
            cell,
            cells,
            span,
            shared,
            folders,
        } = spec;
        self.admit_size(*memory, *cpus, used)?;
        self.admit_image(image.as_deref())?;
        self.admit_sandbox(*sandbox)?;
        self.admit_share_group(share_group.as_deref())?;
        for (key, is_set) in [
            ("cpu_weight", cpu_weight.is_some()),
            // Other VMs wait for their CPUs.
            ("cpu_reservation", cpu_reservation.is_some()),
            // Other VMs get less of memory that is short.
            ("memory_min", memory_min.is_some()),
            ("memory_weight", memory_weight.is_some()),
            // Other VMs lose the hardware threads that it keeps idle.
            ("core_scheduling", *core_scheduling),
            ("cell", cell.is_some()),
            ("cells", !cells.is_empty()),
            ("span", span.is_some()),
            ("shared", !shared.is_empty()),
            // The files belong to another user than the VM's processes.
            ("folders", !folders.is_empty()),
            // Templates are the owner's, and VMs of one template share memory.
            ("warm", *warm),
        ] {
            if is_set {
                return Err(owners(key));
            }
        }
        admit_pages(*pages)?;
        if !memory_nodes.is_empty() {
            return Err(owners("memory_nodes"));
        }
        paging_file
            .iter()
            .try_for_each(|path| self.admit_path(&["paging_file"], path))?;
        if nodes.iter().any(|node| node.host_node.is_some()) {
            return Err(owners("nodes.host_node"));
        }
        admit_root(root)?;
        if let Some(kernel) = kernel {
            self.admit_kernel(kernel)?;
        }
        for (index, disk) in disks.iter().enumerate() {
            self.admit_disk(&index.to_string(), disk)?;
        }
        for (index, net) in nets.iter().flatten().enumerate() {
            admit_net(&index.to_string(), net)?;
        }
        Ok(())
    }

    fn admit_image(&self, image: Option<&str>) -> Result<(), Fault> {
        if let (Some(image), Some(images)) = (image, &self.images)
            && !images.iter().any(|allowed| allowed == image)
        {
            return Err(refused(
                &["image"],
                format!("members may not use the image {image:?}"),
                format!("name one of {}", images.join(", ")),
            ));
        }
        Ok(())
    }

    fn admit_sandbox(&self, sandbox: SandboxSpec) -> Result<(), Fault> {
        if weakness(sandbox) > weakness(self.sandbox) {
            let least = if self.sandbox == SandboxSpec::Auto {
                "auto"
            } else {
                "require"
            };
            return Err(refused(
                &["sandbox"],
                format!("members' VMs need `sandbox = \"{least}\"`"),
                "set `sandbox` so",
            ));
        }
        Ok(())
    }

    fn admit_share_group(&self, group: Option<&str>) -> Result<(), Fault> {
        if let Some(group) = group
            && !self.share_groups.iter().any(|allowed| allowed == group)
        {
            return Err(refused(
                &["share_group"],
                format!("members may not join the share group {group:?}"),
                "leave out `share_group`, or name one that the host's file lists",
            ));
        }
        Ok(())
    }

    fn admit_kernel(&self, kernel: &KernelSpec) -> Result<(), Fault> {
        let KernelSpec {
            path,
            initrd,
            // The guest belongs to the member.
            cmdline: _,
        } = kernel;
        for (key, file) in [("path", path), ("initrd", initrd)] {
            file.iter()
                .try_for_each(|file| self.admit_path(&["kernel", key], file))?;
        }
        Ok(())
    }

    fn admit_size(&self, memory: Size, cpus: u8, used: Usage) -> Result<(), Fault> {
        let free = self.memory.0.saturating_sub(used.memory_bytes);
        if memory.0 > free {
            return Err(refused(
                &["memory"],
                format!(
                    "{memory} of memory: a member may have {}, of which {} are free",
                    self.memory,
                    Size(free)
                ),
                "give the VM less, or end one of yours",
            ));
        }
        let free = self.cpus.saturating_sub(used.cpus);
        if u32::from(cpus) > free {
            return Err(refused(
                &["cpus"],
                format!(
                    "{cpus} CPUs: a member may have {}, of which {free} are free",
                    self.cpus
                ),
                "give the VM fewer, or end one of yours",
            ));
        }
        Ok(())
    }

    fn admit_disk(&self, index: &str, disk: &DiskSpec) -> Result<(), Fault> {
        let DiskSpec {
            path,
            format,
            mode,
            persistent,
            read_only: _,
            device,
            queues: _,
            share: _,
            on_full: _,
            // They can only delay the VM itself.
            bandwidth: _,
            operations: _,
        } = disk;
        match device {
            DiskDevice::Block | DiskDevice::Pmem => {}
        }
        // A qcow2 file with a stated format may have any file of the host as its base. A detected one may
        // not.
        if *format == Some(DiskFormatSpec::Qcow2) {
            return Err(refused(
                &["disks", index, "format"],
                "members may not name the format qcow2: such a file may stand on any other",
                "leave out `format`; a qcow2 file that stands on none is recognized",
            ));
        }
        if *persistent && *mode == DiskMode::Private {
            return Err(overlay(&["disks", index, "persistent"]));
        }
        self.admit_path(&["disks", index, "path"], path)
    }

    /// Whether `path` lies below a directory of the policy.
    fn is_below(&self, path: &Path) -> bool {
        let below = |directory: &PathBuf| path != directory && path.starts_with(directory);
        is_plain(path) && self.paths.iter().any(below)
    }

    fn admit_path(&self, at: &[&str], path: &Path) -> Result<(), Fault> {
        if self.is_below(path) {
            return Ok(());
        }
        let places: Vec<_> = self.paths.iter().map(|path| path.display().to_string()).collect();
        let help = if places.is_empty() {
            "use an image of the image store: the host's file lists no `paths`".to_owned()
        } else {
            format!("use a file below {}", places.join(" or "))
        };
        Err(refused(
            at,
            format!("members may not use {}", path.display()),
            help,
        ))
    }
}

fn admit_pages(pages: PagesSpec) -> Result<(), Fault> {
    match pages {
        PagesSpec::Huge2M | PagesSpec::Huge1G => Err(refused(
            &["pages"],
            "members may not take the host's pool of huge pages",
            "use `pages = \"thp\"` or `\"4K\"`",
        )),
        _ => Ok(()),
    }
}

fn admit_root(root: &RootSpec) -> Result<(), Fault> {
    let RootSpec {
        persistent,
        share: _,
        // They can only delay the VM itself.
        on_full: _,
        bandwidth: _,
        operations: _,
    } = root;
    match persistent {
        true => Err(overlay(&["root", "persistent"])),
        false => Ok(()),
    }
}

fn admit_net(index: &str, net: &NetSpec) -> Result<(), Fault> {
    let NetSpec {
        kind,
        tap,
        forward,
        host,
        mac: _,
        queues: _,
        network,
        address: _,
        bandwidth: _,
        packets: _,
    } = net;
    if *kind == NetKind::Tap || tap.is_some() {
        return Err(refused(
            &["nets", index, "tap"],
            "members may not use TAP devices",
            "use `kind = \"user\"`",
        ));
    }
    if !forward.is_empty() {
        return Err(refused(
            &["nets", index, "forward"],
            "members may not take ports of the host",
            "drop `forward`",
        ));
    }
    if *host {
        return Err(refused(
            &["nets", index, "host"],
            "members' guests may not reach the host itself",
            "drop `host`",
        ));
    }
    // The gateway is the owner's: the network may be one of the owner's VMs, or of another member's.
    if network.is_some() {
        return Err(refused(
            &["nets", index, "network"],
            "members may not choose a network",
            "drop `network`; VMs of one `share_group` are on one network",
        ));
    }
    Ok(())
}

/// Whether a path is absolute and has no `..`.
pub(crate) fn is_plain(path: &Path) -> bool {
    let is_step = |step: Component<'_>| matches!(step, Component::RootDir | Component::Normal(_));
    path.is_absolute() && path.components().all(is_step)
}

/// Rank of sandboxes, the strictest first.
fn weakness(sandbox: SandboxSpec) -> u8 {
    match sandbox {
        SandboxSpec::Require => 0,
        SandboxSpec::Auto => 1,
        SandboxSpec::Off => 2,
    }
}

fn refused(at: &[&str], message: impl Into<String>, help: impl Into<String>) -> Fault {
    fault(at, message, help)
}

fn owners(key: &str) -> Fault {
    let at: Vec<_> = key.split('.').collect();
    refused(
        &at,
        format!("`{key}` is for the owner of the API, not for members"),
        format!("drop `{key}`"),
    )
}

fn overlay(at: &[&str]) -> Fault {
    refused(
        at,
        "members' VMs may not keep the writes of a private disk: the overlay is found by the VM's name, \
         also another user's",
        "drop `persistent`, or use a disk with `mode = \"exclusive\"`",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLICY: &str = "[members]\nimages = [\"debian-12\"]\npaths = [\"/srv/vms\"]\nmemory = \"2G\"\n\
        cpus = 4\n\
                          share_groups = [\"lessons\"]\n";

    fn policy(text: &str) -> MemberPolicy {
        let settings = crate::settings::Settings::parse("host.toml", text).unwrap();
        settings.members.unwrap()
    }

    fn spec(text: &str) -> VmSpec {
        crate::parse("vm.toml", text).unwrap()
    }

    #[test]
    fn listed_specs_are_admitted() {
        let policy = policy(POLICY);
        for text in [
            "image = \"debian-12\"\nsandbox = \"require\"",
            "image = \"debian-12\"\nsandbox = \"require\"\nshare_group = \"lessons\"\ncpus = 4\nmemory = \
             \"2G\"",
            "image = \"debian-12\"\nsandbox = \"require\"\npages = \"thp\"\ncpu_limit = 0.5\nnets = []\n\
             io_limit.reads = 100",
            "image = \"debian-12\"\nsandbox = \"require\"\n[[nets]]\nkind = \"subnet\"\npackets = 9",
            "sandbox = \"require\"\nkernel.path = \"/srv/vms/k\"\nkernel.initrd = \"/srv/vms/a/i\"",
            "image = \"debian-12\"\nsandbox = \"require\"\n[[disks]]\npath = \"/srv/vms/d\"\nmode = \
             \"exclusive\"\npersistent = true",
        ] {
            assert_eq!(policy.admit(&spec(text), Usage::default()), Ok(()), "{text}");
        }
    }

    #[test]
    fn unlisted_specs_are_refused_and_the_key_is_named() {
        let policy = policy(POLICY);
        let disk = |more: &str| format!("[[disks]]\n{more}");
        for (text, key) in [
            ("image = \"tiny\"".to_owned(), "image"),
            ("memory = \"3G\"".to_owned(), "memory"),
            ("cpus = 5".to_owned(), "cpus"),
            ("share_group = \"other\"".to_owned(), "share_group"),
            ("cpu_weight = 10000".to_owned(), "cpu_weight"),
            ("cpu_reservation = 0.5".to_owned(), "cpu_reservation"),
            ("core_scheduling = true".to_owned(), "core_scheduling"),
            ("cell = 0".to_owned(), "cell"),
            ("cpus = 2\nspan = \"auto\"".to_owned(), "span"),
            ("pages = \"2M\"".to_owned(), "pages"),
            ("root.persistent = true".to_owned(), "root"),
            ("kernel.path = \"/boot/vmlinuz\"".to_owned(), "kernel"),
            (
                "kernel.path = \"/srv/vms/k\"\nkernel.initrd = \"/boot/i\"".to_owned(),
                "kernel",
            ),
            (disk("path = \"/dev/sda\""), "disks"),
            (disk("path = \"/srv/vms/../../etc/shadow\""), "disks"),
            (disk("path = \"/srv/vms\""), "disks"),
            (disk("path = \"/srv/vms-other/d\""), "disks"),
            (disk("path = \"/srv/vms/d\"\nformat = \"qcow2\""), "disks"),
            (disk("path = \"/srv/vms/d\"\npersistent = true"), "disks"),
            ("[[nets]]\nkind = \"tap\"\ntap = \"br0\"".to_owned(), "nets"),
            (
                "[[nets]]\nkind = \"user\"\nforward = [\"80:80\"]".to_owned(),
                "nets",
            ),
            (
                "[[nets]]\nkind = \"subnet\"\nnetwork = \"vm-web\"".to_owned(),
                "nets",
            ),
            ("memory_nodes = [0]".to_owned(), "memory_nodes"),
            ("cells = [0]".to_owned(), "cells"),
            ("shared = [{ name = \"table\" }]".to_owned(), "shared"),
            (
                "resident = \"64M\"\npaging_file = \"/dev/sda\"".to_owned(),
                "paging_file",
            ),
            (
                "[[nodes]]\ncpus = \"0\"\nmemory = \"512M\"\nhost_node = 0".to_owned(),
                "nodes",
            ),
        ] {
            let image = if text.contains("image") || text.contains("kernel.path") {
                ""
            } else {
                "image = \"debian-12\"\n"
            };
            let text = format!("name = \"a\"\n{image}sandbox = \"require\"\n{text}");
            let fault = policy.admit(&spec(&text), Usage::default()).unwrap_err();
            assert_eq!(fault.path[0], key, "{text}: {fault:?}");
            assert!(!fault.help.is_empty());
        }
    }

    #[test]
    fn a_sandbox_weaker_than_the_policys_is_refused() {
        for (least, admitted) in [("require", 1), ("auto", 2)] {
            let policy = policy(&format!(
                "[members]\nmemory = \"1G\"\ncpus = 1\nsandbox = \"{least}\""
            ));
            let count = ["require", "auto", "off"]
                .iter()
                .take_while(|sandbox| {
                    let text = format!("image = \"debian-12\"\nsandbox = \"{sandbox}\"");
                    policy.admit(&spec(&text), Usage::default()).is_ok()
                })
                .count();
            assert_eq!(count, admitted, "{least}");
        }
    }

    #[test]
    fn the_limits_are_for_all_vms_of_a_member_together() {
        let policy = policy(POLICY);
        let vm = spec("image = \"debian-12\"\nsandbox = \"require\"\nmemory = \"1G\"\ncpus = 2");
        let used = Usage::of([&vm]);
        assert_eq!(
            used,
            Usage {
                memory_bytes: 1 << 30,
                cpus: 2
            }
        );
        assert_eq!(policy.admit(&vm, used), Ok(()));
        let full = Usage::of([&vm, &vm]);
        assert_eq!(policy.admit(&vm, full).unwrap_err().path, ["memory"]);
        let no_cpus = Usage {
            memory_bytes: 0,
            cpus: 3,
        };
        assert_eq!(policy.admit(&vm, no_cpus).unwrap_err().path, ["cpus"]);
    }

    #[test]
    fn without_a_list_of_paths_members_use_images_only() {
        let policy = policy("[members]\nmemory = \"1G\"\ncpus = 1");
        let any_image = spec("image = \"any\"\nsandbox = \"require\"");
        assert_eq!(policy.admit(&any_image, Usage::default()), Ok(()));
        let with_disk = spec("image = \"any\"\nsandbox = \"require\"\n[[disks]]\npath = \"/srv/d\"");
        let fault = policy.admit(&with_disk, Usage::default()).unwrap_err();
        assert!(fault.help.contains("image of the image store"), "{fault:?}");
    }
}
