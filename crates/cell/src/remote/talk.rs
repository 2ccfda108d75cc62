//! What is said between the monitors of a VM's home and of its parts on other hosts.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::net::SocketAddr;
use std::ops::Range;

use config::VmSpec;
use registry::json_line::Protocol;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};
use shard_api::launch::{Leaf, MemoryLaunch, Order, Report, SandboxPolicy, TscLaunch};
use shard_api::platform::HostProcessor;
use urpc::version::Versions;

use super::lanes::Offer;

/// The protocol of a part as the home speaks it. The shards of a VM exchange packets and pages too, whose
/// form has no version of its own: it changes with this version, and older ones are refused.
pub const OF_HOME: Protocol = Protocol {
    name: "the protocol of VMs over several hosts",
    peer: "the other host",
    versions: Versions { oldest: 1, newest: 1 },
};
/// The protocol as a part's monitor speaks it.
pub const OF_PART: Protocol = Protocol {
    peer: "the home's host",
    ..OF_HOME
};

/// Bytes of what tells the connections of one VM's part from all others.
const TOKEN_BYTES: usize = 16;

/// A secret of a part's monitor and those that it is to be connected with.
#[derive(Clone, Copy, Eq, PartialEq, Serialize, Deserialize)]
pub struct Token([u8; TOKEN_BYTES]);

impl Token {
    /// One that nobody can guess.
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

/// What the home asks of another host. The first line to the part's monitor.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PartRequest {
    /// The VM's name. Here it names files and a control group.
    #[serde(deserialize_with = "vm_name")]
    pub vm: String,
    /// Which of its parts: the number of the shard.
    pub part: u8,
    /// In which cell.
    pub cell: u16,
    /// What the VM was started from, with the vCPUs of this part only. Its memory is all of it: each part has
    /// a copy.
    pub spec: VmSpec,
    /// The home's host.
    pub home: String,
    /// What all its connections have to know.
    pub token: Token,
}

/// A name that a VM can have: the other host may have been broken into.
fn vm_name<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    let name = String::deserialize(from)?;
    match config::is_name(&name) {
        true => Ok(name),
        false => Err(D::Error::custom(format!("{name:?} can't name a VM"))),
    }
}

/// The answer.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "answer")]
pub enum PartAnswer {
    /// The place is taken, until the home has not come for some seconds, or the control connection ends.
    Holds {
        /// Where its monitor is reached.
        port: u16,
        /// What its host has.
        processor: HostProcessor,
    },
    /// It can't be.
    Refused {
        /// Why, and what to do about it.
        why: String,
    },
}

/// Where a part's monitor is reached.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Reach {
    /// The host, as its key says.
    pub host: String,
    /// The part's cell.
    pub cell: u16,
    /// Its address.
    pub address: SocketAddr,
    /// What it wants to hear.
    pub token: Token,
}

impl fmt::Display for Reach {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "cell {} on host {}", self.cell, self.host)
    }
}

/// What a connection to a part's monitor is for.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq, Serialize, Deserialize)]
pub enum Role {
    /// Orders and reports, for as long as the VM lives.
    Control,
    /// The channel of two shards, for one boot of the VM.
    Link(Ends),
    /// Answers with what the host's time-stamp counter reads, before this boot of the VM and as long as it
    /// lasts.
    Clock(u32),
    /// For coherent memory: requests and what they cause, without pages.
    Coherence(LaneEnds),
    /// For coherent memory: pages.
    Pages(LaneEnds),
}

/// A pair of shards in one boot of a VM.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq, Serialize, Deserialize)]
pub struct Ends {
    /// Counts the VM's boots.
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
    /// Which shards, and when.
    pub ends: Ends,
    /// Its number.
    pub lane: u8,
}

/// The first message on each connection.
#[derive(Debug, Serialize, Deserialize)]
pub struct Hello {
    /// Of the part that is called.
    pub token: Token,
    /// What for.
    pub role: Role,
    /// Memory that both hosts may share, with the first connection of two shards' lanes. The answer is
    /// whether they do.
    pub offer: Option<Offer>,
}

/// From the home to a part's monitor.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ToPart {
    /// Start the shard.
    Start(Box<PartStart>),
    /// For the shard.
    Order(Order),
    /// The VM has ended: give the place back.
    Leave,
}

/// From a part's monitor to the home.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FromPart {
    /// Of the shard.
    Report(Report),
    /// The shard's process has ended, or did not start: what is known of that.
    Gone(String),
    /// The place is lost: why.
    Lost(String),
}

/// One boot of a VM, as the monitor of a part on another host is told of it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PartStart {
    /// Counts the VM's boots.
    pub boot: u32,
    /// The shard of each vCPU at the start.
    pub vcpus: Vec<u8>,
    /// The whole VM's memory.
    pub memory: MemoryLaunch,
    /// How the shards' copies of it are kept coherent.
    pub coherence: PartCoherence,
    /// What of it is each shard's, bytes.
    pub shares: Vec<u64>,
    /// As in [`shard_api::launch::LaunchSpec`].
    pub sandbox: SandboxPolicy,
    /// The guest's time-stamp counter.
    pub tsc: TscLaunch,
    /// What the guest is told of the processor.
    pub cpuid: Vec<Leaf>,
    /// The other shards.
    pub others: Vec<Other>,
}

/// What all shards of a VM must have alike of the coherence of its memory.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PartCoherence {
    /// How many lanes each shard has.
    pub lanes: u8,
    /// The shards as people know them, in their order.
    pub names: Vec<String>,
    /// Where the guest's kernel lies, if it does not unpack itself; else empty.
    pub kernel: Range<u64>,
}

/// Another shard, as seen from one.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Other {
    /// Its number.
    pub shard: u8,
    /// Where it is, for people.
    pub place: String,
    /// Where to call it; none if it calls.
    pub reach: Option<Reach>,
}

#[cfg(test)]
mod tests {
    use super::*;

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
