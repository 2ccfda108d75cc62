use std::os::unix::fs::FileExt;

use config::cluster::{HostPlan, SpanTransport};

use super::*;

/// The sites of alpha and beta, with two cells each, which see the files of these names.
fn sites(folder: &Path, memories: [&str; 2]) -> [Site; 2] {
    let host = |name: &str, cells: [u16; 2], memory: &str| HostPlan {
        name: name.to_owned(),
        address: "127.0.0.1:7000".parse().unwrap(),
        shared_memory: Some(folder.join(memory)),
        remote_paths: Vec::new(),
        cells: cells.to_vec(),
    };
    let hosts = vec![
        host("alpha", [0, 3], memories[0]),
        host("beta", [1, 2], memories[1]),
    ];
    ["alpha", "beta"].map(|here| Site {
        here: here.to_owned(),
        hosts: hosts.clone(),
        etcd: Vec::new(),
        runs_etcd: false,
        keys: folder.to_owned(),
        silence_ms: 200,
        spans: SpanTransport::Tls,
        on_lost: config::cluster::OnLost::Keep,
        file: None,
    })
}

fn memory(folder: &Path, name: &str, bytes: u64) {
    File::create(folder.join(name)).unwrap().set_len(bytes).unwrap();
}

fn needed() -> u64 {
    links_bytes(4) + 4 * SLOT_BYTES
}

/// Cell `me` of alpha calls cell `peer` of beta.
fn meet(sites: &[Site; 2], me: u16, peer: u16) -> [SlotResult; 2] {
    let near = ShmSlot::hold(&sites[0], me, peer);
    let offer = near.as_ref().ok().and_then(Option::as_ref);
    let offer = offer.map(|place| place.offer(me).unwrap());
    let far = offer.map_or(Ok(None), |offer| ShmSlot::accept(&sites[1], peer, &offer));
    [near, far]
}

fn why(common: &SlotResult) -> String {
    common.as_ref().unwrap_err().to_string()
}

#[test]
fn both_hosts_find_the_same_pipes_and_no_other_pair_has_them() {
    let folder = tempfile::tempdir().unwrap();
    memory(folder.path(), "memory", needed());
    let sites = sites(folder.path(), ["memory", "memory"]);
    let pairs = [(0, 1), (0, 2), (3, 1), (3, 2)];
    let places: Vec<_> = pairs
        .iter()
        .map(|(me, peer)| meet(&sites, *me, *peer).map(|place| place.unwrap().unwrap()))
        .collect();
    let mut taken: Vec<(u64, u64)> = vec![(0, links_bytes(4))];
    for [near, far] in &places {
        taken.push((near.start, near.start + proof::BYTES));
        for lane in 0..LANES_MAX {
            let (here, there) = (near.pipes(lane), far.pipes(lane));
            for (here, there) in [(here.control, there.control), (here.bulk, there.bulk)] {
                assert_eq!((here.outgoing, here.incoming), (there.incoming, there.outgoing));
                for at in [here.outgoing, here.incoming] {
                    taken.push((at, at + Pipe::bytes(here.words) as u64));
                }
            }
        }
    }
    taken.sort_unstable();
    assert!(taken.windows(2).all(|two| two[0].1 <= two[1].0), "{taken:?}");
    assert!(taken.last().unwrap().1 <= needed());
}

#[test]
fn a_place_is_one_vms_until_nobody_can_reach_it() {
    let folder = tempfile::tempdir().unwrap();
    memory(folder.path(), "memory", needed());
    let sites = sites(folder.path(), ["memory", "memory"]);
    let [near, far] = meet(&sites, 0, 1).map(|place| place.unwrap().unwrap());
    let path = folder.path().join("memory");
    let taken = format!(
        "shared memory {}: another VM of these two cells uses it",
        path.display()
    );
    assert_eq!(why(&meet(&sites, 0, 1)[0]), taken);
    // A mapping of a shard keeps the slot, as the file alone does.
    let at = near.pipes(0).bulk;
    let mapped = SharedPipe::at(near.memory(), at.outgoing, at.words).unwrap();
    drop(near);
    assert_eq!(why(&meet(&sites, 0, 1)[0]), taken);
    drop(mapped);
    // Now the caller's host has the slot, and the other one not yet.
    let file = far.into_memory();
    let [near, refused] = meet(&sites, 0, 1);
    assert!(near.unwrap().is_some());
    assert_eq!(why(&refused), taken);
    drop(file);
    let [near, far] = meet(&sites, 0, 1);
    assert!(near.unwrap().is_some() && far.unwrap().is_some());
}

/// A shard that was about to end may have written there since.
#[test]
fn callee_finds_its_pipes_empty() {
    let folder = tempfile::tempdir().unwrap();
    memory(folder.path(), "memory", needed());
    let sites = sites(folder.path(), ["memory", "memory"]);
    let near = ShmSlot::hold(&sites[0], 0, 1).unwrap().unwrap();
    let offer = near.offer(0).unwrap();
    let at = near.pipes(LANES_MAX - 1).bulk;
    for offset in [at.outgoing, at.incoming] {
        near.memory().write_at(&[0xff; 64], offset).unwrap();
    }
    assert!(ShmSlot::accept(&sites[1], 1, &offer).unwrap().is_some());
    let mut bytes = [1; 64];
    for offset in [at.outgoing, at.incoming] {
        near.memory().read_exact_at(&mut bytes, offset).unwrap();
        assert_eq!(bytes, [0; 64]);
    }
}

#[test]
fn memory_that_is_not_the_same_or_too_small_or_none_is_not_used() {
    let folder = tempfile::tempdir().unwrap();
    memory(folder.path(), "one", needed());
    memory(folder.path(), "other", needed());
    let different = sites(folder.path(), ["one", "other"]);
    let [_, far] = meet(&different, 0, 1);
    assert_eq!(why(&far), "cell 0 sees other memory than this host");
    memory(folder.path(), "small", needed() - 4096);
    let small = sites(folder.path(), ["small", "small"]);
    let [near, _] = meet(&small, 0, 1);
    assert!(
        why(&near).ends_with(&format!("need {} bytes of it", needed())),
        "{near:?}"
    );
    let absent = sites(folder.path(), ["absent", "absent"]);
    assert!(why(&meet(&absent, 0, 1)[0]).contains("absent"));
    let mut none = sites(folder.path(), ["one", "one"]);
    none[0].hosts[1].shared_memory = None;
    assert!(meet(&none, 0, 1)[0].as_ref().unwrap().is_none());
}
