//! The messages between the monitors of a VM's home and of its parts on other hosts.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::net::SocketAddr;
use std::ops::Range;

use config::{Size, VmSpec};
use registry::cluster::interface::Vcpu;
use registry::json_line::Protocol;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};
use shard_api::launch::{Answer, Leaf, MemoryLaunch, Order, Report, SandboxPolicy, TscLaunch};
use shard_api::platform::HostProcessor;
use urpc::version::Versions;

use super::shared_memory::Offer;

/// The protocol of a part as the home speaks it. The shards of a VM also exchange packets and pages, whose
/// form has no version of its own: it changes with this version, and older ones are refused.
///
/// Since version 2 a part's monitor obeys [`ToPart::OfHost`], and passes on the answers to orders that stop
/// one vCPU.
pub const OF_HOME: Protocol = Protocol {
    name: "the protocol of VMs over several hosts",
    peer: "the other host",
    versions: Versions { oldest: 1, newest: 2 },
};

/// The first version whose monitors of parts act on single vCPUs and on their host.
const ACTS_ON_HOST: u16 = 2;

/// Whether a monitor of a part that speaks these versions acts on single vCPUs and on its host.
pub fn acts_on_host(part: Versions) -> bool {
    part.newest >= ACTS_ON_HOST
}

/// The protocol as a part's monitor speaks it.
pub const OF_PART: Protocol = Protocol {
    peer: "the home's host",
    ..OF_HOME
};

/// Bytes of the secret that distinguishes the connections of one VM's part from all others.
const TOKEN_BYTES: usize = 16;

/// A secret of a part's monitor and its peers.
#[derive(Clone, Copy, Eq, PartialEq, Serialize, Deserialize)]
pub struct Token([u8; TOKEN_BYTES]);

impl Token {
    /// A random token.
    pub fn new() -> io::Result<Self> {
        let mut bytes = [0; TOKEN_BYTES];
        File::open("/dev/urandom")?.read_exact(&mut bytes)?;
        Ok(Self(bytes))
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("Token")
    }
}

/// The home's request to another host. The first line to the part's monitor.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PartRequest {
    /// The VM's name. Here it names files and a control group.
    #[serde(deserialize_with = "vm_name")]
    pub vm: String,
    /// The number of the part's shard.
    pub part: u8,
    /// The part's cell.
    pub cell: u16,
    /// The VM's spec, with the vCPUs of this part only. Its memory is all of it: each part has a copy.
    pub spec: VmSpec,
    /// The home's host.
    pub home: String,
    /// The secret of all its connections.
    pub token: Token,
}

/// A name that a VM can have. It is checked, since the other host may have been broken into.
fn vm_name<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    let name = String::deserialize(from)?;
    match config::is_name(&name) {
        true => Ok(name),
        false => Err(D::Error::custom(format!("{name:?} can't name a VM"))),
    }
}

/// The answer to a request for a part.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "answer")]
pub enum PartAnswer {
    /// The place is taken, until the home has not connected for some seconds, or the control connection ends.
    Holds {
        /// The port of its monitor.
        port: u16,
        /// The processor of its host.
        processor: HostProcessor,
        /// The versions of its program; the first if the answer has none.
        #[serde(default)]
        versions: Versions,
    },
    /// The host has no place for the part, or does not allow it.
    Refused {
        /// The reason, and the help.
        why: String,
    },
}

/// The endpoint of a part's monitor.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Endpoint {
    /// The host, as its certificate names it.
    pub host: String,
    /// The part's cell.
    pub cell: u16,
    /// Address at which the part's monitor accepts the connection.
    pub address: SocketAddr,
    /// The secret that its monitor requires.
    pub token: Token,
}

impl fmt::Display for Endpoint {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "cell {} on host {}", self.cell, self.host)
    }
}

