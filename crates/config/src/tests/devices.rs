//! Invalid disks. Each text is refused with exactly this error.

use super::refused;

#[test]
fn disk_without_a_path_is_refused() {
    let text = r#"image = "debian-12"

[[disks]]
path = ""
"#;
    let shown = r#"
  × an empty path
   ╭─[vm.toml:4:8]
 3 │ [[disks]]
 4 │ path = ""
   ·        ─┬
   ·         ╰── here
   ╰────
  help: name the disk's file
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn kept_private_disk_of_a_nameless_vm_is_refused() {
    let text = r#"image = "debian-12"

[[disks]]
path = "a.img"
persistent = true
"#;
    let shown = r#"
  × a private disk that keeps its writes, of a VM without a name
   ╭─[vm.toml:5:14]
 4 │ path = "a.img"
 5 │ persistent = true
   ·              ──┬─
   ·                ╰── here
   ╰────
  help: add `name`: the writes are kept by it
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn read_only_disk_that_keeps_writes_is_refused() {
    let text = r#"image = "debian-12"

[[disks]]
path = "a.img"
persistent = true
read_only = true
"#;
    let shown = r#"
  × a read-only disk has no writes to keep
   ╭─[vm.toml:5:14]
 4 │ path = "a.img"
 5 │ persistent = true
   ·              ──┬─
   ·                ╰── here
 6 │ read_only = true
   ╰────
  help: drop `persistent` or `read_only`
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn read_only_exclusive_disk_that_keeps_writes_is_refused() {
    let text = r#"image = "debian-12"

[[disks]]
path = "a.img"
mode = "exclusive"
persistent = true
read_only = true
"#;
    let shown = r#"
  × a read-only disk has no writes to keep
   ╭─[vm.toml:6:14]
 5 │ mode = "exclusive"
 6 │ persistent = true
   ·              ──┬─
   ·                ╰── here
 7 │ read_only = true
   ╰────
  help: drop `persistent` or `read_only`
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn zero_request_queues_are_refused() {
    let text = r#"image = "debian-12"

[[disks]]
path = "a.img"
queues = 0
"#;
    let shown = r#"
  × not a number of queues
   ╭─[vm.toml:5:10]
 4 │ path = "a.img"
 5 │ queues = 0
   ·          ┬
   ·          ╰── here
   ╰────
  help: write a number from 1 to 16
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn pmem_of_a_qcow2_file_is_refused() {
    let text = r#"image = "debian-12"

[[disks]]
path = "a.img"
format = "qcow2"
as = "pmem"
"#;
    let shown = r#"
  × a qcow2 disk can't be mapped as pmem
   ╭─[vm.toml:5:10]
 4 │ path = "a.img"
 5 │ format = "qcow2"
   ·          ───┬───
   ·             ╰── here
 6 │ as = "pmem"
   ╰────
  help: use a raw file, or `as = "block"`
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn pmem_that_keeps_writes_of_a_private_disk_is_refused() {
    let text = r#"name = "a"
image = "debian-12"

[[disks]]
path = "a.img"
as = "pmem"
persistent = true
"#;
    let shown = r#"
  × pmem keeps writes only when exclusive
   ╭─[vm.toml:7:14]
 6 │ as = "pmem"
 7 │ persistent = true
   ·              ──┬─
   ·                ╰── here
   ╰────
  help: add `mode = "exclusive"`, or use `as = "block"`
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn pmem_with_request_queues_is_refused() {
    let text = r#"image = "debian-12"

[[disks]]
path = "a.img"
as = "pmem"
queues = 2
"#;
    let shown = r#"
  × a pmem disk has no request queues
   ╭─[vm.toml:6:10]
 5 │ as = "pmem"
 6 │ queues = 2
   ·          ┬
   ·          ╰── here
   ╰────
  help: drop `queues`, or use `as = "block"`
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn pmem_that_waits_for_room_is_refused() {
    let text = r#"image = "debian-12"

[[disks]]
path = "a.img"
as = "pmem"
on_full = "pause"
"#;
    let shown = r#"
  × a write to memory can't wait for room
   ╭─[vm.toml:6:11]
 5 │ as = "pmem"
 6 │ on_full = "pause"
   ·           ───┬───
   ·              ╰── here
   ╰────
  help: drop `on_full`: a pmem disk gets all its room at the start; or use `as = "block"`
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn the_second_disk_is_pointed_at() {
    let text = r#"image = "debian-12"

[[disks]]
path = "a.img"

[[disks]]
path = "b.img"
queues = 17
"#;
    let shown = r#"
  × not a number of queues
   ╭─[vm.toml:8:10]
 7 │ path = "b.img"
 8 │ queues = 17
   ·          ─┬
   ·           ╰── here
   ╰────
  help: write a number from 1 to 16
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn sharing_pages_smaller_than_the_memory_has_is_refused() {
    let text = r#"image = "debian-12"
pages = "2M"
share = "deferred"
"#;
    let shown = r#"
  × memory made of the pool's huge pages can't share 4 KiB pages
   ╭─[vm.toml:3:9]
 2 │ pages = "2M"
 3 │ share = "deferred"
   ·         ─────┬────
   ·              ╰── here
   ╰────
  help: use `pages = "thp"` or `"4K"`, `share = "never"`, or a disk `as = "pmem"`
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn sharing_a_disk_written_in_place_is_refused() {
    let text = r#"image = "debian-12"

[[disks]]
path = "a.img"
mode = "exclusive"
persistent = true
share = "at-read"
"#;
    let shown = r#"
  × a disk that is written in place can't share memory
   ╭─[vm.toml:7:9]
 6 │ persistent = true
 7 │ share = "at-read"
   ·         ────┬────
   ·             ╰── here
   ╰────
  help: drop `share`, or use `mode = "private"`
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn sharing_a_disk_that_is_mapped_anyway() {
    let text = r#"image = "debian-12"

[[disks]]
path = "a.img"
as = "pmem"
share = "never"
"#;
    let shown = r#"
  × a pmem disk is mapped: it always shares
   ╭─[vm.toml:6:9]
 5 │ as = "pmem"
 6 │ share = "never"
   ·         ───┬───
   ·            ╰── here
   ╰────
  help: drop `share`, or use `as = "block"`
"#;
    assert_eq!(refused(text), shown);
}
