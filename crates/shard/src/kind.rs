//! The kind of VM that a shard serves.
//!
//! The launch message decides the kind once ([`VmKind::of`], [`VmKind::of_span`]). The shard's start then
//! turns the data of the variant into those of the next step, and never asks the message again:
//!
//! | step | plain | spanning | with coherent memory, beside that |
//! | --- | --- | --- | --- |
//! | launch | what it goes on from | [`SpanLaunch`] | [`CoherenceLaunch`] |
//! | [`OpenedKind`] | the same, open | channels to the other shards | the copy, not served yet |
//! | [`BuiltKind`] | what it shares | its home | the copy, not served yet |
//! | [`ServedKind`] | what it shares | its home | the copy |
//! | [`ReadyKind`] | [`PlainVm`] | its home | the copy |
//! | [`RunningKind`] | [`PlainVm`] | the way to the other shards | the copy |
//!
//! A shard without devices takes the same steps as a [`SpanKind`].

use std::convert::Infallible;
use std::sync::Arc;

use crate::arch::x86_64::cpuid::Groups;
use crate::ending::EndSignal;
use crate::launch::{CoherenceLaunch, ResumeLaunch, SpanLaunch};
use crate::machine::{PlainVm, Resume};
use crate::memory::replica::{Coherence, Replica, ReplicaError};
use crate::sandbox::Threads;
use crate::sharing::Sharing;
use crate::span::machine::{HomeShard, SpanSetup};
use crate::span::router::Router;

/// The kind of VM that a shard serves. `P` is what a plain VM has, `S` what a spanning VM has, `C` its
/// coherent memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VmKind<P, S, C> {
    /// The shard is the whole VM: KVM has the interrupt controllers, and pages of memory may stand for those
    /// of images.
    Plain(P),
    /// One of several shards, which have the interrupt controllers and map the same memory.
    SharedSpan(S),
    /// One of several shards, which have the interrupt controllers and each a copy of the memory. They keep
    /// the copies coherent.
    CoherentSpan(S, C),
}

/// The kind of a VM that spans cells.
pub type SpanKind<S, C> = VmKind<Infallible, S, C>;

/// The files of the launch message are open.
pub type OpenedKind<P = Option<Resume>> = VmKind<P, SpanSetup, Box<Replica>>;

/// The machine is built. A plain VM shares nothing if its pages are too large.
pub type BuiltKind = VmKind<Option<Sharing>, HomeShard, Box<Replica>>;

/// The memory can be used.
pub type ServedKind = VmKind<Option<Sharing>, HomeShard, &'static Coherence>;

/// The vCPUs are made.
pub type ReadyKind = VmKind<PlainVm, HomeShard, &'static Coherence>;

/// The guest runs.
pub type RunningKind = VmKind<PlainVm, Arc<Router>, &'static Coherence>;

/// A launch message that has a VM both span cells and go on from a frozen state.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the launch message resumes a VM that spans cells; help: resume VMs without `span` only")]
pub struct ResumedSpan;

impl<'a> VmKind<Option<&'a ResumeLaunch>, &'a SpanLaunch, &'a CoherenceLaunch> {
    /// The kind of a VM that has these in its launch message.
    ///
    /// # Errors
    /// If it has both.
    pub fn of(span: Option<&'a SpanLaunch>, resume: Option<&'a ResumeLaunch>) -> Result<Self, ResumedSpan> {
        match (span, resume) {
            (None, resume) => Ok(Self::Plain(resume)),
            (Some(span), None) => Ok(Self::of_span(span)),
            (Some(_), Some(_)) => Err(ResumedSpan),
        }
    }
}

impl<'a, P> VmKind<P, &'a SpanLaunch, &'a CoherenceLaunch> {
    /// The kind of a VM that spans cells.
    pub fn of_span(span: &'a SpanLaunch) -> Self {
        match &span.coherence {
            None => Self::SharedSpan(span),
            Some(coherence) => Self::CoherentSpan(span, coherence),
        }
    }
}

impl<P, S, C> VmKind<P, S, C> {
    /// The same kind, with other data of a plain VM.
    pub fn map_plain<Q>(self, map: impl FnOnce(P) -> Q) -> VmKind<Q, S, C> {
        match self {
            Self::Plain(plain) => VmKind::Plain(map(plain)),
            Self::SharedSpan(span) => VmKind::SharedSpan(span),
            Self::CoherentSpan(span, memory) => VmKind::CoherentSpan(span, memory),
        }
    }

    /// The same kind, with other data of a spanning VM, if these can be made.
    ///
    /// # Errors
    /// Those of `map`.
    pub fn try_map_span<T, E>(self, map: impl FnOnce(S) -> Result<T, E>) -> Result<VmKind<P, T, C>, E> {
        Ok(match self {
            Self::Plain(plain) => VmKind::Plain(plain),
            Self::SharedSpan(span) => VmKind::SharedSpan(map(span)?),
            Self::CoherentSpan(span, memory) => VmKind::CoherentSpan(map(span)?, memory),
        })
    }

    /// What CPUID says of which vCPUs belong together, when vCPU v is in node `nodes[v]`.
    pub fn groups(&self, nodes: &[u8]) -> Groups {
        match self {
            Self::Plain(_) | Self::SharedSpan(_) => Groups::of(nodes),
            Self::CoherentSpan(..) => Groups::of_coherent(nodes),
        }
    }
}

impl<S, C> VmKind<Option<Sharing>, S, C> {
    /// What the VM shares memory by, if it is plain and its pages are small enough.
    pub fn sharing(&self) -> Option<&Sharing> {
        match self {
            Self::Plain(sharing) => sharing.as_ref(),
            Self::SharedSpan(_) | Self::CoherentSpan(..) => None,
        }
    }
}

impl<P, S: AsRef<Router>> VmKind<P, S, Box<Replica>> {
    /// Serves a copy of the memory until the process ends. From then on packets to other shards come after
    /// what this shard changed in merged page tables.
    ///
    /// # Errors
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
    /// Has no thread wait for another shard any more: the VM ends.
    pub fn end(&self) {
        match self {
            Self::Plain(_) => {}
            Self::SharedSpan(router) | Self::CoherentSpan(router, _) => router.end(),
        }
    }

    /// Whether all memory can still be reached. A thread that waits for a page that comes no more waits for
    /// ever.
    pub fn memory_is_whole(&self) -> bool {
        match self {
            Self::Plain(_) | Self::SharedSpan(_) => true,
            Self::CoherentSpan(_, coherence) => coherence.is_whole(),
        }
    }
}

impl<S, C> SpanKind<S, C> {
    /// What both kinds have.
    pub fn span(&self) -> &S {
        match self {
            Self::SharedSpan(span) | Self::CoherentSpan(span, _) => span,
            Self::Plain(never) => match *never {},
        }
    }
}

impl<S, C: Copy> SpanKind<S, C> {
    /// The same kind, with something else that both kinds have.
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
    fn a_launch_is_of_one_kind_and_a_resumed_span_of_none() {
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
        // A plain VM has nothing to fail with.
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
