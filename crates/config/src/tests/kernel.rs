//! A kernel and words for its command line: the image's or another, and what is refused.

use super::refused;
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
fn words_for_no_kernel() {
    let text = r#"name = "a"
[kernel]
cmdline = "debug"
"#;
    let shown = r#"
  × neither an image nor a kernel to boot
   ╭─[vm.toml:3:11]
 2 │ [kernel]
 3 │ cmdline = "debug"
   ·           ───┬───
   ·              ╰── here
   ╰────
  help: add `image = "debian-12"`, or a [kernel] with its path
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn an_initramfs_without_its_kernel() {
    let text = r#"image = "debian-12"
[kernel]
initrd = "initrd.img"
"#;
    let shown = r#"
  × an initramfs without its kernel
   ╭─[vm.toml:3:10]
 2 │ [kernel]
 3 │ initrd = "initrd.img"
   ·          ──────┬─────
   ·                ╰── here
   ╰────
  help: add the kernel's `path`, or leave it out: an image has its own
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn a_command_line_of_two_lines() {
    let text = r#"[kernel]
path = "vmlinuz"
cmdline = "a\nb"
"#;
    let shown = r#"
  × not a kernel command line
   ╭─[vm.toml:3:11]
 2 │ path = "vmlinuz"
 3 │ cmdline = "a\nb"
   ·           ───┬──
   ·              ╰── here
   ╰────
  help: one line, 2,000 bytes at most
"#;
    assert_eq!(refused(text), shown);
}
