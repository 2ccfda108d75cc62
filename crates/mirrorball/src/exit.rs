//! Exit statuses of the command (`docs/reference/cli.md`), in addition to those of endings
//! ([`cell::ending::status`]).

/// Invalid input, or a failure of the host.
pub const FAILED: u8 = 1;
/// A time limit was exceeded.
pub const LIMIT: u8 = 124;
