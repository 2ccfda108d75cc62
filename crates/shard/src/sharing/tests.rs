//! The mechanism on real mappings, without KVM: guest memory is this process's, and "the guest" is the test.

use std::fs::File;
use std::io::Write;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use diskstore::disk::{Format, Segments, Store, assemble};
use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

use super::mapper::{Mapped, Mapper, When};
use super::pages::PAGE_BYTES;
use super::{Background, DiskSharing, Frozen, Run, Situations, seal};
use crate::arch::x86_64::layout::Layout;
use crate::gate::Gate;
use crate::launch::{MemoryLaunch, Pages, Share};
use crate::memory::{self, GuestRam};

const RAM_BYTES: u64 = 64 << 20;
/// Guest pages from here on are played with.
const FIRST: u64 = 1024;
const IMAGE_PAGES: u64 = 64;

fn ram() -> GuestRam {
    let layout = Layout::new(RAM_BYTES, &[]).unwrap();
    let launch = MemoryLaunch {
        bytes: RAM_BYTES,
        pages: Pages::Small,
        prefault: false,
    };
    memory::create(&layout, &launch, &[], None).unwrap()
}

/// Byte `at` of the image.
fn byte(at: u64) -> u8 {
    (at / PAGE_BYTES * 7 + at % 251 + 1) as u8
}

fn image_bytes() -> Vec<u8> {
    (0..IMAGE_PAGES * PAGE_BYTES).map(byte).collect()
}

fn image() -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&image_bytes()).unwrap();
    file
}

struct Vm {
    ram: GuestRam,
    mapper: Arc<Mapper>,
    store: Arc<dyn Store>,
    disk: DiskSharing,
}

fn vm(share: Share) -> Vm {
    vm_on(image(), share)
}

fn vm_on(image: File, share: Share) -> Vm {
    let ram = ram();
    let mapper = Mapper::new(&ram, vec![image.try_clone().unwrap()], false).unwrap();
    with(ram, mapper, image, share)
}

fn with(ram: GuestRam, mapper: Arc<Mapper>, image: File, share: Share) -> Vm {
    let store = assemble(vec![(image, Format::Raw)], true).unwrap();
    let disk = DiskSharing {
        mapper: mapper.clone(),
        situations: Arc::new(Situations::open(mapper.images(), None)),
        share,
        images: vec![Some(0)],
    };
    Vm {
        ram,
        mapper,
        store,
        disk,
    }
}

impl Vm {
    fn segments(&self, pieces: &[(u64, u64)]) -> Segments {
        let mut segments = Segments::new();
        for &(at, bytes) in pieces {
            let host = self.ram.get_host_address(GuestAddress(at)).unwrap();
            // SAFETY: guest memory of this test, which lives until its end.
            unsafe { segments.push(host, bytes as usize) };
        }
        segments
    }

    /// A disk read as a queue does it.
    fn read(&self, pieces: &[(u64, u64)], offset: u64) {
        let into = self.segments(pieces);
        match self.disk.read(&*self.store, offset, &into) {
            Some(result) => result.unwrap(),
            None => {
                self.disk.before_copy(&*self.store, offset, &into).unwrap();
                self.store.read(&into, offset).unwrap();
            }
        }
    }

    fn bytes(&self, at: u64, bytes: u64) -> Vec<u8> {
        let mut content = vec![0; bytes as usize];
        self.ram.read_slice(&mut content, GuestAddress(at)).unwrap();
        content
    }

    fn counted(&self, name: &str) -> u64 {
        self.mapper.status()[name].as_u64().unwrap()
    }

    /// Pages that the memory's file holds.
    fn plain_pages(&self) -> u64 {
        use std::os::unix::fs::MetadataExt;
        use vm_memory::GuestMemoryRegion;
        let region = self.ram.iter().next().unwrap();
        region.file_offset().unwrap().file().metadata().unwrap().blocks() * 512 / PAGE_BYTES
    }

    /// Lets the background work until `done` or a limit.
    fn background(&self, share: Share, done: impl Fn(&Self) -> bool) {
        let background = Background::open(self.mapper.clone(), self.disk.situations.clone(), vec![share]);
        let (stop, stopped) = mpsc::channel();
        let thread = std::thread::spawn(move || background.run(&Gate::new(), &stopped));
        let deadline = Instant::now() + Duration::from_secs(20);
        while !done(self) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20));
        }
        drop(stop);
        thread.join().unwrap();
        assert!(done(self), "{}", self.mapper.status());
    }
}

