//! A guest with random accesses, compared with an array.

use proptest::prelude::*;

use super::*;

#[derive(Clone, Debug)]
pub(super) enum Step {
    /// In sectors, so that pages are covered whole and in part.
    Read {
        at: u64,
        offset: u64,
        sectors: u64,
    },
    Write {
        at: u64,
        value: u8,
        bytes: u64,
    },
    Release {
        page: u64,
        pages: u64,
    },
}

pub(super) fn step() -> impl Strategy<Value = Step> {
    let aligned = (0..40u64, 0..48u64, 1..12u64).prop_map(|(page, from, pages)| Step::Read {
        at: page * 8,
        offset: from * 8,
        sectors: pages * 8,
    });
    let odd =
        (0..320u64, 0..400u64, 1..60u64).prop_map(|(at, offset, sectors)| Step::Read { at, offset, sectors });
    prop_oneof![
        3 => aligned,
        1 => odd,
        2 => (0..160_000u64, any::<u8>(), 1..5000u64)
            .prop_map(|(at, value, bytes)| Step::Write { at, value, bytes }),
        1 => (0..40u64, 1..6u64).prop_map(|(page, pages)| Step::Release { page, pages }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn memory_behaves_as_a_plain_array(steps in proptest::collection::vec(step(), 1..40)) {
        let vm = vm(Share::AtRead);
        let image = image_bytes();
        let mut model = vec![0_u8; 64 * 4096];
        for step in steps {
            match step {
                Step::Read { at, offset, sectors } => {
                    let (at, offset) = (at * 512, offset * 512);
                    let bytes = (sectors * 512).min(model.len() as u64 - at).min(image.len() as u64 - offset);
                    vm.read(&[(AT + at, bytes)], offset);
                    let read = &image[offset as usize..(offset + bytes) as usize];
                    model[at as usize..(at + bytes) as usize].copy_from_slice(read);
                }
                Step::Write { at, value, bytes } => {
                    let bytes = bytes.min(model.len() as u64 - at);
                    vm.ram.write_slice(&vec![value; bytes as usize], GuestAddress(AT + at)).unwrap();
                    model[at as usize..(at + bytes) as usize].fill(value);
                }
                Step::Release { page, pages } => {
                    let (start, bytes) = (AT + page * PAGE_BYTES, pages * PAGE_BYTES);
                    crate::virtio::balloon::release(&vm.ram, Some(&vm.mapper), start, bytes).unwrap();
                    model[(page * 4096) as usize..((page + pages) * 4096) as usize].fill(0);
                }
            }
            prop_assert!(vm.bytes(AT, 64 * PAGE_BYTES) == model);
        }
        let mut content = vec![0; image.len()];
        let mut into = Segments::new();
        // SAFETY: `content` outlives the read.
        unsafe { into.push(content.as_mut_ptr(), content.len()) };
        vm.store.read(&into, 0).unwrap();
        prop_assert!(content == image, "the image changed");
    }
}
