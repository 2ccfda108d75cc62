//! The kernel's tables of locks and of unix sockets, whose names any user may choose.

use diskstore::disk::listed;
use hostfiles::lock::table::LockEntry;

const KEY: &str = "mb-disk/fe01:37/";

pub fn fuzz(bytes: &[u8]) {
    let table = String::from_utf8_lossy(bytes);
    for line in table.lines() {
        if let Some(lock) = LockEntry::parse(line) {
            assert!(line.contains(lock.file) && !lock.file.contains(char::is_whitespace));
            assert!(line.contains("FLOCK") || line.contains("POSIX") || !lock.is_flock);
            assert!(lock.pid != Some(0));
            if let Some(pid) = lock.pid {
                assert!(line.contains(&pid.to_string()));
            }
        }
    }
    let holders = listed(&table, KEY);
    for (index, holder) in holders.iter().enumerate() {
        assert!(!holders[..index].contains(holder), "{holder:?} twice");
        assert!(table.contains(&format!("@{KEY}")) && table.contains(&holder.vm));
        assert!(!holder.vm.contains('\n'), "{holder:?}");
    }
}
