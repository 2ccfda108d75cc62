//! Tests with a VM over three cells, whose shards are threads.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use serde_json::json;
use shard_api::launch::{Answer, MoveReport, VCPU_STOP_TOTAL_MAX};

use super::*;
use crate::handle::shard_threads::{Reaction, Role, ShardThreads};

const CELLS: [u16; 3] = [3, 5, 8];

/// State that the shards share.
#[derive(Default)]
struct Played {
    /// The shard of each vCPU.
    places: Mutex<Vec<u8>>,
    /// Orders to stop or continue a vCPU that were carried out, each with the number of its shard.
    obeyed: Mutex<Vec<(u8, Order)>>,
    /// The shards that have refused an order, since the vCPU was in another one.
    refused: Mutex<Vec<u8>>,
    /// Orders for a status that the home has answered.
    statuses: Mutex<usize>,
    /// Time that a move takes.
    move_time: Mutex<Duration>,
}

impl Played {
    fn answer(&self, shard: u8, order: Order) -> Answer {
        let place = |vcpu: u8| self.places.lock().unwrap()[usize::from(vcpu)];
        match order {
            Order::Status if shard == 0 => {
                *self.statuses.lock().unwrap() += 1;
                Answer::Status(json!({ "vcpu_shards": *self.places.lock().unwrap() }))
            }
            Order::Status => Answer::Status(json!({})),
            Order::Move { vcpu, shard } => {
                std::thread::sleep(*self.move_time.lock().unwrap());
                self.places.lock().unwrap()[usize::from(vcpu)] = shard;
                Answer::Moved(MoveReport::Done { still_ns: 1 })
            }
            Order::StopVcpu { vcpu, .. } | Order::ContinueVcpu { vcpu } if place(vcpu) != shard => {
                self.refused.lock().unwrap().push(shard);
                Answer::Refused {
                    why: format!("vCPU {vcpu} is not in this shard"),
                }
            }
            Order::StopVcpu { for_ms: 99, .. } => Answer::Refused {
                why: format!("at most {} s", VCPU_STOP_TOTAL_MAX.as_secs()),
            },
            order @ (Order::StopVcpu { .. } | Order::ContinueVcpu { .. }) => {
                self.obeyed.lock().unwrap().push((shard, order));
                Answer::Done
            }
            other => panic!("{other:?}"),
        }
    }
}

/// A VM of four vCPUs, of which one is in each shard, and the last in the home.
struct Spanning {
    handle: VmHandle,
    played: Arc<Played>,
    _shards: ShardThreads,
}

impl Spanning {
    fn new() -> Self {
        let (handle, played) = (VmHandle::default(), Arc::<Played>::default());
        *played.places.lock().unwrap() = vec![0, 1, 2, 0];
        handle.state().cells = CELLS.to_vec();
        let role = |shard: u8| -> Role {
            let played = played.clone();
            Box::new(move |order| match order {
                Order::Quit => Reaction::End,
                order => Reaction::Answer(played.answer(shard, order)),
            })
        };
        let parts = (1..).zip(&CELLS[1..]);
        let parts = parts.map(|(shard, cell)| (*cell, role(shard)));
        let shards = ShardThreads::start(&handle, role(0), parts);
        Self {
            handle,
            played,
            _shards: shards,
        }
    }

    /// The shards that have stopped a vCPU so far.
    fn obeyed(&self) -> Vec<u8> {
        let obeyed = self.played.obeyed.lock().unwrap();
        obeyed.iter().map(|(shard, _)| *shard).collect()
    }

    fn statuses(&self) -> usize {
        *self.played.statuses.lock().unwrap()
    }
}

#[test]
fn order_goes_to_the_next_shard_only_if_the_vcpu_has_moved_and_not_forever() {
    assert_eq!(next_shard(&[0], Some(1)), Some(1));
    assert_eq!(next_shard(&[0, 1], Some(0)), Some(0), "it has moved back");
    assert_eq!(next_shard(&[0], Some(0)), None, "the refusal has another reason");
    assert_eq!(next_shard(&[0, 1], Some(1)), None);
    assert_eq!(next_shard(&[0], None), None, "the VM has ended");
    assert_eq!(next_shard(&[0, 1, 0], Some(1)), None);
}

