#![allow(clippy::single_range_in_vec_init)] // the ranges are the elements

use std::io::{Seek, Write};

use kvm_bindings::{CpuId, kvm_cpuid_entry2};
use proptest::prelude::*;

use super::acpi::{NodeTable, tables};
use super::cpuid::{self, Groups};
use super::kernel::{Entry, Kernel, KernelError, load, write_cmdline};
use super::layout::*;
use super::memory_map::{MemoryKind, memory_map};
use super::{kernel, start};
use crate::launch::{MemoryLaunch, Pages};
use crate::memory::{self, GuestRam};

fn ram(bytes: u64) -> GuestRam {
    let layout = Layout::new(bytes, &[]).unwrap();
    memory::create(
        &layout,
        &MemoryLaunch {
            bytes,
            pages: Pages::Small,
            prefault: false,
            host_nodes: Vec::new(),
            homes: Vec::new(),
            paging: None,
            scan: false,
        },
        &[],
        None,
    )
    .unwrap()
}

proptest! {
    /// Promise SHARD-09.
    #[test]
    fn map_covers_all_ram_and_overlaps_nothing(
        mib2 in 32u64..(1 << 20),
        pmem in prop::collection::vec(1u64..(1 << 40), 0..4)
    ) {
        let bytes = mib2 << 21;
        let Some(layout) = Layout::new(bytes, &pmem) else { return Ok(()) };
        let total: u64 = layout.ram.iter().map(|range| range.end - range.start).sum();
        prop_assert_eq!(total, bytes);
        let map = memory_map(&layout);
        for pair in map.windows(2) {
            prop_assert!(pair[0].start + pair[0].bytes <= pair[1].start);
        }
        let told: u64 = map.iter().filter(|e| e.kind == MemoryKind::Ram).map(|e| e.bytes).sum();
        prop_assert_eq!(told, bytes - (LEGACY_HOLE_END - LEGACY_HOLE_START));
        let mut end = layout.ram_end();
        for range in layout.pmem.iter().chain([&layout.mmio64]) {
            prop_assert!(range.start >= end && range.start >= HIGH_RAM_START);
            end = range.end;
        }
    }
}

fn checked_tables(image: &[u8]) -> Vec<(String, Vec<u8>)> {
    let qword = |place: usize| u64::from_le_bytes(image[place..place + 8].try_into().unwrap());
    let at = |address: u64| {
        let start = (address - ACPI_START) as usize;
        let bytes = u32::from_le_bytes(image[start + 4..start + 8].try_into().unwrap()) as usize;
        let table = image[start..start + bytes].to_vec();
        let name = String::from_utf8(table[..4].to_vec()).unwrap();
        assert_eq!(
            table.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte)),
            0,
            "checksum of {name}"
        );
        (name, table)
    };
    assert_eq!(&image[..8], b"RSD PTR ");
    assert_eq!(
        image[..36].iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte)),
        0
    );
    let xsdt = at(qword(24));
    let mut all: Vec<_> = xsdt.1[36..]
        .chunks(8)
        .map(|entry| at(u64::from_le_bytes(entry.try_into().unwrap())))
        .collect();
    let fadt = all.iter().find(|(name, _)| name == "FACP").unwrap().1.clone();
    all.push(at(u64::from_le_bytes(fadt[140..148].try_into().unwrap())));
    all
}

#[test]
fn every_table_has_its_checksum() {
    let layout = Layout::new(5 << 30, &[1 << 30]).unwrap();
    let node = |vcpus, ranges, distances| NodeTable {
        vcpus,
        ranges,
        distances,
        ..NodeTable::default()
    };
    let nodes = [
        node(vec![0, 1], vec![0..LOW_RAM_END], vec![10, 30]),
        node(vec![2], vec![HIGH_RAM_START..layout.ram_end()], vec![21, 10]),
    ];
    let image = tables(&layout, 3, &nodes).unwrap();
    let all = checked_tables(&image);
    let names: Vec<_> = all.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["FACP", "APIC", "MCFG", "SRAT", "SLIT", "DSDT"]);
    assert_eq!(all[4].1[44..], [10, 30, 21, 10]);
    // For a disassembler, on a developer's request.
    if let Ok(path) = std::env::var("MIRRORBALL_DSDT") {
        std::fs::write(path, &all[5].1).unwrap();
    }
}

