//! The kind of VM that a shard serves.
//!
//! The launch message decides the kind once ([`VmKind::of`], [`VmKind::of_span`]). Each step of the shard's
//! start converts the variant's data into those of the next step, without reading the message again:
//!
//! | step | plain | spanning | with coherent memory, beside that |
//! | --- | --- | --- | --- |
//! | launch | state to resume from | [`SpanLaunch`] | [`CoherenceLaunch`] |
//! | [`OpenedKind`] | [`OpenedPlain`] | channels to the other shards | the replica, not served yet |
//! | [`BuiltKind`] | [`PlainMemory`] | its home | the replica, not served yet |
//! | [`ServedKind`] | [`PlainMemory`] | its home | the replica |
//! | [`ReadyKind`] | [`PlainVm`] | its home | the replica |
//! | [`RunningKind`] | [`PlainVm`] | the router to the other shards | the replica |
//!
//! A shard without devices takes the same steps as a [`SpanKind`].

use std::convert::Infallible;
use std::sync::Arc;

use crate::arch::x86_64::cpuid::Groups;
use crate::ending::EndSignal;
use crate::launch::{CoherenceLaunch, ResumeLaunch, SpanLaunch};
use crate::machine::{PlainVm, Resume};
use crate::memory::replica::{Coherence, Replica, ReplicaError};
use crate::paging::{Paging, PagingFiles};
use crate::sandbox::Threads;
use crate::sharing::Sharing;
use crate::span::machine::{HomeShard, SpanSetup};
use crate::span::router::Router;

/// The kind of VM that a shard serves. `P` is the data of a plain VM, `S` that of a spanning VM, `C` its
/// coherent memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VmKind<P, S, C> {
    /// The shard is the whole VM: KVM has the interrupt controllers, and memory may map pages of images.
    Plain(P),
    /// One of several shards that emulate the interrupt controllers and map the same memory.
    SharedSpan(S),
    /// One of several shards that emulate the interrupt controllers. Each has a replica of the memory, and
    /// they keep the replicas coherent.
    CoherentSpan(S, C),
}

/// The kind of a VM that spans cells.
pub type SpanKind<S, C> = VmKind<Infallible, S, C>;

/// How a plain VM begins.
pub enum OpenedPlain {
    /// The guest boots from its kernel.
    Boot,
    /// The VM boots, and its memory will be paged.
    BootPaged(PagingFiles),
    /// The VM resumes from a frozen VM.
    Resume(Resume),
}

/// Service of the pages of a plain VM's memory.
pub enum PlainMemory {
    /// Nothing: the pages are too large.
    Whole,
    /// Pages may stand for pages of images.
    Shared(Sharing),
    /// Pages may be in a paging file. They stand for no image's: a mapping of an image would not report its
    /// faults to the pager.
    Paged(Arc<Paging>),
}

/// Kind of a VM whose launch files are open.
pub type OpenedKind<P = OpenedPlain> = VmKind<P, SpanSetup, Box<Replica>>;

/// Kind of a VM whose machine is built.
pub type BuiltKind = VmKind<PlainMemory, HomeShard, Box<Replica>>;

/// Kind of a VM whose memory can be used.
pub type ServedKind = VmKind<PlainMemory, HomeShard, &'static Coherence>;

/// Kind of a VM whose vCPUs exist.
pub type ReadyKind = VmKind<PlainVm, HomeShard, &'static Coherence>;

/// Kind of a VM whose guest runs.
pub type RunningKind = VmKind<PlainVm, Arc<Router>, &'static Coherence>;

/// Error: the launch message has a VM both span cells and resume a frozen state.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the launch message resumes a VM that spans cells; help: resume VMs without `span` only")]
pub struct ResumedSpan;

impl<'a> VmKind<Option<&'a ResumeLaunch>, &'a SpanLaunch, &'a CoherenceLaunch> {
    /// Returns the kind of a VM with these entries in its launch message.
    ///
    /// # Errors
    /// Fails if both are present.
    pub fn of(span: Option<&'a SpanLaunch>, resume: Option<&'a ResumeLaunch>) -> Result<Self, ResumedSpan> {
        match (span, resume) {
            (None, resume) => Ok(Self::Plain(resume)),
            (Some(span), None) => Ok(Self::of_span(span)),
            (Some(_), Some(_)) => Err(ResumedSpan),
        }
    }
}

