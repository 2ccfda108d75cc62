//! Protocol of a VM's console socket: the client's first byte selects a mode, and the console's bytes follow.
//!
//! The socket is `console.sock` in the VM's directory; `cell::console` serves it.

/// Sends the last bytes and all further output; the client may type.
pub const ATTACH: u8 = b'a';
/// Sends further output only; the client, whose monitor has died, may type.
pub const JOIN: u8 = b'j';
/// Sends all buffered bytes.
pub const LOG: u8 = b'l';
/// Sends all buffered bytes and all further output.
pub const FOLLOW: u8 = b'f';
