//! Power: the ACPI sleep and reset registers, the power button, pvpanic.

use std::io;
use std::sync::Arc;

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::arch::x86_64::layout::{RESET_PORT, RESET_VALUE, SLEEP_CONTROL_PORT};
use crate::bus::BusDevice;
use crate::ending::EndSignal;
use crate::launch::Ending;

/// SLP_TYP of `\_S5` (soft off), as in the DSDT.
pub const SLEEP_TYPE_OFF: u8 = 5;
/// SLP_EN of the sleep control register (ACPI 6.5, 4.8.3.7).
const SLEEP_ENABLE: u8 = 1 << 5;
/// Ports of [`PowerRegisters`], from the sleep control register.
pub const POWER_PORTS: u64 = 3;

/// Sleep control, sleep status and reset register, a byte each.
pub struct PowerRegisters(pub Arc<EndSignal>);

impl BusDevice for PowerRegisters {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        if let [byte] = data {
            *byte = 0;
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        const RESET: u64 = (RESET_PORT - SLEEP_CONTROL_PORT) as u64;
        let &[value] = data else { return };
        match offset {
            0 if value & SLEEP_ENABLE != 0 && (value >> 2) & 7 == SLEEP_TYPE_OFF => {
                self.0.end(Ending::PowerOff)
            }
            RESET if value == RESET_VALUE => self.0.end(Ending::Reboot),
            _ => (),
        }
    }
}

/// The command port of a keyboard controller of which only the reset line exists: a kernel's last resort.
pub struct KeyboardReset(pub Arc<EndSignal>);

/// Address of that port.
pub const KEYBOARD_COMMAND_PORT: u16 = 0x64;

impl BusDevice for KeyboardReset {
    fn read(&self, _offset: u64, _data: &mut [u8]) {}

    fn write(&self, _offset: u64, data: &[u8]) {
        if data == [0xFE] {
            self.0.end(Ending::Reboot);
        }
    }
}

/// pvpanic (QEMU's `docs/specs/pvpanic`). Bit 0 of a write reports a panic of the kernel and has no other
/// effect.
pub struct Pvpanic(pub Arc<EndSignal>);

/// The kernel panicked.
const PANICKED: u8 = 1;
/// The kernel panicked and continues with a crash kernel.
const CRASH_LOADED: u8 = 2;

impl BusDevice for Pvpanic {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        if let [byte] = data {
            *byte = PANICKED | CRASH_LOADED;
        }
    }

    fn write(&self, _offset: u64, data: &[u8]) {
        let &[value] = data else { return };
        if value & (PANICKED | CRASH_LOADED) != 0 {
            self.0.panicked();
        }
        if value & PANICKED != 0 {
            self.0.end(Ending::Panic);
        }
    }
}

/// The power button: an edge on the generic event device's interrupt.
pub struct PowerButton(EventFd);

impl PowerButton {
    /// Creates a button; the caller connects [`Self::event`] to its interrupt.
    pub fn new() -> io::Result<Self> {
        EventFd::new(EFD_NONBLOCK).map(Self)
    }

    /// Returns the event file to register as irqfd.
    pub fn event(&self) -> &EventFd {
        &self.0
    }

    /// Presses the button.
    pub fn press(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_s5_with_enable_powers_off() {
        let end = Arc::new(EndSignal::new().unwrap());
        let registers = PowerRegisters(end.clone());
        registers.write(0, &[5 << 2]);
        registers.write(0, &[SLEEP_ENABLE | (3 << 2)]);
        registers.write(0, &[SLEEP_ENABLE | (5 << 2), 0]);
        registers.write(2, &[0]);
        assert_eq!(end.cause(), None);
        registers.write(0, &[SLEEP_ENABLE | (5 << 2)]);
        assert_eq!(end.cause(), Some(Ending::PowerOff));
    }

    #[test]
    fn pvpanic_with_a_crash_kernel_does_not_end_the_vm() {
        let end = Arc::new(EndSignal::new().unwrap());
        Pvpanic(end.clone()).write(0, &[CRASH_LOADED]);
        assert_eq!(end.cause(), None);
        PowerRegisters(end.clone()).write(2, &[RESET_VALUE]);
        assert_eq!(end.cause(), Some(Ending::Panic));
    }

    #[test]
    fn the_reset_register_and_the_keyboard_controllers_line_reboot() {
        let ended = |write: fn(Arc<EndSignal>)| {
            let end = Arc::new(EndSignal::new().unwrap());
            write(end.clone());
            end.cause()
        };
        assert_eq!(
            ended(|end| PowerRegisters(end).write(2, &[RESET_VALUE])),
            Some(Ending::Reboot)
        );
        assert_eq!(ended(|end| PowerRegisters(end).write(1, &[RESET_VALUE])), None);
        assert_eq!(
            ended(|end| KeyboardReset(end).write(0, &[0xFE])),
            Some(Ending::Reboot)
        );
        assert_eq!(ended(|end| KeyboardReset(end).write(0, &[0xFF])), None);
    }

    #[test]
    fn a_panic_without_a_crash_kernel_ends_the_vm() {
        for (written, ending) in [
            (0, None),
            (PANICKED, Some(Ending::Panic)),
            (PANICKED | CRASH_LOADED, Some(Ending::Panic)),
            (0x80, None),
        ] {
            let end = Arc::new(EndSignal::new().unwrap());
            Pvpanic(end.clone()).write(0, &[written]);
            assert_eq!(end.cause(), ending, "{written:#x}");
            // A write that reports no panic leaves the reset a reset.
            end.end(Ending::Reboot);
            let reset = ending.unwrap_or(Ending::Reboot);
            assert_eq!(end.cause(), Some(reset), "{written:#x}");
        }
    }

    #[test]
    fn power_registers_read_as_nothing_pending_and_pvpanic_as_what_it_takes() {
        let end = Arc::new(EndSignal::new().unwrap());
        let (mut byte, mut word) = ([0xFF], [0xFF; 2]);
        PowerRegisters(end.clone()).read(1, &mut byte);
        PowerRegisters(end.clone()).read(1, &mut word);
        assert_eq!((byte, word), ([0], [0xFF; 2]));
        Pvpanic(end.clone()).read(0, &mut byte);
        assert_eq!(byte, [3]);
        KeyboardReset(end).read(0, &mut byte);
        assert_eq!(byte, [3], "an absent controller drives nothing");
    }

    #[test]
    fn a_pressed_power_button_raises_its_event_once() {
        let button = PowerButton::new().unwrap();
        assert!(button.event().read().is_err(), "nothing is pressed yet");
        button.press().unwrap();
        assert_eq!(button.event().read().unwrap(), 1);
        assert!(button.event().read().is_err());
    }
}