impl<'a, P> VmKind<P, &'a SpanLaunch, &'a CoherenceLaunch> {
    /// Returns the kind of a VM that spans cells.
    pub fn of_span(span: &'a SpanLaunch) -> Self {
        match &span.coherence {
            None => Self::SharedSpan(span),
            Some(coherence) => Self::CoherentSpan(span, coherence),
        }
    }
}

impl<P, S, C> VmKind<P, S, C> {
    /// Returns the same kind with converted data of a plain VM.
    pub fn map_plain<Q>(self, map: impl FnOnce(P) -> Q) -> VmKind<Q, S, C> {
        match self {
            Self::Plain(plain) => VmKind::Plain(map(plain)),
            Self::SharedSpan(span) => VmKind::SharedSpan(span),
            Self::CoherentSpan(span, memory) => VmKind::CoherentSpan(span, memory),
        }
    }

    /// Returns the same kind with converted data of a spanning VM.
    ///
    /// # Errors
    /// Returns the error of `map`.
    pub fn try_map_span<T, E>(self, map: impl FnOnce(S) -> Result<T, E>) -> Result<VmKind<P, T, C>, E> {
        Ok(match self {
            Self::Plain(plain) => VmKind::Plain(plain),
            Self::SharedSpan(span) => VmKind::SharedSpan(map(span)?),
            Self::CoherentSpan(span, memory) => VmKind::CoherentSpan(map(span)?, memory),
        })
    }

    /// Returns the groups of vCPUs in CPUID, when vCPU v is in node `nodes[v]`.
    pub fn groups(&self, nodes: &[u8]) -> Groups {
        match self {
            Self::Plain(_) | Self::SharedSpan(_) => Groups::of(nodes),
            Self::CoherentSpan(..) => Groups::of_coherent(nodes),
        }
    }
}

impl PlainMemory {
    /// Returns the page sharing.
    pub fn sharing(&self) -> Option<&Sharing> {
        match self {
            Self::Shared(sharing) => Some(sharing),
            Self::Whole | Self::Paged(_) => None,
        }
    }

    /// Returns the paging.
    pub fn paging(&self) -> Option<&Arc<Paging>> {
        match self {
            Self::Paged(paging) => Some(paging),
            Self::Whole | Self::Shared(_) => None,
        }
    }
}

impl<S, C> VmKind<PlainMemory, S, C> {
    /// Returns the page sharing of a plain VM that has it.
    pub fn sharing(&self) -> Option<&Sharing> {
        match self {
            Self::Plain(memory) => memory.sharing(),
            Self::SharedSpan(_) | Self::CoherentSpan(..) => None,
        }
    }

    /// Returns the paging of a plain VM that has it.
    pub fn paging(&self) -> Option<&Arc<Paging>> {
        match self {
            Self::Plain(memory) => memory.paging(),
            Self::SharedSpan(_) | Self::CoherentSpan(..) => None,
        }
    }
}

impl<P, S: AsRef<Router>> VmKind<P, S, Box<Replica>> {
    /// Starts to serve a replica, until the process ends. From then on packets to other shards are causal:
    /// they follow this shard's changes of merged page tables.
    ///
    /// Fails as [`Replica::start`].
    /// As [`Replica::start`].
    pub fn serve(
        self,
        threads: &Threads,
        end: &Arc<EndSignal>,
    ) -> Result<VmKind<P, S, &'static Coherence>, ReplicaError> {
        Ok(match self {
            Self::Plain(plain) => VmKind::Plain(plain),
            Self::SharedSpan(span) => VmKind::SharedSpan(span),
            Self::CoherentSpan(span, replica) => {
                let coherence = replica.start(threads, end)?;
                if let Some(causal) = coherence.causal() {
                    span.as_ref().set_causal(causal);
                }
                VmKind::CoherentSpan(span, coherence)
            }
        })
    }
}

impl<P> VmKind<P, Arc<Router>, &'static Coherence> {
    /// Stops all waits for other shards; the VM ends.
    pub fn end(&self) {
        match self {
            Self::Plain(_) => {}
            Self::SharedSpan(router) | Self::CoherentSpan(router, _) => router.end(),
        }
    }

    /// Returns whether all memory is still available, where `is_plain_whole` says it of a plain VM. A thread
    /// that waits for a page of a lost shard, or for one that can't be read from a paging file, waits
    /// forever.
    pub fn memory_is_whole(&self, is_plain_whole: impl FnOnce(&P) -> bool) -> bool {
        match self {
            Self::Plain(plain) => is_plain_whole(plain),
            Self::SharedSpan(_) => true,
            Self::CoherentSpan(_, coherence) => coherence.is_whole(),
        }
    }
}

