//! Exit statuses of the command (`docs/reference/cli.md`), beside those of endings ([`cell::ending::status`]).

/// Bad input, or the host can't do it.
pub const FAILED: u8 = 1;
/// A limit on time ran out.
pub const LIMIT: u8 = 124;
