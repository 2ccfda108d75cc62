//! Finds "Kernel panic - not syncing" in the console's output.
//!
//! Debian's kernels have the pvpanic driver as a module, so an early panic is not reported by it. This text
//! marks a panic that is followed by a reset as a panic. It ends nothing by itself: a guest that prints the
//! text affects its own VM only.

const TEXT: &[u8] = b"Kernel panic - not syncing";

/// Length of the text's prefix that the output ends with.
#[derive(Default)]
pub struct PanicText {
    matched: usize,
}

impl PanicText {
    /// Takes a byte; returns true if it completes the text.
    pub fn push(&mut self, byte: u8) -> bool {
        // `K` occurs in the text as its first byte only, so a match can restart only there.
        self.matched = match byte {
            _ if byte == TEXT[self.matched] => self.matched + 1,
            b'K' => 1,
            _ => 0,
        };
        let complete = self.matched == TEXT.len();
        if complete {
            self.matched = 0;
        }
        complete
    }
}
