//! The targets by name. Each is a function `fuzz` of one input.

use libfuzzer_sys::Corpus;
use libfuzzer_sys::arbitrary::{Arbitrary, Unstructured};

mod agent_client;
mod agent_frames;
mod apic;
mod balloon;
mod block;
mod cluster_messages;
mod config;
mod dns_stream;
mod dsm_frames;
mod file_kind;
mod frames;
mod fs;
mod handover;
mod keeper_messages;
mod kernel_load;
mod kernel_payload;
mod lab_file;
mod locks;
mod manifest;
mod nat;
mod net;
mod network;
mod overlay;
mod pci;
mod pmem;
mod qcow2;
mod rng;
mod span_packets;
mod state;
mod vcpu_statistics;
mod vsock;

/// Runs one input. Rejects bytes that make no input of the target's type.
pub type Target = fn(&[u8]) -> Corpus;

macro_rules! targets {
    ($($name:ident)*) => {
        /// Names of all targets.
        pub const NAMES: &[&str] = &[$(stringify!($name)),*];

        /// The target with this name.
        pub fn named(name: &str) -> Option<Target> {
            match name {
                $(stringify!($name) => Some(|bytes| on_input(bytes, $name::fuzz)),)*
                _ => None,
            }
        }
    };
}

targets! {
    agent_client
    agent_frames
    apic
    balloon
    block
    cluster_messages
    config
    dns_stream
    dsm_frames
    file_kind
    frames
    fs
    handover
    keeper_messages
    kernel_load
    kernel_payload
    lab_file
    locks
    manifest
    nat
    net
    network
    overlay
    pci
    pmem
    qcow2
    rng
    span_packets
    state
    vcpu_statistics
    vsock
}

fn on_input<'a, T: Arbitrary<'a>>(bytes: &'a [u8], fuzz: impl FnOnce(T)) -> Corpus {
    if bytes.len() < T::size_hint(0).0 {
        return Corpus::Reject;
    }
    let Ok(input) = T::arbitrary_take_rest(Unstructured::new(bytes)) else {
        return Corpus::Reject;
    };
    fuzz(input);
    Corpus::Keep
}
