//! One boot of a VM that spans cells: the memory and the channels that its shards share, and the launch
//! settings of each shard.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;
use std::sync::atomic::Ordering;

use locks::IgnorePoison;
use shard_api::launch::{
    Fd, LaunchSpec, Leaf, MemoryLaunch, Ratio, SandboxLaunch, SecondaryLaunch, ShardChannels, ShardMemory,
    SpanLaunch, TscLaunch,
};

use super::{MultiHost, Span};
use crate::cluster::reservation::PartPlace;
use crate::coherence::Coherence;
use crate::remote::clock::keeper::{ClockKeeper, Clocks};
use crate::remote::clock::leader::{Clock, Leader, Step};
use crate::remote::clock::{Rounds, counter, relate};
use crate::remote::connections::connect;
use crate::remote::protocol::{Ends, Other, PartStart, Role};

/// Resources that the shards of one boot share.
#[derive(Debug)]
pub struct Boot {
    number: u32,
    vcpus: Vec<u8>,
    memory: Vec<(u64, Vec<u32>, Option<OwnedFd>)>,
    coherence: Option<Coherence>,
    /// Channels from each shard to each: a ring where both are on this host, a connection where only the
    /// first one is.
    channels: Vec<Vec<Option<Channel>>>,
    /// The time-stamp counter of each shard.
    clocks: Vec<TscLaunch>,
    /// The clocks that must be kept together, if there are several.
    timing: Option<Timing>,
    /// The CPUID leaves of the guest, if they are fewer than the host's.
    cpuid: Vec<Leaf>,
}

/// The clocks of several hosts, which drift apart.
#[derive(Debug)]
struct Timing {
    clocks: Clocks,
    /// The rounds with each other host, until a thread makes them.
    rounds: Mutex<Vec<(usize, Rounds)>>,
}

#[derive(Debug)]
enum Channel {
    Ring(OwnedFd),
    Stream(OwnedFd, String),
}

impl Boot {
    /// Makes the memory and the channels. If `coherent` has the range of the guest's kernel, each shard has a
    /// copy of the memory.
    ///
    /// # Errors
    /// If the host has no memory or descriptors left, or another host does not answer.
    pub fn new(span: &Span, memory: &MemoryLaunch, coherent: Option<Range<u64>>) -> io::Result<Self> {
        let number = span.boots.fetch_add(1, Ordering::Relaxed);
        let coherence = coherent.map(|kernel| Coherence::new(span, number, kernel));
        let coherence = coherence.transpose()?;
        let shards = span.places.len();
        let mut vcpus = Vec::new();
        let mut files = Vec::with_capacity(shards);
        for (shard, (place, part)) in (0_u8..).zip(&span.places) {
            vcpus.extend(part.vcpus.clone().map(|_| shard));
            let file = coherence
                .is_none()
                .then(|| shard_api::memory::file_of_shard(memory.pages, memory.bytes))
                .transpose()
                .map_err(io::Error::other)?;
            // Memory of another host's share may come from any node here.
            let nodes = place
                .here()
                .map_or_else(Vec::new, |reservation| reservation.nodes().to_vec());
            files.push((part.memory_bytes, nodes, file.map(OwnedFd::from)));
        }
        let mut channels = Vec::with_capacity(shards);
        for from in 0..shards {
            let channel = |to| channel(span, number, from, to);
            channels.push((0..shards).map(channel).collect::<io::Result<_>>()?);
        }
        // The guest's counter starts at zero, about now.
        let offset = counter().wrapping_neg();
        let (clocks, timing) = clocks(span, number, offset)?;
        Ok(Self {
            number,
            vcpus,
            memory: files,
            coherence,
            channels,
            clocks,
            timing,
            cpuid: span
                .over
                .as_ref()
                .map_or_else(Vec::new, |over| over.guest.leaves.clone()),
        })
    }

    /// The shards' clocks, if they are of several hosts.
    pub fn clocks(&self) -> Option<&Clocks> {
        self.timing.as_ref().map(|timing| &timing.clocks)
    }

    /// Keeps the clocks together, as long as the result lives, by the steps that it passes to `order`. It can
    /// be called once.
    /// # Errors
    /// If the host has no threads left.
    pub fn keep_time(
        &self,
        order: impl Fn(Step) + Clone + Send + 'static,
    ) -> io::Result<Option<ClockKeeper>> {
        let keep = |timing: &Timing| {
            let mut rounds = timing.rounds.lock().ignore_poison();
            ClockKeeper::start(timing.clocks.clone(), std::mem::take(&mut rounds), order)
        };
        self.timing.as_ref().map(keep).transpose()
    }