impl<S, C> SpanKind<S, C> {
    /// Returns the data that both spanning kinds have.
    pub fn span(&self) -> &S {
        match self {
            Self::SharedSpan(span) | Self::CoherentSpan(span, _) => span,
            Self::Plain(never) => match *never {},
        }
    }
}

impl<S, C: Copy> SpanKind<S, C> {
    /// Returns the same kind with other data.
    pub fn with_span<T>(&self, span: T) -> SpanKind<T, C> {
        match self {
            Self::SharedSpan(_) => SpanKind::SharedSpan(span),
            Self::CoherentSpan(_, memory) => SpanKind::CoherentSpan(span, *memory),
            Self::Plain(never) => match *never {},
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::{Fd, Ratio, TscLaunch};

    fn span(coherence: Option<CoherenceLaunch>) -> SpanLaunch {
        SpanLaunch {
            shard: 0,
            vcpus: vec![0, 1],
            memory: Vec::new(),
            coherence,
            channels: vec![None, None],
            tsc: TscLaunch {
                offset: 0,
                ratio: Ratio::ONE,
                khz: None,
                is_relied_on: true,
            },
            cpuid: Vec::new(),
        }
    }

    fn coherence() -> CoherenceLaunch {
        CoherenceLaunch {
            userfaultfd: None,
            lanes: Vec::new(),
            names: Vec::new(),
            kernel: 0..0,
            shared: Vec::new(),
            notes: Vec::new(),
            encrypted: false,
        }
    }

    #[test]
    fn launch_has_one_kind_and_a_resumed_span_is_refused() {
        let resume = ResumeLaunch {
            state: Fd(0),
            memory: vec![Fd(1)],
        };
        let (shared, coherent) = (span(None), span(Some(coherence())));
        assert!(matches!(VmKind::of(None, None), Ok(VmKind::Plain(None))));
        assert!(matches!(
            VmKind::of(None, Some(&resume)),
            Ok(VmKind::Plain(Some(ResumeLaunch { state: Fd(0), .. })))
        ));
        assert!(matches!(
            VmKind::of(Some(&shared), None),
            Ok(VmKind::SharedSpan(SpanLaunch { coherence: None, .. }))
        ));
        assert!(matches!(
            VmKind::of(Some(&coherent), None),
            Ok(VmKind::CoherentSpan(
                SpanLaunch {
                    coherence: Some(_),
                    ..
                },
                _
            ))
        ));
        for span in [&shared, &coherent] {
            assert_eq!(VmKind::of(Some(span), Some(&resume)).err(), Some(ResumedSpan));
        }
    }

    #[test]
    fn a_kind_stays_the_same_when_its_data_change() {
        type Kind = VmKind<u8, u8, u8>;
        let kinds = [Kind::Plain(1), Kind::SharedSpan(2), Kind::CoherentSpan(2, 3)];
        let plain = kinds.map(|kind| kind.map_plain(|plain| plain + 10));
        assert_eq!(
            plain,
            [
                VmKind::Plain(11),
                VmKind::SharedSpan(2),
                VmKind::CoherentSpan(2, 3)
            ]
        );
        let span = kinds.map(|kind| kind.try_map_span(|span| Ok::<_, ()>(span + 10)));
        assert_eq!(
            span,
            [
                Ok(VmKind::Plain(1)),
                Ok(VmKind::SharedSpan(12)),
                Ok(VmKind::CoherentSpan(12, 3))
            ]
        );
        // The map of spanning data is not called for a plain VM.
        let failed = kinds.map(|kind| kind.try_map_span(|_| Err::<u8, _>("refused")));
        assert_eq!(failed, [Ok(VmKind::Plain(1)), Err("refused"), Err("refused")]);
    }

    #[test]
    fn two_nodes_are_two_packages_unless_software_keeps_their_memory_coherent() {
        let nodes = [0, 0, 1, 1];
        let packages = [
            VmKind::Plain(()),
            VmKind::SharedSpan(()),
            VmKind::CoherentSpan((), ()),
        ]
        .map(|kind| kind.groups(&nodes).package);
        assert_eq!(packages, [2, 2, 4]);
    }
}
