//! The CPUID of a guest that runs on several hosts: the features that their processors have in common (Intel
//! SDM, volume 2, CPUID; AMD APM, volume 3, appendix E). Pure.
//!
//! Features are reduced to those of both processors. A difference that no reduction hides from the guest is
//! an error that names it. Descriptive leaves (model, caches, brand) are the first host's for all.

use serde::{Deserialize, Serialize};

/// One entry of CPUID.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct Leaf {
    /// Number of the function (EAX).
    pub function: u32,
    /// Index within the function (ECX).
    pub index: u32,
    /// Flags of KVM.
    pub flags: u32,
    /// Registers EAX, EBX, ECX and EDX.
    pub registers: [u32; 4],
}

/// Error: a guest can't run on both processors.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("their processors differ in {0}")]
pub struct Unlike(pub String);

/// Rule that combines two values of a register.
#[derive(Clone, Copy)]
enum Rule {
    /// The first host's value.
    First,
    /// Bits of features: those of both.
    Both,
    /// The lower number.
    Least,
    /// As [`Rule::Both`], except for these bits, which report missing features: a feature that one processor
    /// lacks is missing for the guest.
    BothOrLacking(u32),
    /// Numbers of eight bits each: the lower ones.
    LeastBytes,
}

use Rule::{Both, BothOrLacking, First, Least, LeastBytes};

/// x87 exceptions update the FPU's data pointer only, and its segments are zero (leaf 7, EBX).
const LACKS_FPU_POINTERS: u32 = 1 << 6 | 1 << 13;
/// A register lists the side channels that the processor is free of (leaf 7, EDX).
const ARCH_CAPABILITIES: u32 = 1 << 29;
/// First component of XSAVE with a separate offset.
const XSAVE_FIRST: u32 = 2;
/// Size of the legacy area and the header, bytes.
const XSAVE_HEADER_END: u32 = 576;

/// Returns the rules of a leaf whose registers are features or limits; none for others.
fn rules(function: u32, index: u32) -> Option<[Rule; 4]> {
    Some(match (function, index) {
        (0 | 0x8000_0000, _) => [Least, First, First, First],
        (1, _) => [First, First, Both, Both],
        (6, _) => [Both, Least, Both, Both],
        (7, 0) => [Least, BothOrLacking(LACKS_FPU_POINTERS), Both, Both],
        (7, _) | (0xD, 1) | (0x8000_0021, _) => [Both, Both, Both, Both],
        (0xD, 0) => [Both, First, First, Both],
        (0x8000_0001, _) => [First, First, Both, Both],
        (0x8000_0007, _) => [First, Both, First, Both],
        (0x8000_0008, _) => [LeastBytes, Both, First, First],
        (0x4000_0001, _) => [Both, First, First, Both],
        // Model, caches, topology, clocks, brand: descriptive leaves.
        (2..=5 | 0xB | 0x15 | 0x16 | 0x1A | 0x1F | 0x4000_0000, _)
        | (0x8000_0002..=0x8000_0006 | 0x8000_0019 | 0x8000_001A | 0x8000_001D | 0x8000_001E, _) => {
            [First, First, First, First]
        }
        _ => return None,
    })
}

/// Returns the CPUID of a guest that runs on `first` and on `other`.
///
/// # Errors
/// Fails if one processor requires a feature of the guest that the other lacks.
pub fn common(first: &[Leaf], other: &[Leaf]) -> Result<Vec<Leaf>, Unlike> {
    let find = |leaves: &[Leaf], function, index| -> Option<Leaf> {
        let mut leaves = leaves.iter();
        leaves
            .find(|leaf| (leaf.function, leaf.index) == (function, index))
            .copied()
    };
    check(
        find(first, 0, 0),
        find(other, 0, 0),
        find(first, 1, 0),
        find(other, 1, 0),
    )?;
    let mut leaves = Vec::with_capacity(first.len());
    for leaf in first {
        let theirs = find(other, leaf.function, leaf.index);
        let mut common = *leaf;
        match (rules(leaf.function, leaf.index), theirs) {
            (Some(rules), Some(theirs)) => {
                let pairs = leaf.registers.into_iter().zip(theirs.registers);
                for ((place, pair), rule) in common.registers.iter_mut().zip(pairs).zip(rules) {
                    *place = one(rule, pair);
                }
            }
            // A descriptive leaf, which is read whether or not the other has it.
            (Some([First, First, First, First]), None) => {}
            (Some(_), None) => continue,
            (None, Some(theirs)) if theirs.registers == leaf.registers => {}
            // Useless in part: processor trace, performance counters, enclaves.
            (None, _) if leaf.function != 0xD => common.registers = [0; 4],
            (None, _) => {}
        }
        leaves.push(common);
    }
    let limits =
        [0, 0x8000_0000].map(|function| find(&leaves, function, 0).map_or(0, |leaf| leaf.registers[0]));
    leaves.retain(|leaf| match leaf.function {
        ..0x4000_0000 => leaf.function <= limits[0],
        0x8000_0000.. => leaf.function <= limits[1],
        _ => true,
    });
    // Immunity to side channels is known of this model only.
    let models = [first, other].map(|leaves| find(leaves, 1, 0).map(|leaf| leaf.registers[0]));
    if models[0] != models[1] {
        let seven = leaves
            .iter_mut()
            .find(|leaf| (leaf.function, leaf.index) == (7, 0));
        seven
            .into_iter()
            .for_each(|leaf| leaf.registers[3] &= !ARCH_CAPABILITIES);
    }
    reduce_xsave(&mut leaves, other)?;
    Ok(leaves)
}

