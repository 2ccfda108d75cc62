//! Kernels and command lines: the image's or another kernel, and refused combinations.

use super::fault_of;
use crate::parse;

#[test]
fn words_for_the_images_kernel_need_no_other() {
    let spec = parse(
        "vm.toml",
        "image = \"debian-12\"\n[kernel]\ncmdline = \"debug psi=1\"",
    )
    .unwrap();
    assert_eq!((spec.cmdline(), spec.kernel_files()), ("debug psi=1", None));
    let text = "[kernel]\npath = \"vmlinuz\"\ninitrd = \"initrd\"";
    let spec = parse("vm.toml", text).unwrap();
    let files = ("vmlinuz".as_ref(), Some("initrd".as_ref()));
    assert_eq!((spec.cmdline(), spec.kernel_files()), ("", Some(files)));
}

#[test]
fn command_line_without_a_kernel_is_refused() {
    assert_eq!(
        fault_of("name = \"a\"\n[kernel]\ncmdline = \"debug\"\n"),
        [
            "neither an image nor a kernel to boot",
            "\"debug\"",
            "add `image = \"debian-12\"`, or a [kernel] with its path",
        ]
    );
}

#[test]
fn initramfs_without_its_kernel_is_refused() {
    assert_eq!(
        fault_of("image = \"debian-12\"\n[kernel]\ninitrd = \"initrd.img\"\n"),
        [
            "an initramfs without its kernel",
            "\"initrd.img\"",
            "add the kernel's `path`, or leave it out: an image has its own",
        ]
    );
}

#[test]
fn command_line_of_two_lines_is_refused() {
    assert_eq!(
        fault_of("[kernel]\npath = \"vmlinuz\"\ncmdline = \"a\\nb\"\n"),
        [
            "not a kernel command line",
            r#""a\nb""#,
            "one line, 2,000 bytes at most",
        ]
    );
}