const AT: u64 = FIRST * PAGE_BYTES;

#[test]
fn a_read_is_mapped_and_a_write_stays_with_the_writer() {
    let image = image();
    let one = vm_on(image.try_clone().unwrap(), Share::AtRead);
    let other = vm_on(image, Share::AtRead);
    for vm in [&one, &other] {
        vm.read(&[(AT, 16 * PAGE_BYTES)], 8 * PAGE_BYTES);
        assert_eq!(vm.bytes(AT, 16 * PAGE_BYTES), image_bytes()[8 * 4096..24 * 4096]);
        assert_eq!(
            (
                vm.counted("mapped_at_read"),
                vm.counted("mappings"),
                vm.plain_pages()
            ),
            (16, 1, 0)
        );
    }
    one.ram.write_slice(b"mine", GuestAddress(AT + 5000)).unwrap();
    assert_eq!(one.bytes(AT + 5000, 4), b"mine");
    assert_eq!(
        other.bytes(AT, 16 * PAGE_BYTES),
        image_bytes()[8 * 4096..24 * 4096]
    );
    let into = other.segments(&[(AT + (64 << 12), 4096)]);
    other.store.read(&into, 9 * PAGE_BYTES).unwrap();
    assert_eq!(
        other.bytes(AT + (64 << 12), 4096),
        image_bytes()[9 * 4096..10 * 4096],
        "the image changed"
    );
}

#[test]
fn the_same_page_can_be_read_again_and_again() {
    let vm = vm(Share::AtRead);
    for page in [3, 9, 9, 4] {
        vm.read(&[(AT, PAGE_BYTES)], page * PAGE_BYTES);
        assert_eq!(
            vm.bytes(AT, PAGE_BYTES),
            image_bytes()[page as usize * 4096..][..4096]
        );
    }
    // The same block twice, and a buffer that repeats: the last counts.
    vm.read(
        &[(AT, PAGE_BYTES), (AT + PAGE_BYTES, PAGE_BYTES), (AT, PAGE_BYTES)],
        5 * PAGE_BYTES,
    );
    assert_eq!(vm.bytes(AT, PAGE_BYTES), image_bytes()[7 * 4096..][..4096]);
    assert_eq!(
        vm.bytes(AT + PAGE_BYTES, PAGE_BYTES),
        image_bytes()[6 * 4096..][..4096]
    );
}

#[test]
fn what_the_balloon_takes_is_plain_and_zero() {
    let vm = vm(Share::AtRead);
    vm.read(&[(AT, 8 * PAGE_BYTES)], 0);
    vm.mapper.release(FIRST + 2..FIRST + 5).unwrap();
    assert_eq!(vm.bytes(AT + 2 * PAGE_BYTES, 3 * PAGE_BYTES), vec![0; 3 * 4096]);
    assert_eq!(vm.bytes(AT, 2 * PAGE_BYTES), image_bytes()[..2 * 4096]);
    assert_eq!(
        vm.bytes(AT + 5 * PAGE_BYTES, 3 * PAGE_BYTES),
        image_bytes()[5 * 4096..8 * 4096]
    );
    assert_eq!((vm.counted("mapped_pages"), vm.counted("mappings")), (5, 2));
}

#[test]
fn at_the_limit_pages_are_copied_and_counted() {
    let mut vm = vm(Share::AtRead);
    let mapper = Arc::into_inner(std::mem::replace(
        &mut vm.mapper,
        Mapper::new(&vm.ram, Vec::new(), false).unwrap(),
    ));
    assert!(mapper.is_none(), "the disk holds the mapper too");
    let mut mapper = Arc::into_inner(std::mem::replace(&mut vm.disk.mapper, vm.mapper.clone())).unwrap();
    mapper.limit(3);
    (vm.mapper, vm.disk.mapper) = {
        let mapper = Arc::new(mapper);
        (mapper.clone(), mapper)
    };
    for page in 0..6 {
        vm.read(&[(AT + page * 2 * PAGE_BYTES, PAGE_BYTES)], page * PAGE_BYTES);
        assert_eq!(
            vm.bytes(AT + page * 2 * PAGE_BYTES, PAGE_BYTES),
            image_bytes()[page as usize * 4096..][..4096]
        );
    }
    assert_eq!((vm.counted("mappings"), vm.counted("at_limit")), (2, 4));
}

