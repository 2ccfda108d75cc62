use std::process::Command;

use config::Size;
use registry::cluster::admission::Limits;
use registry::update::Update;
use registry::vms::{HostPlace, Record, Registry};
use serde_json::json;
use shard_api::control::ControlSocket;
use shard_api::launch::{NumberedOrder, OrderId};
use shard_api::version::VERSIONS;
use urpc::version::Versions;

use super::*;
use crate::shard_process::ShardProcess;

/// The next order that a shard receives; none at the end.
fn next_order(shard: &ControlSocket) -> Option<NumberedOrder> {
    let (message, _) = shard.receive_with_files().ok()?;
    Some(serde_json::from_slice(&message).expect("an order"))
}

/// A VM whose shard is a process that reads nothing, and the shard's end of the socket.
fn hung() -> (VmHandle, Arc<ShardProcess>, ControlSocket) {
    let (shard, theirs) = ShardProcess::of(Command::new("sleep").arg("100"));
    let (handle, shard) = (VmHandle::default(), Arc::new(shard));
    handle.state().start(shard.clone(), None);
    (handle, shard, theirs)
}

/// The steps of the VM's own thread when its shard has ended.
fn end(handle: &VmHandle, shard: &ShardProcess) -> String {
    let why = shard.wait();
    handle.end_orders();
    handle.over();
    why
}

/// Promise HOSTILE-39.
#[test]
fn a_kill_ends_a_shard_whose_orders_fill_the_socket() {
    let (handle, shard, _unread) = hung();
    while shard.link.order(&Order::Status).is_ok() {}
    let started = Instant::now();
    std::thread::scope(|scope| {
        let ended = scope.spawn(|| {
            loop {
                if handle.state().ending {
                    break end(&handle, &shard);
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        // A client that requests the status waits no longer than the kill takes.
        let asked = scope.spawn(|| handle.status());
        handle.kill();
        assert_eq!(
            ended.join().unwrap(),
            "its process read no orders any more and was killed"
        );
        assert!(asked.join().unwrap().is_err());
    });
    assert!(started.elapsed() < QUIT_LIMIT, "{:?}", started.elapsed());
}

#[test]
fn a_quit_is_enforced_on_a_shard_that_does_not_obey() {
    let (handle, shard, _unread) = hung();
    std::thread::scope(|scope| {
        let ended = scope.spawn(|| {
            // Later than the limit after which it would kill the shard itself.
            std::thread::sleep(ACKNOWLEDGEMENT_LIMIT + Duration::from_millis(200));
            end(&handle, &shard)
        });
        handle.quit();
        assert_eq!(ended.join().unwrap(), "its process was ended by SIGKILL");
    });
}

/// Time for which `kill` lets a shard live that obeys no order. Once the shard has read the order to
/// quit, `played` plays its part with the order's number.
fn killed_after(versions: Versions, played: impl FnOnce(&VmHandle, OrderId) + Send) -> Duration {
    let (handle, shard, orders) = hung();
    handle.state().runs = true;
    shard.note_versions(versions);
    let begun = Instant::now();
    std::thread::scope(|scope| {
        let ended = scope.spawn(|| {
            let NumberedOrder { id, order } = next_order(&orders).unwrap();
            assert_eq!(order, Order::Quit);
            played(&handle, id);
            while !shard.has_ended() {
                std::thread::sleep(Duration::from_millis(1));
            }
            let took = begun.elapsed();
            end(&handle, &shard);
            took
        });
        handle.kill();
        ended.join().unwrap()
    })
}

#[test]
fn shard_that_does_not_acknowledge_its_end_is_killed_within_a_second() {
    let took = killed_after(VERSIONS, |_, _| ());
    assert!(
        (ACKNOWLEDGEMENT_LIMIT..Duration::from_secs(1)).contains(&took),
        "{took:?}"
    );
    // An answer to another order is no acknowledgement.
    let took = killed_after(VERSIONS, |handle, id| {
        let to = OrderId {
            request: id.request + 1,
            ..id
        };
        handle.state().note_answer(to, Answer::Done);
        handle.changed();
    });
    assert!(took < Duration::from_secs(1), "{took:?}");
}

#[test]
fn shard_that_flushes_its_disks_or_is_of_the_release_before_has_5_s() {
    let acknowledged = |handle: &VmHandle, id| {
        handle.state().note_answer(id, Answer::Done);
        handle.changed();
    };
    std::thread::scope(|scope| {
        let flushes = scope.spawn(|| killed_after(VERSIONS, acknowledged));
        let of_version_1 = killed_after(Versions::FIRST, |_, _| ());
        for took in [flushes.join().unwrap(), of_version_1] {
            assert!(
                (QUIT_LIMIT..QUIT_LIMIT + ACKNOWLEDGEMENT_LIMIT * 2).contains(&took),
                "{took:?}"
            );
        }
    });
}

#[test]
fn many_clients_that_ask_for_the_status_send_one_order() {
    let (handle, shard, orders) = hung();
    std::thread::scope(|scope| {
        let asked: Vec<_> = (0..20).map(|_| scope.spawn(|| handle.status())).collect();
        let NumberedOrder { id, order } = next_order(&orders).unwrap();
        assert_eq!(order, Order::Status);
        std::thread::sleep(Duration::from_secs(1));
        let answer = Answer::Status(json!({ "exits": [] }));
        handle.state().note_answer(id, answer);
        handle.changed();
        for one in asked {
            assert_eq!(one.join().unwrap().unwrap()["exits"], json!([]));
        }
    });
    shard.kill();
    assert_eq!(next_order(&orders), None);
}

#[test]
fn a_pause_between_two_boots_ends_when_the_vm_is_to_end() {
    let handle = VmHandle::default();
    let started = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(50));
            handle.stop(Duration::ZERO);
        });
        handle.wait_between_boots(Duration::from_secs(100));
        handle.over();
    });
    assert!(started.elapsed() < Duration::from_secs(50));
}

