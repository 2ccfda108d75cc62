//! The kind of an imported file, by its first bytes.

use std::os::fd::AsRawFd;
use std::path::PathBuf;

use crate::file::file_of;
use diskstore::image::FileKind;

pub fn fuzz(bytes: &[u8]) {
    let file = file_of(bytes);
    let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    let _ = FileKind::of(&path);
}