#[test]
fn copies_become_mappings_unless_they_changed() {
    let vm = vm(Share::Deferred);
    vm.read(&[(AT, 32 * PAGE_BYTES)], 0);
    assert_eq!((vm.counted("candidates"), vm.plain_pages()), (32, 32));
    vm.ram
        .write_slice(&[99], GuestAddress(AT + 7 * PAGE_BYTES + 1))
        .unwrap();
    vm.background(Share::Deferred, |vm| vm.counted("mapped_later") == 31);
    assert_eq!(
        (vm.counted("changed"), vm.counted("mappings"), vm.plain_pages()),
        (1, 2, 1)
    );
    let mut expected = image_bytes()[..32 * 4096].to_vec();
    expected[7 * 4096 + 1] = 99;
    assert_eq!(vm.bytes(AT, 32 * PAGE_BYTES), expected);
}

#[test]
fn chosen_copies_that_are_overwritten_or_given_up_are_left_alone() {
    let vm = vm(Share::Deferred);
    vm.read(&[(AT, 32 * PAGE_BYTES)], 0);
    let (mapper, situations) = (vm.mapper.clone(), vm.disk.situations.clone());
    let mut background = Background::open(mapper, situations, vec![Share::Deferred]);
    let gate = Gate::new();
    background.age();
    assert!(background.step(&gate).more);
    assert_eq!((vm.counted("mapped_later"), vm.counted("candidates")), (0, 32));
    // The guest writes one, reads another anew, and gives a third up.
    vm.ram
        .write_slice(&[99], GuestAddress(AT + 3 * PAGE_BYTES))
        .unwrap();
    vm.read(&[(AT + 9 * PAGE_BYTES, PAGE_BYTES)], 40 * PAGE_BYTES);
    let given_up = FIRST + 20;
    vm.mapper.release(given_up..given_up + 1).unwrap();
    for _ in 0..9 {
        background.step(&gate);
    }
    assert_eq!((vm.counted("mapped_later"), vm.counted("changed")), (29, 1));
    assert_eq!(vm.counted("candidates"), 1, "the page read anew");
    let mut expected = image_bytes()[..32 * 4096].to_vec();
    expected[3 * 4096] = 99;
    expected.splice(
        9 * 4096..10 * 4096,
        image_bytes()[40 * 4096..41 * 4096].iter().copied(),
    );
    assert_eq!(vm.bytes(AT, 32 * PAGE_BYTES), expected);
}

#[test]
fn a_lone_page_waits_until_memory_is_short() {
    let vm = vm(Share::Adaptive);
    let lone = AT + 64 * PAGE_BYTES;
    vm.read(&[(AT, 8 * PAGE_BYTES)], 0);
    vm.read(&[(lone, PAGE_BYTES)], 0);
    let (mapper, situations) = (vm.mapper.clone(), vm.disk.situations.clone());
    assert!(
        !situations.short(),
        "this test needs a host that is not short of memory"
    );
    let mut background = Background::open(mapper, situations.clone(), vec![Share::Adaptive]);
    let gate = Gate::new();
    let mut round = || {
        background.age();
        while background.step(&gate).more {}
    };
    round();
    assert_eq!((vm.counted("mapped_later"), vm.counted("candidates")), (8, 1));
    situations.make_short();
    round();
    assert_eq!((vm.counted("mapped_later"), vm.counted("candidates")), (9, 0));
}

#[test]
fn a_copy_over_mapped_pages_makes_them_plain_at_once() {
    let vm = vm(Share::Deferred);
    vm.read(&[(AT, 32 * PAGE_BYTES)], 0);
    vm.background(Share::Deferred, |vm| {
        vm.counted("mapped_later") == 32 && vm.plain_pages() == 0
    });
    vm.read(&[(AT + 8 * PAGE_BYTES, 8 * PAGE_BYTES)], 32 * PAGE_BYTES);
    assert_eq!((vm.counted("restored"), vm.plain_pages()), (8, 8));
    let image = image_bytes();
    let page = |number: usize| &image[number * 4096..][..4096];
    for number in 0..32_usize {
        let from = if (8..16).contains(&number) {
            number + 24
        } else {
            number
        };
        assert_eq!(
            vm.bytes(AT + number as u64 * PAGE_BYTES, PAGE_BYTES),
            page(from),
            "page {number}"
        );
    }
}