/// Nodes of a vCPU each, without memory, and the image with their tables.
fn measured(latencies_ps: &[&[u64]], bandwidths_mb_s: &[&[u64]]) -> Vec<(String, Vec<u8>)> {
    let layout = Layout::new(64 << 20, &[]).unwrap();
    let figures = latencies_ps.iter().zip(bandwidths_mb_s).enumerate();
    let nodes: Vec<NodeTable> = figures
        .map(|(node, (latencies, bandwidths))| NodeTable {
            vcpus: vec![node as u8],
            latencies_ps: latencies.to_vec(),
            bandwidths_mb_s: bandwidths.to_vec(),
            ..NodeTable::default()
        })
        .collect();
    checked_tables(&tables(&layout, nodes.len() as u8, &nodes).unwrap())
}

/// Returns the structures of the HMAT: each one's type, and its bytes after the length.
fn hmat_structures(table: &[u8]) -> Vec<(u16, &[u8])> {
    let mut rest = &table[40..];
    let mut all = Vec::new();
    while !rest.is_empty() {
        let bytes = u32::from_le_bytes(rest[4..8].try_into().unwrap()) as usize;
        all.push((u16::from_le_bytes(rest[..2].try_into().unwrap()), &rest[8..bytes]));
        rest = &rest[bytes..];
    }
    all
}

/// Returns data type, base unit, and the value of each entry.
fn locality(body: &[u8]) -> (u8, u64, Vec<u64>) {
    let word = |at: usize| u64::from(u16::from_le_bytes(body[at..at + 2].try_into().unwrap()));
    let dword = |at: usize| u32::from_le_bytes(body[at..at + 4].try_into().unwrap()) as usize;
    let (initiators, targets) = (dword(4), dword(8));
    let base = u64::from_le_bytes(body[16..24].try_into().unwrap());
    for (at, count) in [(24, initiators), (24 + 4 * initiators, targets)] {
        let nodes: Vec<usize> = (0..count).map(|node| dword(at + 4 * node)).collect();
        assert_eq!(nodes, (0..count).collect::<Vec<_>>());
    }
    let first = 24 + 4 * (initiators + targets);
    assert_eq!(body.len(), first + 2 * initiators * targets);
    let values = (0..initiators * targets).map(|entry| word(first + 2 * entry) * base);
    (body[1], base, values.collect())
}

/// Promise SHARD-06.
#[test]
fn hmat_has_the_measured_latencies_and_bandwidths() {
    let latencies: [&[u64]; 2] = [&[90_000, 140_000], &[141_000, 91_000]];
    let bandwidths: [&[u64]; 2] = [&[16_000, 9_000], &[8_900, 17_000]];
    let all = measured(&latencies, &bandwidths);
    let names: Vec<_> = all.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["FACP", "APIC", "MCFG", "SRAT", "SLIT", "HMAT", "DSDT"]);
    assert_eq!(all[5].1[8], 2, "revision");
    let structures = hmat_structures(&all[5].1);
    let types: Vec<u16> = structures.iter().map(|(kind, _)| *kind).collect();
    assert_eq!(types, [0, 0, 1, 1]);
    for (node, (_, body)) in structures[..2].iter().enumerate() {
        // The flag that the node's own CPUs are its initiators.
        assert_eq!(body.len(), 32);
        assert_eq!((body[0], body[4], body[8]), (1, node as u8, node as u8));
    }
    let (latency, bandwidth) = (locality(structures[2].1), locality(structures[3].1));
    assert_eq!(latency, (0, 10, latencies.concat()));
    assert_eq!(bandwidth, (4, 1, bandwidths.concat()));
}

