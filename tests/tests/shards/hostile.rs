//! A guest that makes accesses to its interrupt controllers that no kernel makes: it harms only itself.

use std::time::Duration;

use guest_tests::host::Traces;
use guest_tests::pattern::Numbers;
use guest_tests::span::{cells_are_empty, two_cells};
use guest_tests::storm::Storm;
use guest_tests::{Cluster, Scratch, wait};

use crate::SOON;

const LIMIT: Duration = Duration::from_secs(120);
/// Allowed ends: powered off, in a triple fault, by an instruction that KVM can't emulate, killed. Its shards
/// do not fail.
const ENDINGS: [i32; 4] = [0, 71, 72, 74];

#[test]
fn guest_that_floods_its_controllers_harms_only_itself() {
    let scratch = Scratch::new("hostile");
    let before = Traces::now();
    let cluster = Cluster::up(&scratch);
    let victim = two_cells("victim").cpus(2).start(&scratch);
    victim.add_tool();
    let given = cluster.given_bytes(0);
    let mut numbers = Numbers::new(57);
    for round in 0..3 {
        let hostile = Storm::hostile(&scratch, "hostile", 4, &["--span", "0,1"]);
        let work = victim.tool(&["ipi", "2", "6"]).limit(LIMIT).spawn();
        // It is moved as any other, while there is something to move.
        for _ in 0..10 {
            let moved = hostile
                .vm
                .move_vcpu(numbers.below(4) as usize, numbers.below(2))
                .run();
            assert!([0, 1].contains(&moved.status), "{moved}");
        }
        println!("{}", work.wait().expect(0).text().trim());
        let (status, seen) = hostile.end(SOON);
        println!("round {round}: it ended with status {status}");
        assert!(
            ENDINGS.contains(&status),
            "exit status {status}; the terminal:\n{seen}"
        );
        wait::until("the cells have only the victim", SOON, || {
            (cluster.given_bytes(0) == given && cluster.vms(0).len() == 1).then_some(())
        });
    }
    assert_eq!(victim.tool(&["pinned", "2"]).ok().text().trim(), "0 1");
    victim.expect_sound_clock();
    victim.stop();
    cells_are_empty(&cluster);
    drop((victim, cluster));
    before.expect_unchanged("hostile guests");
}
