//! Finds "Kernel panic - not syncing" in the console's output.
//!
//! Debian's kernels have the pvpanic driver as a module, so an early panic is not told through it. With this
//! a panic that is followed by a reset is still called one. It ends nothing by itself: whoever prints the
//! text fools only its own VM.

const TEXT: &[u8] = b"Kernel panic - not syncing";

/// How much of the text was seen last.
#[derive(Default)]
pub struct PanicText {
    matched: usize,
}

impl PanicText {
    /// Takes a byte; true when it completes the text.
    pub fn push(&mut self, byte: u8) -> bool {
        // `K` occurs in the text only as its first byte, so a mismatch can go on only from there.
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