    /// The launch settings of shard `shard`; the files that it is sent are added to `files`.
    pub fn launch<'a>(&'a self, shard: usize, files: &mut Vec<BorrowedFd<'a>>) -> SpanLaunch {
        let mut add = |file: BorrowedFd<'a>| {
            files.push(file);
            Fd(files.len() - 1)
        };
        let memory = self
            .memory
            .iter()
            .map(|(bytes, nodes, file)| ShardMemory {
                bytes: *bytes,
                file: file.as_ref().map(|file| add(file.as_fd())),
                host_nodes: nodes.clone(),
            })
            .collect();
        let mut channels = Vec::with_capacity(self.channels.len());
        for other in 0..self.channels.len() {
            let back = self.channels[other][shard].as_ref();
            channels.push(match (&self.channels[shard][other], back) {
                (Some(Channel::Ring(outgoing)), Some(Channel::Ring(incoming))) => {
                    Some(ShardChannels::Rings {
                        outgoing: add(outgoing.as_fd()),
                        incoming: add(incoming.as_fd()),
                    })
                }
                (Some(Channel::Stream(socket, peer)), _) => Some(ShardChannels::Stream {
                    socket: add(socket.as_fd()),
                    peer: peer.clone(),
                }),
                _ => None,
            });
        }
        let coherence = self.coherence.as_ref();
        SpanLaunch {
            shard: shard as u8,
            vcpus: self.vcpus.clone(),
            memory,
            coherence: coherence.map(|coherence| coherence.launch(shard, &mut add)),
            channels,
            tsc: self.clocks[shard],
            cpuid: self.cpuid.clone(),
        }
    }

    /// The message for the monitor of a shard on another host; none without coherent memory.
    pub fn remote(&self, span: &Span, shard: usize, home: &LaunchSpec) -> Option<PartStart> {
        let coherence = self.coherence.as_ref()?.remote();
        let numbered = (0..)
            .zip(span.places.iter().zip(span.places()))
            .filter(|(other, _)| usize::from(*other) != shard);
        let others = numbered.map(|(number, ((place, _), named))| Other {
            shard: number,
            place: named,
            // The lower number calls, and the home's monitor calls for all shards on its host.
            reach: match place {
                PartPlace::There(remote) if shard < usize::from(number) => Some(remote.endpoint().clone()),
                _ => None,
            },
        });
        Some(PartStart {
            boot: self.number,
            vcpus: self.vcpus.clone(),
            memory: home.memory.clone(),
            coherence,
            shares: self.memory.iter().map(|(bytes, _, _)| *bytes).collect(),
            sandbox: home.sandbox.policy,
            tsc: self.clocks[shard],
            cpuid: self.cpuid.clone(),
            others: others.collect(),
        })
    }

    /// The launch of a shard that is not the home, and its files: `kvm`, `log`, and those of
    /// [`Boot::launch`].
    pub fn part<'a>(
        &'a self,
        shard: usize,
        home: &LaunchSpec,
        kvm: BorrowedFd<'a>,
        log: BorrowedFd<'a>,
        sandbox: SandboxLaunch,
    ) -> (SecondaryLaunch, Vec<BorrowedFd<'a>>) {
        let mut files = vec![kvm, log];
        let part = SecondaryLaunch {
            kvm: Fd(0),
            log: Fd(1),
            memory: home.memory.clone(),
            span: self.launch(shard, &mut files),
            sandbox,
        };
        (part, files)
    }
}

/// The channel from one shard to another, or to both where that is on another host; none where another
/// monitor makes it.
fn channel(span: &Span, boot: u32, from: usize, to: usize) -> io::Result<Option<Channel>> {
    if from == to || span.remote(from).is_some() {
        return Ok(None);
    }
    let Some(remote) = span.remote(to) else {
        let ring = shard_api::memory::channel().map_err(io::Error::other)?;
        return Ok(Some(Channel::Ring(ring)));
    };
    let ends = Ends {
        boot,
        from: from as u8,
        to: to as u8,
    };
    let socket = span.call(to, Role::Link(ends))?;
    Ok(Some(Channel::Stream(socket, remote.endpoint().to_string())))
}

/// The mapping from each shard's counter to the guest's, which is this host's and `offset`; and the clocks
/// that keep it so.
fn clocks(span: &Span, boot: u32, offset: u64) -> io::Result<(Vec<TscLaunch>, Option<Timing>)> {
    let here = TscLaunch {
        offset,
        ratio: Ratio::ONE,
        khz: None,
        is_relied_on: true,
    };
    let Some(MultiHost { hosts, guest }) = &span.over else {
        return Ok((vec![here; span.places.len()], None));
    };
    let here = TscLaunch {
        khz: Some(guest.khz),
        is_relied_on: guest.is_relied_on,
        ..here
    };
    let (mut launches, mut clocks, mut all_rounds) = (Vec::new(), Vec::new(), Vec::new());
    for (shard, ((place, _), ratio)) in span.places.iter().zip(&guest.ratios).enumerate() {
        let clock = if let PartPlace::There(remote) = place {
            let mut rounds = Rounds::new(connect(hosts, remote.endpoint(), Role::Clock(boot))?);
            let relation = relate(&mut rounds)?;
            all_rounds.push((shard, rounds));
            Clock::there(relation, offset, *ratio, guest.khz)
        } else {
            Clock::new(offset, None)
        };
        launches.push(TscLaunch {
            offset: clock.offset,
            ratio: *ratio,
            ..here
        });
        clocks.push(clock);
    }
    let timing = Timing {
        clocks: Clocks::new(Leader::new(guest.khz, clocks)),
        rounds: Mutex::new(all_rounds),
    };
    Ok((launches, Some(timing)))
}
