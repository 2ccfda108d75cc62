//! Contents of guest memory at the start of the first vCPU: kernel, initramfs, command line, boot data,
//! tables.

use vm_memory::{Bytes, GuestAddress};

use super::BootFiles;
use super::error::MachineError;
use crate::arch::x86_64::acpi::{self, NodeTable};
use crate::arch::x86_64::early_memory;
use crate::arch::x86_64::kernel::{self, Entry, KernelError};
use crate::arch::x86_64::layout::{self, Layout};
use crate::arch::x86_64::memory_map::memory_map;
use crate::arch::x86_64::start;
use crate::launch::{LaunchSpec, Share};
use crate::memory::{self, GuestRam};
use crate::sharing::Mapper;

/// Loads these contents. Returns the entry of the kernel.
pub(super) fn load(
    memory: &GuestRam,
    layout: &Layout,
    spec: &LaunchSpec,
    cmdline: &str,
    files: &mut BootFiles,
    sharing: Option<&Mapper>,
) -> Result<Entry, MachineError> {
    let map = spec.share_boot == Share::AtRead && sharing.is_some();
    let kernel = kernel::load(memory, &mut files.kernel, map)?;
    let initrd = match &mut files.initrd {
        Some(file) => Some(kernel::load_initrd(memory, file, &kernel)?),
        None => None,
    };
    // Paged memory and memory that the host scans are in small pages.
    let is_small = spec.memory.paging.is_some() || spec.memory.scan;
    // Other programs do not use their memory so, and Linux with several nodes divides it.
    if kernel.is_linux() && spec.nodes.is_empty() && !is_small {
        let initrd = initrd.map_or(0..0, |initrd| initrd.start..initrd.start + initrd.bytes);
        let structs = early_memory::page_structs(&layout.ram, &initrd);
        let objects = early_memory::kernel_objects(&layout.ram, kernel.end, &structs);
        memory::fill_with_huge_pages(memory, structs);
        if !map {
            for range in objects {
                memory::fill_with_huge_pages(memory, range);
            }
        }
    }
    if let Some(sharing) = sharing {
        if !map && !is_small {
            // The kernel frees much of the rest after its start, for page cache that is to be shared.
            for part in kernel.segments.iter().filter(|part| !part.writable) {
                sharing.mark_huge(part.at, part.at.saturating_add(part.bytes));
            }
        }
        for part in &kernel.segments {
            sharing.note_loaded(&files.kernel, part.at, part.offset, part.bytes);
        }
        if let (Some(file), Some(initrd)) = (&files.initrd, initrd) {
            sharing.note_loaded(file, initrd.start, 0, initrd.bytes);
        }
        // Pages that the kernel writes would not stay shared.
        for part in kernel.segments.iter().filter(|part| !part.writable) {
            sharing.loaded(&files.kernel, part.at, part.offset, part.bytes, map)?;
        }
        // An unpacked initramfs is free memory: sharing it later would be useless.
        if let (Some(file), Some(initrd), true) = (&files.initrd, initrd, map) {
            sharing.loaded(file, initrd.start, 0, initrd.bytes, map)?;
        }
    }
    kernel::write_cmdline(memory, cmdline, &kernel)?;
    start::write(memory, &kernel, initrd, cmdline.len(), &memory_map(layout))?;
    let ranges = memory::part_ranges(layout, spec.nodes.iter().map(|node| node.memory_bytes));
    let nodes: Vec<_> = spec
        .nodes
        .iter()
        .zip(ranges)
        .map(|(node, ranges)| NodeTable {
            vcpus: node.vcpus.clone(),
            ranges,
            distances: node.distances.clone(),
            latencies_ps: node.latencies_ps.clone(),
            bandwidths_mb_s: node.bandwidths_mb_s.clone(),
        })
        .collect();
    let tables = acpi::tables(layout, spec.vcpus, &nodes)?;
    memory
        .write_slice(&tables, GuestAddress(layout::ACPI_START))
        .map_err(KernelError::Memory)?;
    Ok(kernel.entry)
}
