//! In which cell a VM starts.

/// What a cell has to give.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Room {
    /// The cell.
    pub cell: u16,
    /// Its CPUs.
    pub cpus: u32,
    /// vCPUs that run there.
    pub vcpus: u32,
    /// Memory that it has not given out, bytes.
    pub free_bytes: u64,
    /// Whether it takes no new VM.
    pub is_cordoned: bool,
}

/// The cell for a VM of that many vCPUs and that much memory: of those that have the memory, the one with the fewest vCPUs
/// on each CPU afterwards; of these the one with the most memory left, then the lowest number. Cordoned cells take no part.
/// `None` if no other one has the memory.
pub fn place(rooms: &[Room], vcpus: u32, memory_bytes: u64) -> Option<u16> {
    let fitting = rooms
        .iter()
        .filter(|room| room.free_bytes >= memory_bytes && room.cpus > 0 && !room.is_cordoned);
    let load_milli = |room: &Room| u64::from(room.vcpus + vcpus) * 1000 / u64::from(room.cpus);
    let best = fitting.min_by_key(|room| (load_milli(room), u64::MAX - room.free_bytes, room.cell));
    best.map(|room| room.cell)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn room(cell: u16, cpus: u32, vcpus: u32, free_mib: u64) -> Room {
        Room {
            cell,
            cpus,
            vcpus,
            free_bytes: free_mib << 20,
            is_cordoned: false,
        }
    }

    #[test]
    fn cordoned_cell_is_never_chosen_however_much_room_it_has() {
        let mut rooms = [room(0, 1, 9, 128), room(1, 8, 0, 1 << 20)];
        assert_eq!(place(&rooms, 1, 64 << 20), Some(1));
        rooms[1].is_cordoned = true;
        assert_eq!(place(&rooms, 1, 64 << 20), Some(0));
        rooms[0].is_cordoned = true;
        assert_eq!(place(&rooms, 1, 64 << 20), None);
    }

    #[test]
    fn the_least_loaded_that_fits_is_taken() {
        let rooms = [room(0, 4, 4, 1024), room(1, 4, 2, 1024), room(2, 8, 0, 100)];
        assert_eq!(place(&rooms, 2, 512 << 20), Some(1));
        assert_eq!(place(&rooms, 2, 64 << 20), Some(2));
        assert_eq!(place(&rooms, 1, 2048 << 20), None);
    }

    #[test]
    fn load_is_vcpus_for_each_cpu_with_those_of_the_vm() {
        assert_eq!(place(&[room(0, 1, 0, 64), room(1, 4, 1, 64)], 1, 0), Some(1));
        assert_eq!(place(&[room(0, 4, 3, 64), room(1, 5, 5, 64)], 1, 0), Some(0));
    }

    #[test]
    fn of_equal_load_a_byte_more_of_memory_decides() {
        let mut rooms = [0, 1].map(|cell| room(cell, 2, 0, 1 << 20));
        rooms[1].free_bytes += 1;
        assert_eq!(place(&rooms, 1, 0), Some(1));
    }

    proptest! {
        /// VMs of one size, one after another: equal cells differ by one at most.
        #[test]
        fn equal_cells_are_filled_evenly(cells in 1..9_u16, cpus in 1..9_u32, vcpus in 1..5_u32, count in 0..40_u32) {
            let mut rooms: Vec<Room> = (0..cells).map(|cell| room(cell, cpus, 0, 1 << 20)).collect();
            for _ in 0..count {
                let cell = place(&rooms, vcpus, 64 << 20).expect("memory for all");
                rooms[usize::from(cell)].vcpus += vcpus;
                rooms[usize::from(cell)].free_bytes -= 64 << 20;
            }
            let placed = rooms.iter().map(|room| room.vcpus / vcpus);
            let (least, most) = (placed.clone().min().expect("one"), placed.max().expect("one"));
            prop_assert!(most - least <= 1);
        }
    }
}
