//! Hosts in software: real Linux hosts with KVM inside QEMU.
