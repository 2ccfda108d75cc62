//! A guest under QEMU, in a control group whose memory the host swaps.

use std::fs;

use bench::Outcome;
use bench::guest_process::GuestProcess;
use bench::kernel_file::swapped_pages;

use crate::Environment;
use crate::control_group::ControlGroup;
use crate::kinds::Kind;
use crate::sample::{Host, HostPages, cmdline, start};
use crate::swap_file::SwapFile;

/// Memory that QEMU itself has beside the guest's: its heap, and KVM's tables.
const OWN_MIB: u64 = 32;

/// A running QEMU. Ended when dropped, before its group and swap.
pub struct Qemu<'a> {
    environment: &'a Environment,
    guest: GuestProcess,
    group: ControlGroup,
    _swap: SwapFile,
}

impl<'a> Qemu<'a> {
    /// Starts a VM without a limit. The inner error is the reason why the host can't limit it.
    pub fn start(environment: &'a Environment, kind: Kind) -> Outcome<Result<Self, String>> {
        let sizes = environment.sizes;
        let host = ControlGroup::create().and_then(|group| {
            let swap = SwapFile::open(&environment.folder.join("swap"), sizes.host_swap_mib())?;
            Ok((group, swap))
        });
        let (group, swap) = match host {
            Ok(host) => host,
            Err(reason) => return Ok(Err(reason)),
        };
        let mut qemu = environment.files.qemu();
        qemu.args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"])
            .args([
                "-serial",
                "stdio",
                "-M",
                "pc,accel=kvm",
                "-cpu",
                "host",
                "-smp",
                "1",
            ])
            .args(["-m", &format!("{}M", sizes.memory_mib(kind)), "-kernel"])
            .arg(&environment.files.kernel)
            .arg("-initrd")
            .arg(&environment.files.initrd)
            .args(["-append", &cmdline(environment, kind)]);
        if kind.has_ordinary_disk() {
            let disk = environment.folder.join("disk");
            fs::File::create(&disk)?.set_len(sizes.disk_mib() << 20)?;
            let drive = format!("file={},if=none,id=d0,format=raw,cache=writeback", disk.display());
            qemu.args(["-object", "iothread,id=io0", "-drive", &drive])
                .args(["-device", "virtio-blk-pci,drive=d0,iothread=io0"]);
        }
        Ok(Ok(Self {
            environment,
            guest: start(&mut group.command(&qemu))?,
            group,
            _swap: swap,
        }))
    }
}

impl Host for Qemu<'_> {
    fn guest(&mut self) -> &mut GuestProcess {
        &mut self.guest
    }

    fn limit(&mut self) -> Outcome<()> {
        let mib = self.environment.sizes.resident_mib + OWN_MIB;
        Ok(self.group.limit(mib << 20)?)
    }

    fn pages(&self) -> Outcome<HostPages> {
        let [read, written] = swapped_pages()?;
        Ok(HostPages {
            read,
            written,
            without_io: None,
            faults: None,
        })
    }
}