/// The role of a connection to a part's monitor.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq, Serialize, Deserialize)]
pub enum Role {
    /// Orders and reports, for as long as the VM lives.
    Control,
    /// The channel of two shards, for one boot of the VM.
    Link(Ends),
    /// Reads of the host's time-stamp counter, before this boot of the VM and as long as it lasts.
    Clock(u32),
    /// For coherent memory: requests and replies, without pages.
    Coherence(LaneEnds),
    /// For coherent memory: pages.
    Pages(LaneEnds),
}

/// A pair of shards in one boot of a VM.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq, Serialize, Deserialize)]
pub struct Ends {
    /// Number of the VM's boot.
    pub boot: u32,
    /// The shard whose monitor calls: the home's, for all shards that it has itself, or else the lower
    /// number.
    pub from: u8,
    /// The shard whose monitor is called.
    pub to: u8,
}

/// One of the lanes between two shards.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq, Serialize, Deserialize)]
pub struct LaneEnds {
    /// The shards, and the boot.
    pub ends: Ends,
    /// The lane's number.
    pub lane: u8,
}

/// The first message on each connection.
#[derive(Debug, Serialize, Deserialize)]
pub struct Hello {
    /// The secret of the part that is called.
    pub token: Token,
    /// The role of the connection.
    pub role: Role,
    /// Memory that both hosts may share, with the first connection of two shards' lanes. The answer says
    /// whether they do.
    pub offer: Option<Offer>,
}

/// From the home to a part's monitor.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ToPart {
    /// Start the shard.
    Start(Box<PartStart>),
    /// An order for the shard.
    Order(Order),
    /// A request about the part's host. Sent only to a monitor that [`acts_on_host`].
    OfHost {
        /// Number of the request, which its answer has.
        number: u64,
        /// Request that the part's monitor carries out.
        request: HostRequest,
    },
    /// The VM has ended: give the place back.
    Leave,
}

/// A request to a part's monitor about its host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HostRequest {
    /// List the vCPUs' threads of the part's shard, with KVM's statistics.
    Vcpus,
    /// Restrict a vCPU's thread to CPUs of the part's cell.
    Pin {
        /// The vCPU's number.
        vcpu: u8,
        /// The CPUs; all of the cell when empty.
        cpus: Vec<usize>,
    },
    /// Set the weight and the limits of the part's control group. An absent one is removed.
    Limit(PartLimits),
}

/// The weight and the limits that can be changed while a VM runs, as in its spec.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PartLimits {
    /// Share of the host's CPUs relative to other VMs.
    pub cpu_weight: Option<u16>,
    /// Limit of host CPUs.
    pub cpu_limit: Option<f64>,
    /// Limit of host memory.
    pub memory_limit: Option<Size>,
}

impl From<&VmSpec> for PartLimits {
    fn from(spec: &VmSpec) -> Self {
        Self {
            cpu_weight: spec.cpu_weight,
            cpu_limit: spec.cpu_limit,
            memory_limit: spec.memory_limit,
        }
    }
}

impl PartLimits {
    /// The spec with these limits.
    pub fn applied_to(&self, spec: &VmSpec) -> VmSpec {
        VmSpec {
            cpu_weight: self.cpu_weight,
            cpu_limit: self.cpu_limit,
            memory_limit: self.memory_limit,
            ..spec.clone()
        }
    }
}

/// The answer to a request about a part's host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HostAnswer {
    /// The request was carried out.
    Done,
    /// The vCPUs of the VM, each with its thread in the part's shard.
    Vcpus(Vec<Vcpu>),
    /// The request was not carried out.
    Refused {
        /// Reason, in one line.
        why: String,
    },
}

/// From a part's monitor to the home.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FromPart {
    /// A report of the shard.
    Report(Report),
    /// The shard's answer to the first order of [`is_awaited`](super::part::is_awaited) that it has not
    /// answered yet. A home that sends none of these gets none.
    Answered(Answer),
    /// The answer to a [`ToPart::OfHost`].
    OfHost {
        /// Number of the request.
        number: u64,
        /// Answer to the request with that number.
        answer: HostAnswer,
    },
    /// The shard's process has ended, or did not start, for this reason.
    Gone(String),
    /// The place is lost, for this reason.
    Lost(String),
}

