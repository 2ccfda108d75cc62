use std::os::unix::fs::FileExt;

use nix::sys::memfd::{MFdFlags, memfd_create};

use super::*;

const MIB: u64 = 1 << 20;

fn file(bytes: u64) -> File {
    let file = File::from(memfd_create(c"region", MFdFlags::MFD_CLOEXEC).unwrap());
    file.set_len(bytes).unwrap();
    file
}

/// Bytes of a file that the host has in memory.
fn present(file: &File) -> u64 {
    use std::os::unix::fs::MetadataExt;
    file.metadata().unwrap().blocks() * 512
}

#[test]
fn pages_of_a_file_are_found_and_holes_stay_holes() {
    let page = page_size().unwrap() as u64;
    let file = file(2 * PIECE_BYTES);
    // At the end of the first piece, over the boundary, and in the second one.
    file.write_all_at(&[1; 100], 8 * MIB).unwrap();
    file.write_all_at(&vec![2; 2 * page as usize], PIECE_BYTES - page)
        .unwrap();
    assert_eq!(
        data(&file, 0, PIECE_BYTES).unwrap(),
        [(8 * MIB, 8 * MIB + page), (PIECE_BYTES - page, PIECE_BYTES)]
    );
    assert_eq!(
        data(&file, PIECE_BYTES, 2 * PIECE_BYTES).unwrap(),
        [(PIECE_BYTES, PIECE_BYTES + page)]
    );
    assert_eq!(present(&file), 3 * page);
    let mut counts = Vec::new();
    for_each_piece(&file, 2 * PIECE_BYTES, |piece, offset| {
        let pages = piece.populate(&file, offset)?;
        let here = Nodes::new(&(0..64).collect::<Vec<_>>());
        let nowhere = Nodes::new(&[]);
        counts.push((
            pages.len(),
            piece.elsewhere(&pages, &here)?,
            piece.elsewhere(&pages, &nowhere)?,
        ));
        Ok(())
    })
    .unwrap();
    assert_eq!(counts, [(2, 0, 2 * page), (1, 0, page)]);
    assert_eq!(present(&file), 3 * page, "no page was added");
}

#[test]
fn pages_that_are_on_the_nodes_already_do_not_move() {
    let file = file(4 * MIB);
    file.write_all_at(&[7; 4096], MIB).unwrap();
    let brought = bring(&file, 4 * MIB, &[0]).unwrap();
    assert_eq!((brought.before, brought.left), (0, 0));
    let mut byte = [0];
    file.read_exact_at(&mut byte, MIB).unwrap();
    assert_eq!(byte, [7], "the content stays");
}

#[test]
fn nodes_that_the_host_lacks_are_an_error() {
    let file = file(MIB);
    file.write_all_at(&[7; 4096], 0).unwrap();
    let error = bring(&file, MIB, &[900]).err().expect("no such node");
    assert_eq!(error.raw_os_error(), Some(libc::EINVAL), "{error}");
}
