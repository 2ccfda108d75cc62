//! Memory that cells share with one another; which pages of a VM are in the host's memory, and where the
//! others are; and how much of it VMs keep while the host is short of memory.

pub mod borrowing;
pub mod image_slots;
mod page_state;
pub mod paging_disk;
pub mod paging_slots;
pub mod pressure;
pub mod read_ahead;
pub mod resident_set;
mod slot_bitmap;
