//! Pauses of a VM over three cells, whose shards obey, refuse, end or do not answer.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use super::*;
use crate::handle::shard_threads::{self, Reaction, ShardThreads};

/// Behavior of a shard when it receives a pause.
#[derive(Clone, Copy, PartialEq)]
enum Role {
    Obeys,
    Refuses,
    Silent,
    Dies,
}

/// Orders to pause or resume that the shards have received, with the shard's cell.
type Received = Arc<Mutex<Vec<(u16, Order)>>>;

/// A VM over the cells 0, which is its home, 1 and 2.
struct Spanning {
    handle: VmHandle,
    received: Received,
    _shards: ShardThreads,
}

impl Role {
    /// The reactions of the shard of a cell, which records the orders that it receives.
    fn of_shard(self, cell: u16, received: &Received) -> shard_threads::Role {
        let received = received.clone();
        Box::new(move |order| {
            let is_pause = order == Order::Pause;
            if !matches!(order, Order::Pause | Order::Resume) {
                return Reaction::End;
            }
            received.lock().unwrap().push((cell, order));
            let why = "its vCPUs do not leave the guest".to_owned();
            match self {
                Self::Refuses if is_pause => Reaction::Answer(Answer::Refused { why }),
                Self::Silent if is_pause => Reaction::Silence,
                Self::Dies if is_pause => Reaction::End,
                _ => Reaction::Answer(Answer::Done),
            }
        })
    }
}

impl Spanning {
    fn new(home: Role, parts: [Role; 2]) -> Self {
        let (handle, received) = (VmHandle::default(), Received::default());
        let parts = (1..).zip(parts);
        let parts = parts.map(|(cell, role)| (cell, role.of_shard(cell, &received)));
        let shards = ShardThreads::start(&handle, home.of_shard(0, &received), parts);
        Self {
            handle,
            received,
            _shards: shards,
        }
    }

    /// The cells whose shards have received this order, in the order in which they received it.
    fn cells(&self, order: &Order) -> Vec<u16> {
        let received = self.received.lock().unwrap();
        let cells = received.iter().filter(|(_, received)| received == order);
        cells.map(|(cell, _)| *cell).collect()
    }

    /// Waits until the shards of these cells have received a resume.
    fn expect_resumes(&self, cells: &[u16]) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while !cells.iter().all(|cell| self.cells(&Order::Resume).contains(cell)) {
            assert!(Instant::now() < deadline, "{:?}", self.received);
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test]
fn vm_is_paused_when_all_its_shards_are_and_the_home_is_the_last() {
    let vm = Spanning::new(Role::Obeys, [Role::Obeys, Role::Obeys]);
    for _ in 0..2 {
        vm.handle.pause().unwrap();
        assert!(vm.handle.state().is_paused);
    }
    let paused = vm.cells(&Order::Pause);
    assert_eq!(paused.len(), 6);
    for round in paused.chunks(3) {
        assert!(
            round[2] == 0 && round.contains(&1) && round.contains(&2),
            "{paused:?}"
        );
    }
    assert_eq!(vm.cells(&Order::Resume), [0; 0]);
    vm.handle.resume().unwrap();
    assert!(!vm.handle.state().is_paused);
    let resumed = vm.cells(&Order::Resume);
    assert!(resumed.len() == 3 && resumed[2] == 0, "{resumed:?}");
}

#[test]
fn all_shards_go_on_if_one_refuses_to_pause() {
    let vm = Spanning::new(Role::Obeys, [Role::Obeys, Role::Refuses]);
    let why = vm.handle.pause().unwrap_err().to_string();
    assert_eq!(why, "its shard in cell 2: its vCPUs do not leave the guest");
    vm.expect_resumes(&[0, 1, 2]);
    assert!(!vm.handle.state().is_paused);
    assert!(!vm.cells(&Order::Pause).contains(&0), "the home was to pause");
}

#[test]
fn all_shards_go_on_if_the_home_refuses_to_pause() {
    let vm = Spanning::new(Role::Refuses, [Role::Obeys, Role::Obeys]);
    let why = vm.handle.pause().unwrap_err().to_string();
    assert_eq!(why, "its vCPUs do not leave the guest");
    vm.expect_resumes(&[0, 1, 2]);
    assert!(!vm.handle.state().is_paused);
}

#[test]
fn all_shards_go_on_if_one_does_not_answer_within_the_limit() {
    let vm = Spanning::new(Role::Obeys, [Role::Silent, Role::Obeys]);
    let begun = Instant::now();
    let why = vm.handle.pause().unwrap_err().to_string();
    assert_eq!(why, "its shard in cell 1: it does not answer");
    assert!((PARTS_LIMIT..3 * PARTS_LIMIT).contains(&begun.elapsed()));
    vm.expect_resumes(&[0, 1, 2]);
    assert!(!vm.handle.state().is_paused);
}

#[test]
fn pause_fails_at_once_if_a_shard_ends() {
    let vm = Spanning::new(Role::Obeys, [Role::Obeys, Role::Dies]);
    let begun = Instant::now();
    let why = vm.handle.pause().unwrap_err().to_string();
    assert_eq!(why, "its shard in cell 2: it has ended");
    assert!(begun.elapsed() < PARTS_LIMIT, "{:?}", begun.elapsed());
    assert!(!vm.handle.state().is_paused);
}

#[test]
fn vm_that_does_not_run_yet_is_not_paused() {
    let vm = Spanning::new(Role::Obeys, [Role::Obeys, Role::Obeys]);
    vm.handle.state().runs = false;
    let why = vm.handle.pause().unwrap_err().to_string();
    assert_eq!(why, "the VM does not run yet");
    assert_eq!(vm.cells(&Order::Pause), [0; 0]);
}

#[test]
fn successor_has_all_shards_do_what_the_record_says() {
    let vm = Spanning::new(Role::Obeys, [Role::Obeys, Role::Obeys]);
    vm.handle.state().go_on(true);
    vm.handle.align_shards(true);
    // The shards answer one order after another, so these come after the pauses.
    vm.handle.resume().unwrap();
    let mut paused = vm.cells(&Order::Pause);
    paused.sort_unstable();
    assert_eq!(paused, [0, 1, 2]);
    let before = vm.cells(&Order::Resume).len();
    vm.handle.align_shards(false);
    vm.handle.pause().unwrap();
    assert_eq!(vm.cells(&Order::Resume).len(), before + 3);
    assert!(vm.handle.state().is_paused);
}
