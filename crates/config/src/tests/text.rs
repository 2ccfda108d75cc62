//! Text that the reader refuses: keys, words, types, sizes. Each text is refused with exactly this error.

use super::refused;

#[test]
fn help_for_a_misspelt_key_names_the_intended_key() {
    let text = r#"image = "debian-12"
memry = "1G"
"#;
    let shown = r#"
  × unknown key `memry`
   ╭─[vm.toml:2:1]
 1 │ image = "debian-12"
 2 │ memry = "1G"
   · ──┬──
   ·   ╰── here
   ╰────
  help: did you mean `memory`?
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn help_for_an_unknown_key_of_a_disk_lists_a_disks_keys() {
    let text = r#"image = "debian-12"

[[disks]]
path = "a.img"
readonly = true
"#;
    let shown = r#"
  × unknown key `readonly`
   ╭─[vm.toml:5:1]
 4 │ path = "a.img"
 5 │ readonly = true
   · ────┬───
   ·     ╰── here
   ╰────
  help: did you mean `read_only`?
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn help_for_an_unknown_key_of_a_net_lists_a_nets_keys() {
    let text = r#"image = "debian-12"

[[nets]]
kind = "user"
forwards = ["8080:80"]
"#;
    let shown = r#"
  × unknown key `forwards`
   ╭─[vm.toml:5:1]
 4 │ kind = "user"
 5 │ forwards = ["8080:80"]
   · ────┬───
   ·     ╰── here
   ╰────
  help: did you mean `forward`?
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn help_for_an_unknown_key_of_a_node_lists_a_nodes_keys() {
    let text = r#"image = "debian-12"
[[nodes]]
cpus = "0"
memory = "512M"
host-node = 1
"#;
    let shown = r#"
  × unknown key `host-node`
   ╭─[vm.toml:5:1]
 4 │ memory = "512M"
 5 │ host-node = 1
   · ────┬────
   ·     ╰── here
   ╰────
  help: did you mean `host_node`?
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn help_for_an_unknown_key_of_the_kernel_lists_the_kernels_keys() {
    let text = r#"[kernel]
path = "vmlinuz"
initramfs = "i"
"#;
    let shown = r#"
  × unknown key `initramfs`
   ╭─[vm.toml:3:1]
 2 │ path = "vmlinuz"
 3 │ initramfs = "i"
   · ────┬────
   ·     ╰── here
   ╰────
  help: the keys here: `path`, `initrd`, `cmdline`
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn help_for_an_unrecognizable_key_lists_all_keys() {
    let text = r#"image = "debian-12"
[root]
colour = "red"
"#;
    let shown = r#"
  × unknown key `colour`
   ╭─[vm.toml:3:1]
 2 │ [root]
 3 │ colour = "red"
   · ───┬──
   ·    ╰── here
   ╰────
  help: the keys here: `persistent`, `share`, `on_full`
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn help_for_a_misspelt_word_names_the_intended_word() {
    let text = r#"image = "debian-12"

[[disks]]
path = "a.img"
mode = "exclusiv"
"#;
    let shown = r#"
  × unknown value `exclusiv`
   ╭─[vm.toml:5:8]
 4 │ path = "a.img"
 5 │ mode = "exclusiv"
   ·        ─────┬────
   ·             ╰── here
   ╰────
  help: did you mean `exclusive`?
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn help_for_an_unrecognizable_word_lists_all_words() {
    let text = r#"image = "debian-12"
pages = "big"
"#;
    let shown = r#"
  × unknown value `big`
   ╭─[vm.toml:2:9]
 1 │ image = "debian-12"
 2 │ pages = "big"
   ·         ──┬──
   ·           ╰── here
   ╰────
  help: write one of `4K`, `thp`, `2M`, `1G`
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn text_where_a_number_belongs_is_refused() {
    let text = r#"image = "debian-12"
cpus = "two"
"#;
    let shown = r#"
  × string "two", where a number belongs
   ╭─[vm.toml:2:8]
 1 │ image = "debian-12"
 2 │ cpus = "two"
   ·        ──┬──
   ·          ╰── here
   ╰────
  help: write a whole number, without quotes
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn number_where_text_belongs_is_refused() {
    let text = r#"image = 12
"#;
    let shown = r#"
  × integer `12`, where text belongs
   ╭─[vm.toml:1:9]
 1 │ image = 12
   ·         ─┬
   ·          ╰── here
   ╰────
  help: put it in quotes
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn text_where_true_or_false_belongs_is_refused() {
    let text = r#"image = "debian-12"
balloon = "no"
"#;
    let shown = r#"
  × string "no", where true or false belongs
   ╭─[vm.toml:2:11]
 1 │ image = "debian-12"
 2 │ balloon = "no"
   ·           ──┬─
   ·             ╰── here
   ╰────
  help: write true or false, without quotes
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn text_where_a_list_belongs_is_refused() {
    let text = r#"image = "debian-12"
command = "uname -a"
"#;
    let shown = r#"
  × string "uname -a", where a list belongs
   ╭─[vm.toml:2:11]
 1 │ image = "debian-12"
 2 │ command = "uname -a"
   ·           ─────┬────
   ·                ╰── here
   ╰────
  help: write a list, as ["a", "b"]
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn text_where_a_table_belongs_is_refused() {
    let text = r#"kernel = "vmlinuz"
"#;
    let shown = r#"
  × string "vmlinuz", where a table belongs
   ╭─[vm.toml:1:10]
 1 │ kernel = "vmlinuz"
   ·          ────┬────
   ·              ╰── here
   ╰────
  help: write a table of keys and values
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn size_without_a_unit_is_refused() {
    let text = r#"image = "debian-12"
memory = 512
"#;
    let shown = r#"
  × the size 512 has no unit
   ╭─[vm.toml:2:10]
 1 │ image = "debian-12"
 2 │ memory = 512
   ·          ─┬─
   ·           ╰── here
   ╰────
  help: write "512M" or "512G"
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn size_in_text_without_a_unit_is_refused() {
    let text = r#"image = "debian-12"
memory = "512"
"#;
    let shown = r#"
  × the size "512" has no unit
   ╭─[vm.toml:2:10]
 1 │ image = "debian-12"
 2 │ memory = "512"
   ·          ──┬──
   ·            ╰── here
   ╰────
  help: write "512M" or "512G"
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn size_of_an_unknown_unit_is_refused() {
    let text = r#"image = "debian-12"
memory = "512X"
"#;
    let shown = r#"
  × "X" is not a unit of size
   ╭─[vm.toml:2:10]
 1 │ image = "debian-12"
 2 │ memory = "512X"
   ·          ───┬──
   ·             ╰── here
   ╰────
  help: use K, M, G or T
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn size_below_zero_is_refused() {
    let text = r#"image = "debian-12"
memory = -512
"#;
    let shown = r#"
  × -512 is not a size
   ╭─[vm.toml:2:10]
 1 │ image = "debian-12"
 2 │ memory = -512
   ·          ──┬─
   ·            ╰── here
   ╰────
  help: write a number and a unit, as "512M"
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn size_above_all_numbers_is_refused() {
    let text = r#"image = "debian-12"
memory = "99999999T"
"#;
    let shown = r#"
  × the size "99999999T" is too large for any machine
   ╭─[vm.toml:2:10]
 1 │ image = "debian-12"
 2 │ memory = "99999999T"
   ·          ─────┬─────
   ·               ╰── here
   ╰────
  help: write a smaller one
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn missing_key_is_refused() {
    let text = r#"image = "debian-12"

[[disks]]
mode = "private"
"#;
    let shown = r#"
  × `path` is missing
   ╭─[vm.toml:3:1]
 2 │ 
 3 │ [[disks]]
   · ────┬────
   ·     ╰── here
 4 │ mode = "private"
   ╰────
  help: add `path = ...` here
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn key_given_twice_is_refused() {
    let text = r#"image = "debian-12"
cpus = 1
cpus = 2
"#;
    let shown = r#"
  × duplicate key
   ╭─[vm.toml:3:1]
 2 │ cpus = 1
 3 │ cpus = 2
   · ──┬─
   ·   ╰── here
   ╰────
  help: give each key once
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn text_that_is_not_toml() {
    let text = r#"image = "debian-12"
cpus 2
"#;
    let shown = r#"
  × key with no value
   ╭─[vm.toml:2:6]
 1 │ image = "debian-12"
 2 │ cpus 2
   ·      ▲
   ·      ╰── here
   ╰────
  help: expected `=`
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn open_quote_is_refused() {
    let text = r#"image = "debian-12
"#;
    let shown = r#"
  × invalid basic string
   ╭─[vm.toml:1:19]
 1 │ image = "debian-12
   ·                   ▲
   ·                   ╰── here
   ╰────
  help: expected `"`
"#;
    assert_eq!(refused(text), shown);
}