fn one(rule: Rule, (first, other): (u32, u32)) -> u32 {
    match rule {
        First => first,
        Both => first & other,
        Least => first.min(other),
        BothOrLacking(lacking) => first & other | (first | other) & lacking,
        LeastBytes => {
            let (first, other) = (first.to_le_bytes(), other.to_le_bytes());
            u32::from_le_bytes(std::array::from_fn(|at| first[at].min(other[at])))
        }
    }
}

/// Checks values that may not differ, whatever CPUID the guest has.
fn check(
    first: Option<Leaf>,
    other: Option<Leaf>,
    first_model: Option<Leaf>,
    other_model: Option<Leaf>,
) -> Result<(), Unlike> {
    let vendor = |leaf: Option<Leaf>| {
        let [_, b, c, d] = leaf.map_or([0; 4], |leaf| leaf.registers);
        let bytes = [b, d, c].map(u32::to_le_bytes).concat();
        String::from_utf8_lossy(&bytes).into_owned()
    };
    let (mine, theirs) = (vendor(first), vendor(other));
    if mine != theirs {
        return Err(Unlike(format!("their maker: {mine} and {theirs}")));
    }
    // In units of eight bytes: a guest flushes by it.
    let line = |leaf: Option<Leaf>| leaf.map_or(0, |leaf| leaf.registers[1] >> 8 & 0xFF);
    let (mine, theirs) = (line(first_model), line(other_model));
    if mine != theirs {
        let sizes = format!("{} and {} bytes", mine * 8, theirs * 8);
        return Err(Unlike(format!("the line that CLFLUSH writes back: {sizes}")));
    }
    Ok(())
}

