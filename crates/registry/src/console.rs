//! The protocol of a VM's console socket: the client's first byte says what it wants, and the console's bytes follow.
//!
//! The socket is `console.sock` in the VM's directory; `cell::console` serves it.

/// The last bytes and what comes; the client may type.
pub const ATTACH: u8 = b'a';
/// What comes alone; the client, whose monitor has died, may type.
pub const JOIN: u8 = b'j';
/// All bytes kept.
pub const LOG: u8 = b'l';
/// All bytes kept and what comes.
pub const FOLLOW: u8 = b'f';
