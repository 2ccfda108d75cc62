//! The power button of a guest without an init system: pressing it powers the guest off.

use std::fs::{self, File};
use std::io::Read;

use nix::sys::reboot::{RebootMode, reboot};
use nix::unistd::sync;

/// Type and code of a key event of the power key (Linux, `input-event-codes.h`).
const EV_KEY: u16 = 1;
const KEY_POWER: u16 = 116;

/// Bytes of a `struct input_event`: a time of 16, then type, code and value.
const EVENT_BYTES: usize = 24;

/// Waits on every input device; returns if there is none.
pub fn wait_for_button() {
    let entries = fs::read_dir("/dev/input").into_iter().flatten().flatten();
    let devices = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with("event"));
    let waiting: Vec<_> = devices
        .filter_map(|entry| File::open(entry.path()).ok())
        .map(|device| std::thread::spawn(move || watch(device)))
        .collect();
    for thread in waiting {
        // A thread that ended has lost its device; the others continue.
        let _ = thread.join();
    }
}

fn watch(mut device: File) {
    let mut event = [0; EVENT_BYTES];
    while device.read_exact(&mut event).is_ok() {
        let kind = u16::from_ne_bytes([event[16], event[17]]);
        let code = u16::from_ne_bytes([event[18], event[19]]);
        let value = i32::from_ne_bytes([event[20], event[21], event[22], event[23]]);
        if (kind, code, value) == (EV_KEY, KEY_POWER, 1) {
            sync();
            let Err(error) = reboot(RebootMode::RB_POWER_OFF);
            eprintln!("mirrorball: can't power off: {error}");
        }
    }
}
