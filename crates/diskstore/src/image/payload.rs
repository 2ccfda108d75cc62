//! Extracts the ELF kernel from a bzImage (Linux, `Documentation/x86/boot.rst`: `payload_offset`,
//! `payload_length`).
//!
//! Booting the ELF saves the guest the decompression. Its bytes are those that the guest would have unpacked.

use std::io::Read;

/// Maximum size of an unpacked kernel, in bytes. Small under the fuzzer, which reports much memory as a bug.
const KERNEL_BYTES_MAX: usize = if cfg!(fuzzing) { 16 << 20 } else { 1 << 30 };

/// Block length of the legacy lz4 format, in bytes.
const LZ4_BLOCK_BYTES: usize = 8 << 20;

/// True for a bzImage.
pub fn is_bzimage(kernel: &[u8]) -> bool {
    kernel.get(0x202..0x206) == Some(b"HdrS")
}

/// True for an ELF file.
pub fn is_elf(kernel: &[u8]) -> bool {
    kernel.starts_with(b"\x7fELF")
}

/// Returns the ELF kernel of a bzImage; `None` if its compression is unknown or it is damaged: the bzImage is
/// then used unchanged.
pub fn extract(kernel: &[u8]) -> Option<Vec<u8>> {
    if !is_bzimage(kernel) {
        return None;
    }
    let setup_sectors = match *kernel.get(0x1f1)? {
        0 => 4,
        sectors => usize::from(sectors),
    };
    let word = |at: usize| Some(u32::from_le_bytes(kernel.get(at..at + 4)?.try_into().ok()?) as usize);
    let start = ((setup_sectors + 1) * 512).checked_add(word(0x248)?)?;
    let payload = kernel.get(start..start.checked_add(word(0x24c)?)?)?;
    let elf = unpack(payload)?;
    is_elf(&elf).then_some(elf)
}

fn unpack(payload: &[u8]) -> Option<Vec<u8>> {
    match payload {
        [0x02, 0x21, 0x4c, 0x18, rest @ ..] => unpack_lz4_legacy(rest),
        [0x1f, 0x8b, ..] => read_bounded(flate2::read::GzDecoder::new(payload)),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => read_bounded(ruzstd::decoding::StreamingDecoder::new(payload).ok()?),
        _ => None,
    }
}

/// Blocks, each a length and that many bytes that unpack to 8 MiB, the last to less; then the unpacked
/// length.
fn unpack_lz4_legacy(mut packed: &[u8]) -> Option<Vec<u8>> {
    let mut out = Vec::new();
    let mut block = vec![0; LZ4_BLOCK_BYTES];
    // At the end are the four bytes of the unpacked length.
    while packed.len() > 4 {
        let (length, rest) = packed.split_first_chunk::<4>()?;
        let length = u32::from_le_bytes(*length) as usize;
        let bytes = lz4_flex::block::decompress_into(rest.get(..length)?, &mut block).ok()?;
        if out.len() + bytes > KERNEL_BYTES_MAX {
            return None;
        }
        out.extend_from_slice(&block[..bytes]);
        packed = &rest[length..];
    }
    let said = u32::from_le_bytes(packed.try_into().ok()?) as usize;
    (said == out.len()).then_some(out)
}

fn read_bounded(reader: impl Read) -> Option<Vec<u8>> {
    let mut out = Vec::new();
    // The error after the end is the unpacked length that the kernel's build appends, taken for another
    // member.
    let result = reader.take(KERNEL_BYTES_MAX as u64).read_to_end(&mut out);
    (result.is_ok() || !out.is_empty()).then_some(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bzimage(payload: &[u8]) -> Vec<u8> {
        let mut kernel = vec![0; 1024];
        kernel[0x1f1] = 1;
        kernel[0x202..0x206].copy_from_slice(b"HdrS");
        kernel[0x248..0x24c].copy_from_slice(&16u32.to_le_bytes());
        kernel[0x24c..0x250].copy_from_slice(&(payload.len() as u32).to_le_bytes());
        kernel.extend_from_slice(&[0xcc; 16]);
        kernel.extend_from_slice(payload);
        kernel.extend_from_slice(&[0xcc; 100]);
        kernel
    }

    fn lz4(elf: &[u8]) -> Vec<u8> {
        let mut payload = vec![0x02, 0x21, 0x4c, 0x18];
        for block in elf.chunks(LZ4_BLOCK_BYTES) {
            let packed = lz4_flex::block::compress(block);
            payload.extend_from_slice(&(packed.len() as u32).to_le_bytes());
            payload.extend_from_slice(&packed);
        }
        payload.extend_from_slice(&(elf.len() as u32).to_le_bytes());
        payload
    }

    fn elf(bytes: usize) -> Vec<u8> {
        let mut elf: Vec<u8> = (0..bytes).map(|n| ((n * n) >> 7) as u8).collect();
        elf[..4].copy_from_slice(b"\x7fELF");
        elf
    }

    #[test]
    fn an_lz4_kernel_of_several_blocks_is_unpacked_unchanged() {
        let elf = elf((16 << 20) + 1234);
        assert!(extract(&bzimage(&lz4(&elf))).unwrap() == elf);
    }

    #[test]
    fn a_gzip_kernel_is_unpacked_unchanged() {
        use std::io::Write;
        let elf = elf(100_000);
        let mut packer = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        packer.write_all(&elf).unwrap();
        let mut payload = packer.finish().unwrap();
        payload.extend_from_slice(&(elf.len() as u32).to_le_bytes());
        assert!(extract(&bzimage(&payload)).unwrap() == elf);
    }

    #[test]
    fn a_cut_or_foreign_kernel_gives_none() {
        let whole = bzimage(&lz4(&elf(100_000)));
        assert!(extract(&whole[..whole.len() / 2]).is_none());
        assert!(extract(b"").is_none());
        assert!(extract(&bzimage(b"\x02\x21\x4c\x18")).is_none());
        assert!(extract(&bzimage(&lz4(b"not an ELF file"))).is_none());
    }

    proptest! {
        #[test]
        fn any_payload_is_unpacked_or_refused_without_panic(
            payload in prop::collection::vec(any::<u8>(), 0..300)
        ) {
            for magic in [&[0x02, 0x21, 0x4c, 0x18][..], &[0x1f, 0x8b], &[0x28, 0xb5, 0x2f, 0xfd], &[]] {
                extract(&bzimage(&[magic, &payload].concat()));
            }
        }
    }
}
