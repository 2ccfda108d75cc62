//! Loads the modules of `/modules`, in the order that `/modules/order` lists them.

use std::ffi::CStr;
use std::fs::{self, File};

use nix::errno::Errno;
use nix::kmod::{ModuleInitFlags, finit_module};

const FOLDER: &str = "/modules";

/// Loads every listed module. A failure is reported on the console; the guest may work without the module.
pub fn load() {
    let Ok(order) = fs::read_to_string(format!("{FOLDER}/order")) else {
        return;
    };
    for name in order.lines().filter(|name| !name.is_empty()) {
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
