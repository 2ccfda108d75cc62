//! The saved state of a machine: its text, and its map of memory, which a shard lays over guest memory.

use crate::file::sparse_file;
use crate::guest::{Guest, MEMORY_BYTES};
use shard::sharing::{Advice, FrozenMap, ImageName, Mapper, PAGE_BYTES};
use shard::snapshot::MachineState;

/// Lays the map over the memory of a guest that has an image and a layer.
fn adopt(mut map: FrozenMap) {
    let (image, layer) = (sparse_file(MEMORY_BYTES), sparse_file(MEMORY_BYTES));
    // The text can't know the image's file: without this every map would be refused at once.
    if let Some(first) = map.images.first_mut() {
        *first = ImageName::of(&image).expect("a file");
    }
    let guest = Guest::new(0);
    let mapper = Mapper::new(&guest.memory, vec![image], Advice::Ordinary).expect("memory of small pages");
    let adopted = mapper.adopt(vec![layer], &map);
    let pages = MEMORY_BYTES / PAGE_BYTES;
    let status = mapper.status();
    assert!(
        status["mapped_pages"]
            .as_u64()
            .is_some_and(|mapped| mapped <= pages),
        "{status}"
    );
    if adopted.is_ok() {
        let inside = |&(at, run): &(u64, shard::sharing::Run)| {
            at.checked_add(run.pages).is_some_and(|end| end <= pages)
        };
        assert!(map.runs.iter().all(inside), "{map:?}");
    }
}

pub fn fuzz(text: &[u8]) {
    match MachineState::parse(text) {
        Ok(state) => adopt(state.memory),
        Err(error) => {
            let _ = error.to_string();
        }
    }
    if let Ok(map) = serde_json::from_slice::<FrozenMap>(text) {
        adopt(map);
    }
}