#[test]
fn hmat_is_absent_unless_all_pairs_of_nodes_were_measured() {
    let whole: [&[u64]; 2] = [&[1, 2], &[2, 1]];
    let has_hmat = |latencies: &[&[u64]], bandwidths: &[&[u64]]| {
        measured(latencies, bandwidths)
            .iter()
            .any(|(name, _)| name == "HMAT")
    };
    assert!(has_hmat(&whole, &whole));
    for part in [
        [&[][..], &[]],
        [&[1, 2], &[]],
        [&[1, 2], &[2]],
        [&[1, 2], &[0, 1]],
    ] {
        assert!(!has_hmat(&part, &whole) && !has_hmat(&whole, &part), "{part:?}");
    }
}

#[test]
fn memory_of_a_node_without_cpus_has_no_initiator() {
    let layout = Layout::new(64 << 20, &[]).unwrap();
    let node = |vcpus| NodeTable {
        vcpus,
        latencies_ps: vec![5, 5],
        bandwidths_mb_s: vec![5, 5],
        ..NodeTable::default()
    };
    let image = tables(&layout, 1, &[node(vec![0]), node(Vec::new())]).unwrap();
    let all = checked_tables(&image);
    let (_, body) = hmat_structures(&all[5].1)[1];
    assert_eq!((body[0], body[8]), (0, 1));
}

#[test]
fn tables_of_the_greatest_number_of_nodes_fit() {
    let row: &[u64] = &[100_000; 64];
    let all = measured(&[row; 64], &[row; 64]);
    assert_eq!(hmat_structures(&all[5].1).len(), 64 + 2);
}

proptest! {
    /// An entry is neither "unreachable" nor absent, and its error is below 1/6,500 of the largest.
    #[test]
    fn figures_are_rounded_a_little(figures in prop::collection::vec((0..40_u32, 1..1000_u64), 4)) {
        let figures: Vec<u64> = figures.iter().map(|(bits, value)| value << bits).collect();
        let rows = [&figures[..2], &figures[2..]];
        let all = measured(&rows, &rows);
        let most = *figures.iter().max().unwrap();
        let (_, base, values) = locality(hmat_structures(&all[5].1)[2].1);
        for (value, figure) in values.iter().zip(&figures) {
            prop_assert!((1..=0xFFFE).contains(&(value / base)));
            prop_assert!(value.abs_diff(*figure) <= (most / 6_500).max(base - 1));
        }
    }
}

/// Promise SHARD-07.
#[test]
fn tables_of_the_greatest_number_of_vcpus_fit() {
    let layout = Layout::new(64 << 20, &[]).unwrap();
    let image = tables(&layout, 254, &[]).unwrap();
    let madt = &checked_tables(&image)[1].1;
    assert_eq!(madt.len(), 44 + 12 + 254 * 8);
}

#[test]
fn cpuid_numbers_every_vcpu() {
    let leaf = |function, eax| kvm_cpuid_entry2 {
        function,
        eax,
        ..Default::default()
    };
    let leaves = [
        leaf(0, 0xD),
        leaf(1, 0),
        leaf(4, 0x1_0063),
        leaf(6, 0),
        leaf(0x8000_0008, 0),
        leaf(0x8000_001E, 0),
    ];
    let supported = CpuId::from_entries(&leaves).unwrap();
    for (vcpus, bits) in [(1u8, 0), (2, 1), (3, 2), (4, 2), (5, 3), (254, 8)] {
        for id in [0, vcpus - 1] {
            let leaves = cpuid::of_vcpu(
                &supported,
                id,
                Groups {
                    package: vcpus,
                    cache: vcpus,
                },
            )
            .unwrap();
            let get = |function, index| {
                *leaves
                    .as_slice()
                    .iter()
                    .find(|l| l.function == function && l.index == index)
                    .unwrap()
            };
            assert_eq!(get(1, 0).ebx >> 24, u32::from(id));
            assert_eq!(get(0xB, 0).edx, u32::from(id));
            assert_eq!((get(0xB, 1).eax, get(0xB, 1).ebx), (bits, u32::from(vcpus)));
            assert_eq!(get(0x8000_001E, 0).eax, u32::from(id));
            assert_eq!(get(0x8000_0008, 0).ecx & 0xFF, u32::from(vcpus) - 1);
            assert_eq!((get(4, 0).eax >> 14) & 0xFFF, u32::from(vcpus) - 1);
        }
    }
}

