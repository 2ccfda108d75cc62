//! The agent's program inside the guest.
fn main() {}
