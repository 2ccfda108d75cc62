//! Connections between shards that each have a copy of the VM's memory and keep it coherent, and their
//! permission to handle each other's page faults.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use dsm::SHARERS_MAX;
use serde_json::{Value, json};
use shard_api::cmdline;
use shard_api::launch::{CoherenceLaunch, Fd, LanePipes, LaneSockets, SharedLanes};

use crate::remote::protocol::{Ends, LaneEnds, PartCoherence, Role};
use crate::remote::shared_memory::{LANES_MAX, LanesError, ShmSlot, SlotResult};
use crate::spanning::Span;

/// Number of hottest pages that are reported.
const HOTTEST: usize = 20;
/// Maximum real-time priority of a lane: enough to run before vCPUs, and less than hosts use themselves.
const PRIORITY_MAX: u64 = 10;

/// Parameters of the guest's kernel that save faults (`docs/design/coherence.md`, "A guest that needs less of
/// it").
const COHERENT_CMDLINE: [&str; 10] = [
    // While a system boots all its CPUs write the same pages all the time. The agent brings the others online
    // after the boot.
    "maxcpus=1",
    "mirrorball.cpus=late",
    // Simultaneous ticks of all CPUs want the same pages at once.
    "skew_tick=1",
    // Timers and threads on each CPU that poll the CPU, or memory, though nothing happens.
    "nowatchdog",
    "psi=0",
    "sysctl.vm.stat_interval=60",
    "sysctl.vm.compaction_proactiveness=0",
    // No page is nearer on another node, and a large one is no faster here than its small ones.
    "numa_balancing=disable",
    "transparent_hugepage=never",
    // An idle CPU does not search for work on other nodes, whose domains have this level at least; the
    // periodic balance does.
    "relax_domain_level=3",
];

/// The kernel's command line for a guest whose memory is kept coherent. A parameter that the user has set
/// stays. A command line with `maxcpus` has no late CPUs, and one with `mirrorball.cpus` other than `late`
/// boots all.
pub fn coherent_cmdline(cmdline: &str) -> String {
    let are_counted = cmdline::has(cmdline, "maxcpus");
    let are_early = cmdline::value(cmdline, "mirrorball.cpus").is_some_and(|value| value != "late");
    let is_wanted = |word: &&str| match *word {
        "maxcpus=1" => !are_early,
        "mirrorball.cpus=late" => !are_counted,
        _ => true,
    };
    cmdline::before(COHERENT_CMDLINE.into_iter().filter(is_wanted), cmdline)
}

/// The connections of a lane, by shard, by the shard at the other end: control and bulk.
type Lane = Vec<Vec<Option<[OwnedFd; 2]>>>;

/// Coherence of one boot: resources of the shards on this host.
#[derive(Debug)]
pub struct Coherence {
    userfaultfd: Option<OwnedFd>,
    lanes: Vec<Lane>,
    /// Shared memory with the shards on other hosts, by the local shard and the other.
    shared: BTreeMap<(usize, usize), SlotResult>,
    names: Vec<String>,
    kernel: Range<u64>,
    encrypted: bool,
}

impl Coherence {
    /// Makes connections from the shards on this host to all shards, for the boot of that number. The guest's
    /// kernel is at `kernel`.
    ///
    /// # Errors
    /// If the host has no descriptors left, or another host does not answer.
    pub fn new(span: &Span, boot: u32, kernel: Range<u64>) -> io::Result<Self> {
        let shards = span.cells().len();
        let lanes = lanes(shards, span.cpus());
        let is_here: Vec<bool> = (0..shards).map(|shard| span.remote(shard).is_none()).collect();
        let mut shared = BTreeMap::new();
        let mut one = |number: usize| {
            let call = |from: usize, to: usize| {
                let of = LaneEnds {
                    ends: Ends {
                        boot,
                        from: from as u8,
                        to: to as u8,
                    },
                    lane: number as u8,
                };
                let control = match number {
                    0 => {
                        let (socket, found) = span.call_first(from, to, Role::Coherence(of))?;
                        shared.insert((from, to), found);
                        socket
                    }
                    _ => span.call(to, Role::Coherence(of))?,
                };
                Ok([control, span.call(to, Role::Pages(of))?])
            };
            lane(&is_here, call)
        };
        let name = |place| format!("the shard in {place}");
        let lanes = (0..lanes).map(&mut one).collect::<io::Result<_>>()?;
        Ok(Self {
            userfaultfd: userfaultfd(),
            lanes,
            shared,
            names: span.places().into_iter().map(name).collect(),
            kernel,
            encrypted: span.is_encrypted(),
        })
    }

    /// The settings that the shards on other hosts must have alike.
    pub fn remote(&self) -> PartCoherence {
        PartCoherence {
            lanes: self.lanes.len() as u8,
            names: self.names.clone(),
            kernel: self.kernel.clone(),
        }
    }

