//! Memory that cells share with one another; and which pages of a VM are in the host's memory, and where the
//! others are.

pub mod borrowing;
pub mod paging_disk;
pub mod paging_slots;
pub mod resident_set;
mod slot_bitmap;
