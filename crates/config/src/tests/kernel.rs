//! Kernels and command lines: the image's or another kernel.

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