    /// The launch settings of shard `shard`; `add` adds a file to its message.
    pub fn launch<'a>(&'a self, shard: usize, add: &mut impl FnMut(BorrowedFd<'a>) -> Fd) -> CoherenceLaunch {
        let userfaultfd = self.userfaultfd.as_ref().map(|file| add(file.as_fd()));
        let mut lanes = Vec::with_capacity(self.lanes.len());
        for lane in &self.lanes {
            let mut row = Vec::with_capacity(lane[shard].len());
            for sockets in &lane[shard] {
                row.push(sockets.as_ref().map(|[control, bulk]| LaneSockets {
                    control: add(control.as_fd()),
                    bulk: add(bulk.as_fd()),
                }));
            }
            lanes.push(row);
        }
        let (mut shared, mut notes) = (Vec::with_capacity(self.names.len()), Vec::new());
        for (other, name) in self.names.iter().enumerate() {
            shared.push(match self.shared.get(&(shard, other)) {
                Some(Ok(Some(place))) => Some(SharedLanes {
                    memory: add(place.memory().as_fd()),
                    lanes: pipes_of(place, lanes.len()),
                }),
                Some(Err(why)) => {
                    notes.push(without_memory(name, why));
                    None
                }
                Some(Ok(None)) | None => None,
            });
        }
        CoherenceLaunch {
            userfaultfd,
            lanes,
            names: self.names.clone(),
            kernel: self.kernel.clone(),
            shared,
            notes,
            encrypted: self.encrypted,
        }
    }
}

/// The positions of the pipes of so many lanes.
pub(crate) fn pipes_of(place: &ShmSlot, lanes: usize) -> Vec<LanePipes> {
    (0..lanes).map(|lane| place.pipes(lane)).collect()
}

/// The note for people when lanes work without shared memory that is there.
pub(crate) fn without_memory(other: &str, why: &LanesError) -> String {
    format!("pages of {other} come by streams: {why}")
}

/// The number of lanes of each of so many shards, whose cells have so many CPUs at most. Page tables are
/// merged by one lane alone, which saves a guest more faults than further lanes would serve; shards that are
/// too many to merge have more.
fn lanes(shards: usize, cpus: usize) -> usize {
    match shards {
        ..=SHARERS_MAX => 1,
        _ => cpus.clamp(1, LANES_MAX),
    }
}

/// Opens `/dev/userfaultfd`. Where that fails the shard uses another way, or reports the help.
pub(crate) fn userfaultfd() -> Option<OwnedFd> {
    let path = dsm::USERFAULT_DEVICE;
    let device = File::options().read(true).write(true).open(path);
    device.ok().map(OwnedFd::from)
}

/// The connections of one lane, from each shard on this host to each shard. `call` makes those from a local
/// shard to a remote one.
fn lane(
    is_here: &[bool],
    mut call: impl FnMut(usize, usize) -> io::Result<[OwnedFd; 2]>,
) -> io::Result<Lane> {
    let shards = is_here.len();
    let mut ends: Lane = (0..shards).map(|_| (0..shards).map(|_| None).collect()).collect();
    for high in 1..shards {
        for low in 0..high {
            match (is_here[low], is_here[high]) {
                (true, true) => {
                    let ((control, far_control), (bulk, far_bulk)) =
                        (UnixStream::pair()?, UnixStream::pair()?);
                    ends[low][high] = Some([control.into(), bulk.into()]);
                    ends[high][low] = Some([far_control.into(), far_bulk.into()]);
                }
                (true, false) => ends[low][high] = Some(call(low, high)?),
                (false, true) => ends[high][low] = Some(call(high, low)?),
                // The monitors of those shards make the connections.
                (false, false) => {}
            }
        }
    }
    Ok(ends)
}

/// The pages that came most often to any shard, by the shards' reports of their own hottest: address, and the
/// sum of their counts.
pub fn hottest(shards: &[&Value]) -> Vec<Value> {
    let mut pages = BTreeMap::<&str, u64>::new();
    let lists = shards.iter().filter_map(|shard| shard.get("heat")?.as_array());
    for page in lists.flatten() {
        let address = page.get("address").and_then(Value::as_str);
        let times = page.get("times").and_then(Value::as_u64);
        if let (Some(address), Some(times)) = (address, times) {
            *pages.entry(address).or_default() += times;
        }
    }
    let mut pages: Vec<_> = pages.into_iter().collect();
    pages.sort_by_key(|(_, times)| std::cmp::Reverse(*times));
    pages.truncate(HOTTEST);
    let page = |(address, times)| json!({ "address": address, "times": times });
    pages.into_iter().map(page).collect()
}