/// Promise CMD-14.
#[test]
fn the_power_button_is_pressed_again_for_a_guest_that_did_not_notice() {
    let (handle, shard, orders) = hung();
    handle.state().runs = true;
    let guest = handle.clone();
    let booting = std::thread::spawn(move || {
        let mut presses = 0;
        while let Some(NumberedOrder { order, .. }) = next_order(&orders) {
            assert!(matches!(order, Order::PowerButton), "{order:?}");
            presses += 1;
            if presses == 2 {
                guest.over();
                break;
            }
        }
        presses
    });
    let is_killed = handle.stop(Duration::from_secs(60));
    assert!(!is_killed);
    assert_eq!(booting.join().expect("it ends"), 2);
    shard.kill();
}

/// The limit of an order for the resident memory.
fn resident_limit(order: &NumberedOrder) -> u64 {
    match order.order {
        Order::Resident { bytes } => bytes,
        ref other => panic!("{other:?}"),
    }
}

#[test]
fn shard_that_does_not_answer_gets_one_order_of_its_limit_and_is_not_killed_for_it() {
    let (handle, shard, orders) = hung();
    // A home that does not run yet starts with the limit.
    handle.limit_resident_to(64 << 20);
    assert_eq!(handle.resident_limit(Size(512 << 20)), 64 << 20);
    assert_eq!(
        handle.resident_limit(Size(32 << 20)),
        32 << 20,
        "the user's is less"
    );
    handle.state().runs = true;
    for round in 1..5000 {
        handle.limit_resident_to(round << 20);
    }
    let first = next_order(&orders).unwrap();
    assert_eq!(resident_limit(&first), 1 << 20);
    // An answer to another order is none; the right one lets the last limit go out, once.
    let other = OrderId {
        request: first.id.request + 1,
        ..first.id
    };
    handle.state().note_answer(other, Answer::Done);
    handle.limit_resident_to(7 << 20);
    handle.state().note_answer(first.id, Answer::Done);
    for _ in 0..5 {
        handle.limit_resident_to(8 << 20);
    }
    let second = next_order(&orders).unwrap();
    assert_eq!(resident_limit(&second), 8 << 20);
    handle.state().note_answer(second.id, Answer::Done);
    handle.limit_resident_to(8 << 20);
    assert!(!shard.has_ended());

    // The next boot's shard gets its order anew.
    let (next, its_orders) = ShardProcess::of(Command::new("sleep").arg("100"));
    let next = Arc::new(next);
    handle.state().start(next.clone(), None);
    handle.state().runs = true;
    handle.limit_resident_to(8 << 20);
    assert_eq!(resident_limit(&next_order(&its_orders).unwrap()), 8 << 20);
    shard.kill();
    next.kill();
    assert_eq!(next_order(&orders), None);
}