#[test]
fn copies_in_huge_pages_stay_while_memory_is_plenty() {
    let vm = vm(Share::Deferred);
    let elsewhere = AT + (8 << 20);
    vm.mapper.keep_whole(AT, AT + 8 * PAGE_BYTES);
    vm.read(&[(AT, 8 * PAGE_BYTES)], 0);
    vm.read(&[(elsewhere, 8 * PAGE_BYTES)], 0);
    assert!(
        !vm.disk.situations.short(),
        "this test needs a host that is not short of memory"
    );
    vm.background(Share::Deferred, |vm| vm.counted("mapped_later") >= 8);
    let mapped: Vec<_> = vm.mapper.pages().mapped.iter().map(|(at, _)| at).collect();
    assert_eq!(mapped, [elsewhere / PAGE_BYTES]);
}

#[test]
fn written_mappings_become_plain_memory_again() {
    let vm = vm(Share::AtRead);
    vm.read(&[(AT, 8 * PAGE_BYTES)], 0);
    for page in 0..8 {
        vm.ram
            .write_slice(&[page], GuestAddress(AT + u64::from(page) * PAGE_BYTES + 9))
            .unwrap();
    }
    let background = Background::open(vm.mapper.clone(), vm.disk.situations.clone(), Vec::new());
    background.trim(&Gate::new()).unwrap();
    assert_eq!(vm.counted("restored"), 8);
    let mut expected = image_bytes()[..8 * 4096].to_vec();
    (0..8).for_each(|page| expected[page * 4096 + 9] = page as u8);
    assert_eq!(vm.bytes(AT, 8 * PAGE_BYTES), expected);
    assert_eq!((vm.counted("mappings"), vm.plain_pages()), (0, 8));
}

#[test]
fn nothing_is_remembered_or_mapped_when_never() {
    let vm = vm(Share::Never);
    vm.read(&[(AT, 8 * PAGE_BYTES)], 0);
    assert_eq!((vm.counted("candidates"), vm.counted("mapped_pages")), (0, 0));
}

#[test]
fn a_run_outside_memory_is_refused() {
    let vm = vm(Share::AtRead);
    let run = Run {
        pages: 8,
        image: 0,
        first: 0,
    };
    let last = RAM_BYTES / PAGE_BYTES - 4;
    let counter = &vm.mapper.metrics.mapped_at_read;
    assert!(
        vm.mapper
            .map(&mut vm.mapper.pages(), last, run, When::AtRead, counter)
            .is_err()
    );
    assert_eq!(
        vm.mapper
            .map(&mut vm.mapper.pages(), last - 4, run, When::AtRead, counter)
            .unwrap(),
        Mapped::Yes
    );
}

