//! A place in the memory of a transfer.

use dsm::PAGE_LEN;
use libc::iovec;

/// Position in a transfer's memory, with which the transfer can go on later.
#[derive(Clone, Copy, Debug, Default)]
pub struct SegmentPosition {
    piece: usize,
    /// Bytes of the piece that are done.
    done: usize,
}

/// Pieces of guest memory from a position on.
pub struct SegmentCursor<'a> {
    pieces: &'a [iovec],
    position: &'a mut SegmentPosition,
    left: u64,
}

impl<'a> SegmentCursor<'a> {
    /// Creates a cursor on pieces of guest memory, at `position`. `left` bytes are left from there on.
    ///
    /// # Safety
    /// The pieces must be mapped, readable and writable as long as the cursor is used. No Rust reference to
    /// them may be relied on meanwhile.
    pub unsafe fn new(pieces: &'a [iovec], position: &'a mut SegmentPosition, left: u64) -> Self {
        Self {
            pieces,
            position,
            left,
        }
    }

    /// Returns the number of bytes that are left.
    pub fn left(&self) -> u64 {
        self.left
    }

    /// Returns the address of the next bytes if they are a whole page of memory.
    pub fn whole_page(&self) -> Option<usize> {
        let piece = self.pieces.get(self.position.piece)?;
        let address = (piece.iov_base as usize).checked_add(self.position.done)?;
        let is_whole = piece.iov_len - self.position.done >= PAGE_LEN && address.is_multiple_of(PAGE_LEN);
        is_whole.then_some(address)
    }

    /// Advances past the next bytes.
    pub fn skip(&mut self, bytes: usize) {
        self.walk(bytes, |_, _, _| {});
    }

    /// Copies the next bytes of memory to `into`.
    pub fn read(&mut self, into: &mut [u8]) {
        let target = into.as_mut_ptr();
        self.walk(into.len(), |guest, done, count| {
            // SAFETY: `walk` gives a range inside a piece, which the caller of `new` guaranteed to be mapped.
            // `into` has `count` bytes from `done` on, as `walk` never passes the length that it got. A guest
            // that changes the bytes meanwhile changes bytes of its disk.
            unsafe { std::ptr::copy_nonoverlapping(guest, target.add(done), count) };
        });
    }

    /// Copies `from` to the next bytes of memory.
    pub fn write(&mut self, from: &[u8]) {
        self.walk(from.len(), |guest, done, count| {
            // SAFETY: as in `read`, the other way.
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr().add(done), guest, count) };
        });
    }

    /// Advances by `length` bytes, and calls `visit` with each piece's address, the bytes before it, and its
    /// length.
    fn walk(&mut self, length: usize, mut visit: impl FnMut(*mut u8, usize, usize)) {
        let mut walked = 0;
        while walked < length {
            let Some(piece) = self.pieces.get(self.position.piece) else {
                break;
            };
            let count = (piece.iov_len - self.position.done).min(length - walked);
            visit(
                piece.iov_base.cast::<u8>().wrapping_add(self.position.done),
                walked,
                count,
            );
            walked += count;
            self.position.done += count;
            if self.position.done == piece.iov_len {
                *self.position = SegmentPosition {
                    piece: self.position.piece + 1,
                    done: 0,
                };
            }
        }
        self.left = self.left.saturating_sub(walked as u64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_copied_across_pieces_and_from_where_they_ended() {
        let mut memory = [[1_u8; 3], [2; 3]];
        let pieces = memory.each_mut().map(|piece| iovec {
            iov_base: piece.as_mut_ptr().cast(),
            iov_len: piece.len(),
        });
        let mut position = SegmentPosition::default();
        // SAFETY: the pieces are local arrays, which nothing else uses until the end of the cursors.
        let mut cursor = unsafe { SegmentCursor::new(&pieces, &mut position, 6) };
        let mut bytes = [0; 2];
        cursor.read(&mut bytes);
        assert_eq!((bytes, cursor.left()), ([1, 1], 4));
        // SAFETY: as above.
        let mut cursor = unsafe { SegmentCursor::new(&pieces, &mut position, 4) };
        cursor.write(&[8, 9]);
        cursor.skip(1);
        cursor.read(&mut bytes[..1]);
        assert_eq!((bytes[0], cursor.left()), (2, 0));
        cursor.write(&[7]);
        assert_eq!(memory, [[1, 1, 8], [9, 2, 2]], "nothing is behind the end");
    }

    #[test]
    fn whole_page_is_aligned_and_in_one_piece() {
        let page = |address: usize, bytes: usize, done: usize| {
            let piece = iovec {
                iov_base: address as *mut libc::c_void,
                iov_len: bytes,
            };
            let mut position = SegmentPosition { piece: 0, done };
            let pieces = [piece];
            // SAFETY: the memory is not accessed.
            unsafe { SegmentCursor::new(&pieces, &mut position, bytes as u64) }.whole_page()
        };
        assert_eq!(page(0x1000, 0x1000, 0), Some(0x1000));
        assert_eq!(page(0xfff, 0x2001, 1), Some(0x1000));
        assert_eq!(page(0x1000, 0x2000, 0x1000), Some(0x2000));
        assert_eq!(page(0x1000, 0xfff, 0), None);
        assert_eq!(page(0x1001, 0x2000, 0), None);
        assert_eq!(page(0x1000, 0x2000, 0x1001), None);
    }
}
