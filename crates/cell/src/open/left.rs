//! An opened VM on its way from a monitor to its successor.

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use child_process::{LeftProcess, ServiceProcess};
use config::VmSpec;
use diskstore::claim::Claim;
use diskstore::disk::announce_again;
use registry::share_group::ShareGroup;
use registry::subnet::{Join, NetworkSettings};
use serde::{Deserialize, Serialize};
use shard_api::launch::{DiskFormat, Fd, LaunchSpec, NetBackendLaunch};
use subnet::passt::{LeftCard, PasstChild};
use subnet::process::{Count, FilterProcess, LeftFilter};

use super::cards::{OnSubnet, UserCard, hardware_addresses, join, passt_spec};
use super::egress::egress;
use super::folders::{Folder, LeftServer};
use super::{Locks, OpenError, VmResources};
use crate::left::{Leaving, LeftFiles};
use crate::programs::BuildProgram;
use crate::shard_log::ShardLog;
use crate::share_group::Claims;
use crate::subnet_card::{LeftSubnetCard, SubnetCard};

/// Everything of a [`VmResources`] but its spec, which is in the VM's record. Descriptors are positions among
/// those that are left.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct LeftOpened {
    launch: LaunchSpec,
    files: Vec<Fd>,
    console: Fd,
    kernel: PathBuf,
    ports: Fd,
    disk_file_bytes: u64,
    keeps_writes: bool,
    group: ShareGroup,
    claims: Vec<(Fd, u64)>,
    refused: Vec<PathBuf>,
    locks: Vec<Fd>,
    log: [Fd; 3],
    cards: Vec<Card>,
    /// Shared folders. Absent from a monitor of the release before.
    #[serde(default)]
    folders: Vec<LeftServer>,
    /// Added for cards of a subnet; a program that does not know it has none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    subnet: Vec<SubnetCardRecord>,
}

/// A card of a subnet.
#[derive(Debug, Serialize, Deserialize)]
struct SubnetCardRecord {
    /// Its number among all cards of the VM.
    number: usize,
    /// The shard's end of its socket among the VM's files.
    file: Fd,
    /// Copy of the gateway's end.
    far: Fd,
    /// The connection that joined it; none if it is off its network.
    connection: Option<Fd>,
    /// Whether the guest reaches the outside. Absent from a program that does not know it.
    #[serde(default = "yes")]
    outside: bool,
    /// Settings of its network when it joined: the cluster's file may have others now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    settings: Option<NetworkSettings>,
}

fn yes() -> bool {
    true
}

/// A card of user-mode networking.
#[derive(Debug, Serialize, Deserialize)]
struct Card {
    /// Its number among all cards of the VM.
    number: usize,
    /// Its socket among the VM's files.
    file: Fd,
    /// Its processes; none if they could not be started again.
    passt: Option<Process>,
    filter: Option<Filter>,
    count: Option<Fd>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Process {
    pid: u32,
    pidfd: Fd,
}

#[derive(Debug, Serialize, Deserialize)]
struct Filter {
    process: Process,
    lists: Fd,
    log: Fd,
}

impl Process {
    pub(super) fn leave(process: &ServiceProcess, leaving: &mut Leaving) -> io::Result<Self> {
        Ok(Self {
            pid: process.id(),
            pidfd: leaving.add(process.pidfd())?,
        })
    }

    pub(super) fn take(self, files: &mut LeftFiles) -> io::Result<LeftProcess> {
        Ok(LeftProcess {
            pid: self.pid,
            pidfd: files.take(self.pidfd)?,
        })
    }
}

impl Filter {
    fn leave(filter: &FilterProcess, leaving: &mut Leaving) -> io::Result<Self> {
        Ok(Self {
            process: Process::leave(filter.process(), leaving)?,
            lists: leaving.add(filter.lists())?,
            log: leaving.add(filter.log())?,
        })
    }

    fn take(self, files: &mut LeftFiles) -> io::Result<LeftFilter> {
        Ok(LeftFilter {
            process: self.process.take(files)?,
            lists: files.take(self.lists)?,
            log: files.take(self.log)?,
        })
    }
}

impl VmResources {
    /// Leaves the VM to a successor of this process.
    ///
    /// # Errors
    /// If this process has no descriptors left.
    pub(crate) fn leave(&self, leaving: &mut Leaving) -> io::Result<LeftOpened> {
        let mut all = Vec::new();
        for file in &self.files {
            all.push(leaving.add(file)?);
        }
        let mut claims = Vec::new();
        for claim in self.claims.held() {
            let (file, byte) = claim.left();
            claims.push((leaving.add(file)?, byte));
        }
        let mut locks = Vec::new();
        for lock in self.locks.files() {
            locks.push(leaving.add(lock)?);
        }
        let cards = self.passt.iter().map(|card| card.leave(leaving));
        let cards = cards.collect::<io::Result<_>>()?;
        let folders = self.folders.iter().map(|folder| folder.leave(leaving));
        let folders = folders.collect::<io::Result<_>>()?;
        let subnet = self.subnet.iter().map(|card| card.leave(leaving));
        let subnet = subnet.collect::<io::Result<_>>()?;
        Ok(LeftOpened {
            launch: self.launch.clone(),
            files: all,
            console: leaving.add(&self.console)?,
            kernel: self.kernel.clone(),
            ports: leaving.add(&self.ports)?,
            disk_file_bytes: self.disk_file_bytes,
            keeps_writes: self.keeps_writes,
            group: self.claims.group().clone(),
            claims,
            refused: self.claims.refused().to_vec(),
            locks,
            log: self.log.leave(leaving)?,
            cards,
            folders,
            subnet,
        })
    }

