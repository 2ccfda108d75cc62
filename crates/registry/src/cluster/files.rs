//! The files of this host's cells: a directory for each below the runtime directory.
//!
//! A cell's process holds its directory's lock, so at most one process runs. Its guard holds another lock, so
//! at most one guard runs, whether it has started a process or not. A file counts the processes; the count is
//! the cell's incarnation number. The plan lists the cells with their CPUs and memory. It lasts as long as
//! the cluster, and so does the state that a cell's next process needs: the incarnation number and the memory
//! that the cell has lent.
//!
//! `cluster up` writes the plan and `cluster down` removes it. Cells claim their directories. Commands,
//! monitors, the API and `hostinfo::facts` find cells here.

mod lock;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use config::cluster::{BorrowingSpec, CellPlan, NetworkSpec, PressureSpec, RegionSpec, SchedulingSpec, Site};
use hostfiles::{private, replace_file, replace_volatile_file};
use protocol::grant::Amounts;

pub use self::lock::{CellLock, GuardLock};
use crate::runtime;

/// The directory of a host's cells.
#[derive(Clone, Debug)]
pub struct Files(PathBuf);

/// The directory of one cell.
#[derive(Clone, Debug)]
pub struct CellFiles(PathBuf);

impl Files {
    /// The directory below this user's runtime directory.
    pub fn open() -> io::Result<Self> {
        Ok(Self::at(&runtime::directory()?))
    }

    /// The directory below a runtime directory.
    pub fn at(runtime: &Path) -> Self {
        Self(runtime.join("cells"))
    }