/// Permits real-time priority for the lanes of a shard that is starting, if this process may. A shard without
/// it serves faults later on a busy host, and reports that.
pub fn permit_priority(shard: i32) {
    let limit = libc::rlimit64 {
        rlim_cur: PRIORITY_MAX,
        rlim_max: PRIORITY_MAX,
    };
    // SAFETY: reads a live limit, and changes that of a process of this user.
    unsafe { libc::prlimit64(shard, libc::RLIMIT_RTPRIO, &limit, std::ptr::null_mut()) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guest_gets_parameters_that_save_pages_unless_the_user_has_set_them() {
        assert_eq!(
            coherent_cmdline("quiet psi=1"),
            "maxcpus=1 mirrorball.cpus=late skew_tick=1 nowatchdog sysctl.vm.stat_interval=60 \
             sysctl.vm.compaction_proactiveness=0 numa_balancing=disable transparent_hugepage=never \
             relax_domain_level=3 quiet psi=1"
        );
        let own = coherent_cmdline("maxcpus=4");
        assert!(own.starts_with("skew_tick=1 nowatchdog psi=0 "), "{own}");
        assert!(own.ends_with(" relax_domain_level=3 maxcpus=4"), "{own}");
    }

    #[test]
    fn command_line_without_late_cpus_boots_all() {
        for (cmdline, first) in [
            ("mirrorball.cpus=early", "skew_tick=1"),
            ("mirrorball.cpus=", "skew_tick=1"),
            ("mirrorball.cpus=late mirrorball.cpus=early", "skew_tick=1"),
            ("mirrorball.cpus=late", "maxcpus=1"),
            ("mirrorball.cpus=early mirrorball.cpus=late", "maxcpus=1"),
            // Parameters for the init program are not the agent's.
            ("quiet -- mirrorball.cpus=early", "maxcpus=1"),
        ] {
            let told = coherent_cmdline(cmdline);
            assert_eq!(told.split(' ').next(), Some(first), "{told}");
            assert!(told.ends_with(cmdline), "{told}");
        }
    }

    #[test]
    fn shards_that_merge_page_tables_have_one_lane_and_more_have_others() {
        for (shards, cpus, expected) in [(1, 8, 1), (2, 8, 1), (8, 8, 1), (9, 1, 1), (9, 3, 3), (64, 8, 4)] {
            assert_eq!(lanes(shards, cpus), expected, "{shards} shards of {cpus} CPUs");
        }
    }

    #[test]
    fn heat_of_a_page_is_the_sum_of_all_shards_reports() {
        let one =
            json!({ "heat": [{ "address": "0x1000", "times": 5 }, { "address": "0x2000", "times": 4 }] });
        let other = json!({ "heat": [{ "address": "0x2000", "times": 3 }] });
        let nonsense = json!({ "heat": [{ "address": 7, "times": "x" }, 8], "faults": {} });
        let hottest = hottest(&[&one, &other, &nonsense, &Value::Null]);
        assert_eq!(
            Value::from(hottest),
            json!([{ "address": "0x2000", "times": 7 }, { "address": "0x1000", "times": 5 }])
        );
    }

    #[test]
    fn local_shards_call_remote_ones_and_remote_ones_are_not_called_for() {
        let called = std::cell::RefCell::new(Vec::new());
        let call = |from, to| {
            called.borrow_mut().push((from, to));
            let (near, far) = UnixStream::pair()?;
            Ok([near.into(), far.into()])
        };
        let ends = lane(&[true, false, true, false], call).unwrap();
        called.borrow_mut().sort();
        assert_eq!(*called.borrow(), [(0, 1), (0, 3), (2, 1), (2, 3)]);
        let has = |row: &Vec<Option<_>>| row.iter().map(Option::is_some).collect::<Vec<_>>();
        let has: Vec<_> = ends.iter().map(has).collect();
        assert_eq!(
            [&has[0], &has[2]],
            [&[false, true, true, true], &[true, true, false, true]]
        );
        assert_eq!([&has[1], &has[3]], [&[false; 4]; 2]);
    }

    #[test]
    fn every_two_shards_have_a_connection_of_each_kind_and_none_has_one_to_itself() {
        let ends = lane(&[true; 3], |_, _| panic!("all are here")).unwrap();
        for (from, row) in ends.iter().enumerate() {
            for (to, sockets) in row.iter().enumerate() {
                assert_eq!(sockets.is_some(), from != to);
            }
        }
        for (control_or_bulk, name) in [(0, "control"), (1, "bulk")] {
            let [near, far] = [&ends[0][2], &ends[2][0]].map(|pair| &pair.as_ref().unwrap()[control_or_bulk]);
            nix::unistd::write(near, name.as_bytes()).unwrap();
            let mut came = [0; 16];
            let count = nix::unistd::read(far, &mut came).unwrap();
            assert_eq!(&came[..count], name.as_bytes());
        }
    }
}
