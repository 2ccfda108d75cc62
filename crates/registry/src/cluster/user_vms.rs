//! Records of the VMs of other users that have a place in this host's cells: one file each, which only root
//! reads.
//!
//! The admission server writes the files; the user can't. A restarted cell counts the places from them, and
//! the failure of a cell ends the VMs listed here. No file contains a path chosen by the user.

use std::fs;
use std::io;
use std::path::PathBuf;

use config::cluster::UserPlan;
use config::is_name;
use hostfiles::{private, replace_file, replace_volatile_file};
use serde::{Deserialize, Serialize};

use super::files::Files;
use super::interface::{LentMemory, RunningVm, VmShare, owned_name};

/// A VM of another user in a cell of this host.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct UserVm {
    /// The user's id.
    pub uid: u32,
    /// The VM's name, without its owner.
    pub name: String,
    /// The VM's cell.
    pub cell: u16,
    /// Resources that it takes of the cell.
    pub share: VmShare,
    /// Memory that other cells lent for it, by lender.
    pub borrowed: Vec<LentMemory>,
    /// Session of the process that requested the place.
    pub session: i32,
    /// Control group of the VM's processes, relative to the root of control groups; none where limits are
    /// best effort.
    pub group: Option<PathBuf>,
}

impl UserVm {
    /// The name of the VM in the cluster.
    pub fn owned_name(&self) -> String {
        owned_name(self.uid, &self.name)
    }

    /// Whether the VM uses CPUs or memory of this cell.
    pub fn depends_on(&self, cell: u16) -> bool {
        self.cell == cell || self.borrowed.iter().any(|part| part.cell == cell)
    }

    /// Returns the VM's place, for a restarted cell.
    pub fn running(&self) -> RunningVm {
        RunningVm {
            name: self.owned_name(),
            cell: self.cell,
            share: self.share,
            borrowed: self.borrowed.clone(),
            cells: Vec::new(),
            borrowed_cpus: Vec::new(),
            regions: Vec::new(),
        }
    }
}

