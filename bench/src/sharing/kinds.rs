//! The compared ways of giving a guest its disk.

use std::path::Path;
use std::process::{Command, Stdio};
use std::str::FromStr;

use crate::Outcome;
use crate::stage::{DISK, DISK_BYTES, INITRD, KERNEL};

/// Memory of each guest.
pub const MEMORY_BYTES: u64 = 512 << 20;
const MEMORY: &str = "512M";
const CMDLINE: &str = "console=ttyS0 quiet panic=-1 reboot=t tsc=reliable no_timer_check rdinit=/reader";

/// Program and settings that run the guests of one measurement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Mirrorball with a virtio-blk disk and default settings.
    Mirrorball,
    /// The same with a policy in the VM file's `share`.
    MirrorballShare(String),
    /// Mirrorball with memory in huge pages where the guest touches it, which are QEMU's default.
    MirrorballHuge,
    /// Mirrorball with the disk as persistent memory.
    MirrorballPmem,
    /// Mirrorball: one VM that reads, and clones of it.
    MirrorballClones,
    /// QEMU with virtio-blk, past the host's page cache.
    QemuBlock,
    /// The same, with KSM until it has found all equal pages.
    QemuKsm,
    /// QEMU with private persistent memory.
    QemuPmem,
    /// QEMU with virtio-blk, through the host's page cache.
    QemuCached,
}

const POLICIES: [&str; 4] = ["never", "deferred", "at-read", "adaptive"];

impl FromStr for Kind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "mirrorball" => Ok(Self::Mirrorball),
            "mirrorball-huge" => Ok(Self::MirrorballHuge),
            "mirrorball-pmem" => Ok(Self::MirrorballPmem),
            "mirrorball-clones" => Ok(Self::MirrorballClones),
            "qemu-blk" => Ok(Self::QemuBlock),
            "qemu-ksm" => Ok(Self::QemuKsm),
            "qemu-pmem" => Ok(Self::QemuPmem),
            "qemu-cached" => Ok(Self::QemuCached),
            policy if POLICIES.contains(&policy) => Ok(Self::MirrorballShare(policy.to_owned())),
            _ => Err(format!(
                "no kind '{text}'; there are mirrorball, {}, mirrorball-huge, mirrorball-pmem, \
                 mirrorball-clones, qemu-blk, qemu-ksm, qemu-pmem, qemu-cached",
                POLICIES.join(", ")
            )),
        }
    }
}

impl Kind {
    /// The name in the table.
    pub fn name(&self) -> String {
        match self {
            Self::Mirrorball => "Mirrorball virtio-blk".to_owned(),
            Self::MirrorballShare(policy) => format!("Mirrorball virtio-blk, share = \"{policy}\""),
            Self::MirrorballHuge => "Mirrorball virtio-blk, pages = \"thp\"".to_owned(),
            Self::MirrorballPmem => "Mirrorball pmem, DAX".to_owned(),
            Self::MirrorballClones => "Mirrorball virtio-blk, one VM and its clones".to_owned(),
            Self::QemuBlock => "QEMU virtio-blk, cache=none".to_owned(),
            Self::QemuKsm => "QEMU virtio-blk with KSM".to_owned(),
            Self::QemuPmem => "QEMU pmem, private, DAX".to_owned(),
            Self::QemuCached => "QEMU virtio-blk, cache=writeback".to_owned(),
        }
    }

    /// Whether Mirrorball runs it.
    pub fn ours(&self) -> bool {
        matches!(
            self,
            Self::Mirrorball
                | Self::MirrorballShare(_)
                | Self::MirrorballHuge
                | Self::MirrorballPmem
                | Self::MirrorballClones
        )
    }

    /// The VM file of Mirrorball's kinds; `words` are added to the kernel's command line.
    pub fn vm_file(&self, files: &Path, words: &str) -> String {
        let cmdline = format!("{CMDLINE} {words}");
        let [kernel, initrd, disk] = [KERNEL, INITRD, DISK].map(|name| files.join(name));
        let (share, device) = match self {
            // Set for the whole VM, so that it holds for the kernel's pages too.
            Self::MirrorballShare(policy) => (format!("share = {policy:?}\n"), ""),
            Self::MirrorballHuge => ("pages = \"thp\"\n".to_owned(), ""),
            Self::MirrorballPmem => (String::new(), "as = \"pmem\"\n"),
            _ => (String::new(), ""),
        };
        format!(
            "name = \"sharing\"\nmemory = {MEMORY:?}\nnets = []\n{share}\n[kernel]\npath = {kernel:?}\n\
             initrd = {initrd:?}\ncmdline = {cmdline:?}\n\n[[disks]]\npath = {disk:?}\n{device}"
        )
    }

    /// QEMU's command; the guest's console goes to `console`, and `words` are added to the kernel's command
    /// line.
    pub fn qemu(&self, files: &Path, console: &Path, words: &str) -> Outcome<Command> {
        let mut command = Command::new("qemu-system-x86_64");
        command
            .args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"])
            .args(["-M", "pc,accel=kvm", "-cpu", "host", "-smp", "1", "-serial"])
            .arg(format!("file:{}", console.display()))
            .arg("-kernel")
            .arg(files.join(KERNEL))
            .arg("-initrd")
            .arg(files.join(INITRD))
            .args(["-append", &format!("{CMDLINE} {words}")]);
        let disk = files.join(DISK);
        let disk = disk.to_str().ok_or("the folder's name is no text")?;
        if *self == Self::QemuPmem {
            command
                .args(["-m", &format!("{MEMORY},slots=1,maxmem=2G"), "-object"])
                .arg(format!(
                    "memory-backend-file,id=p0,mem-path={disk},share=off,size={DISK_BYTES}"
                ))
                .args(["-device", "virtio-pmem-pci,memdev=p0"]);
        } else {
            let cache = if *self == Self::QemuCached {
                "writeback"
            } else {
                "none"
            };
            command
                .args(["-m", MEMORY, "-drive"])
                .arg(format!(
                    "file={disk},if=none,id=d0,format=raw,cache={cache},aio=threads,readonly=on"
                ))
                .args(["-device", "virtio-blk-pci,drive=d0"]);
        }
        command.stdin(Stdio::null()).stdout(Stdio::null());
        Ok(command)
    }
}
