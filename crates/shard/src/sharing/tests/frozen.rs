//! Tests of frozen memory and its clones.

use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::model::{Step, step};
use super::*;
use crate::sharing::{Frozen, seal};

/// Creates a VM that resumes from frozen memory, with the same image.
pub(super) fn thaw(frozen: &Frozen, image: &File, advice: Advice) -> Vm {
    let mut files = frozen.files.iter().map(|file| file.try_clone().unwrap());
    let ram = ram_of(files.next());
    let mapper = Mapper::new(&ram, vec![image.try_clone().unwrap()], advice).unwrap();
    if advice == Advice::Scan {
        mapper.begin_scan(false).unwrap();
    }
    mapper.adopt(files.collect(), &frozen.map).unwrap();
    with(ram, mapper, image.try_clone().unwrap(), Share::AtRead)
}

impl Vm {
    fn freeze(&self) -> Frozen {
        let quiescer = Quiescer::new();
        let frozen = self.mapper.freeze(&quiescer.pause().unwrap()).unwrap();
        frozen.files.iter().for_each(|file| seal_in_time(file));
        frozen
    }
}

/// Seals a file. Other tests of this process fork, and a child keeps the memory mapped until it ends; a shard
/// has no children.
pub(super) fn seal_in_time(file: &File) {
    let start = Instant::now();
    while let Err(error) = seal(file) {
        let is_busy = error.raw_os_error() == Some(libc::EBUSY);
        assert!(is_busy && start.elapsed() < Duration::from_secs(20), "{error}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[derive(Debug, Clone)]
enum Operation {
    Step(Step),
    Clone,
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![8 => step().prop_map(Operation::Step), 1 => Just(Operation::Clone)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    /// Writes of a clone are invisible to its parent, its children and other clones.
    #[test]
    fn clones_behave_as_independent_arrays(
        is_scanned: bool,
        operations in proptest::collection::vec((any::<prop::sample::Index>(), operation()), 1..60)
    ) {
        const BYTES: u64 = 64 * PAGE_BYTES;
        let file = image();
        let content = image_bytes();
        let (first, advice) = match is_scanned {
            true => (scanned_vm_on(file.try_clone().unwrap(), Share::AtRead), Advice::Scan),
            false => (vm_on(file.try_clone().unwrap(), Share::AtRead), Advice::Ordinary),
        };
        let mut family = vec![(first, vec![0_u8; BYTES as usize])];
        for (who, operation) in operations {
            let who = who.index(family.len());
            let (vm, model) = &mut family[who];
            match operation {
                Operation::Step(Step::Read { at, offset, sectors }) => {
                    let (at, offset) = (at * 512, offset * 512);
                    let bytes = (sectors * 512).min(BYTES - at).min(content.len() as u64 - offset);
                    vm.read(&[(AT + at, bytes)], offset);
                    let read = &content[offset as usize..(offset + bytes) as usize];
                    model[at as usize..(at + bytes) as usize].copy_from_slice(read);
                }
                Operation::Step(Step::Write { at, value, bytes }) => {
                    let bytes = bytes.min(BYTES - at);
                    vm.ram.write_slice(&vec![value; bytes as usize], GuestAddress(AT + at)).unwrap();
                    model[at as usize..(at + bytes) as usize].fill(value);
                }
                Operation::Step(Step::Release { page, pages }) => {
                    let (start, bytes) = (AT + page * PAGE_BYTES, pages * PAGE_BYTES);
                    crate::virtio::balloon::release(&vm.ram, Some(&vm.mapper), start, bytes).unwrap();
                    // The page may have a private copy now, but keeps its content.
                    let range = (page * PAGE_BYTES) as usize..((page + pages) * PAGE_BYTES) as usize;
                    let now = vm.bytes(AT + page * PAGE_BYTES, pages * PAGE_BYTES);
                    model[range].copy_from_slice(&now);
                }
                Operation::Clone => {
                    let clone = (thaw(&vm.freeze(), &file, advice), model.clone());
                    if family.len() < 5 {
                        family.push(clone);
                    }
                }
            }
            for (number, (vm, model)) in family.iter().enumerate() {
                prop_assert!(vm.bytes(AT, BYTES) == *model, "VM {number} after {who} acted");
            }
        }
    }
}

#[test]
fn frozen_files_can_not_be_changed_and_clones_share_them() {
    let vm = vm(Share::AtRead);
    vm.ram.write_slice(&[7; 100 * 4096], GuestAddress(AT)).unwrap();
    let frozen = vm.freeze();
    assert_eq!(frozen.files.len(), 1);
    use std::os::unix::fs::FileExt;
    assert!(frozen.files[0].write_at(b"x", AT).is_err());
    // Writes between two freezes go into a layer, and nothing else does.
    vm.ram
        .write_slice(b"later", GuestAddress(AT + 8 * PAGE_BYTES))
        .unwrap();
    let again = vm.freeze();
    assert_eq!(again.files.len(), 2);
    use std::os::unix::fs::MetadataExt;
    let layer = again.files[1].metadata().unwrap().blocks() * 512 / PAGE_BYTES;
    assert!(layer <= 2, "a layer of {layer} pages for one that was written");
    // Without writes, no layer is added.
    assert_eq!(vm.freeze().files.len(), 2);
}

#[test]
fn memory_of_another_image_is_refused() {
    let vm = vm(Share::AtRead);
    vm.read(&[(AT, 8 * PAGE_BYTES)], 0);
    let frozen = vm.freeze();
    let ram = ram_of(Some(frozen.files[0].try_clone().unwrap()));
    let other = Mapper::new(&ram, vec![image()], Advice::Ordinary).unwrap();
    let error = other.adopt(Vec::new(), &frozen.map).unwrap_err();
    assert!(error.to_string().contains("changed or replaced"), "{error}");
}
