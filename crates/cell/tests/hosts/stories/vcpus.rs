//! Orders to single vCPUs of a part, and requests about its host.

use cell::remote::part::RemotePart;
use cell::remote::protocol::{FromPart, PartLimits};
use registry::cluster::interface::Vcpu;
use serde_json::Value;
use shard::launch::{Answer, Order, Report};

use crate::hosts::two::{SOON, Two, remote, started, wait};

/// The part's answer to an order that is awaited.
#[track_caller]
fn answer(part: &RemotePart, order: &Order) -> Answer {
    part.order(order).expect("an order");
    match part.next(Some(SOON)) {
        Some(FromPart::Answered(answer)) => answer,
        other => panic!("{other:?}"),
    }
}

/// The stops of each vCPU in the part's shard.
#[track_caller]
fn stops(part: &RemotePart) -> Value {
    part.order(&Order::Status).expect("an order");
    match part.next(Some(SOON)) {
        Some(FromPart::Report(Report::Answer {
            answer: Answer::Status(status),
            ..
        })) => status["stops"].clone(),
        other => panic!("{other:?}"),
    }
}

/// The part's threads of vCPUs, by number.
#[track_caller]
fn threads(part: &RemotePart) -> Vec<Vcpu> {
    let known = part.vcpus().expect("its vCPUs");
    let numbers: Vec<u8> = known.iter().map(|known| known.vcpu).collect();
    assert_eq!(numbers, [0, 1], "a thread for each vCPU of the VM: {known:?}");
    known
}

/// The part on beta has vCPU 1, and vCPU 0 is in the home.
pub fn acted_on(two: &Two) {
    let span = two.span();
    let opened = two.opened();
    let part = remote(&span);
    assert!(part.vcpus().is_err(), "it does not run yet");
    let _boot = started(two, &span, &opened);

    assert_eq!(
        answer(part, &Order::StopVcpu { vcpu: 1, for_ms: 50 }),
        Answer::Done
    );
    wait(|| stops(part)[1]["stopped_ns"].as_u64() > Some(0));
    assert_eq!(stops(part)[1]["count"], 1);
    assert_eq!(answer(part, &Order::ContinueVcpu { vcpu: 1 }), Answer::Done);
    for (vcpu, for_ms, why) in [
        (0, 50, "vCPU 0 is not in this shard"),
        (2, 50, "the VM has no vCPU 2"),
        (1, 101, "a vCPU is stopped for 1 to 100 ms at a time"),
    ] {
        match answer(part, &Order::StopVcpu { vcpu, for_ms }) {
            Answer::Refused { why: refused } => assert!(refused.starts_with(why), "{refused}"),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(stops(part)[0]["count"], 0);

    let own = threads(part)[1].cpus.clone();
    for known in threads(part) {
        // Linux 5.14 and later.
        let kvm = known.kvm.expect("KVM's statistics");
        assert!(kvm.exits.is_some() && kvm.halts.is_some(), "{kvm:?}");
        assert_eq!((kvm.halted_ms, kvm.is_halted), (None, None));
    }
    let last = *own.last().expect("a CPU");
    part.pin(1, &[last]).expect("a CPU of its cell");
    assert_eq!(threads(part)[1].cpus, [last]);
    assert_eq!(threads(part)[0].cpus, own);
    let refused = part.pin(1, &[1023]).expect_err("no CPU of its cell").to_string();
    let why = "cell 1 on host beta: vCPU 1 is in cell 1, which has no CPU 1023; help: ";
    assert!(refused.starts_with(why), "{refused}");
    part.pin(1, &[]).expect("all CPUs of its cell");
    assert_eq!(threads(part)[1].cpus, own);

    // Only some hosts of these tests let this user make control groups.
    let limits = PartLimits {
        cpu_weight: Some(300),
        ..PartLimits::default()
    };
    if let Err(refused) = part.limit(limits) {
        let why = "cell 1 on host beta: cannot limit what the VM uses of the host: ";
        assert!(refused.to_string().starts_with(why), "{refused}");
    } else {
        let shard = two.shards()[0];
        let group = std::fs::read_to_string(format!("/proc/{shard}/cgroup")).expect("its group");
        let group = group.trim().rsplit(':').next().expect("a path").to_owned();
        let weight = std::fs::read_to_string(format!("/sys/fs/cgroup{group}/cpu.weight"));
        assert_eq!(weight.expect("a weight").trim(), "300");
    }
    drop(span);
    two.wait_until_free();
}