/// Keeps the components of XSAVE that both have, if they have the same layout, and sizes the area for these.
fn reduce_xsave(leaves: &mut Vec<Leaf>, other: &[Leaf]) -> Result<(), Unlike> {
    let is_main = |leaf: &&mut Leaf| (leaf.function, leaf.index) == (0xD, 0);
    let Some(main) = leaves.iter_mut().find(is_main) else {
        return Ok(());
    };
    let user = u64::from(main.registers[0]) | u64::from(main.registers[3]) << 32;
    let compact = leaves.iter().find(|leaf| (leaf.function, leaf.index) == (0xD, 1));
    let system = compact.map_or(0, |leaf| {
        u64::from(leaf.registers[2]) | u64::from(leaf.registers[3]) << 32
    });
    let is_component = |leaf: &Leaf| leaf.function == 0xD && leaf.index >= XSAVE_FIRST;
    leaves.retain(|leaf| !is_component(leaf) || (user | system) >> leaf.index & 1 != 0);
    let mut end = XSAVE_HEADER_END;
    for leaf in leaves.iter().filter(|leaf| is_component(leaf)) {
        let alike = other.iter().any(|theirs| {
            is_component(theirs) && theirs.index == leaf.index && theirs.registers == leaf.registers
        });
        if !alike {
            return Err(Unlike(format!("the place of component {} of XSAVE", leaf.index)));
        }
        if user >> leaf.index & 1 != 0 {
            end = end.max(leaf.registers[0].saturating_add(leaf.registers[1]));
        }
    }
    if let Some(main) = leaves.iter_mut().find(is_main) {
        main.registers[2] = end;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leaf(function: u32, index: u32, registers: [u32; 4]) -> Leaf {
        Leaf {
            function,
            index,
            flags: 0,
            registers,
        }
    }

    fn maker(text: &[u8; 12]) -> [u32; 3] {
        let word = |at: usize| u32::from_le_bytes([text[at], text[at + 1], text[at + 2], text[at + 3]]);
        [word(0), word(8), word(4)]
    }

    /// x87, SSE, AVX, and protection keys as the ninth component.
    fn host() -> Vec<Leaf> {
        let [b, c, d] = maker(b"AuthenticAMD");
        vec![
            leaf(0, 0, [0x10, b, c, d]),
            leaf(1, 0, [0x0080_0F11, 0x0002_0800, 0b1111, 0b1010]),
            leaf(7, 0, [1, 0b1100, 0b11, ARCH_CAPABILITIES | 1]),
            leaf(0xD, 0, [0b10_0000_0111, 832, 2440, 0]),
            leaf(0xD, 1, [0xF, 0, 0, 0]),
            leaf(0xD, 2, [256, 576, 0, 0]),
            leaf(0xD, 9, [8, 2432, 0, 0]),
            leaf(0xF, 0, [7, 7, 7, 7]),
            leaf(0x8000_0000, 0, [0x8000_0021, b, c, d]),
            leaf(0x8000_0001, 0, [9, 9, 0b111, 0b101]),
            leaf(0x8000_0002, 0, [65, 66, 67, 68]),
            leaf(0x8000_0008, 0, [0x0000_3030, 0b11, 5, 0]),
            leaf(0x8000_0021, 0, [0b110, 0, 0, 0]),
        ]
    }

    fn changed(function: u32, index: u32, change: impl FnOnce(&mut [u32; 4])) -> Vec<Leaf> {
        let mut leaves = host();
        let mut all = leaves.iter_mut();
        let found = all.find(|leaf| (leaf.function, leaf.index) == (function, index));
        change(&mut found.expect("the leaf exists").registers);
        leaves
    }

    fn registers(leaves: &[Leaf], function: u32, index: u32) -> Option<[u32; 4]> {
        let mut leaves = leaves.iter();
        let found = leaves.find(|leaf| (leaf.function, leaf.index) == (function, index));
        found.map(|leaf| leaf.registers)
    }

    #[test]
    fn equal_leaves_are_unchanged() {
        assert_eq!(common(&host(), &host()), Ok(host()));
    }

    #[test]
    fn guest_has_the_features_of_both_hosts() {
        for (function, at, mine, theirs, both) in [
            (1, 2, 0b1111, 0b1001, 0b1001),
            (1, 3, 0b1010, 0b0110, 0b0010),
            (7, 2, 0b11, 0b10, 0b10),
            (0x8000_0001, 2, 0b111, 0b011, 0b011),
            (0x8000_0008, 1, 0b11, 0b01, 0b01),
            (0x8000_0021, 0, 0b110, 0b100, 0b100),
            // Addresses of 48 bits here, 46 there.
            (0x8000_0008, 0, 0x3030, 0x392E, 0x302E),
            // A descriptive leaf.
            (0x8000_0002, 1, 66, 77, 66),
            // A leaf of unknown meaning.
            (0xF, 0, 7, 6, 0),
        ] {
            let other = changed(function, 0, |registers| registers[at] = theirs);
            let common = common(&host(), &other).expect("alike enough");
            let found = registers(&common, function, 0).expect("the guest has the leaf")[at];
            assert_eq!(found, both, "leaf {function:#x}, register {at}");
            assert_eq!(
                registers(&host(), function, 0).expect("the host has the leaf")[at],
                mine
            );
        }
    }

    #[test]
    fn feature_that_one_host_lacks_is_missing_for_the_guest() {
        let other = changed(7, 0, |registers| registers[1] = 0b0100 | 1 << 6);
        let seven = registers(&common(&host(), &other).expect("alike enough"), 7, 0);
        assert_eq!(seven.expect("the guest has the leaf")[1], 0b0100 | 1 << 6);
    }

    #[test]
    fn leaves_that_one_host_lacks_are_missing_for_the_guest() {
        let mut other = changed(0x8000_0000, 0, |registers| registers[0] = 0x8000_0008);
        other.retain(|leaf| leaf.function != 7);
        let common = common(&host(), &other).expect("alike enough");
        assert_eq!(registers(&common, 7, 0), None);
        assert_eq!(registers(&common, 0x8000_0021, 0), None, "beyond the last");
        assert!(registers(&common, 0x8000_0008, 0).is_some());
    }

    #[test]
    fn another_model_is_not_assumed_immune() {
        let safe = |other: &[Leaf]| {
            let common = common(&host(), other).expect("alike enough");
            registers(&common, 7, 0).expect("the guest has the leaf")[3] & ARCH_CAPABILITIES != 0
        };
        assert!(safe(&host()));
        assert!(!safe(&changed(1, 0, |registers| registers[0] += 1)));
    }

    #[test]
    fn area_of_xsave_has_the_size_of_the_common_components() {
        let mut other = changed(0xD, 0, |registers| registers[0] = 0b111);
        other.retain(|leaf| leaf.index != 9);
        for (first, other) in [(host(), other.clone()), (other, host())] {
            let common = common(&first, &other).expect("alike enough");
            let main = registers(&common, 0xD, 0).expect("the guest has the leaf");
            assert_eq!((main[0], main[2]), (0b111, 832));
            assert!(registers(&common, 0xD, 2).is_some() && registers(&common, 0xD, 9).is_none());
        }
    }

    #[test]
    fn difference_that_cannot_be_hidden_is_named() {
        let unlike = |other: Vec<Leaf>| common(&host(), &other).expect_err("unlike").to_string();
        let [b, c, d] = maker(b"GenuineIntel");
        let intel = changed(0, 0, |registers| *registers = [0x10, b, c, d]);
        assert_eq!(
            unlike(intel),
            "their processors differ in their maker: AuthenticAMD and GenuineIntel"
        );
        let line = changed(1, 0, |registers| registers[1] = 0x0002_1000);
        assert_eq!(
            unlike(line),
            "their processors differ in the line that CLFLUSH writes back: 64 and 128 bytes"
        );
        // Intel has the keys at another offset than AMD, and so may the next model.
        let moved = changed(0xD, 9, |registers| registers[1] = 2688);
        assert_eq!(
            unlike(moved),
            "their processors differ in the place of component 9 of XSAVE"
        );
    }
}
