//! A VM's serial console: the last bytes are kept, and copied to whoever listens.
//!
//! A flooding guest costs bounded memory; a listener that does not read is dropped, it never holds the guest up.

use std::collections::VecDeque;
use std::io::Write;
use std::os::unix::net::UnixStream;

/// Bytes of a console kept.
const KEPT_BYTES: usize = 1 << 20;

/// The console.
#[derive(Debug, Default)]
pub struct Console {
    kept: VecDeque<u8>,
    listeners: Vec<UnixStream>,
}

impl Console {
    /// Takes output of the guest.
    pub fn output(&mut self, bytes: &[u8]) {
        let bytes = &bytes[bytes.len().saturating_sub(KEPT_BYTES)..];
        let over = (self.kept.len() + bytes.len()).saturating_sub(KEPT_BYTES);
        self.kept.drain(..over);
        self.kept.extend(bytes);
        self.listeners
            .retain_mut(|listener| listener.write_all(bytes).is_ok());
    }

    /// Adds a listener; it is made non-blocking, so that a full one fails and is dropped.
    pub fn attach(&mut self, listener: UnixStream) -> std::io::Result<()> {
        listener.set_nonblocking(true)?;
        self.listeners.push(listener);
        Ok(())
    }

    /// Everything kept.
    pub fn kept(&self) -> Vec<u8> {
        self.kept.iter().copied().collect()
    }

    /// The last lines, made safe to print: no control characters but tabs.
    pub fn last_lines(&self, count: usize) -> Vec<String> {
        let text = String::from_utf8_lossy(&self.kept()).into_owned();
        let lines: Vec<String> = text
            .lines()
            .map(|line| {
                line.chars()
                    .filter(|&c| c == '\t' || !c.is_control())
                    .collect::<String>()
            })
            .filter(|line| !line.trim().is_empty())
            .collect();
        lines[lines.len().saturating_sub(count)..].to_vec()
    }
}

#[cfg(test)]
mod tests {
    use super::Console;

    #[test]
    fn a_flood_keeps_only_the_end() {
        let mut console = Console::default();
        for _ in 0..5 {
            console.output(&vec![b'x'; super::KEPT_BYTES / 2]);
        }
        console.output(b"\nend");
        assert_eq!(console.kept().len(), super::KEPT_BYTES);
        assert_eq!(console.last_lines(1), ["end"]);
    }

    #[test]
    fn a_listener_that_does_not_read_is_dropped() {
        let mut console = Console::default();
        let (ours, _theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        console.attach(ours).unwrap();
        for _ in 0..8 {
            console.output(&vec![b'x'; super::KEPT_BYTES]);
        }
        assert!(console.listeners.is_empty());
    }
}
