//! What an imported file is, by its first bytes.
#![no_main]

use std::os::fd::AsRawFd;
use std::path::PathBuf;

use diskstore::image::FileKind;
use libfuzzer_sys::fuzz_target;
use mirrorball_fuzz::file::file_of;

fuzz_target!(|bytes: &[u8]| {
    let file = file_of(bytes);
    let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    let _ = FileKind::of(&path);
});
