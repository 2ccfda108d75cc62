//! All fuzz targets in one program, which libFuzzer drives: `mirrorball-fuzz --target=vsock [FILE or
//! FOLDER...]`.
//!
//! A target takes bytes, and is the same function of them each time. A panic, a hang (5 s), a single
//! allocation above 64 MiB and memory above 512 MiB are bugs; so is a broken promise that a target asserts.
#![no_main]

mod file;
mod guest;
mod script;
mod targets;

use std::sync::LazyLock;

use libfuzzer_sys::{Corpus, fuzz_target};
use targets::Target;

/// The target that the command line names. libFuzzer ignores flags with two dashes.
static TARGET: LazyLock<Target> = LazyLock::new(|| {
    let name = std::env::args().find_map(|word| word.strip_prefix("--target=").map(str::to_owned));
    let name = name.unwrap_or_default();
    targets::named(&name).unwrap_or_else(|| {
        let names = targets::NAMES.join(", ");
        eprintln!("mirrorball-fuzz: no target {name:?}; help: --target=NAME, NAME one of {names}");
        std::process::exit(2)
    })
});

fuzz_target!(init: LazyLock::force(&TARGET), |bytes: &[u8]| -> Corpus { TARGET(bytes) });
