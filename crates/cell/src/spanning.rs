//! The shards of a VM that spans cells, as its monitor makes them: one boot's memory and channels, and a process in each cell.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use config::VmSpec;
use policy::span::Part;
use shard::launch::{Fd, MemoryLaunch, PartLaunch, ShardChannels, ShardMemory, SpanLaunch};

use crate::cluster::tenure::{Tenure, TenureError, begin_span, leave_span};
use crate::coherence::Coherence;

/// The places of all shards, the home's first: a cell each, and what of the VM starts there.
#[derive(Debug)]
pub struct Span(Vec<(Tenure, Part)>);

impl Span {
    /// Asks for the places of a VM; none for one that does not span cells.
    pub fn begin(name: &str, spec: &VmSpec) -> Result<Option<Self>, TenureError> {
        let places = begin_span(name, spec)?;
        Ok((!places.is_empty()).then_some(Self(places)))
    }

    /// The place of its home.
    pub fn home(&self) -> Option<&Tenure> {
        self.0.first().map(|(tenure, _)| tenure)
    }

    /// What of the VM starts where.
    pub fn parts(&self) -> Vec<Part> {
        self.0.iter().map(|(_, part)| part.clone()).collect()
    }

    /// The VM has ended.
    pub fn leave(self) {
        leave_span(self.0);
    }

    /// The CPUs of the cell that has most.
    pub fn cpus(&self) -> usize {
        self.0.iter().map(|(tenure, _)| tenure.cpus()).max().unwrap_or(1)
    }

    /// The cells, in the order of the shards.
    pub fn cells(&self) -> Vec<u16> {
        self.0.iter().map(|(tenure, _)| tenure.cell()).collect()
    }

    /// A cell of it that is lost for good.
    pub fn lost(&self) -> Option<u16> {
        let lost = self.0.iter().find(|(tenure, _)| tenure.lost());
        lost.map(|(tenure, _)| tenure.cell())
    }

    /// Keeps the calling thread, and the processes that it starts, to the cell of that shard.
    pub fn settle(&self, shard: usize) -> Result<(), TenureError> {
        self.0.get(shard).map_or(Ok(()), |(tenure, _)| tenure.settle())
    }
}

/// What the shards of one boot share.
#[derive(Debug)]
pub struct Boot {
    vcpus: Vec<u8>,
    memory: Vec<(u64, Vec<u32>, Option<OwnedFd>)>,
    coherence: Option<Coherence>,
    /// From each shard to each.
    channels: Vec<Vec<Option<OwnedFd>>>,
    tsc_offset: u64,
}

impl Boot {
    /// New memory and channels.
    pub fn new(span: &Span, memory: &MemoryLaunch, is_coherent: bool) -> io::Result<Self> {
        let shards = span.0.len();
        let mut vcpus = Vec::new();
        let mut files = Vec::with_capacity(shards);
        for (shard, (tenure, part)) in (0_u8..).zip(&span.0) {
            vcpus.extend(part.vcpus.clone().map(|_| shard));
            let file = (!is_coherent)
                .then(|| shard::memory::file_of_shard(memory.pages, memory.bytes))
                .transpose()
                .map_err(io::Error::other)?;
            files.push((
                part.memory_bytes,
                tenure.nodes().to_vec(),
                file.map(OwnedFd::from),
            ));
        }
        let mut channels = Vec::with_capacity(shards);
        for from in 0..shards {
            let ring = |to| {
                (from != to)
                    .then(|| shard::span::link::memory().map_err(io::Error::other))
                    .transpose()
            };
            channels.push((0..shards).map(ring).collect::<io::Result<_>>()?);
        }
        // The guest's counter starts at zero, about now.
        // SAFETY: reads a counter that every x86-64 processor has.
        let host_tsc = unsafe { std::arch::x86_64::_rdtsc() };
        Ok(Self {
            vcpus,
            memory: files,
            coherence: is_coherent.then(|| Coherence::new(span)).transpose()?,
            channels,
            tsc_offset: host_tsc.wrapping_neg(),
        })
    }

    /// What shard `shard` is told; the files that it is sent are added to `files`.
    pub fn launch<'a>(&'a self, shard: usize, files: &mut Vec<BorrowedFd<'a>>) -> SpanLaunch {
        let mut add = |file: &'a OwnedFd| {
            files.push(file.as_fd());
            Fd(files.len() - 1)
        };
        let memory = self
            .memory
            .iter()
            .map(|(bytes, nodes, file)| ShardMemory {
                bytes: *bytes,
                file: file.as_ref().map(&mut add),
                host_nodes: nodes.clone(),
            })
            .collect();
        let mut channels = Vec::with_capacity(self.channels.len());
        for other in 0..self.channels.len() {
            let pair = self.channels[shard][other]
                .as_ref()
                .zip(self.channels[other][shard].as_ref());
            channels.push(pair.map(|(outgoing, incoming)| ShardChannels {
                outgoing: add(outgoing),
                incoming: add(incoming),
            }));
        }
        let coherence = self.coherence.as_ref();
        SpanLaunch {
            shard: shard as u8,
            vcpus: self.vcpus.clone(),
            memory,
            coherence: coherence.map(|coherence| coherence.launch(shard, &mut add)),
            channels,
            tsc_offset: self.tsc_offset,
        }
    }

    /// What a shard that is not the home is started with, and its files: `kvm`, `log`, and those of [`Boot::launch`].
    pub fn part<'a>(
        &'a self,
        shard: usize,
        home: &shard::launch::LaunchSpec,
        kvm: BorrowedFd<'a>,
        log: BorrowedFd<'a>,
        sandbox_missing: Vec<String>,
    ) -> (PartLaunch, Vec<BorrowedFd<'a>>) {
        let mut files = vec![kvm, log];
        let part = PartLaunch {
            kvm: Fd(0),
            log: Fd(1),
            memory: home.memory.clone(),
            span: self.launch(shard, &mut files),
            sandbox: home.sandbox,
            sandbox_missing,
        };
        (part, files)
    }
}
