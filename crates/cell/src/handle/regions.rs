//! The shared regions of a running VM.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use registry::cluster::interface::LentMemory;
use registry::vms::Record;

use super::VmHandle;

impl VmHandle {
    /// The file of a shared region that the VM has.
    pub(crate) fn region(&self, name: &str) -> Option<Arc<OwnedFd>> {
        let state = self.state();
        let mut regions = state.regions.iter();
        regions
            .find(|(region, _)| region == name)
            .map(|(_, file)| file.clone())
    }

    /// Records the cells of the memory of a shared region.
    ///
    /// # Errors
    /// If the VM has no such region, or the record can't be written.
    pub(crate) fn record_lenders(&self, name: &str, borrowed: &[LentMemory]) -> io::Result<()> {
        let has = |record: &Record| record.regions.iter().any(|grant| grant.name == name);
        if self.recorder().read(has) != Some(true) {
            return Err(io::Error::other(format!("the VM has no shared region {name}")));
        }
        self.recorder().try_change(|record| {
            let grants = record.regions.iter_mut().filter(|grant| grant.name == name);
            grants.for_each(|grant| grant.borrowed = borrowed.to_vec());
        })
    }
}
