//! The bytes of a connection of the agent, in pieces: frames, and the server's reading of them.

use agent::protocol::{Decoder, FRAME_BYTES_MAX, Request, WindowSize};

pub fn fuzz((cut, bytes): (u8, &[u8])) {
    let mut decoder = Decoder::default();
    for piece in bytes.chunks(usize::from(cut) + 1) {
        decoder.feed(piece);
        loop {
            match decoder.next_frame() {
                Ok(Some(frame)) => {
                    assert!(frame.payload.len() <= FRAME_BYTES_MAX);
                    assert!(!frame.text().chars().any(char::is_control));
                    // Only read, never served: a request may run any program.
                    let _ = frame.json::<Request>();
                    let _ = frame.json::<WindowSize>();
                }
                Ok(None) => break,
                Err(_) => return,
            }
        }
    }
}