/// A VM of 512 MiB whose record has these keys.
fn recorded(handle: &VmHandle, directory: &std::path::Path, keys: &str) {
    let text = format!("image = \"x\"\nmemory = \"512M\"\n{keys}");
    let spec = config::parse("vm.toml", &text).unwrap();
    let entry = Registry::at(directory).unwrap().claim("vm").unwrap();
    let record = Record::new("vm".to_owned(), spec, 3);
    // The record stays until the directory goes.
    std::mem::forget(handle.recorder().begin(entry, record).unwrap());
}

#[test]
fn limit_of_a_vm_in_another_users_cluster_stays_within_its_place() {
    let (handle, shard, orders) = hung();
    let directory = tempfile::tempdir().unwrap();
    recorded(
        &handle,
        directory.path(),
        "resident = \"128M\"\nmemory_min = \"32M\"\n",
    );
    handle.state().runs = true;
    handle.recorder().change(|record| {
        record.host_place = Some(HostPlace {
            cell: 1,
            limits: Limits::Group,
            resident_max_bytes: Some(128 << 20),
        });
    });
    let update = |mib: u64| Update {
        resident: Some(Size(mib << 20)),
        ..Update::default()
    };
    let refused = handle.update(&update(129)).unwrap_err().to_string();
    assert_eq!(
        refused,
        "its place in the host's cluster has memory for 128M, not for 129M; help: start the VM with a larger \
         `resident`"
    );
    for mib in [64, 128] {
        std::thread::scope(|scope| {
            let updating = scope.spawn(|| handle.update(&update(mib)));
            let order = next_order(&orders).unwrap();
            handle.state().note_answer(order.id, Answer::Done);
            handle.changed();
            updating.join().unwrap().unwrap();
            assert_eq!(resident_limit(&order), mib << 20);
        });
    }
    shard.kill();
}

#[test]
fn users_limit_does_not_undo_a_lower_one_of_the_watch() {
    let (handle, shard, orders) = hung();
    let directory = tempfile::tempdir().unwrap();
    recorded(
        &handle,
        directory.path(),
        "resident = \"128M\"\nmemory_min = \"32M\"\n",
    );
    handle.state().runs = true;
    let update = |mib: u64| {
        let update = Update {
            resident: Some(Size(mib << 20)),
            ..Update::default()
        };
        std::thread::scope(|scope| {
            let updating = scope.spawn(|| handle.update(&update));
            let order = next_order(&orders).unwrap();
            handle.state().note_answer(order.id, Answer::Done);
            handle.changed();
            updating.join().unwrap().unwrap();
            resident_limit(&order) >> 20
        })
    };
    // The watch has ordered the user's limit: it lowers none.
    handle.limit_resident_to(128 << 20);
    let order = next_order(&orders).unwrap();
    handle.state().note_answer(order.id, Answer::Done);
    assert_eq!(update(256), 256);
    assert_eq!(handle.trimmable().unwrap().limit_bytes, 256 << 20);
    handle.limit_resident_to(64 << 20);
    let order = next_order(&orders).unwrap();
    handle.state().note_answer(order.id, Answer::Done);
    assert_eq!(
        (resident_limit(&order) >> 20, update(512), update(48)),
        (64, 64, 48)
    );
    let promise = handle.promise_status().unwrap();
    assert_eq!(promise["promised_bytes"], 32 << 20);
    assert_eq!(promise["limit_bytes"], 48 << 20);
    let wrong = Update {
        resident: Some(Size(31 << 20)),
        ..Update::default()
    };
    let refused = handle.update(&wrong).unwrap_err().to_string();
    assert!(refused.contains("a promise of 32M"), "{refused}");
    shard.kill();
}

#[test]
fn promise_without_a_control_group_is_best_effort_and_says_so() {
    let (handle, shard, _orders) = hung();
    let directory = tempfile::tempdir().unwrap();
    recorded(&handle, directory.path(), "memory_min = \"32M\"\n");
    let promise = handle.promise_status().unwrap();
    assert_eq!(promise["kept_by"], "best effort");
    assert!(
        promise["why"].as_str().unwrap().contains("no control group"),
        "{promise}"
    );
    assert_eq!(promise["is_trimmed"], false);
    assert_eq!(promise["worst_bytes"], 576 << 20);
    assert!(handle.trimmable().is_none(), "it is not paged");
    shard.kill();
    let plain = VmHandle::default();
    let directory = tempfile::tempdir().unwrap();
    recorded(&plain, directory.path(), "");
    assert!(plain.promise_status().is_none(), "it has no promise of its own");
}