#[derive(Clone, Debug)]
enum Step {
    /// Sectors, so that pages are hit whole and in part.
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

fn step() -> impl Strategy<Value = Step> {
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
        2 => (0..160_000u64, any::<u8>(), 1..5000u64).prop_map(|(at, value, bytes)| Step::Write { at, value, bytes }),
        1 => (0..40u64, 1..6u64).prop_map(|(page, pages)| Step::Release { page, pages }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn memory_is_what_a_plain_array_is(steps in proptest::collection::vec(step(), 1..40)) {
        let vm = vm(Share::AtRead);
        let image = image_bytes();
        let mut model = vec![0_u8; 64 * 4096];
        for step in steps {
            match step {
                Step::Read { at, offset, sectors } => {
                    let (at, offset) = (at * 512, offset * 512);
                    let bytes = (sectors * 512).min(model.len() as u64 - at).min(image.len() as u64 - offset);
                    vm.read(&[(AT + at, bytes)], offset);
                    model[at as usize..(at + bytes) as usize].copy_from_slice(&image[offset as usize..(offset + bytes) as usize]);
                }
                Step::Write { at, value, bytes } => {
                    let bytes = bytes.min(model.len() as u64 - at);
                    vm.ram.write_slice(&vec![value; bytes as usize], GuestAddress(AT + at)).unwrap();
                    model[at as usize..(at + bytes) as usize].fill(value);
                }
                Step::Release { page, pages } => {
                    crate::virtio::balloon::release(&vm.ram, Some(&vm.mapper), AT + page * PAGE_BYTES, pages * PAGE_BYTES).unwrap();
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

/// A VM that goes on from frozen memory, on the same image.
fn thaw(frozen: &Frozen, image: &File) -> Vm {
    let mut files = frozen.files.iter().map(|file| file.try_clone().unwrap());
    let layout = Layout::new(RAM_BYTES, &[]).unwrap();
    let launch = MemoryLaunch {
        bytes: RAM_BYTES,
        pages: Pages::Small,
        prefault: false,
    };
    let ram = memory::create(&layout, &launch, &[], files.next()).unwrap();
    let mapper = Mapper::new(&ram, vec![image.try_clone().unwrap()], false).unwrap();
    mapper.adopt(files.collect(), &frozen.map).unwrap();
    with(ram, mapper, image.try_clone().unwrap(), Share::AtRead)
}

impl Vm {
    fn freeze(&self) -> Frozen {
        let gate = Gate::new();
        let frozen = self.mapper.freeze(&gate.pause().unwrap()).unwrap();
        for file in &frozen.files {
            seal(file).unwrap();
        }
        frozen
    }
}

#[derive(Debug, Clone)]
enum Deed {
    Step(Step),
    Clone,
}

fn deed() -> impl Strategy<Value = Deed> {
    prop_oneof![8 => step().prop_map(Deed::Step), 1 => Just(Deed::Clone)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    /// Clones, their parents and their children: what each does, none of the others sees.
    #[test]
    fn a_family_is_as_many_plain_arrays(deeds in proptest::collection::vec((any::<prop::sample::Index>(), deed()), 1..60)) {
        const BYTES: u64 = 64 * PAGE_BYTES;
        let file = image();
        let content = image_bytes();
        let mut family = vec![(vm_on(file.try_clone().unwrap(), Share::AtRead), vec![0_u8; BYTES as usize])];
        for (who, deed) in deeds {
            let who = who.index(family.len());
            let (vm, model) = &mut family[who];
            match deed {
                Deed::Step(Step::Read { at, offset, sectors }) => {
                    let (at, offset) = (at * 512, offset * 512);
                    let bytes = (sectors * 512).min(BYTES - at).min(content.len() as u64 - offset);
                    vm.read(&[(AT + at, bytes)], offset);
                    model[at as usize..(at + bytes) as usize].copy_from_slice(&content[offset as usize..(offset + bytes) as usize]);
                }
                Deed::Step(Step::Write { at, value, bytes }) => {
                    let bytes = bytes.min(BYTES - at);
                    vm.ram.write_slice(&vec![value; bytes as usize], GuestAddress(AT + at)).unwrap();
                    model[at as usize..(at + bytes) as usize].fill(value);
                }
                Deed::Step(Step::Release { page, pages }) => {
                    crate::virtio::balloon::release(&vm.ram, Some(&vm.mapper), AT + page * PAGE_BYTES, pages * PAGE_BYTES).unwrap();
                    // Anything of its own may be there now, but it stays what it is.
                    let range = (page * PAGE_BYTES) as usize..((page + pages) * PAGE_BYTES) as usize;
                    let now = vm.bytes(AT + page * PAGE_BYTES, pages * PAGE_BYTES);
                    model[range].copy_from_slice(&now);
                }
                Deed::Clone => {
                    let clone = (thaw(&vm.freeze(), &file), model.clone());
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
    // What is written between two freezings goes into a layer, and only that.
    vm.ram
        .write_slice(b"later", GuestAddress(AT + 8 * PAGE_BYTES))
        .unwrap();
    let again = vm.freeze();
    assert_eq!(again.files.len(), 2);
    use std::os::unix::fs::MetadataExt;
    let layer = again.files[1].metadata().unwrap().blocks() * 512 / PAGE_BYTES;
    assert!(layer <= 2, "a layer of {layer} pages for one that was written");
    // Nothing was written since: nothing is added.
    assert_eq!(vm.freeze().files.len(), 2);
}

#[test]
fn memory_of_another_image_is_refused() {
    let vm = vm(Share::AtRead);
    vm.read(&[(AT, 8 * PAGE_BYTES)], 0);
    let frozen = vm.freeze();
    let layout = Layout::new(RAM_BYTES, &[]).unwrap();
    let launch = MemoryLaunch {
        bytes: RAM_BYTES,
        pages: Pages::Small,
        prefault: false,
    };
    let first = frozen.files[0].try_clone().unwrap();
    let ram = memory::create(&layout, &launch, &[], Some(first)).unwrap();
    let other = Mapper::new(&ram, vec![image()], false).unwrap();
    let error = other.adopt(Vec::new(), &frozen.map).unwrap_err();
    assert!(error.to_string().contains("changed or replaced"), "{error}");
}
