//! All that a template stands on: another value of any of it is another template.

use std::fmt;
use std::fs;
use std::io;
use std::path::Path;

use config::VmSpec;
use config::settings::ShareBetween;
use config::vm::NetKind;
use data_encoding::HEXLOWER;
use diskstore::image::Record;
use serde::{Deserialize, Serialize};
use serde_json::json;
use sha2::{Digest, Sha256};

use crate::snapshot;

/// Version of `template.json`, and of the way in which templates are made.
const FORMAT: u32 = 2;
/// Bytes of the digest in a key.
const KEY_BYTES: usize = 8;
/// Lines of `/proc/cpuinfo` by which guests find their processor.
const PROCESSOR_LINES: [&str; 7] = [
    "vendor_id",
    "cpu family",
    "model",
    "model name",
    "stepping",
    "microcode",
    "flags",
];

/// Name of a template: a digest of its basis.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key(String);

/// The part of the host that a guest's state depends on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostIdentity {
    /// Digest of the processor's description by the host's kernel.
    pub processor: String,
    /// Release of the host's kernel, whose KVM decides which features of the processor a guest has.
    pub kernel: String,
}

/// VMs that share the template's memory with one another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TemplateSharing {
    /// All VMs of the user.
    User,
    /// The VMs of a named share group.
    Group(String),
    /// The VMs that start from the template.
    Template,
}

/// A disk beside the image's, as far as a guest that has found it does not expect a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TemplateDisk {
    /// Whether the guest may not write.
    pub read_only: bool,
    /// Number of queues; by the number of vCPUs when absent.
    queues: Option<u16>,
}

/// The machine that a guest has found: VMs that have the same one can start from one template.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TemplateMachine {
    /// Guest memory, bytes.
    pub memory: u64,
    /// Number of vCPUs.
    pub cpus: u8,
    /// Kinds of the network cards, in their order.
    // Templates of the first format have none in their description.
    #[serde(default)]
    pub cards: Vec<NetKind>,
    /// Disks beside the image's, in their order.
    #[serde(default)]
    pub disks: Vec<TemplateDisk>,
}

impl TemplateMachine {
    /// The machine of a VM of `spec`.
    pub fn of(spec: &VmSpec) -> Self {
        let disks = spec.disks.iter();
        Self {
            memory: spec.memory.0,
            cpus: spec.cpus,
            cards: spec.cards().iter().map(|card| card.kind).collect(),
            disks: disks
                .map(|disk| TemplateDisk {
                    read_only: disk.read_only,
                    queues: disk.queues,
                })
                .collect(),
        }
    }
}

/// All that a template stands on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Basis {
    format: u32,
    snapshot: u32,
    program: String,
    /// Name of the image.
    pub image: String,
    /// Names and digests of the image's files.
    files: Vec<(String, String)>,
    cmdline: String,
    agent: Option<String>,
    /// The machine that the guest has found.
    #[serde(flatten)]
    pub machine: TemplateMachine,
    /// VMs that share its memory.
    pub sharing: TemplateSharing,
    processor: String,
    kernel: String,
}

impl Key {
    /// The key with this text; none if the text is none.
    pub fn parse(text: &str) -> Option<Self> {
        let digits = text.len() == 2 * KEY_BYTES;
        let hexadecimal = |c: char| matches!(c, '0'..='9' | 'a'..='f');
        (digits && text.chars().all(hexadecimal)).then(|| Self(text.to_owned()))
    }

    /// The text of the key.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl HostIdentity {
    /// That of this host.
    ///
    /// # Errors
    /// If `/proc` is not mounted.
    pub fn of_this_host() -> io::Result<Self> {
        let release = fs::read_to_string("/proc/sys/kernel/osrelease")?;
        Ok(Self {
            processor: processor(&fs::read_to_string("/proc/cpuinfo")?),
            kernel: release.trim().to_owned(),
        })
    }
}

/// Digest of the first processor in a text of `/proc/cpuinfo`.
pub(super) fn processor(cpuinfo: &str) -> String {
    let first = cpuinfo.lines().take_while(|line| !line.trim().is_empty());
    let mut hash = Sha256::new();
    for line in first {
        let name = line.split(':').next().unwrap_or_default().trim();
        if PROCESSOR_LINES.contains(&name) {
            hash.update(line.as_bytes());
            hash.update(b"\n");
        }
    }
    HEXLOWER.encode(&hash.finalize()[..KEY_BYTES])
}

impl Basis {
    /// The basis of the template from which a VM of `spec` starts, whose image has `record`. `between` is the
    /// host file's rule for sharing.
    pub fn of(spec: &VmSpec, record: &Record, between: ShareBetween, host: &HostIdentity) -> Self {
        let files = record.files();
        Self {
            format: FORMAT,
            snapshot: snapshot::VERSION,
            program: env!("CARGO_PKG_VERSION").to_owned(),
            image: record.name.clone(),
            files: files
                .map(|file| (file.file.clone(), file.digest.clone()))
                .collect(),
            cmdline: record.cmdline.clone(),
            agent: record.agent.clone(),
            machine: TemplateMachine::of(spec),
            sharing: match (&spec.share_group, between) {
                (Some(group), _) => TemplateSharing::Group(group.clone()),
                (None, ShareBetween::All) => TemplateSharing::User,
                (None, ShareBetween::Group) => TemplateSharing::Template,
            },
            processor: host.processor.clone(),
            kernel: host.kernel.clone(),
        }
    }

    /// The template's key.
    ///
    /// # Errors
    /// If the basis can't be written as JSON.
    pub fn key(&self) -> io::Result<Key> {
        let text = serde_json::to_vec(self)?;
        Ok(Key(HEXLOWER.encode(&Sha256::digest(text)[..KEY_BYTES])))
    }

    /// The spec of the VM of which the template is made. The file `placeholder` stands for each of its disks
    /// beside the image's.
    ///
    /// # Errors
    /// If the basis, which was read from a file, describes no VM.
    pub fn spec(&self, key: &Key, placeholder: &Path) -> io::Result<VmSpec> {
        let name = format!("template-{key}");
        let card = |kind: &NetKind| match kind {
            // Not the network of its share group: its VMs must not find a guest that is to be copied.
            NetKind::Subnet => json!({ "kind": kind, "network": name }),
            NetKind::User | NetKind::Tap => json!({ "kind": kind }),
        };
        let disk = |disk: &TemplateDisk| {
            json!({
                "path": placeholder,
                "format": "raw",
                "read_only": disk.read_only,
                "queues": disk.queues,
                "share": "never",
            })
        };
        let TemplateMachine {
            memory,
            cpus,
            cards,
            disks,
        } = &self.machine;
        let mut spec = json!({
            "name": name,
            "image": self.image,
            "cpus": cpus,
            "memory": config::Size(*memory),
            "nets": cards.iter().map(card).collect::<Vec<_>>(),
            "disks": disks.iter().map(disk).collect::<Vec<_>>(),
        });
        match &self.sharing {
            TemplateSharing::User => {}
            TemplateSharing::Group(group) => spec["share_group"] = group.as_str().into(),
            // Memory that stands for an image's pages can't be mapped while VMs of another group map them.
            TemplateSharing::Template => spec["share"] = "never".into(),
        }
        Ok(serde_json::from_value(spec)?)
    }

    /// Whether the image of `record` is no longer the one of this basis.
    pub fn is_stale(&self, record: &Record) -> bool {
        let files = record.files().map(|file| (&file.file, &file.digest));
        let own = self.files.iter().map(|(file, digest)| (file, digest));
        !files.eq(own) || self.cmdline != record.cmdline || self.agent != record.agent
    }
}
