//! Loads the modules of `/modules`, in the order that `/modules/order` lists them.

use std::ffi::CStr;
use std::fs::{self, File};

use nix::errno::Errno;
use nix::kmod::{ModuleInitFlags, finit_module};

const FOLDER: &str = "/modules";
/// PCI devices of the guest.
const DEVICES: &str = "/sys/bus/pci/devices";
/// The file system device of virtio (0x1040 + 26).
const FOLDER_DEVICE: &str = "0x105a";
/// Modules for shared folders, which take memory that a guest without them keeps.
const FOR_FOLDERS: [&str; 2] = ["fuse.ko", "virtiofs.ko"];

/// Loads every listed module that the guest has a use for. A failure is reported on the console; the guest
/// may work without the module.
pub fn load() {
    let Ok(order) = fs::read_to_string(format!("{FOLDER}/order")) else {
        return;
    };
    for name in order.lines().filter(|name| !name.is_empty()) {
        if FOR_FOLDERS.contains(&name) && !has_folders() {
            continue;
        }
        let path = format!("{FOLDER}/{name}");
        let loaded =
            File::open(&path)
                .map_err(|error| error.to_string())
                .and_then(
                    |file| match finit_module(&file, c"" as &CStr, ModuleInitFlags::empty()) {
                        Ok(()) | Err(Errno::EEXIST | Errno::ENODEV) => Ok(()),
                        Err(error) => Err(error.to_string()),
                    },
                );
        if let Err(reason) = loaded {
            eprintln!("mirrorball: module {name}: {reason}");
        }
    }
}

/// Whether the VM has a shared folder.
fn has_folders() -> bool {
    let devices = fs::read_dir(DEVICES).into_iter().flatten().flatten();
    devices
        .map(|device| fs::read_to_string(device.path().join("device")))
        .any(|id| {
            let id = id.unwrap_or_default();
            id.trim_end() == FOLDER_DEVICE
        })
}