#[test]
fn vcpu_is_stopped_and_goes_on_by_the_shard_that_it_is_in() {
    let vm = Spanning::new();
    for vcpu in 0..4 {
        vm.handle.stop_vcpu(vcpu, 50).unwrap();
        vm.handle.continue_vcpu(vcpu).unwrap();
    }
    assert_eq!(vm.obeyed(), [0, 0, 1, 1, 2, 2, 0, 0]);
    let last = vm.played.obeyed.lock().unwrap().last().cloned();
    assert_eq!(last, Some((0, Order::ContinueVcpu { vcpu: 3 })));
    assert_eq!(
        vm.statuses(),
        1,
        "its places were requested again, though none was to move"
    );
    let refused = vm.handle.stop_vcpu(4, 50).unwrap_err().to_string();
    assert_eq!(refused, "the VM has no vCPU 4");
    let refused = vm.handle.stop_vcpu(1, 101).unwrap_err().to_string();
    assert!(refused.contains("1 to 100 ms at a time"), "{refused}");
    let refused = vm.handle.stop_vcpu(1, 99).unwrap_err().to_string();
    assert_eq!(refused, "its shard in cell 5: at most 5 s");
    assert_eq!(vm.obeyed().len(), 8);
}

#[test]
fn stop_waits_for_a_move_that_runs_and_follows_the_vcpu() {
    let vm = Spanning::new();
    vm.handle.stop_vcpu(1, 50).unwrap();
    *vm.played.move_time.lock().unwrap() = UPDATE_LIMIT / 4;
    std::thread::scope(|scope| {
        let moved = scope.spawn(|| vm.handle.move_vcpu(1, CELLS[2]));
        while vm.handle.try_begin_update().is_some() {
            std::thread::yield_now();
        }
        vm.handle.stop_vcpu(1, 50).unwrap();
        moved.join().unwrap().unwrap();
    });
    assert_eq!(vm.obeyed(), [1, 2]);
    assert!(vm.played.refused.lock().unwrap().is_empty());
}

#[test]
fn stop_is_refused_while_a_move_takes_long() {
    let vm = Spanning::new();
    *vm.played.move_time.lock().unwrap() = 3 * UPDATE_LIMIT;
    std::thread::scope(|scope| {
        let moved = scope.spawn(|| vm.handle.move_vcpu(1, CELLS[2]));
        while vm.handle.try_begin_update().is_some() {
            std::thread::yield_now();
        }
        let begun = Instant::now();
        let refused = vm.handle.stop_vcpu(1, 50).unwrap_err().to_string();
        assert!(refused.starts_with("a vCPU of the VM moves"), "{refused}");
        assert!((UPDATE_LIMIT..2 * UPDATE_LIMIT).contains(&begun.elapsed()));
        moved.join().unwrap().unwrap();
    });
    assert!(vm.obeyed().is_empty());
    vm.handle.stop_vcpu(1, 50).unwrap();
    assert_eq!(vm.obeyed(), [2]);
}

#[test]
fn vcpu_that_has_moved_after_the_limit_of_its_move_is_found_again() {
    let vm = Spanning::new();
    vm.handle.stop_vcpu(2, 50).unwrap();
    vm.played.places.lock().unwrap()[2] = 0;
    vm.handle.stop_vcpu(2, 50).unwrap();
    assert_eq!(vm.obeyed(), [2, 0]);
    assert_eq!(*vm.played.refused.lock().unwrap(), [2]);
    assert_eq!(vm.statuses(), 2);
}

#[test]
fn renewals_by_several_clients_wait_for_each_other() {
    const CLIENTS: usize = 4;
    const RENEWALS: usize = 25;
    let vm = Spanning::new();
    std::thread::scope(|scope| {
        for _ in 0..CLIENTS {
            scope.spawn(|| {
                for _ in 0..RENEWALS {
                    vm.handle.stop_vcpu(1, 100).unwrap();
                }
            });
        }
    });
    assert_eq!(vm.obeyed(), [1; CLIENTS * RENEWALS]);
}

#[test]
fn vcpu_of_a_vm_whose_shard_has_ended_is_not_stopped() {
    let vm = Spanning::new();
    vm.handle.stop_vcpu(1, 50).unwrap();
    vm.handle.state().runs = false;
    for vcpu in [0, 1] {
        let refused = vm.handle.stop_vcpu(vcpu, 50).unwrap_err().to_string();
        assert_eq!(refused, "the VM does not run yet");
    }
    assert_eq!(vm.obeyed(), [1]);
}