/// Promise SHARD-02.
#[test]
fn files_that_are_no_kernel_are_refused_with_the_reason() {
    let memory = ram(64 << 20);
    let mut bz_header = vec![0; 0x1000];
    bz_header[0x202..0x206].copy_from_slice(b"HdrS");
    let mut elf_header = b"\x7FELF".to_vec();
    elf_header.resize(40, 0xFF);
    for content in [
        vec![],
        vec![0; 100],
        b"#!/bin/sh\n".repeat(100),
        bz_header,
        elf_header,
    ] {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&content).unwrap();
        file.rewind().unwrap();
        let error = load(&memory, &mut file, false).unwrap_err();
        assert!(
            matches!(error, KernelError::NotAKernel | KernelError::Load(_)),
            "{error}"
        );
    }
}

fn elf_kernel() -> Kernel {
    Kernel {
        entry: Entry::Linux64(KERNEL_START),
        header: None,
        start: 8 << 20,
        end: 16 << 20,
        cmdline_bytes_max: 2048,
        segments: Vec::new(),
    }
}

/// Promise SHARD-03.
#[test]
fn cmdline_too_long_is_refused() {
    let memory = ram(64 << 20);
    let kernel = elf_kernel();
    write_cmdline(&memory, &"x".repeat(2047), &kernel).unwrap();
    let error = write_cmdline(&memory, &"x".repeat(2048), &kernel).unwrap_err();
    assert!(matches!(
        error,
        KernelError::CmdlineTooLong {
            bytes: 2048,
            bytes_max: 2047
        }
    ));
}

#[test]
fn initramfs_larger_than_memory_is_refused() {
    let memory = ram(64 << 20);
    let mut file = tempfile::tempfile().unwrap();
    file.set_len(50 << 20).unwrap();
    let error = kernel::load_initrd(&memory, &mut file, &elf_kernel()).unwrap_err();
    assert!(matches!(error, KernelError::NoRoom { needed_mib: 66 }), "{error}");
}

#[test]
fn start_data_fits_below_the_command_line() {
    let memory = ram(64 << 20);
    let layout = Layout::new(5 << 30, &[]).unwrap();
    let map = memory_map(&layout);
    for entry in [Entry::Linux64(KERNEL_START), Entry::Pvh(KERNEL_START)] {
        start::write(
            &memory,
            &Kernel {
                entry,
                ..elf_kernel()
            },
            None,
            0,
            &map,
        )
        .unwrap();
    }
    const { assert!(PAGE_TABLES_START + 6 * 4096 <= CMDLINE_START) };
    const { assert!(CMDLINE_START + CMDLINE_BYTES_MAX as u64 <= LEGACY_HOLE_START) };
    assert!(PVH_INFO_START + 40 + 32 + 24 * map.len() as u64 <= ZERO_PAGE_START);
}

#[test]
fn initramfs_goes_below_the_kernel_when_the_top_is_full() {
    let memory = ram(64 << 20);
    let kernel = Kernel {
        start: 16 << 20,
        end: 62 << 20,
        ..elf_kernel()
    };
    let mut file = tempfile::tempfile().unwrap();
    file.set_len(5 << 20).unwrap();
    let initrd = kernel::load_initrd(&memory, &mut file, &kernel).unwrap();
    assert_eq!((initrd.start, initrd.bytes), (11 << 20, 5 << 20));
    file.set_len(1 << 20).unwrap();
    let initrd = kernel::load_initrd(&memory, &mut file, &kernel).unwrap();
    assert_eq!(initrd.start, 63 << 20);
}
