//! The network cards of a VM: TAP devices, and processes of user-mode networking.

use std::sync::Arc;

use config::VmSpec;
use config::vm::{NetKind, NetSpec, SandboxSpec};
use nix::unistd::geteuid;
use registry::cluster::files::Files;
use registry::subnet::{HostFacts, Join};
use shard_api::launch::{Fd, NetBackendLaunch, NetLaunch};
use subnet::Egress;
use subnet::passt::{Passt, PasstChild, PasstSpec};
use subnet::process::Count;

use super::egress::egress;
use super::{OpenError, Opening};
use crate::identity::{Given, IdOwner};
use crate::programs::BuildProgram;
use crate::shard_log::ShardLog;
use crate::subnet_card::{SubnetCard, SubnetCardError, configure};

/// A card of user-mode networking: its passt, and how to start it again.
#[derive(Debug)]
pub(super) struct UserCard {
    /// Its number among all cards of the VM.
    pub number: usize,
    pub spec: PasstSpec,
    /// Its socket among the files.
    pub file: Fd,
    /// Its process, which ends when this is dropped.
    pub child: Option<PasstChild>,
}

/// A card of a subnet.
#[derive(Debug)]
pub(super) struct OnSubnet {
    /// Its number among all cards of the VM.
    pub number: usize,
    /// The shard's end of its socket among the files.
    pub file: Fd,
    /// Its connection, which ends when this is dropped.
    pub card: SubnetCard,
}

/// The cards of a VM.
#[derive(Default)]
pub(super) struct Cards {
    pub launches: Vec<NetLaunch>,
    pub user_mode: Vec<UserCard>,
    pub subnet: Vec<OnSubnet>,
}

impl Opening<'_> {
    /// Opens the TAP devices, and starts the processes of user-mode networking.
    pub fn cards(
        &mut self,
        cid: u32,
        program: &BuildProgram,
        log: &Arc<ShardLog>,
    ) -> Result<Cards, OpenError> {
        let mut all = Cards::default();
        let addresses = hardware_addresses(self.spec, self.name)?;
        for (index, (net, mac)) in self.spec.cards().into_iter().zip(addresses).enumerate() {
            let id = format!("net{index}");
            let backend = match (&net.kind, &net.tap) {
                (NetKind::Tap, Some(tap)) => {
                    let queues = subnet::tap::open(tap, net.queues.unwrap_or(1))?;
                    let queues = queues.into_iter().map(|queue| self.files.add(queue));
                    NetBackendLaunch::Tap(queues.collect())
                }
                (NetKind::Subnet, _) => {
                    let mut join = join(&net, mac, index, self.name, self.spec);
                    configure(&mut join, &Files::open().map_err(SubnetCardError::from)?)?;
                    let (near, card) = SubnetCard::join(id.clone(), join, log.clone())?;
                    let file = self.files.add(near);
                    let backend = match card.has_offloads() {
                        true => NetBackendLaunch::Offloads(file),
                        false => NetBackendLaunch::Packets(file),
                    };
                    all.subnet.push(OnSubnet {
                        number: index,
                        file,
                        card,
                    });
                    backend
                }
                _ => {
                    let count = Count::new()?;
                    let egress =
                        (!net.host).then(|| egress(&id, program, self.spec.sandbox, log.clone(), count));
                    let spec = passt_spec(&net, mac, egress.transpose()?, cid)?;
                    let Passt { socket, child } = subnet::passt::start(&spec)?;
                    let file = self.files.add(socket);
                    all.user_mode.push(UserCard {
                        number: index,
                        spec,
                        file,
                        child: Some(child),
                    });
                    NetBackendLaunch::Stream(file)
                }
            };
            all.launches.push(NetLaunch { id, mac, backend });
        }
        Ok(all)
    }
}

/// The request of a card that joins its subnet. Its network is the one that it names, else that of the VM's
/// share group, else one of the VM alone: commands name a network for the VMs that they start together.
pub(super) fn join(net: &NetSpec, mac: [u8; 6], card: usize, vm: &str, spec: &VmSpec) -> Join {
    let network = net.network.clone().unwrap_or_else(|| match &spec.share_group {
        Some(group) => format!("group-{group}"),
        None => format!("vm-{vm}"),
    });
    Join {
        network,
        vm: vm.to_owned(),
        card,
        mac,
        address: net.address,
        forward: net.forward.clone(),
        host: net.host,
        bandwidth: net.bandwidth.map(|size| size.0),
        packets: net.packets,
        offloads: false,
        sandbox_required: spec.sandbox == SandboxSpec::Require,
        outside: true,
        settings: None,
        facts: HostFacts::default(),
    }
}

/// The settings of a user-mode card's passt.
pub(super) fn passt_spec(
    net: &NetSpec,
    mac: [u8; 6],
    egress: Option<Egress>,
    cid: u32,
) -> Result<PasstSpec, subnet::SubnetError> {
    let forward: Result<_, _> = net.forward.iter().map(|text| text.parse()).collect();
    Ok(PasstSpec {
        mac,
        forward: forward?,
        egress,
        user: passt_user(cid),
    })
}

/// The user and group of the VM's passt and filters: those of its shards outside. Only root can choose them.
fn passt_user(cid: u32) -> Option<(u32, u32)> {
    let identity = geteuid()
        .is_root()
        .then(|| Given::of(IdOwner::Vm(cid)).identity)
        .flatten();
    identity.map(|identity| (identity.uid, identity.gid))
}

/// The hardware address of each card of the VM called `name`: its own, or one made of the name.
pub fn hardware_addresses(spec: &VmSpec, name: &str) -> Result<Vec<[u8; 6]>, subnet::SubnetError> {
    let address = |(index, card): (usize, &NetSpec)| match &card.mac {
        Some(text) => subnet::parse_mac(text),
        None => Ok(subnet::mac_address(name, index)),
    };
    spec.cards().iter().enumerate().map(address).collect()
}
