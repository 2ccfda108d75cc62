//! Opens the resources that the launch message has for the kind of VM: memory, and channels to other shards.

use std::fs::File;

use super::{Files, ProcessError};
use crate::arch::x86_64::layout::Layout;
use crate::kind::{OpenedKind, OpenedPlain, SpanKind, VmKind};
use crate::launch::{LaunchSpec, MemoryLaunch, PagingLaunch, ResumeLaunch, SpanLaunch};
use crate::machine::{MachineError, Resume};
use crate::memory::replica::Replica;
use crate::memory::{self, GuestRam};
use crate::paging::{PagingError, PagingFiles};
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
            let (file, opened) = match (launch, &spec.memory.paging) {
                (None, None) => (None, OpenedPlain::Boot),
                (None, Some(launch)) => (None, OpenedPlain::BootPaged(paging(launch, files)?)),
                (Some(launch), None) => {
                    let (file, resume) = frozen(launch, files)?;
                    (file, OpenedPlain::Resume(resume))
                }
                (Some(_), Some(_)) => return Err(MachineError::from(PagingError::Resumed).into()),
            };
            let memory = memory::create(layout, &spec.memory, &spec.nodes, file);
            Ok((VmKind::Plain(opened), memory.map_err(MachineError::from)?))
        }
        VmKind::SharedSpan(_) | VmKind::CoherentSpan(..) if spec.memory.paging.is_some() => {
            Err(MachineError::from(PagingError::Spanning).into())
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

/// Opens the files of paging.
fn paging(launch: &PagingLaunch, files: &mut Files) -> Result<PagingFiles, ProcessError> {
    Ok(PagingFiles {
        file: files.take(launch.file)?,
        name: launch.name.clone(),
        userfaultfd: launch.userfaultfd.map(|fd| files.take(fd)).transpose()?,
        resident_bytes: launch.resident_bytes,
        disk_bytes: launch.disk_bytes,
    })
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
