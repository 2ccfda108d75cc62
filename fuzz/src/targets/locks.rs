//! The kernel's tables of locks and of unix sockets, whose names any user may choose.

use diskstore::disk::{Held, listed};

const FILE: (u32, u32, u64) = (0xfe, 1, 55);
const FILE_NAME: &str = "fe:01:55";
const KEY: &str = "mb-disk/fe01:37/";

pub fn fuzz(bytes: &[u8]) {
    let table = String::from_utf8_lossy(bytes);
    for line in table.lines() {
        if let Some(held) = Held::parse(line) {
            assert!(line.contains(held.file) && !held.file.contains(char::is_whitespace));
        }
    }
    for pid in hostfiles::lock::listed(&table, FILE) {
        assert!(pid > 0 && table.contains(&pid.to_string()) && table.contains(FILE_NAME));
    }
    let holders = listed(&table, KEY);
    for (index, holder) in holders.iter().enumerate() {
        assert!(!holders[..index].contains(holder), "{holder:?} twice");
        assert!(table.contains(&format!("@{KEY}")) && table.contains(&holder.vm));
        assert!(!holder.vm.contains('\n'), "{holder:?}");
    }
}
