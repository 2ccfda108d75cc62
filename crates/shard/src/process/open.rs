//! Opens the resources that the launch message has for the kind of VM: memory, and channels to other shards.

use std::fs::File;

use super::{Files, ProcessError};
use crate::arch::x86_64::layout::Layout;
use crate::kind::{OpenedKind, SpanKind, VmKind};
use crate::launch::{LaunchSpec, MemoryLaunch, ResumeLaunch, SpanLaunch};
use crate::machine::{MachineError, Resume};
use crate::memory::replica::Replica;
use crate::memory::{self, GuestRam};
use crate::snapshot::MachineState;
use crate::span::machine::{Channels, SpanSetup, wake_promptly};

/// Returns the kind of the VM of `spec`, and its memory.
pub fn vm(
    spec: &LaunchSpec,
    layout: &Layout,
    files: &mut Files,
) -> Result<(OpenedKind, GuestRam), ProcessError> {
    match VmKind::of(spec.span.as_ref(), spec.resume.as_ref())? {
        VmKind::Plain(launch) => {
            let frozen = launch.map(|launch| frozen(launch, files)).transpose()?;
            let (file, resume) = frozen.unzip();
            let memory = memory::create(layout, &spec.memory, &spec.nodes, file.flatten());
            Ok((VmKind::Plain(resume), memory.map_err(MachineError::from)?))
        }
        VmKind::SharedSpan(launch) | VmKind::CoherentSpan(launch, _) => {
            span(launch, &spec.memory, layout, files)
        }
    }
}

/// Returns the kind of a VM that spans cells, and its memory.
pub fn span<P>(
    launch: &SpanLaunch,
    memory: &MemoryLaunch,
    layout: &Layout,
    files: &mut Files,
) -> Result<(OpenedKind<P>, GuestRam), ProcessError> {
    wake_promptly();
    let setup = SpanSetup::new(launch, Channels::take(launch, files)?);
    match SpanKind::of_span(launch) {
        VmKind::SharedSpan(_) => {
            let named = launch.memory.iter().filter_map(|part| part.file);
            let all: Vec<File> = named.map(|fd| files.take(fd)).collect::<Result<_, _>>()?;
            let ram = memory::create_shared(layout, memory, launch, &all);
            Ok((VmKind::SharedSpan(setup), ram.map_err(MachineError::from)?))
        }
        VmKind::CoherentSpan(_, coherence) => {
            let replica =
                Replica::take(launch, coherence, memory.bytes, files).map_err(MachineError::from)?;
            let ram = memory::create_coherent(layout, memory, &replica);
            let kind = VmKind::CoherentSpan(setup, Box::new(replica));
            Ok((kind, ram.map_err(MachineError::from)?))
        }
    }
}

/// Opens the frozen VM to resume from: the file of its memory, and the rest.
fn frozen(launch: &ResumeLaunch, files: &mut Files) -> Result<(Option<File>, Resume), ProcessError> {
    let state = files.take(launch.state)?;
    let mut memory = launch.memory.iter().map(|fd| files.take(*fd));
    let file = memory.next().transpose()?;
    let layers = memory.collect::<Result<_, _>>()?;
    Ok((
        file,
        Resume {
            state: MachineState::read(&state)?,
            layers,
        },
    ))
}