impl Files {
    /// Returns the users that the cluster admits; none without a cluster.
    ///
    /// # Errors
    /// If the list can't be read.
    pub fn users(&self) -> io::Result<Vec<UserPlan>> {
        match fs::read(self.users_list()) {
            Ok(text) => Ok(serde_json::from_slice(&text)?),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }

    /// Sets the users that the cluster admits. Called before the cluster begins. Removes the records of an
    /// earlier cluster's VMs.
    ///
    /// # Errors
    /// If the list can't be written.
    pub fn admit(&self, users: &[UserPlan]) -> io::Result<()> {
        if self.plan()?.is_empty() && self.user_vms_directory().exists() {
            fs::remove_dir_all(self.user_vms_directory())?;
        }
        private::directories(&self.user_vms_directory())?;
        replace_file(
            &self.users_list(),
            private::FILE_MODE,
            &serde_json::to_vec_pretty(users)?,
        )
    }

    /// Returns the VMs of other users in the cells of this host, by owner and name.
    ///
    /// # Errors
    /// If the directory can't be read.
    pub fn user_vms(&self) -> io::Result<Vec<UserVm>> {
        let entries = match fs::read_dir(self.user_vms_directory()) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        let mut vms = Vec::new();
        for entry in entries {
            // A file that is being replaced has another name briefly, and a file that was just removed has
            // none.
            let text = fs::read(entry?.path()).unwrap_or_default();
            vms.extend(serde_json::from_slice::<UserVm>(&text));
        }
        vms.sort_by(|a, b| (a.uid, &a.name).cmp(&(b.uid, &b.name)));
        vms.dedup_by(|a, b| (a.uid, &a.name) == (b.uid, &b.name));
        Ok(vms)
    }

    /// Writes the record of a user's VM.
    ///
    /// # Errors
    /// If no VM can have the name, or the file can't be written.
    pub fn keep_user_vm(&self, vm: &UserVm) -> io::Result<()> {
        private::directories(&self.user_vms_directory())?;
        let file = self.user_vm_file(vm.uid, &vm.name)?;
        replace_volatile_file(&file, private::FILE_MODE, &serde_json::to_vec(vm)?)
    }

    /// Removes the record of a user's VM, if there is one.
    ///
    /// # Errors
    /// If no VM can have the name, or the file can't be removed.
    pub fn remove_user_vm(&self, uid: u32, name: &str) -> io::Result<()> {
        match fs::remove_file(self.user_vm_file(uid, name)?) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Whether the record of a user's VM equals `vm`.
    pub fn has_user_vm(&self, vm: &UserVm) -> bool {
        let text = self.user_vm_file(vm.uid, &vm.name).and_then(fs::read);
        text.is_ok_and(|text| serde_json::from_slice::<UserVm>(&text).is_ok_and(|written| written == *vm))
    }

    fn user_vm_file(&self, uid: u32, name: &str) -> io::Result<PathBuf> {
        if !is_name(name) {
            return Err(io::Error::other(format!("{name:?} is no VM's name")));
        }
        let file = format!("{}.json", owned_name(uid, name));
        Ok(self.user_vms_directory().join(file))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vm(uid: u32, name: &str) -> UserVm {
        UserVm {
            uid,
            name: name.to_owned(),
            cell: 1,
            share: VmShare {
                vcpus: 2,
                memory_bytes: 1 << 30,
                ..VmShare::default()
            },
            borrowed: vec![LentMemory {
                cell: 0,
                bytes: 1 << 20,
            }],
            session: 7,
            group: None,
        }
    }

    #[test]
    fn vms_of_two_users_with_one_name_are_kept_apart() {
        let directory = tempfile::tempdir().unwrap();
        let files = Files::at(directory.path());
        assert_eq!(files.user_vms().unwrap(), []);
        let (alice, bob) = (vm(1001, "web"), vm(1002, "web"));
        for vm in [&bob, &alice] {
            files.keep_user_vm(vm).unwrap();
        }
        assert_eq!(files.user_vms().unwrap(), [alice.clone(), bob.clone()]);
        files.remove_user_vm(1001, "web").unwrap();
        files.remove_user_vm(1001, "web").unwrap();
        assert_eq!(files.user_vms().unwrap(), std::slice::from_ref(&bob));
        assert!(!files.has_user_vm(&alice) && files.has_user_vm(&bob));
        let moved = UserVm { cell: 0, ..bob };
        assert!(!files.has_user_vm(&moved), "another VM of the same name");
    }

    #[test]
    fn no_name_leads_out_of_the_directory() {
        let directory = tempfile::tempdir().unwrap();
        let files = Files::at(directory.path());
        for name in ["../plan", "", "a/b", ".hidden", "x:y", &"n".repeat(64)] {
            assert!(files.keep_user_vm(&vm(1001, name)).is_err(), "{name:?}");
            assert!(files.remove_user_vm(1001, name).is_err(), "{name:?}");
        }
        assert_eq!(files.user_vms().unwrap(), []);
    }

    #[test]
    fn vm_depends_on_its_cell_and_on_those_that_lent_it_memory() {
        let vm = vm(1001, "web");
        assert!(vm.depends_on(1) && vm.depends_on(0) && !vm.depends_on(2));
        assert_eq!(vm.running().name, "1001:web");
    }

    #[test]
    fn users_are_those_of_the_last_list() {
        let directory = tempfile::tempdir().unwrap();
        let files = Files::at(directory.path());
        assert_eq!(files.users().unwrap(), []);
        let alice = UserPlan {
            uid: 1001,
            name: "alice".to_owned(),
            vcpus: 4,
            memory_bytes: 8 << 30,
        };
        files.admit(std::slice::from_ref(&alice)).unwrap();
        assert_eq!(files.users().unwrap(), [alice]);
        files.keep_user_vm(&vm(1001, "web")).unwrap();
        files.admit(&[]).unwrap();
        assert_eq!(files.users().unwrap(), []);
        assert_eq!(files.user_vms().unwrap(), [], "of another cluster");
    }
}
