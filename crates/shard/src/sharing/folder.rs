//! Sharing for a shared folder: records which guest pages are copies of pages of its files.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::sync::Arc;

use super::extents::ImageId;
use super::leases::FILES_MAX;
use super::mapper::Mapper;
use super::read_parts::{Source, cut};

/// Sharing of one folder.
pub struct FolderSharing {
    mapper: Arc<Mapper>,
    /// The leased file of each node. A wrong one does no harm: pages are compared before they are mapped.
    files: BTreeMap<u64, ImageId>,
}

impl FolderSharing {
    /// Creates the sharing of a folder without leased files.
    pub fn new(mapper: Arc<Mapper>) -> Self {
        Self {
            mapper,
            files: BTreeMap::new(),
        }
    }

    /// Takes the file of a node from the folder's process, which is not trusted. Returns whether its pages
    /// will be shared.
    pub fn receive(&mut self, node: u64, file: File) -> bool {
        let Some(image) = self.mapper.lend(file) else {
            return false;
        };
        if self.files.len() >= 2 * FILES_MAX {
            let mapper = &self.mapper;
            self.files.retain(|_, image| mapper.image(*image).is_some());
        }
        self.files.insert(node, image);
        true
    }

    /// Forgets the nodes: the guest begins another connection.
    pub fn forget(&mut self) {
        self.files.clear();
    }

    /// Prepares for data of a node's file from `offset` on that are about to be copied to `pieces` (address
    /// and length each), and records their origin.
    ///
    /// # Errors
    /// Fails if the host has no memory for it.
    pub fn before_copy(
        &self,
        node: u64,
        offset: u64,
        pieces: impl Iterator<Item = (u64, u64)>,
    ) -> io::Result<()> {
        let Some(image) = self.files.get(&node).copied() else {
            return Ok(());
        };
        if self.mapper.image(image).is_none() {
            return Ok(());
        }
        let source = |offset, bytes| Source::Image { image, offset, bytes };
        let parts = cut(pieces, offset, source, |host| self.mapper.page_at(host));
        self.mapper.before_copy(&parts)
    }
}
