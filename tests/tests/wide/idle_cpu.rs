//! The scenario of Cellular Disco's figure 8 with real vCPUs: VM A runs on CPUs 2 and 3, VM B has a CPU of
//! its own and waits on CPU 2, and CPU 1 is idle.

use std::time::Duration;

use guest_tests::cluster::allowed_cpus;
use guest_tests::command::Running;
use guest_tests::halting::spinning_guest;
use guest_tests::{Cluster, Scratch, mirrorball, wait};
use serde_json::{Value, json};

use super::CPUS;

/// Time limit of a step on an emulated host.
const SOON: Duration = Duration::from_secs(60);
/// Number and interval of samples of the threads' states.
const SAMPLES: u32 = 50;
const SAMPLE_INTERVAL: Duration = Duration::from_millis(2);

/// The vCPUs of a VM that the cells list, by number.
#[track_caller]
fn vcpus(name: &str) -> Vec<Value> {
    let listed = mirrorball(["cluster", "vcpus", "--json"]).ok().json();
    let all = listed.as_array().expect("an array").iter();
    all.filter(|vcpu| vcpu["vm"] == name).cloned().collect()
}

/// The CPU of each vCPU of a VM; none while one may run on several.
#[track_caller]
fn cpus_of(name: &str) -> Option<[u64; 2]> {
    let one = |vcpu: &Value| match vcpu["cpus"].as_array()?.as_slice() {
        [cpu] => cpu.as_u64(),
        _ => None,
    };
    let cpus: Option<Vec<u64>> = vcpus(name).iter().map(one).collect();
    cpus?.try_into().ok()
}

/// Starts a VM of two vCPUs that spin. It ends with the command.
#[track_caller]
fn start(name: &str, scratch: &Scratch) -> Running {
    // A file for each: a VM ends whose kernel is written.
    let guest = scratch.write(&format!("{name}.guest"), spinning_guest());
    let kernel = format!("kernel = {{ path = {guest:?} }}");
    let text = format!("name = \"{name}\"\n{kernel}\nnets = []\nmemory = \"64M\"\ncpus = 2\ncell = 0\n");
    let file = scratch.write(&format!("{name}.toml"), text);
    let run = mirrorball(["run", file.to_str().expect("UTF-8")]).spawn();
    wait::until("a VM whose vCPUs have a CPU each", SOON, || cpus_of(name));
    run
}

/// Whether a vCPU runs or is ready: it does not stand still by an order.
fn is_ready(vcpu: &Value) -> bool {
    let path = format!("/proc/{}/task/{}/stat", vcpu["shard_pid"], vcpu["thread_id"]);
    let stat = std::fs::read_to_string(path).expect("the VM runs");
    let (_, fields) = stat.rsplit_once(") ").expect("a name");
    fields.starts_with('R')
}

#[test]
fn waiting_vcpu_moves_to_the_idle_cpu_of_its_cell_and_the_other_vm_stays() {
    let scratch = Scratch::new("figure-8");
    let cpus: Vec<u64> = allowed_cpus().take(CPUS).map(|cpu| cpu as u64).collect();
    assert_eq!(cpus.len(), CPUS, "a host of four CPUs");
    let list: Vec<String> = cpus.iter().map(u64::to_string).collect();
    let cells = format!(
        "[[cells]]\ncpus = \"{}\"\nmemory = \"256M\"\n[scheduling]\ncpus = \"gangs\"\n",
        list.join(",")
    );
    let _cluster = Cluster::of(&scratch.write("cluster.toml", cells));
    let mut a = start("a", &scratch);
    mirrorball(["update", "a"])
        .args([
            "--pin",
            &format!("0={}", cpus[2]),
            "--pin",
            &format!("1={}", cpus[3]),
        ])
        .ok();
    let place_of_a = [cpus[2], cpus[3]];
    wait::until("A on its CPUs", SOON, || {
        (cpus_of("a")? == place_of_a).then_some(())
    });
    let b = start("b", &scratch);
    let first = wait::until("B on the other CPUs", SOON, || {
        let mut first = cpus_of("b")?;
        let place = first;
        first.sort_unstable();
        (first[..] == cpus[..2]).then_some(place)
    });

    mirrorball(["move", "b", "--vcpu", "1", "--cpu", &cpus[2].to_string()]).ok();
    wait::until("B's waiting vCPU on the idle CPU", SOON, || {
        let place = cpus_of("a");
        assert!(!a.has_ended(), "A has ended: {}", a.seen());
        assert_eq!(place, Some(place_of_a), "A moves");
        (cpus_of("b")? == first).then_some(())
    });
    // With a CPU each, no driver stops a vCPU.
    wait::until("four vCPUs that run", SOON, || {
        let all = [vcpus("a"), vcpus("b")].concat();
        let run = (0..SAMPLES).all(|_| {
            std::thread::sleep(SAMPLE_INTERVAL);
            all.iter().all(is_ready)
        });
        run.then_some(())
    });
    assert_eq!((cpus_of("a"), cpus_of("b")), (Some(place_of_a), Some(first)));
    let sample = mirrorball(["top", "--json", "--count", "1", "--interval", "0.1"])
        .ok()
        .json();
    let shown = sample["cpus"].as_array().expect("an array");
    let idle = shown
        .iter()
        .find(|cpu| cpu["cpu"] == json!(first[1]))
        .expect("its CPU");
    let moves = &idle["queue"]["moves"];
    let came = [&moves["idle"], &moves["periodic"]].map(|count| count.as_u64().expect("a count"));
    assert_eq!(came.iter().sum::<u64>(), 1, "{sample}");
    for (name, run) in [("a", a), ("b", b)] {
        mirrorball(["kill", name]).ok();
        run.wait();
    }
}