    /// Takes over a VM with this spec, which is called `name`, from a predecessor of this process. Filters
    /// that are started again execute `program`.
    ///
    /// # Errors
    /// If a descriptor is missing, or the host has no threads left.
    pub(crate) fn adopt(
        left: LeftOpened,
        files: &mut LeftFiles,
        spec: VmSpec,
        name: &str,
        program: &BuildProgram,
    ) -> Result<Self, OpenError> {
        let mut take_all =
            |all: Vec<Fd>| -> io::Result<Vec<_>> { all.into_iter().map(|file| files.take(file)).collect() };
        let (all, locks) = (take_all(left.files)?, take_all(left.locks)?);
        let mut claims = Vec::new();
        for (file, byte) in left.claims {
            claims.push(Arc::new(Claim::adopt(files.take(file)?.into(), byte)));
        }
        let log = Arc::new(ShardLog::take(left.log, files)?);
        let cid = left.launch.vsock.as_ref().map_or(0, |vsock| vsock.cid);
        let (nets, addresses) = (spec.cards(), hardware_addresses(&spec, name)?);
        let mut passt = Vec::new();
        for card in left.cards {
            let missing = || io::Error::from(io::ErrorKind::InvalidData);
            let net = nets.get(card.number).ok_or_else(missing)?;
            let mac = *addresses.get(card.number).ok_or_else(missing)?;
            let id = format!("net{}", card.number);
            let egress = card.count.map(|count| {
                let count = Count::adopt(files.take(count)?)?;
                egress(&id, program, spec.sandbox, log.clone(), count)
            });
            let spec = passt_spec(net, mac, egress.transpose()?, cid)?;
            let child = card.passt.map(|process| {
                let left = LeftCard {
                    passt: process.take(files)?,
                    filter: card.filter.map(|filter| filter.take(files)).transpose()?,
                };
                PasstChild::adopt(left, &spec)
            });
            let child = child.transpose()?;
            passt.push(UserCard {
                number: card.number,
                spec,
                file: card.file,
                child,
            });
        }
        let folders = left.folders.into_iter();
        let folders = folders.map(|folder| Folder::adopt(folder, files, &spec, program, &log));
        let folders = folders.collect::<io::Result<_>>()?;
        let mut subnet = Vec::new();
        for card in left.subnet {
            let missing = || io::Error::from(io::ErrorKind::InvalidData);
            let net = nets.get(card.number).ok_or_else(missing)?;
            let mac = *addresses.get(card.number).ok_or_else(missing)?;
            // The shard's launch decides: it has the other end of the socket.
            let launch = left.launch.nets.get(card.number).ok_or_else(missing)?;
            let request = Join {
                outside: card.outside,
                settings: card.settings,
                offloads: matches!(launch.backend, NetBackendLaunch::Offloads(_)),
                ..join(net, mac, card.number, name, &spec)
            };
            let descriptors = LeftSubnetCard {
                far: files.take(card.far)?,
                connection: card.connection.map(|file| files.take(file)).transpose()?,
            };
            let id = format!("net{}", card.number);
            subnet.push(OnSubnet {
                number: card.number,
                file: card.file,
                card: SubnetCard::adopt(id, request, descriptors, log.clone())?,
            });
        }
        let announcements = left
            .launch
            .disks
            .iter()
            .flat_map(|disk| &disk.layers)
            .filter(|layer| layer.format != DiskFormat::Scratch)
            .filter_map(|layer| all.get(layer.file.0))
            .map(|file| announce_again(file, name))
            .collect();
        Ok(Self {
            spec,
            claims: Claims::adopt(left.group, claims, left.refused),
            launch: left.launch,
            files: all,
            console: files.take(left.console)?.into(),
            kernel: left.kernel,
            ports: File::from(files.take(left.ports)?),
            disk_file_bytes: left.disk_file_bytes,
            keeps_writes: left.keeps_writes,
            locks: Locks::Left {
                files: locks,
                _announcements: announcements,
            },
            passt,
            folders,
            subnet,
            log,
        })
    }
}

impl OnSubnet {
    fn leave(&self, leaving: &mut Leaving) -> io::Result<SubnetCardRecord> {
        let LeftSubnetCard { far, connection } = self.card.left()?;
        Ok(SubnetCardRecord {
            number: self.number,
            file: self.file,
            far: leaving.add(far)?,
            connection: connection.map(|file| leaving.add(file)).transpose()?,
            outside: self.card.request().outside,
            settings: self.card.request().settings.clone(),
        })
    }
}

impl UserCard {
    fn leave(&self, leaving: &mut Leaving) -> io::Result<Card> {
        let passt = self.child.as_ref().map(PasstChild::passt);
        let filter = self.child.as_ref().and_then(PasstChild::filter);
        let count = self.spec.egress.as_ref().map(|egress| &egress.count);
        Ok(Card {
            number: self.number,
            file: self.file,
            passt: passt
                .map(|process| Process::leave(process, leaving))
                .transpose()?,
            filter: filter.map(|filter| Filter::leave(filter, leaving)).transpose()?,
            count: count.map(|count| leaving.add(count.as_ref())).transpose()?,
        })
    }
}
