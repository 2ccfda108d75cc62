//! Threads in the roles of shards obey, refuse, or are silent. Each shard's process is one that does nothing.

use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use shard_api::control::ControlSocket;
use shard_api::launch::{NumberedOrder, Report};

use super::*;
use crate::secondary_shards::SecondaryShard;
use crate::shard_process::ShardProcess;

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
}

/// Receives orders until the shard is to end, and gives `answer` the reports to make.
fn play(cell: u16, role: Role, socket: &ControlSocket, received: &Received, answer: impl Fn(Report)) {
    while let Ok((message, _)) = socket.receive_with_files() {
        let NumberedOrder { id: to, order } = serde_json::from_slice(&message).expect("an order");
        let is_pause = order == Order::Pause;
        if matches!(order, Order::Pause | Order::Resume) {
            received.lock().unwrap().push((cell, order));
        } else {
            return;
        }
        let why = "its vCPUs do not leave the guest".to_owned();
        match role {
            Role::Refuses if is_pause => answer(Report::Answer {
                to,
                answer: Answer::Refused { why },
            }),
            Role::Silent if is_pause => {}
            Role::Dies if is_pause => return,
            _ => answer(Report::Answer {
                to,
                answer: Answer::Done,
            }),
        }
    }
}

impl Spanning {
    fn new(home: Role, parts: [Role; 2]) -> Self {
        let (handle, received) = (VmHandle::default(), Received::default());
        let parts = (1..).zip(parts).map(|(cell, role)| {
            let (process, socket) = ShardProcess::of(Command::new("sleep").arg("100"));
            let received = received.clone();
            std::thread::spawn(move || {
                let answer = |report| socket.send(&report, &[]).expect("its monitor reads");
                play(cell, role, &socket, &received, answer);
            });
            SecondaryShard::Here { cell, process }
        });
        let (told, ended) = (handle.clone(), handle.clone());
        let parts = SecondaryShards::watch(
            parts.collect(),
            move || told.changed(),
            move || ended.part_ended(),
        );
        let (process, socket) = ShardProcess::of(Command::new("sleep").arg("100"));
        handle.state().start(Arc::new(process), Some(parts.unwrap()));
        handle.state().runs = true;
        let (vm, got) = (handle.clone(), received.clone());
        std::thread::spawn(move || {
            // As the thread that reads the home's reports.
            let answer = |report| {
                let Report::Answer { to, answer } = report else {
                    return;
                };
                let _ = vm.state().paused_by(to, &answer);
                vm.state().note_answer(to, answer);
                vm.changed();
            };
            play(0, home, &socket, &got, answer);
            vm.end_orders();
        });
        Self { handle, received }
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

impl Drop for Spanning {
    fn drop(&mut self) {
        let (home, parts) = {
            let mut state = self.handle.state();
            (state.home.take(), state.parts.take())
        };
        drop(parts);
        home.iter().for_each(|home| _ = home.kill());
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
