//! `mirrorball lab`: real Linux hosts with KVM inside QEMU. The subcommands live with the lab.

pub use lab::cli::{LabArgs, run};
