//! The block device driven as a guest drives it: real threads, real files, descriptors written by hand.

mod driver;
mod full;
mod hostile;
mod requests;
