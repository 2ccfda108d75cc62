//! `image.json`: the description of an image.

use serde::{Deserialize, Serialize};

use crate::disk::Format;

/// Version of the record that this program writes and reads.
pub(super) const VERSION: u32 = 1;

/// An image's record.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Version of the format.
    pub version: u32,
    /// The image's name.
    pub name: String,
    /// Kernel file.
    pub kernel: Option<FileRecord>,
    /// Record of the initramfs, if there is one.
    pub initrd: Option<FileRecord>,
    /// Root disk.
    pub disk: Option<FileRecord>,
    /// Format of the root disk: `raw` or `qcow2`.
    pub format: Option<String>,
    /// Required kernel command line of the guest.
    pub cmdline: String,
    /// Origin, for people.
    pub built_from: String,
    /// Seconds since 1970.
    pub created_s: u64,
    /// Version of its agent ([`super::agent_version`]); `None` for an imported image.
    pub agent: Option<String>,
    /// Packages that the user requested beside those of the recipe.
    #[serde(default)]
    pub packages: Vec<String>,
}

/// Why an image that was built is to be built anew.
#[derive(Debug, Eq, PartialEq)]
pub enum Outdated {
    /// Another version of this program built it.
    OtherVersion,
    /// It lacks packages that are requested now.
    Lacks(Vec<String>),
}

impl std::fmt::Display for Outdated {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::OtherVersion => f.write_str("built by another version"),
            Self::Lacks(packages) => write!(f, "built without {}", packages.join(", ")),
        }
    }
}

/// One file of an image.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FileRecord {
    /// Its name in the image's folder.
    pub file: String,
    /// Its length in bytes; a sparse file takes less space.
    pub bytes: u64,
    /// Kind of digest and its value: `sha256:…`, or `sha256-nonzero-64k:…` for a disk (see `digest`).
    pub digest: String,
}

impl Record {
    /// Creates an empty record with the current time.
    pub(super) fn new(name: &str, built_from: String) -> Self {
        let since = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .unwrap_or_default();
        Self {
            version: VERSION,
            name: name.into(),
            kernel: None,
            initrd: None,
            disk: None,
            format: None,
            cmdline: String::new(),
            built_from,
            created_s: since.as_secs(),
            agent: None,
            packages: Vec::new(),
        }
    }

    /// Why the image is to be built anew if it shall have this agent, command line and further packages.
    /// `None` for a current image, and for an imported one, which has any agent and any command line.
    pub fn outdated(&self, agent: &str, cmdline: &str, packages: &[String]) -> Option<Outdated> {
        let had = self.agent.as_deref()?;
        if had != agent || self.cmdline != cmdline {
            return Some(Outdated::OtherVersion);
        }
        let lacks = packages.iter().filter(|name| !self.packages.contains(name));
        let lacks: Vec<String> = lacks.cloned().collect();
        (!lacks.is_empty()).then_some(Outdated::Lacks(lacks))
    }

    /// Format of the root disk.
    pub(super) fn disk_format(&self) -> Option<Format> {
        match self.format.as_deref() {
            Some("raw") => Some(Format::Raw),
            Some("qcow2") => Some(Format::Qcow2),
            _ => None,
        }
    }

    /// Sum of the files' lengths, in bytes.
    pub fn bytes(&self) -> u64 {
        self.files().map(|file| file.bytes).sum()
    }

    /// Yields the files.
    pub fn files(&self) -> impl Iterator<Item = &FileRecord> {
        [&self.kernel, &self.initrd, &self.disk].into_iter().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    /// Promise CMD-31.
    #[test]
    fn image_without_a_requested_package_is_outdated() {
        let mut record = Record::new("debian-12", String::new());
        record.agent = Some("1".into());
        record.cmdline = "quiet".into();
        record.packages = names(&["make", "gcc"]);
        let outdated = |packages: &[&str]| record.outdated("1", "quiet", &names(packages));
        assert_eq!(outdated(&[]), None);
        assert_eq!(outdated(&["gcc", "make"]), None);
        let lacks = Outdated::Lacks(names(&["git", "jq"]));
        assert_eq!(lacks.to_string(), "built without git, jq");
        assert_eq!(outdated(&["git", "gcc", "jq"]), Some(lacks));
        assert_eq!(record.outdated("2", "quiet", &[]), Some(Outdated::OtherVersion));
        assert_eq!(record.outdated("1", "", &[]), Some(Outdated::OtherVersion));
    }

    #[test]
    fn imported_image_is_never_outdated() {
        let record = Record::new("own", String::new());
        assert_eq!(record.outdated("1", "quiet", &names(&["gcc"])), None);
    }
}
