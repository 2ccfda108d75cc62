//! Memory of each node, written on one and read on every other one.

use std::fs;

use guest_tests::pattern::mix;

use crate::Fault;
use crate::memory::Region;
use crate::pinned::pin;

const WORDS: usize = 512;
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// A node and the first of its CPUs.
struct Node {
    number: usize,
    cpu: usize,
}

/// For each node: a CPU of the node writes `mib` MiB of its memory, and one of every other node checks it and
/// writes new values, which the first checks. Returns, for each node, the amount and a checksum.
pub fn check(mib: usize) -> Result<String, Fault> {
    let nodes = nodes()?;
    let mut said = Vec::new();
    for home in &nodes {
        bind(home.number)?;
        pin(home.cpu)?;
        let mut region = Region::new(mib << 20)?;
        let mut seed = home.number as u64 + 1;
        let mut sum = write(&mut region, seed);
        let away = misplaced(&mut region, home.number)?;
        if away > 0 {
            return Err(format!(
                "{away} pages that were bound to node {} are elsewhere",
                home.number
            )
            .into());
        }
        expect(&mut region, seed, home, home)?;
        for other in nodes.iter().filter(|other| other.number != home.number) {
            pin(other.cpu)?;
            expect(&mut region, seed, home, other)?;
            seed += 1000;
            sum = write(&mut region, seed);
            pin(home.cpu)?;
            expect(&mut region, seed, home, home)?;
        }
        said.push(format!("node{}={mib}MiB:{sum:016x}", home.number));
    }
    Ok(said.join(" "))
}

/// Nodes with CPUs and memory.
fn nodes() -> Result<Vec<Node>, Fault> {
    let mut nodes = Vec::new();
    for number in list(&fs::read_to_string("/sys/devices/system/node/has_memory")?)? {
        let cpus = fs::read_to_string(format!("/sys/devices/system/node/node{number}/cpulist"))?;
        if let Some(cpu) = list(&cpus)?.first() {
            nodes.push(Node { number, cpu: *cpu });
        }
    }
    Ok(nodes)
}

/// Parses numbers as the kernel lists them: `0-2,5`.
fn list(text: &str) -> Result<Vec<usize>, Fault> {
    let mut numbers = Vec::new();
    for part in text.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        numbers.extend(first.parse::<usize>()?..=last.parse()?);
    }
    Ok(numbers)
}

/// Binds this thread's memory to one node.
fn bind(node: usize) -> Result<(), Fault> {
    let mask = 1u64 << node;
    // SAFETY: reads a mask of 64 bits.
    let result = unsafe { libc::syscall(libc::SYS_set_mempolicy, libc::MPOL_BIND, &mask, 64) };
    if result != 0 {
        return Err(format!("memory of node {node}: {}", std::io::Error::last_os_error()).into());
    }
    Ok(())
}

/// Number of pages that are not on this node.
fn misplaced(region: &mut Region, node: usize) -> Result<usize, Fault> {
    let pages: Vec<*mut u64> = (0..region.pages())
        .map(|page| region.page(page).as_mut_ptr())
        .collect();
    let mut places = vec![0i32; pages.len()];
    // SAFETY: both arrays have as many entries as the call says; without nodes to move to, pages stay where
    // they are.
    let result = unsafe {
        libc::syscall(
            libc::SYS_move_pages,
            0,
            pages.len(),
            pages.as_ptr(),
            std::ptr::null::<i32>(),
            places.as_mut_ptr(),
            0,
        )
    };
    if result != 0 {
        return Err(format!("move_pages: {}", std::io::Error::last_os_error()).into());
    }
    Ok(places.iter().filter(|place| **place != node as i32).count())
}

fn first(seed: u64, page: usize) -> u64 {
    mix(seed << 32 | page as u64)
}

/// Fills the region; returns the sum of all words.
fn write(region: &mut Region, seed: u64) -> u64 {
    let mut sum = 0u64;
    for number in 0..region.pages() {
        let mut value = first(seed, number);
        for word in region.page(number) {
            *word = value;
            sum = sum.wrapping_add(value);
            value = value.wrapping_add(STEP);
        }
    }
    sum
}

fn expect(region: &mut Region, seed: u64, home: &Node, reader: &Node) -> Result<(), Fault> {
    for number in 0..region.pages() {
        let start = first(seed, number);
        let page = region.page(number);
        let wrong =
            (0..WORDS).find(|index| page[*index] != start.wrapping_add((*index as u64).wrapping_mul(STEP)));
        if let Some(index) = wrong {
            return Err(format!(
                "page {number} of node {}, word {index}: CPU {} read {:#x}",
                home.number, reader.cpu, page[index]
            )
            .into());
        }
    }
    Ok(())
}
