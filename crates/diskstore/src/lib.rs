//! Images and disks: building, importing and listing images; opening raw and qcow2 disks.

pub mod claim;
pub mod disk;
pub mod group_copy;
pub mod image;
