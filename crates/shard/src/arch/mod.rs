//! Code that depends on the guest's processor architecture.

pub mod x86_64;
