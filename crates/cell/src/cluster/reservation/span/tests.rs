//! Spans of real cells' states behind real sockets; the links between the cells are in memory.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use config::cluster::{HostPlan, Site};
use registry::cluster::files::CellLock;
use registry::cluster::interface::{CellRequest, CellResponse, RunningVm};

use super::*;
use crate::cluster::state::tests::{World, id, plan, vm};

const MIB: u64 = 1 << 20;

type Connections = Arc<Mutex<Vec<UnixStream>>>;

/// A host with a cluster of cells with two CPUs, a node and 1 GiB each.
struct Cluster {
    directory: tempfile::TempDir,
    files: Files,
    world: Arc<Mutex<World>>,
    /// The lock of each running cell, and the ends of its clients' connections.
    runs: BTreeMap<u16, (CellLock, Connections)>,
    clients: Arc<AtomicU64>,
}

impl Cluster {
    fn up(count: u16) -> Self {
        Self::up_with(count, None)
    }

    fn up_with(count: u16, site: Option<&Site>) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let files = Files::at(directory.path());
        let plans: Vec<CellPlan> = (0..count).map(plan).collect();
        files.create(&plans, site).unwrap();
        let mut cluster = Self {
            directory,
            files,
            world: Arc::new(Mutex::new(World::new(count))),
            runs: BTreeMap::new(),
            clients: Arc::new(AtomicU64::new(1000)),
        };
        (0..count).for_each(|number| cluster.listen(number));
        cluster
    }

    fn listen(&mut self, number: u16) {
        let own = self.files.cell(number);
        let claim = own.claim(number).unwrap();
        let _ = std::fs::remove_file(own.socket());
        let listener = UnixListener::bind(own.socket()).unwrap();
        let streams = Connections::default();
        let (world, clients, kept) = (self.world.clone(), self.clients.clone(), streams.clone());
        let cell = claim.id;
        self.runs.insert(number, (claim, streams));
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                kept.lock().unwrap().push(stream.try_clone().unwrap());
                let (world, client) = (world.clone(), clients.fetch_add(1, Ordering::Relaxed));
                std::thread::spawn(move || {
                    let mut lines = BufReader::new(stream);
                    let mut line = String::new();
                    while lines.read_line(&mut line).is_ok_and(|bytes| bytes > 0) {
                        let ask: CellRequest = serde_json::from_str(&line).unwrap();
                        line.clear();
                        let answer = world.lock().unwrap().ask(cell, client, ask);
                        let mut answer = serde_json::to_vec(&answer).unwrap();
                        answer.push(b'\n');
                        lines.get_mut().write_all(&answer).unwrap();
                    }
                    let mut world = world.lock().unwrap();
                    if world.cells.contains_key(&cell) {
                        world.act(cell, |state| state.handle_disconnect(client));
                        world.settle();
                    }
                });
            }
        });
    }

    /// Ends a cell's process.
    fn kill(&mut self, number: u16) {
        std::fs::remove_file(self.files.cell(number).socket()).unwrap();
        let (claim, streams) = self.runs.remove(&number).unwrap();
        self.world().die(claim.id);
        for stream in streams.lock().unwrap().iter() {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }

    /// Starts it again.
    fn start(&mut self, number: u16) {
        self.listen(number);
        let cell = self.runs[&number].0.id;
        self.world().start(cell);
    }

    fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap()
    }

    fn begin(
        &self,
        name: &str,
        cpus: u8,
        mib: u64,
        span: SpanSpec,
    ) -> Result<Vec<(PartPlace, Part)>, ReservationError> {
        begin_in(&self.files, name, &spec(cpus, mib, span))
    }

    #[track_caller]
    fn refused(&self, cpus: u8, mib: u64, span: SpanSpec, expected: &str) {
        match self.begin("x", cpus, mib, span) {
            Ok(held) => panic!("not refused: {:?}", parts(&held)),
            Err(why) => assert_eq!(why.to_string(), expected),
        }
    }

    /// Waits for the work of other threads.
    #[track_caller]
    fn wait(&self, what: impl Fn() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(5);
        while !what() {
            assert!(Instant::now() < deadline, "it does not come to be");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

fn spec(cpus: u8, mib: u64, span: SpanSpec) -> VmSpec {
    let mut spec = config::parse("vm.toml", "image = \"debian-12\"\n").unwrap();
    (spec.cpus, spec.memory) = (cpus, config::Size(mib * MIB));
    spec.span = Some(span);
    spec
}

fn cells(cells: &[u16]) -> SpanSpec {
    SpanSpec::Cells(cells.to_vec())
}

fn here((place, _): &(PartPlace, Part)) -> &Reservation {
    place.here().expect("on this host")
}

fn parts(held: &[(PartPlace, Part)]) -> Vec<Part> {
    held.iter().map(|(_, part)| part.clone()).collect()
}

fn part(cell: u16, vcpus: std::ops::Range<u8>, mib: u64) -> Part {
    Part {
        cell,
        vcpus,
        memory_bytes: mib * MIB,
    }
}

#[test]
fn it_has_a_place_in_each_cell_until_it_ends() {
    let cluster = Cluster::up(3);
    let held = cluster.begin("a", 4, 1024, cells(&[2, 0])).unwrap();
    assert_eq!(parts(&held), [part(2, 0..2, 512), part(0, 2..4, 512)]);
    assert_eq!([held[0].0.cell(), held[1].0.cell()], [2, 0]);
    assert_eq!([here(&held[0]).nodes(), here(&held[1]).nodes()], [[2], [0]]);
    cluster.world().vms(&[&["a/1"], &[], &["a"]]);
    leave_span(held);
    cluster.world().vms(&[&[], &[], &[]]);
}

#[test]
fn it_has_no_places_after_its_monitor_has_died() {
    let cluster = Cluster::up(2);
    drop(cluster.begin("a", 2, 256, cells(&[0, 1])).unwrap());
    let status = || client::status(&cluster.files).unwrap().unwrap();
    cluster.wait(|| {
        status()
            .cells
            .iter()
            .all(|cell| cell.vms.is_empty() && cell.given_bytes == 0)
    });
}

#[test]
fn one_without_a_span_has_none_of_these_places() {
    let cluster = Cluster::up(1);
    let mut plain = spec(1, 64, SpanSpec::Auto);
    plain.span = None;
    assert!(begin_in(&cluster.files, "a", &plain).unwrap().is_empty());
    cluster.world().vms(&[&[]]);
}

#[test]
fn one_part_without_room_gives_all_others_back() {
    let cluster = Cluster::up(3);
    let there = AdmitVm {
        only: Some(2),
        ..vm("b", 700)
    };
    cluster.world().ask(id(2, 1), 1, CellRequest::AdmitVm(there));
    cluster.refused(
        6,
        1536,
        cells(&[0, 1, 2]),
        "cell 2 has 324 MiB of its own memory, and 512 MiB are needed there; give the VM less, end another \
         one, or span other cells",
    );
    cluster.world().vms(&[&[], &[], &["b"]]);
    assert_eq!(cluster.begin("x", 6, 900, cells(&[0, 1, 2])).unwrap().len(), 3);
}

#[test]
fn cordoned_cell_gets_no_part() {
    let cluster = Cluster::up(3);
    let cordon = |cell, cordoned| {
        let answer = cluster
            .world()
            .ask(id(cell, 1), 1, CellRequest::Cordon { cordoned });
        assert_eq!(answer, CellResponse::Done);
    };
    cordon(1, true);
    let why = "cell 1 is cordoned and takes no new VM; name another cell, or end the cordon with `mirrorball \
               cluster uncordon 1`";
    cluster.refused(2, 256, cells(&[0, 1]), why);
    cluster.world().vms(&[&[], &[], &[]]);
    let held = cluster.begin("x", 4, 1024, SpanSpec::Auto).unwrap();
    assert_eq!(parts(&held), [part(0, 0..2, 512), part(2, 2..4, 512)]);
    cordon(0, true);
    cordon(2, true);
    let why = "no cells of this host have 256M of memory for 2 vCPUs together: cell 0 is cordoned, cell 1 is \
               cordoned, cell 2 is cordoned; give it less, or end another VM";
    cluster.refused(2, 256, SpanSpec::Auto, why);
    cordon(1, false);
    assert_eq!(cluster.begin("y", 2, 256, cells(&[1])).unwrap().len(), 1);
}

#[test]
fn parts_borrow_nothing() {
    let cluster = Cluster::up(2);
    let lend = CellRequest::Lend {
        to: 1,
        bytes: 512 * MIB,
    };
    assert_eq!(cluster.world().ask(id(0, 1), 1, lend), CellResponse::Done);
    cluster.refused(
        2,
        1200,
        cells(&[1]),
        "cell 1 has 1024 MiB of its own memory, and 1200 MiB are needed there; give the VM less, end another \
         one, or span other cells",
    );
    let why = "no cells of this host have 1600M of memory for 4 vCPUs together: cell 0 has 512 MiB, cell 1 \
               has 1024 MiB; give it less, or end another VM";
    cluster.refused(4, 1600, SpanSpec::Auto, why);
}

#[test]
fn a_name_is_taken_by_all_of_it() {
    let cluster = Cluster::up(2);
    let _held = cluster.begin("x", 2, 256, cells(&[0, 1])).unwrap();
    let taken = |cell| {
        format!(
            "a VM named x is running already, in cell {cell}; choose another name, or end it with \
             `mirrorball stop x`"
        )
    };
    cluster.refused(1, 64, cells(&[0]), &taken(0));
    cluster.refused(2, 256, cells(&[1, 0]), &taken(0));
    cluster.world().vms(&[&["x"], &["x/1"]]);
}

#[test]
fn part_that_is_left_of_an_earlier_vm_is_distinguished_from_a_vm() {
    let cluster = Cluster::up(2);
    let left = AdmitVm {
        only: Some(1),
        ..vm("x/1", 64)
    };
    cluster.world().ask(id(1, 1), 1, CellRequest::AdmitVm(left));
    let why = "a part of an earlier VM named x is still in cell 1; try again in a moment";
    cluster.refused(2, 256, cells(&[0, 1]), why);
    cluster.world().vms(&[&[], &["x/1"]]);
}

/// Two hosts, of which alpha is this one.
fn two_hosts() -> Site {
    let host = |name: &str, cells: &[u16]| HostPlan {
        name: name.to_owned(),
        address: "192.0.2.1:7000".parse().unwrap(),
        shared_memory: None,
        remote_paths: Vec::new(),
        cells: cells.to_vec(),
    };
    Site {
        here: "alpha".to_owned(),
        hosts: vec![host("alpha", &[0, 1]), host("beta", &[2])],
        etcd: Vec::new(),
        runs_etcd: false,
        keys: Default::default(),
        silence_ms: 200,
        spans: Default::default(),
        on_lost: config::cluster::OnLost::Keep,
        file: None,
    }
}

#[test]
fn several_hosts_need_coherent_memory() {
    let cluster = Cluster::up_with(2, Some(&two_hosts()));
    let why = "it spans cell 2 on host beta, and hosts have no memory in common: write \
               `memory = \"coherent\"` in `span` (`--span-memory coherent`), so that each cell keeps a copy \
               of all of it, or name cells of this host";
    cluster.refused(2, 256, cells(&[0, 2]), why);
    cluster.world().vms(&[&[], &[]]);
}

#[test]
fn span_over_missing_or_stopped_cells_is_refused() {
    let mut cluster = Cluster::up_with(2, Some(&two_hosts()));
    let why = "cell 2 on host beta does not run; start it again with `mirrorball cluster up` there, or span \
               other cells";
    cluster.refused(2, 256, SpanSpec::Coherent(vec![0, 2]), why);
    let why = "its home, cell 2, is on host beta; start it there, or name a cell of this host first: 0, 1";
    cluster.refused(2, 256, cells(&[2, 0]), why);
    cluster.refused(
        2,
        256,
        cells(&[7, 0]),
        "there is no cell 7 to span; there is 0, 1",
    );
    cluster.kill(1);
    let why = "cell 1 does not run; start it again with `mirrorball cluster up`, or span other cells";
    cluster.refused(2, 256, cells(&[0, 1]), why);
    cluster.world().vms(&[&[], &[]]);
    // Nor is it chosen, where there are too few CPUs without it.
    let held = cluster.begin("x", 4, 1024, SpanSpec::Auto).unwrap();
    assert_eq!(parts(&held), [part(0, 0..4, 1024)]);
}

#[test]
fn span_without_a_cluster_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let error = begin_in(&Files::at(directory.path()), "a", &spec(2, 256, SpanSpec::Auto)).unwrap_err();
    let why = "the VM has a span, and no cluster is up here; start one with `mirrorball cluster up`, or \
               leave `span` out";
    assert_eq!(error.to_string(), why);
}

#[test]
fn the_fewest_cells_are_chosen_that_have_the_room() {
    let cluster = Cluster::up(3);
    let busy = AdmitVm {
        only: Some(0),
        ..vm("b", 700)
    };
    cluster.world().ask(id(0, 1), 1, CellRequest::AdmitVm(busy));
    let one = cluster.begin("one", 2, 512, SpanSpec::Auto).unwrap();
    assert_eq!(parts(&one), [part(1, 0..2, 512)]);
    leave_span(one);
    let two = cluster.begin("two", 4, 1024, SpanSpec::Auto).unwrap();
    assert_eq!(parts(&two), [part(1, 0..2, 512), part(2, 2..4, 512)]);
    cluster.world().vms(&[&["b"], &["two"], &["two/1"]]);
}

#[test]
fn a_cell_that_comes_back_has_its_part_again() {
    let mut cluster = Cluster::up(2);
    let held = cluster.begin("a", 4, 1024, cells(&[0, 1])).unwrap();
    let now = Duration::ZERO;
    assert!(held.iter().all(|place| !here(place).is_away_for(now)));
    cluster.kill(1);
    cluster.wait(|| here(&held[1]).is_away_for(Duration::from_millis(50)));
    assert!(held[1].0.lost().is_none() && !here(&held[0]).is_away_for(now));
    // As the host's registry reports.
    cluster.world().running = vec![running("a", 0), running("a/1", 1)];
    cluster.start(1);
    cluster.wait(|| !here(&held[1]).is_away_for(now));
    let cell = cluster.runs[&1].0.id;
    cluster.world().act(cell, |state| state.give_up_orphans());
    cluster.world().vms(&[&["a"], &["a/1"]]);
}

fn running(name: &str, cell: u16) -> RunningVm {
    RunningVm {
        name: name.to_owned(),
        cell,
        share: VmShare {
            vcpus: 2,
            memory_bytes: 512 * MIB,
            ..VmShare::default()
        },
        borrowed: Vec::new(),
        cells: Vec::new(),
        borrowed_cpus: Vec::new(),
        regions: Vec::new(),
    }
}

#[test]
fn nothing_is_lost_when_the_whole_cluster_goes_down() {
    let mut cluster = Cluster::up(2);
    let held = cluster.begin("a", 4, 1024, cells(&[0, 1])).unwrap();
    cluster.kill(0);
    cluster.kill(1);
    cluster.wait(|| held.iter().all(|place| here(place).is_away_for(Duration::ZERO)));
    cluster.files.remove().unwrap();
    cluster.wait(|| held.iter().all(|place| !here(place).is_away_for(Duration::ZERO)));
    drop(cluster.directory);
}

/// Four at once, of which at most two have the room: none has a part only, and nothing stays taken.
#[test]
fn of_many_at_once_each_has_all_or_nothing() {
    let cluster = Cluster::up(3);
    for round in 0..20 {
        let held: Vec<_> = std::thread::scope(|scope| {
            let begin = |number: u16| {
                let cluster = &cluster;
                let order = [number % 3, (number + 1) % 3, (number + 2) % 3];
                scope.spawn(move || cluster.begin(&format!("vm{number}"), 3, 1200, cells(&order)))
            };
            let begun: Vec<_> = (0..4).map(begin).collect();
            begun.into_iter().map(|vm| vm.join().unwrap()).collect()
        });
        let whole: Vec<_> = held.into_iter().filter_map(Result::ok).collect();
        assert!(
            whole.len() <= 2 && whole.iter().all(|vm| vm.len() == 3),
            "round {round}"
        );
        let given = |cluster: &Cluster| -> Vec<u64> {
            let status = client::status(&cluster.files).unwrap().unwrap();
            status.cells.iter().map(|cell| cell.given_bytes).collect()
        };
        assert_eq!(
            given(&cluster),
            [400 * MIB * whole.len() as u64; 3],
            "round {round}"
        );
        whole.into_iter().for_each(leave_span);
        assert_eq!(given(&cluster), [0; 3], "round {round}");
    }
}
