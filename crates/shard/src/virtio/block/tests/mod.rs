//! Tests of the block device with real threads, real files, and descriptors written as by a guest.

mod driver;
mod full;
mod hostile;
mod images;
mod paging_disk;
mod requests;
mod resumed;
