//! What the fuzz targets share: a guest that drives a device's queues by a script, and files made of bytes.
//!
//! A target takes bytes, and is the same function of them each time. A panic, a hang (5 s), a single allocation above
//! 64 MiB and memory above 512 MiB are bugs; so is a broken promise that a target asserts.

pub mod file;
pub mod guest;
pub mod script;
