//! Invalid VMs: name, CPUs, memory, kernel, command and nodes. Each text is refused with exactly this error.

use super::refused;

#[test]
fn zero_cpus_are_refused() {
    let text = r#"image = "debian-12"
cpus = 0
"#;
    let shown = r#"
  × 0 CPUs
   ╭─[vm.toml:2:8]
 1 │ image = "debian-12"
 2 │ cpus = 0
   ·        ┬
   ·        ╰── here
   ╰────
  help: write a number from 1 to 254
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn more_than_254_cpus_are_refused() {
    let text = r#"image = "debian-12"
cpus = 255
"#;
    let shown = r#"
  × 255 CPUs
   ╭─[vm.toml:2:8]
 1 │ image = "debian-12"
 2 │ cpus = 255
   ·        ─┬─
   ·         ╰── here
   ╰────
  help: write a number from 1 to 254
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn more_cpus_than_a_byte_holds_are_refused() {
    let text = r#"image = "debian-12"
cpus = 1000
"#;
    let shown = r#"
  × 1000 CPUs
   ╭─[vm.toml:2:8]
 1 │ image = "debian-12"
 2 │ cpus = 1000
   ·        ──┬─
   ·          ╰── here
   ╰────
  help: write a number from 1 to 254
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn invalid_name_is_refused() {
    let text = r#"name = "my vm"
image = "debian-12"
"#;
    let shown = r#"
  × "my vm" can't name a VM
   ╭─[vm.toml:1:8]
 1 │ name = "my vm"
   ·        ───┬───
   ·           ╰── here
 2 │ image = "debian-12"
   ╰────
  help: letters, digits, `-`, `_` and `.`, 63 at most, not starting with `-` or `.`
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn too_little_memory_is_refused() {
    let text = r#"image = "debian-12"
memory = "32M"
"#;
    let shown = r#"
  × 32M of memory is too little
   ╭─[vm.toml:2:10]
 1 │ image = "debian-12"
 2 │ memory = "32M"
   ·          ──┬──
   ·            ╰── here
   ╰────
  help: give it 64M or more
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn memory_that_is_no_multiple_of_2m() {
    let text = r#"image = "debian-12"
memory = "65M"
"#;
    let shown = r#"
  × 65M is not a multiple of 2M
   ╭─[vm.toml:2:10]
 1 │ image = "debian-12"
 2 │ memory = "65M"
   ·          ──┬──
   ·            ╰── here
   ╰────
  help: use 64M
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn too_much_memory_is_refused() {
    let text = r#"image = "debian-12"
memory = "5T"
"#;
    let shown = r#"
  × 5T of memory is too much
   ╭─[vm.toml:2:10]
 1 │ image = "debian-12"
 2 │ memory = "5T"
   ·          ──┬─
   ·            ╰── here
   ╰────
  help: give it 4T at most
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn missing_boot_source_is_refused() {
    let text = r#"cpus = 2
"#;
    let shown = r#"
  × neither an image nor a kernel to boot
   ╭─[vm.toml:1:1]
 1 │ cpus = 2
   · ▲
   · ╰── here
   ╰────
  help: add `image = "debian-12"`, or a [kernel] with its path
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn empty_file_is_refused() {
    let text = r#""#;
    let shown = r#"
  × neither an image nor a kernel to boot
   ╭─[vm.toml:1:1]
   ╰────
  help: add `image = "debian-12"`, or a [kernel] with its path
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn empty_command_is_refused() {
    let text = r#"image = "debian-12"
command = []
"#;
    let shown = r#"
  × an empty command
   ╭─[vm.toml:2:11]
 1 │ image = "debian-12"
 2 │ command = []
   ·           ─┬
   ·            ╰── here
   ╰────
  help: give a program and its arguments, or leave it out
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn kept_root_disk_of_a_nameless_vm_is_refused() {
    let text = r#"image = "debian-12"

[root]
persistent = true
"#;
    let shown = r#"
  × a persistent root disk of a VM without a name
   ╭─[vm.toml:3:1]
 2 │ 
 3 │ [root]
   · ───┬──
   ·    ╰── here
 4 │ persistent = true
   ╰────
  help: add `name`: the disk is kept by it
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn kept_root_disk_without_an_image_is_refused() {
    let text = r#"name = "a"
[kernel]
path = "vmlinuz"
[root]
persistent = true
"#;
    let shown = r#"
  × a root disk without an image
   ╭─[vm.toml:4:1]
 3 │ path = "vmlinuz"
 4 │ [root]
   · ───┬──
   ·    ╰── here
 5 │ persistent = true
   ╰────
  help: add `image`, or list the disk under [[disks]]
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn nodes_that_do_not_add_up_are_refused() {
    let text = r#"image = "debian-12"
memory = "1G"

[[nodes]]
cpus = "0"
memory = "256M"
"#;
    let shown = r#"
  × the nodes' memory does not add up to the VM's 1G
   ╭─[vm.toml:4:1]
 3 │ 
 4 │ [[nodes]]
   · ────┬────
   ·     ╰── here
 5 │ cpus = "0"
   ╰────
  help: the nodes have 256M: write `memory = "256M"`, or change theirs
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn nodes_that_do_not_add_up_to_the_default_are_refused() {
    let text = r#"image = "debian-12"

[[nodes]]
cpus = "0"
memory = "256M"
"#;
    let shown = r#"
  × the nodes' memory does not add up to the VM's 512M
   ╭─[vm.toml:3:1]
 2 │ 
 3 │ [[nodes]]
   · ────┬────
   ·     ╰── here
 4 │ cpus = "0"
   ╰────
  help: the nodes have 256M: write `memory = "256M"`, or change theirs
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn node_with_an_unknown_cpu_is_refused() {
    let text = r#"image = "debian-12"
cpus = 2

[[nodes]]
cpus = "0"
memory = "256M"

[[nodes]]
cpus = "1-2"
memory = "256M"
"#;
    let shown = r#"
  × CPU 2 of a VM with 2 CPUs
    ╭─[vm.toml:9:8]
  8 │ [[nodes]]
  9 │ cpus = "1-2"
    ·        ──┬──
    ·          ╰── here
 10 │ memory = "256M"
    ╰────
  help: CPUs are 0 to 1
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn cpu_in_two_nodes_is_refused() {
    let text = r#"image = "debian-12"
cpus = 2

[[nodes]]
cpus = "0-1"
memory = "256M"

[[nodes]]
cpus = "1"
memory = "256M"
"#;
    let shown = r#"
  × CPU 1 is in two nodes
    ╭─[vm.toml:9:8]
  8 │ [[nodes]]
  9 │ cpus = "1"
    ·        ─┬─
    ·         ╰── here
 10 │ memory = "256M"
    ╰────
  help: list it once
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn cpu_in_no_node_is_refused() {
    let text = r#"image = "debian-12"
cpus = 2

[[nodes]]
cpus = "0"
memory = "256M"
"#;
    let shown = r#"
  × CPU 1 is in no node
   ╭─[vm.toml:4:1]
 3 │ 
 4 │ [[nodes]]
   · ────┬────
   ·     ╰── here
 5 │ cpus = "0"
   ╰────
  help: list each CPU in one node
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn invalid_list_of_cpus_is_refused() {
    let text = r#"image = "debian-12"

[[nodes]]
cpus = "first"
memory = "256M"
"#;
    let shown = r#"
  × "first" is not a list of CPUs
   ╭─[vm.toml:4:8]
 3 │ [[nodes]]
 4 │ cpus = "first"
   ·        ───┬───
   ·           ╰── here
 5 │ memory = "256M"
   ╰────
  help: write it as "0-1,4"
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn too_few_distances_are_refused() {
    let text = r#"image = "debian-12"
cpus = 2

[[nodes]]
cpus = "0"
memory = "256M"
distances = [10]

[[nodes]]
cpus = "1"
memory = "256M"
"#;
    let shown = r#"
  × 1 distances for 2 nodes
   ╭─[vm.toml:7:13]
 6 │ memory = "256M"
 7 │ distances = [10]
   ·             ──┬─
   ·               ╰── here
 8 │ 
   ╰────
  help: write one for each node, in order
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn node_far_from_itself_is_refused() {
    let text = r#"image = "debian-12"
cpus = 2

[[nodes]]
cpus = "0"
memory = "256M"
distances = [20, 20]

[[nodes]]
cpus = "1"
memory = "256M"
"#;
    let shown = r#"
  × [20, 20] are not node 0's distances
   ╭─[vm.toml:7:13]
 6 │ memory = "256M"
 7 │ distances = [20, 20]
   ·             ────┬───
   ·                 ╰── here
 8 │ 
   ╰────
  help: write 10 for the node itself, more than 10 for the others
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn node_of_no_memory_is_refused() {
    let text = r#"image = "debian-12"

[[nodes]]
cpus = "0"
memory = "1M"
"#;
    let shown = r#"
  × 1M is not 2M or a multiple of it
   ╭─[vm.toml:5:10]
 4 │ cpus = "0"
 5 │ memory = "1M"
   ·          ──┬─
   ·            ╰── here
   ╰────
  help: give the node a multiple of 2M
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn share_groups_have_names_of_their_own() {
    let text = r#"image = "debian-12"
share_group = "-x"
"#;
    let shown = r#"
  × "-x" can't name a group
   ╭─[vm.toml:2:15]
 1 │ image = "debian-12"
 2 │ share_group = "-x"
   ·               ──┬─
   ·                 ╰── here
   ╰────
  help: letters, digits, `-`, `_` and `.`, 63 at most, not starting with `-` or `.`
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn share_groups_keep_no_private_writes() {
    let text = r#"name = "a"
image = "debian-12"
share_group = "red"
root.persistent = true
"#;
    let shown = r#"
  × a share group, and a private disk that keeps its writes: they would stand on the group's copy of the
  │ image
   ╭─[vm.toml:3:15]
 2 │ image = "debian-12"
 3 │ share_group = "red"
   ·               ──┬──
   ·                 ╰── here
 4 │ root.persistent = true
   ╰────
  help: leave out `persistent`, or give the VM an exclusive disk
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn limit_below_the_minimum_of_a_temporary_overlay_is_refused() {
    let text = r#"image = "debian-12"
scratch_limit = "512K"
"#;
    let shown = r#"
  × too little for a disk
   ╭─[vm.toml:2:17]
 1 │ image = "debian-12"
 2 │ scratch_limit = "512K"
   ·                 ───┬──
   ·                    ╰── here
   ╰────
  help: write 1M or more, as 4G, or leave it out
"#;
    assert_eq!(refused(text), shown);
}
