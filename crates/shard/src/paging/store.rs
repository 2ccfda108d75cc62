//! The slots of a VM: encrypted pages in the paging file, and pages of images.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt};

use dsm::PAGE_LEN;

use super::cipher::{PageCipher, Seal};
use super::images::Images;

/// Buffer of pages at an address that direct I/O takes.
pub struct PageBuffer {
    pages: Vec<AlignedPage>,
}

#[derive(Clone)]
#[repr(C, align(4096))]
struct AlignedPage([u8; PAGE_LEN]);

impl PageBuffer {
    /// Creates a buffer of `count` pages of zeroes.
    pub fn new(count: u32) -> Self {
        Self {
            pages: vec![AlignedPage([0; PAGE_LEN]); count as usize],
        }
    }

    /// Returns the pages.
    pub fn pages(&mut self) -> &mut [[u8; PAGE_LEN]] {
        let (start, count) = (self.pages.as_mut_ptr().cast(), self.pages.len());
        // SAFETY: an aligned page has the size of its bytes, by the assertion below, and no other field; they
        // are borrowed as long as the buffer is.
        unsafe { std::slice::from_raw_parts_mut(start, count) }
    }
}

const _: () = assert!(size_of::<AlignedPage>() == PAGE_LEN);

/// Access to the bytes of a paging file.
pub trait Storage: Send + Sync {
    /// Reads bytes at an offset, as `pread`. Returns their number, 0 at the end of the file.
    ///
    /// # Errors
    /// The host's error.
    fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<usize>;
    /// Writes bytes at an offset, as `pwrite`. Returns their number.
    ///
    /// # Errors
    /// The host's error.
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize>;
}

impl Storage for File {
    fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
        FileExt::read_at(self, bytes, offset)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        FileExt::write_at(self, bytes, offset)
    }
}

/// Reason why pages can't be read back: the VM cannot go on.
#[derive(Debug, thiserror::Error)]
#[error("{file} cannot be read at byte {offset}: {reason}")]
pub struct ReadFailure {
    file: String,
    offset: u64,
    reason: String,
}

/// Slots of one VM: those of its paging file, and those of images.
pub struct PageStore {
    storage: Box<dyn Storage>,
    cipher: PageCipher,
    /// Name of the file, for messages.
    name: String,
    images: Images,
}

impl PageStore {
    /// Creates a store without images that encrypts by a new key.
    ///
    /// # Errors
    /// As [`PageCipher::new`].
    pub fn new(storage: Box<dyn Storage>, name: String) -> io::Result<Self> {
        Ok(Self {
            storage,
            cipher: PageCipher::new()?,
            name,
            images: Images::default(),
        })
    }

    /// Adds images.
    pub fn with_images(self, images: Images) -> Self {
        Self { images, ..self }
    }

    /// Returns the images.
    pub fn images(&self) -> &Images {
        &self.images
    }