/// One boot of a VM, for the monitor of a part on another host.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PartStart {
    /// Number of the VM's boot.
    pub boot: u32,
    /// The shard of each vCPU at the start.
    pub vcpus: Vec<u8>,
    /// The whole VM's memory.
    pub memory: MemoryLaunch,
    /// Settings by which the shards' copies of it are kept coherent.
    pub coherence: PartCoherence,
    /// Each shard's share of the memory, bytes.
    pub shares: Vec<u64>,
    /// As in [`shard_api::launch::LaunchSpec`].
    pub sandbox: SandboxPolicy,
    /// The guest's time-stamp counter.
    pub tsc: TscLaunch,
    /// The CPUID leaves of the guest.
    pub cpuid: Vec<Leaf>,
    /// The other shards.
    pub others: Vec<Other>,
}

/// Settings of coherent memory that all shards of a VM must have alike.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PartCoherence {
    /// Number of each shard's lanes.
    pub lanes: u8,
    /// Names of the shards for people, in their order.
    pub names: Vec<String>,
    /// The range of the guest's kernel, if it does not unpack itself; else empty.
    pub kernel: Range<u64>,
}

/// Another shard, as seen from one.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Other {
    /// Number of the shard in the VM; 0 is the home.
    pub shard: u8,
    /// Its cell and host, for people.
    pub place: String,
    /// The endpoint to call; none if the other shard calls.
    pub reach: Option<Endpoint>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn part_of_the_release_before_names_no_versions_and_is_sent_no_request_about_its_host() {
        let processor = serde_json::json!({
            "leaves": [], "counter": { "khz": 1, "digits": null }, "relies_on_counter": true,
        });
        let mut answer = serde_json::json!({ "answer": "holds", "port": 1, "processor": processor });
        let versions = |answer: &serde_json::Value| match serde_json::from_value(answer.clone()).unwrap() {
            PartAnswer::Holds { versions, .. } => versions,
            other => panic!("{other:?}"),
        };
        assert!(!acts_on_host(versions(&answer)));
        answer["versions"] = serde_json::to_value(OF_PART.versions).unwrap();
        assert!(acts_on_host(versions(&answer)));
        // That release speaks the first version alone, and this one still does.
        assert_eq!(OF_HOME.versions.agree(Versions::FIRST, "", "").unwrap(), 1);
    }

    #[test]
    fn limits_of_a_part_replace_those_of_its_spec_and_nothing_else() {
        let text = "image = \"x\"\ncpus = 3\ncpu_weight = 200\ncpu_limit = 1.5\n";
        let spec = config::parse("vm.toml", text).unwrap();
        let limits = PartLimits {
            cpu_weight: Some(300),
            cpu_limit: None,
            memory_limit: Some(Size(1 << 30)),
        };
        let sent = HostRequest::Limit(limits.clone());
        let line = serde_json::to_string(&sent).unwrap();
        assert_eq!(serde_json::from_str::<HostRequest>(&line).unwrap(), sent);
        let after = limits.applied_to(&spec);
        assert_eq!((after.cpus, &after.image), (3, &spec.image));
        assert_eq!(PartLimits::from(&after), limits);
    }

    #[test]
    fn a_name_that_leaves_its_folder_is_refused_at_the_wire() {
        let request = |vm: &str| PartRequest {
            vm: vm.to_owned(),
            part: 1,
            cell: 1,
            spec: config::parse("vm", "image = \"tiny\"").unwrap(),
            home: "alpha".to_owned(),
            token: Token([7; TOKEN_BYTES]),
        };
        let sent = |vm: &str| {
            let line = serde_json::to_vec(&request(vm)).unwrap();
            serde_json::from_slice::<PartRequest>(&line).map(|received| received.vm)
        };
        assert_eq!(sent("web-1.x").unwrap(), "web-1.x");
        for wrong in ["../../x", "/x", "", ".x", "a/b", "a\0"] {
            let error = sent(wrong).unwrap_err().to_string();
            assert!(error.contains("can't name a VM"), "{wrong:?}: {error}");
        }
    }
}
