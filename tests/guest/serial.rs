//! Output to the first serial port, typed keys from it, and power-off.
//!
//! Nothing here is `core::fmt`: code of the standard library that is not compiled with this program keeps
//! values below the stack pointer, where an interrupt would overwrite them.

use core::sync::atomic::{AtomicBool, Ordering};

use crate::cpu;

const DATA: u16 = 0x3F8;
const LINE_STATUS: u16 = DATA + 5;
const SLEEP_CONTROL: u16 = 0x600;
/// SLP_EN and the type of soft off.
const POWER_OFF: u8 = 1 << 5 | 5 << 2;

static TAKEN: AtomicBool = AtomicBool::new(false);

/// A line, written by one CPU at a time; it ends when this is dropped.
pub struct Line(());

impl Line {
    /// Begins a line.
    pub fn new() -> Self {
        while TAKEN.swap(true, Ordering::Acquire) {
            cpu::pause();
        }
        Self(())
    }

    /// Adds a text.
    pub fn text(self, text: &str) -> Self {
        text.bytes().for_each(put);
        self
    }

    /// Adds a name and a number.
    pub fn number(self, name: &str, value: u64) -> Self {
        self.based(name, value, 10)
    }

    /// Adds a name and a number in hexadecimal.
    pub fn address(self, name: &str, value: u64) -> Self {
        self.based(name, value, 16)
    }

    fn based(self, name: &str, mut value: u64, base: u64) -> Self {
        let line = self.text(" ").text(name).text("=");
        let (mut digits, mut count) = ([0u8; 20], 0);
        loop {
            digits[count] = b"0123456789abcdef"[(value % base) as usize];
            value /= base;
            count += 1;
            if value == 0 {
                break;
            }
        }
        while count > 0 {
            count -= 1;
            put(digits[count]);
        }
        line
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        put(b'\r');
        put(b'\n');
        TAKEN.store(false, Ordering::Release);
    }
}

fn put(byte: u8) {
    while cpu::input(LINE_STATUS) & 0x20 == 0 {
        cpu::pause();
    }
    cpu::out(DATA, byte);
}

/// Whether this key was typed since the last call; other keys are dropped.
pub fn typed(key: u8) -> bool {
    let mut found = false;
    while cpu::input(LINE_STATUS) & 1 == 1 {
        found |= cpu::input(DATA) == key;
    }
    found
}

/// Turns the machine off.
pub fn power_off() -> ! {
    cpu::out(SLEEP_CONTROL, POWER_OFF);
    loop {
        cpu::pause();
    }
}

/// Reports an error, even in the midst of another CPU's line, and turns the machine off.
pub fn give_up(what: impl FnOnce(Line) -> Line) -> ! {
    cpu::close();
    // The holder of the line may be this CPU, or wait for this one: the wait for it is short.
    for _ in 0..100_000 {
        if !TAKEN.load(Ordering::Relaxed) {
            break;
        }
        cpu::pause();
    }
    TAKEN.store(true, Ordering::Relaxed);
    drop(what(Line(()).text("FAULT:")));
    power_off()
}
