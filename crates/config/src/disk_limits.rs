//! Limits of the requests to a VM's disks, by the names of the disks.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::fault::{Fault, fault};
use crate::size::Size;
use crate::vm::VmSpec;

/// A disk of a VM. In JSON and on the command line, `"root"` or a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum DiskName {
    /// The image's root disk.
    Root,
    /// One of the other disks, by its place in the VM file, from 0.
    Other(usize),
}

impl FromStr for DiskName {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "root" => Ok(Self::Root),
            number => {
                let number = number.parse::<u16>();
                let number = number.map_err(|_| "write root, or a disk's place in the VM file, from 0");
                number.map(|number| Self::Other(usize::from(number)))
            }
        }
    }
}

impl TryFrom<String> for DiskName {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<DiskName> for String {
    fn from(name: DiskName) -> Self {
        match name {
            DiskName::Root => "root".to_owned(),
            DiskName::Other(number) => number.to_string(),
        }
    }
}

/// The limits of one disk in a spec.
#[derive(Debug)]
pub struct DiskLimitsMut<'a> {
    /// Bytes per second.
    pub bandwidth: &'a mut Option<Size>,
    /// Requests per second.
    pub operations: &'a mut Option<u32>,
}

impl VmSpec {
    /// Returns the limits of a disk.
    ///
    /// # Errors
    /// If the VM has no such disk.
    pub fn disk_limits(&mut self, disk: DiskName) -> Result<DiskLimitsMut<'_>, Fault> {
        let number = match disk {
            DiskName::Root => {
                let root = &mut self.root;
                return Ok(DiskLimitsMut {
                    bandwidth: &mut root.bandwidth,
                    operations: &mut root.operations,
                });
            }
            DiskName::Other(number) => number,
        };
        let count = self.disks.len();
        let disk = self.disks.get_mut(number).ok_or_else(|| {
            fault(
                &["disks", &number.to_string()],
                format!("there is no disk {number}; the VM file has {count}"),
                "name a disk by its place in the VM file, from 0, or root",
            )
        })?;
        Ok(DiskLimitsMut {
            bandwidth: &mut disk.bandwidth,
            operations: &mut disk.operations,
        })
    }
}
