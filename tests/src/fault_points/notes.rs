//! The fault points that a program's file lists: notes in SystemTap's format (`.note.stapsdt`).

use std::ffi::CStr;

use object::Endianness;
use object::elf::{FileHeader64, NoteType, SHF_EXECINSTR};
use object::read::elf::{FileHeader, SectionHeader};

const OWNER: &[u8] = b"stapsdt";
const KIND: NoteType = NoteType(3);
const PROVIDER: &CStr = c"mirrorball";
/// Before the texts: the addresses of the probe, of a section that shows prelinking, and of a semaphore.
const ADDRESSES_BYTES: usize = 24;

/// A fault point in a program's file.
#[derive(Debug, PartialEq, Eq)]
pub struct Point {
    pub name: String,
    /// The address of its no-op, as the file counts.
    pub address: u64,
}

/// All fault points of a program, from its file's bytes. A point that the compiler has duplicated appears
/// several times. A point whose code the linker has left out, since nothing calls it, has a note that names
/// no code: it does not appear.
pub fn points(file: &[u8]) -> Result<Vec<Point>, String> {
    let header = FileHeader64::<Endianness>::parse(file).map_err(|error| error.to_string())?;
    let endian = header.endian().map_err(|error| error.to_string())?;
    let sections = header.sections(endian, file).map_err(|error| error.to_string())?;
    let is_code = |address: u64| {
        sections.iter().any(|section| {
            let start = section.sh_addr(endian);
            section.sh_flags(endian).contains(SHF_EXECINSTR)
                && (start..start + section.sh_size(endian)).contains(&address)
        })
    };
    let mut points = Vec::new();
    for section in sections.iter() {
        let Some(mut notes) = section.notes(endian, file).map_err(|error| error.to_string())? else {
            continue;
        };
        while let Some(note) = notes.next().map_err(|error| error.to_string())? {
            if note.name() == OWNER && note.n_type(endian) == KIND {
                let point = point(note.desc()).ok_or("a malformed note of a probe")?;
                points.extend(point.filter(|point| is_code(point.address)));
            }
        }
    }
    Ok(points)
}

/// The point that a note describes: `Some(None)` for a probe of another provider, `None` for a malformed
/// note.
fn point(note: &[u8]) -> Option<Option<Point>> {
    let address = u64::from_le_bytes(*note.first_chunk()?);
    let texts = note.get(ADDRESSES_BYTES..)?;
    let provider = CStr::from_bytes_until_nul(texts).ok()?;
    let name = CStr::from_bytes_until_nul(&texts[provider.count_bytes() + 1..]).ok()?;
    let name = name.to_str().ok()?.to_owned();
    Some((provider == PROVIDER).then_some(Point { name, address }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(provider: &str) -> Vec<u8> {
        let mut note = vec![0; ADDRESSES_BYTES];
        note[..8].copy_from_slice(&0x1234_u64.to_le_bytes());
        note.extend_from_slice(format!("{provider}\0move_sent\0\0").as_bytes());
        note
    }

    #[test]
    fn note_of_another_provider_is_no_fault_point() {
        let ours = Point {
            name: "move_sent".into(),
            address: 0x1234,
        };
        assert_eq!(point(&note("mirrorball")), Some(Some(ours)));
        assert_eq!(point(&note("libc")), Some(None));
    }

    #[test]
    fn note_that_ends_early_is_refused() {
        let whole = note("mirrorball");
        for bytes in 0..whole.len() - 1 {
            assert_eq!(point(&whole[..bytes]), None, "{bytes} bytes");
        }
        assert!(points(b"no program").is_err());
    }
}