    /// The cells with their CPUs and memory; none without a cluster.
    pub fn plan(&self) -> io::Result<Vec<CellPlan>> {
        match fs::read(self.0.join("plan.json")) {
            Ok(text) => Ok(serde_json::from_slice(&text)?),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }

    /// Hosts of the cluster; none if this host is the only one.
    pub fn site(&self) -> io::Result<Option<Site>> {
        match fs::read(self.0.join("site.json")) {
            Ok(text) => Ok(Some(serde_json::from_slice(&text)?)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Whether and at which amounts the cells of this host borrow by themselves.
    ///
    /// # Errors
    /// If the record can't be read.
    pub fn borrowing(&self) -> io::Result<BorrowingSpec> {
        match fs::read(self.0.join("borrowing.json")) {
            Ok(text) => Ok(serde_json::from_slice(&text)?),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(BorrowingSpec::default()),
            Err(error) => Err(error),
        }
    }

    /// Sets how the cells of this host borrow. Called before the cells start.
    ///
    /// # Errors
    /// If it can't be written.
    pub fn set_borrowing(&self, spec: &BorrowingSpec) -> io::Result<()> {
        private::directories(&self.0)?;
        replace(&self.0.join("borrowing.json"), &serde_json::to_vec_pretty(spec)?)
    }

    /// The reaction of this host's cells to a shortage of memory.
    ///
    /// # Errors
    /// If the record can't be read.
    pub fn pressure(&self) -> io::Result<PressureSpec> {
        match fs::read(self.0.join("pressure.json")) {
            Ok(text) => Ok(serde_json::from_slice(&text)?),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(PressureSpec::default()),
            Err(error) => Err(error),
        }
    }

    /// Sets how the cells of this host react to a shortage of memory. Called before the cells start.
    ///
    /// # Errors
    /// If it can't be written.
    pub fn set_pressure(&self, spec: &PressureSpec) -> io::Result<()> {
        private::directories(&self.0)?;
        replace(&self.0.join("pressure.json"), &serde_json::to_vec_pretty(spec)?)
    }

    /// The scheduler of the CPUs of this host's cells. The default without a record, as after an upgrade.
    ///
    /// # Errors
    /// If the record can't be read.
    pub fn scheduling(&self) -> io::Result<SchedulingSpec> {
        match fs::read(self.0.join("scheduling.json")) {
            Ok(text) => Ok(serde_json::from_slice(&text)?),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(SchedulingSpec::default()),
            Err(error) => Err(error),
        }
    }

    /// Sets the scheduler of the CPUs of this host's cells. Called before the cells start.
    ///
    /// # Errors
    /// If it can't be written.
    pub fn set_scheduling(&self, spec: &SchedulingSpec) -> io::Result<()> {
        private::directories(&self.0)?;
        replace(&self.0.join("scheduling.json"), &serde_json::to_vec_pretty(spec)?)
    }

    /// The shared regions of the cluster, those of other hosts too. None without a record, as after an
    /// upgrade.
    ///
    /// # Errors
    /// If the record can't be read.
    pub fn regions(&self) -> io::Result<Vec<RegionSpec>> {
        match fs::read(self.0.join("regions.json")) {
            Ok(text) => Ok(serde_json::from_slice(&text)?),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }

    /// Sets the shared regions of the cluster. Called before the cells start.
    ///
    /// # Errors
    /// If it can't be written.
    pub fn set_regions(&self, regions: &[RegionSpec]) -> io::Result<()> {
        private::directories(&self.0)?;
        replace(&self.0.join("regions.json"), &serde_json::to_vec_pretty(regions)?)
    }

    /// The networks of the cluster, those of other hosts too. None without a record, as after an upgrade.
    ///
    /// # Errors
    /// If the record can't be read.
    pub fn networks(&self) -> io::Result<Vec<NetworkSpec>> {
        match fs::read(self.0.join("networks.json")) {
            Ok(text) => Ok(serde_json::from_slice(&text)?),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }

    /// Sets the networks of the cluster. Called before the cells start.
    ///
    /// # Errors
    /// If it can't be written.
    pub fn set_networks(&self, networks: &[NetworkSpec]) -> io::Result<()> {
        private::directories(&self.0)?;
        replace(
            &self.0.join("networks.json"),
            &serde_json::to_vec_pretty(networks)?,
        )
    }

    /// List of users that the cluster admits.
    pub(super) fn users_list(&self) -> PathBuf {
        self.0.join("users.json")
    }

    /// Directory of the records of users' VMs.
    pub(super) fn user_vms_directory(&self) -> PathBuf {
        self.0.join("user-vms")
    }

    /// Copy of the last file of asserted facts that was right: it counts while the user's file is wrong.
    pub fn asserted_facts(&self) -> PathBuf {
        self.0.join("asserted.facts")
    }

    /// The log of the admission server.
    pub fn admission_log(&self) -> PathBuf {
        self.0.join("admission.log")
    }

    /// Directory of the etcd that this host runs, with its data and its log.
    pub fn etcd(&self) -> PathBuf {
        self.0.join("etcd")
    }

    /// Creates a cluster: a directory for each cell, and the plan.
    pub fn create(&self, plan: &[CellPlan], site: Option<&Site>) -> io::Result<()> {
        for cell in plan {
            private::directories(&self.cell(cell.number).0)?;
            for note in ["failed", "ends"] {
                remove(&self.cell(cell.number).0.join(note))?;
            }
        }
        // Loans and cordons last as long as the plan is the same.
        if self.plan()? != plan {
            for cell in plan {
                self.cell(cell.number).forget_lent()?;
                self.cell(cell.number).cordon(false)?;
            }
        }
        // The plan comes last, because its existence marks the cluster as created.
        match site {
            Some(site) => replace(&self.0.join("site.json"), &serde_json::to_vec_pretty(site)?)?,
            None => remove(&self.0.join("site.json"))?,
        }
        replace(&self.0.join("plan.json"), &serde_json::to_vec_pretty(plan)?)
    }

    /// Replaces this host's record of the cluster's hosts while its cells run.
    ///
    /// # Errors
    /// If it can't be written.
    pub fn set_site(&self, site: &Site) -> io::Result<()> {
        replace(&self.0.join("site.json"), &serde_json::to_vec_pretty(site)?)
    }

    /// Removes the files of a cluster that has no running cell.
    pub fn remove(&self) -> io::Result<()> {
        match fs::remove_dir_all(&self.0) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// The directory of a cell.
    pub fn cell(&self, number: u16) -> CellFiles {
        CellFiles(self.0.join(number.to_string()))
    }

    /// Cells whose processes run, or whose guards try to start one. The guard of a failed cell starts none.
    pub fn occupied(&self) -> io::Result<Vec<CellPlan>> {
        let mut plan = self.plan()?;
        plan.retain(|cell| {
            let cell = self.cell(cell.number);
            cell.runs() || cell.is_guarded() && !cell.has_failed()
        });
        Ok(plan)
    }

    /// Cells whose processes run.
    pub fn running(&self) -> io::Result<Vec<CellPlan>> {
        let mut plan = self.plan()?;
        plan.retain(|cell| self.cell(cell.number).runs());
        Ok(plan)
    }
}

impl CellFiles {
    /// Socket to which other cells of this host connect.
    pub fn link_socket(&self) -> PathBuf {
        self.0.join("link.sock")
    }

    /// Socket to which clients connect.
    pub fn socket(&self) -> PathBuf {
        self.0.join("cell.sock")
    }

    /// Socket on which the cell's guard accepts requests.
    pub fn guard_socket(&self) -> PathBuf {
        self.0.join("guard.sock")
    }

    /// Log of the cell's processes.
    pub fn log(&self) -> PathBuf {
        self.0.join("log")
    }

    /// Records that the cell has failed: no process of it starts again until the cluster is created anew.
    ///
    /// # Errors
    /// If the note can't be written.
    pub fn fail(&self) -> io::Result<()> {
        replace(&self.0.join("failed"), b"")
    }

    /// Whether the cell has failed.
    pub fn has_failed(&self) -> bool {
        self.0.join("failed").exists()
    }

    /// Records whether the cell is cordoned, for all its later processes.
    ///
    /// # Errors
    /// If the note can't be written or removed.
    pub fn cordon(&self, is_cordoned: bool) -> io::Result<()> {
        let note = self.0.join("cordoned");
        if is_cordoned {
            return replace(&note, b"");
        }
        remove(&note)
    }

    /// Whether the cell is cordoned: it takes no new VM.
    pub fn is_cordoned(&self) -> bool {
        self.0.join("cordoned").exists()
    }

    /// Records that the cell is to end, for a process of it that accepts no requests yet.
    ///
    /// # Errors
    /// If the note can't be written.
    pub fn end(&self) -> io::Result<()> {
        replace(&self.0.join("ends"), b"")
    }

    /// Whether the cell is to end.
    pub fn is_to_end(&self) -> bool {
        self.0.join("ends").exists()
    }

    /// Withdraws an order to end, for a guard that is started again.
    ///
    /// # Errors
    /// If the note can't be removed.
    pub fn begin_again(&self) -> io::Result<()> {
        remove(&self.0.join("ends"))
    }

    /// Incarnation number of the cell's last process; 0 before the first.
    pub fn life(&self) -> u32 {
        let text = fs::read_to_string(self.0.join("lives")).unwrap_or_default();
        text.trim().parse().unwrap_or(0)
    }

    /// Replaces the incarnation number, because the hosts of a cluster count incarnations together.
    pub fn set_life(&self, life: u32) -> io::Result<()> {
        replace(&self.0.join("lives"), life.to_string().as_bytes())
    }

    /// Records when the cell was last certainly a member, in milliseconds since the host's start. The record
    /// outlives the process.
    ///
    /// # Errors
    /// If the note can't be written.
    pub fn note_member(&self, uptime_ms: u64) -> io::Result<()> {
        replace_volatile_file(
            &self.0.join("member"),
            private::FILE_MODE,
            uptime_ms.to_string().as_bytes(),
        )
    }

    /// Time at which the cell was last certainly a member, as recorded by [`CellFiles::note_member`]; none if
    /// it never was.
    pub fn last_member(&self) -> Option<u64> {
        let text = fs::read_to_string(self.0.join("member")).ok()?;
        text.trim().parse().ok()
    }

    /// Memory that the cell has lent, by borrower; none if it never lent any.
    pub fn lent(&self) -> io::Result<Option<Amounts>> {
        match fs::read(self.0.join("lent.json")) {
            // The host has crashed: no VM uses what was lent.
            Ok(text) if text.is_empty() => Ok(None),
            Ok(text) => Ok(Some(serde_json::from_slice(&text)?)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Records the memory that the cell has lent. The record outlives the process, not a restart of the host.
    /// Only the cell's process calls it, which holds the directory's lock.
    pub fn keep_lent(&self, lent: &Amounts) -> io::Result<()> {
        private::replace_own_file(&self.0.join("lent.json"), &serde_json::to_vec(lent)?)
    }

    /// The part of the lent memory that borrowers requested, by borrower; empty without a record.
    pub fn lent_on_request(&self) -> io::Result<Amounts> {
        match fs::read(self.0.join("lent-on-request.json")) {
            Ok(text) if text.is_empty() => Ok(Amounts::new()),
            Ok(text) => Ok(serde_json::from_slice(&text)?),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Amounts::new()),
            Err(error) => Err(error),
        }
    }

    /// Records the part of the lent memory that borrowers requested. It lasts as long as that of
    /// [`CellFiles::keep_lent`].
    pub fn keep_lent_on_request(&self, lent: &Amounts) -> io::Result<()> {
        private::replace_own_file(&self.0.join("lent-on-request.json"), &serde_json::to_vec(lent)?)
    }

    fn forget_lent(&self) -> io::Result<()> {
        remove(&self.0.join("lent-on-request.json"))?;
        remove(&self.0.join("lent.json"))
    }
}

/// Replaces a file whole. Only this user can read it.
fn replace(path: &Path, text: &[u8]) -> io::Result<()> {
    replace_file(path, private::FILE_MODE, text)
}

/// Removes a file, which may be missing.
fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
