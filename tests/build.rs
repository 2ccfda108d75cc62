//! Compiles the kernel of `guest/`, which runs on a bare virtual machine: another program than cargo would
//! make for this target, with no standard library and no stack below the stack pointer.

use std::path::PathBuf;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=guest");
    let variable = |name: &str| std::env::var(name).unwrap_or_else(|_| panic!("cargo sets {name}"));
    let here = PathBuf::from(variable("CARGO_MANIFEST_DIR")).join("guest");
    let out = PathBuf::from(variable("OUT_DIR")).join("storm");
    let script = format!("link-arg=-Wl,-T,{}", here.join("link.ld").display());
    let flags = [
        "opt-level=2",
        "codegen-units=1",
        "relro-level=off",
        "panic=abort",
        "relocation-model=static",
        "target-feature=+crt-static",
        "no-redzone=yes",
        "strip=symbols",
        "link-arg=-nostdlib",
        "link-arg=-nostartfiles",
        "link-arg=-static",
        "link-arg=-no-pie",
        "link-arg=-Wl,--build-id=none,--gc-sections",
        &script,
    ];
    let mut rustc = Command::new(variable("RUSTC"));
    rustc
        .args([
            "--edition",
            "2024",
            "--crate-name",
            "storm",
            "--crate-type",
            "bin",
        ])
        .args(["--target", "x86_64-unknown-linux-gnu"])
        .args(flags.iter().flat_map(|flag| ["-C", flag]))
        .arg("-o")
        .arg(out)
        .arg(here.join("main.rs"));
    let status = rustc.status().expect("cargo names a compiler that runs");
    assert!(status.success(), "guest/ does not compile: {rustc:?}");
}