    /// Returns the name of the file.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Encrypts `pages` in place, writes them into the slots from `first` on, and returns the slots' seals.
    ///
    /// # Errors
    /// The host's error, [`io::ErrorKind::StorageFull`] among them. The slots' bytes are undefined then.
    pub fn write(&self, first: u32, pages: &mut [[u8; PAGE_LEN]]) -> io::Result<Vec<Seal>> {
        let mut seals = Vec::with_capacity(pages.len());
        for (slot, page) in (first..).zip(&mut *pages) {
            seals.push(self.cipher.seal(slot, page)?);
        }
        let (mut bytes, mut offset) = (pages.as_flattened(), offset_of(first));
        while !bytes.is_empty() {
            match self.storage.write_at(bytes, offset) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => {
                    bytes = bytes.get(written..).unwrap_or_default();
                    offset += written as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(seals)
    }

    /// Returns whether a page has the content of a slot: by its seal, without a read, or by the bytes of the
    /// image. A page of an image that can't be read differs. The bytes of `scratch` are undefined afterwards.
    ///
    /// # Errors
    /// Never with a page.
    pub fn is_content(
        &self,
        slot: u32,
        seal: &Seal,
        page: &[u8; PAGE_LEN],
        scratch: &mut [u8; PAGE_LEN],
    ) -> io::Result<bool> {
        if let Some((image, offset)) = self.images.place(slot) {
            let read = read_all(scratch, offset, |bytes, at| image.read_at(bytes, at));
            return Ok(read.is_ok() && scratch == page);
        }
        self.cipher.is_sealed(slot, seal, page, scratch)
    }

    /// Reads the pages of the slots from `first` on, and decrypts them. There are as many `pages` as `seals`.
    /// All slots are of the paging file, or of one image.
    ///
    /// # Errors
    /// If a byte is wrong or missing, or the host can't read it.
    pub fn read(&self, first: u32, seals: &[Seal], pages: &mut [[u8; PAGE_LEN]]) -> Result<(), ReadFailure> {
        let failed = |file: String| move |(offset, reason)| ReadFailure { file, offset, reason };
        if let Some((image, offset)) = self.images.place(first) {
            let read = read_all(pages.as_flattened_mut(), offset, |bytes, at| {
                image.read_at(bytes, at)
            });
            return read.map_err(failed(image.to_string()));
        }
        let failed = failed(format!("the paging file {}", self.name));
        let read = |bytes: &mut [u8], at| self.storage.read_at(bytes, at);
        let opened = read_all(pages.as_flattened_mut(), offset_of(first), read).and_then(|()| {
            for ((slot, seal), page) in (first..).zip(seals).zip(pages) {
                let opened = self.cipher.open(slot, seal, page);
                opened.map_err(|error| (offset_of(slot), error.to_string()))?;
            }
            Ok(())
        });
        opened.map_err(failed)
    }
}

/// Fills `bytes` from `offset` on. Returns the byte that can't be read otherwise, and the reason.
fn read_all(
    mut bytes: &mut [u8],
    mut offset: u64,
    read_at: impl Fn(&mut [u8], u64) -> io::Result<usize>,
) -> Result<(), (u64, String)> {
    while !bytes.is_empty() {
        match read_at(bytes, offset) {
            Ok(0) => return Err((offset, "the file ends there".to_owned())),
            Ok(read) => {
                bytes = bytes.get_mut(read..).unwrap_or_default();
                offset += read as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err((offset, error.to_string())),
        }
    }
    Ok(())
}

/// Returns the number of slots that a file may have: as many as `wanted`, or as a block device has.
///
/// # Errors
/// If the host does not report its type or length.
pub fn capacity(file: &File, wanted: u32) -> io::Result<u32> {
    if !file.metadata()?.file_type().is_block_device() {
        return Ok(wanted);
    }
    let bytes = nix::unistd::lseek(file, 0, nix::unistd::Whence::SeekEnd)?;
    let slots = (u64::try_from(bytes).unwrap_or(0) / PAGE_LEN as u64).saturating_sub(1);
    Ok(u32::try_from(slots).unwrap_or(u32::MAX).min(wanted))
}

fn offset_of(slot: u32) -> u64 {
    // The first page has the file's mark (`shard_api::launch::PAGING_FILE_MARK`).
    (u64::from(slot) + 1) * PAGE_LEN as u64
}

#[cfg(test)]
mod tests {
    use super::super::images::DiskImage;
    use super::*;

    #[test]
    fn each_fault_of_the_file_is_an_error_that_names_file_and_byte() {
        let file = tempfile::tempfile().unwrap();
        let store = PageStore::new(Box::new(file.try_clone().unwrap()), "/x/paging".to_owned()).unwrap();
        let pages = [[1; PAGE_LEN], [2; PAGE_LEN], [3; PAGE_LEN]];
        let seals = store.write(4, &mut pages.clone()).unwrap();
        let mut read = [[0; PAGE_LEN]; 3];
        store.read(4, &seals, &mut read).unwrap();
        assert_eq!(read, pages);
        let mut one = [[0; PAGE_LEN]];
        store.read(5, &seals[1..2], &mut one).unwrap();
        assert_eq!(one, pages[1..2]);

        FileExt::write_all_at(&file, &[0xff], 6 * PAGE_LEN as u64 + 17).unwrap();
        let error = store.read(4, &seals, &mut read).unwrap_err().to_string();
        assert_eq!(
            error,
            "the paging file /x/paging cannot be read at byte 24576: the bytes are not those that were \
             written"
        );
        file.set_len(7 * PAGE_LEN as u64 + 9).unwrap();
        let error = store.read(6, &seals[2..], &mut one).unwrap_err().to_string();
        assert!(error.ends_with("at byte 28681: the file ends there"), "{error}");
    }
    #[test]
    fn page_of_an_image_that_cannot_be_read_differs() {
        let image = tempfile::tempfile().unwrap();
        let page = [7; PAGE_LEN];
        image.write_all_at(&page, PAGE_LEN as u64).unwrap();
        let of_disk = DiskImage {
            file: image.try_clone().unwrap(),
            disk: "vda".to_owned(),
        };
        let paging_file = Box::new(tempfile::tempfile().unwrap());
        let store = PageStore::new(paging_file, "/x/paging".to_owned()).unwrap();
        let store = store.with_images(Images::new(10, vec![of_disk]).unwrap());
        let slot = store.images().slots().slot(0, 1).unwrap();
        let mut scratch = [0; PAGE_LEN];
        let mut is_content = |page| {
            let seal = Seal::default();
            store.is_content(slot, &seal, page, &mut scratch).unwrap()
        };
        assert!(is_content(&page));
        assert!(!is_content(&[8; PAGE_LEN]));
        assert!(is_content(&page));
        // The buffer still has the bytes of the last read.
        for bytes in [2 * PAGE_LEN - 1, PAGE_LEN] {
            image.set_len(bytes as u64).unwrap();
            assert!(!is_content(&page), "the image has {bytes} bytes");
        }
    }
}
