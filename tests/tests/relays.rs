//! Risk: a relay of a multicast tree that dies with the votes of other cells lets a name be given twice, or
//! never.
//!
//! Twenty-four cells run on this machine's CPUs, with the distances of a recorded machine of 64 nodes
//! asserted: trees have relays, as on that machine. The tests start no guest: they ask cells for places as a
//! VM's monitor does, and hold the connections.

use std::fmt::Write as _;
use std::fs;
use std::io::{BufRead, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use guest_tests::command::Call;
use guest_tests::fault_points::{FaultPoints, Held};
use guest_tests::{Scratch, host, mirrorball, wait};
use serde_json::{Value, json};

const CELLS: usize = 24;
/// The claimer whose relays die.
const SOURCE: usize = 0;
/// A claim is answered by then: a cell that hangs counts as dead after 4 s.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);
/// The guards start cells again by then, and cells have met.
const AGREE_LIMIT: Duration = Duration::from_secs(60);
/// Time limit until a relay is at a fault point.
const REACH_LIMIT: Duration = Duration::from_secs(20);
/// After this time cells without work have sent all confirmations, which go every 100 ms.
const QUIET: Duration = Duration::from_secs(1);
/// Names in each round of claims.
const NAMES: usize = 6;
/// Rounds of claims without a death.
const ROUNDS: usize = 3;

/// The cells, in a runtime directory of their own. Ended when dropped.
struct Cells(Scratch);

impl Cells {
    #[track_caller]
    fn up() -> Self {
        let scratch = Scratch::new("relays");
        fs::create_dir(scratch.join("data")).expect("our own directory");
        fs::write(scratch.join("data/asserted.facts"), asserted()).expect("our own directory");
        let cpus = nix::sched::sched_getaffinity(nix::unistd::Pid::from_raw(0)).expect("of this process");
        let cpus: Vec<usize> = (0..nix::sched::CpuSet::count())
            .filter(|cpu| cpus.is_set(*cpu).unwrap_or(false))
            .collect();
        let mut file = "shared_cpus = true\n".to_owned();
        for number in 0..CELLS {
            let cpu = cpus[number % cpus.len()];
            writeln!(file, "[[cells]]\ncpus = \"{cpu}\"\nmemory = \"64M\"").expect("a string");
        }
        // Loans would be further messages.
        file.push_str("[borrowing]\nautomatic = false\n");
        let file = scratch.write("cluster.toml", file);
        // Ended even if it comes up half.
        let cells = Self(scratch);
        let up = cells.call(["cluster", "up", file.to_str().expect("UTF-8"), "--lab", "never"]);
        up.limit(AGREE_LIMIT).ok();
        cells
    }

    fn call<'a>(&self, arguments: impl IntoIterator<Item = &'a str>) -> Call {
        mirrorball(arguments)
            .env("MIRRORBALL_IN_LAB", "1")
            .env("MIRRORBALL_RUNTIME", self.0.join("runtime"))
            .env("MIRRORBALL_DATA", self.0.join("data"))
    }

    fn file(&self, number: usize, name: &str) -> PathBuf {
        self.0.join(&format!("runtime/cells/{number}/{name}"))
    }

    /// Asks a cell, and returns its answer and the connection.
    fn ask(&self, number: usize, ask: &Value) -> std::io::Result<(Value, UnixStream)> {
        let mut stream = UnixStream::connect(self.file(number, "cell.sock"))?;
        stream.set_read_timeout(Some(ANSWER_LIMIT))?;
        stream.write_all(format!("{ask}\n").as_bytes())?;
        let mut line = String::new();
        BufReader::new(&stream).read_line(&mut line)?;
        let answer = serde_json::from_str(&line).map_err(std::io::Error::other)?;
        Ok((answer, stream))
    }

    /// Asks a cell for a place for a VM, as the VM's monitor does.
    fn claim(&self, number: usize, name: &str) -> Claim {
        let begin = Instant::now();
        let share = json!({ "vcpus": 1, "memory_bytes": 1 << 20 });
        let ask = json!({
            "ask": "host", "name": name, "share": share,
            "only": number, "own": true, "sent": false, "runs": false,
        });
        let outcome = match self.ask(number, &ask) {
            Ok((answer, stream)) if answer["answer"] == "hosted" => Outcome::Won { _held: stream },
            Ok((answer, _)) if answer["answer"] == "refused" => {
                Outcome::Refused(answer["why"].as_str().expect("a reason").to_owned())
            }
            Ok((answer, _)) => panic!("cell {number}, asked for {name}: {answer}"),
            Err(error) => panic!(
                "cell {number}, asked for {name}, has not answered after {:?}: {error}",
                begin.elapsed()
            ),
        };
        Claim {
            cell: number,
            name: name.to_owned(),
            outcome,
        }
    }

    /// Claims names from several cells at once: each name by the cells beside it.
    #[track_caller]
    fn claim_all(&self, wanted: &[(String, Vec<usize>)]) -> Vec<Claim> {
        std::thread::scope(|scope| {
            let pairs = wanted
                .iter()
                .flat_map(|(name, cells)| cells.iter().map(move |cell| (*cell, name)));
            let claims: Vec<_> = pairs
                .map(|(cell, name)| scope.spawn(move || self.claim(cell, name)))
                .collect();
            let claims = claims.into_iter();
            claims
                .map(|claim| claim.join().expect("a claim is answered"))
                .collect()
        })
    }

    /// A cell's own table: life, process and VMs of each cell. None while the cell has not met all others.
    fn table(&self, number: usize) -> Option<Vec<Value>> {
        let (answer, _) = self.ask(number, &json!({ "ask": "status" })).ok()?;
        let cells = answer["cells"].as_array()?;
        let is_whole = answer["ready"] == true && cells.iter().all(|cell| !cell["life"].is_null());
        let rows = cells.iter().map(|cell| {
            json!({
                "number": cell["number"], "life": cell["life"], "pid": cell["pid"], "vms": cell["vms"],
            })
        });
        is_whole.then(|| rows.collect())
    }

    /// Waits until the tables of all cells are the same and fulfil a condition.
    #[track_caller]
    fn agree(&self, what: &str, condition: impl Fn(&[Value]) -> bool) -> Vec<Value> {
        let agreed = wait::within(AGREE_LIMIT, || {
            let first = self.table(0)?;
            let same = (1..CELLS).all(|number| self.table(number).as_ref() == Some(&first));
            (same && condition(&first)).then_some(first)
        });
        agreed.unwrap_or_else(|| {
            let tables: Vec<_> = (0..CELLS).map(|number| self.table(number)).collect();
            panic!("{what}: not within {AGREE_LIMIT:?}: {tables:?}")
        })
    }

    fn pid(&self, number: usize) -> u32 {
        let table = self.table(number).expect("the cell answers");
        table[number]["pid"].as_u64().expect("a process number") as u32
    }

    /// The relays of a cell's tree, each with the cells that it sends to.
    #[track_caller]
    fn relays(&self, source: usize) -> Vec<(usize, Vec<usize>)> {
        let route = self
            .call(["knowledge", "route", &source.to_string(), "--json"])
            .ok()
            .json();
        let arrivals = route.as_array().expect("an array");
        let number = |value: &Value| value.as_u64().map(|number| number as usize);
        let below = |relay: usize| {
            let children = arrivals
                .iter()
                .filter(|arrival| number(&arrival["from"]) == Some(relay));
            children
                .filter_map(|arrival| number(&arrival["cell"]))
                .collect::<Vec<_>>()
        };
        let others = (0..CELLS).filter(|cell| *cell != source);
        others
            .map(|cell| (cell, below(cell)))
            .filter(|(_, cells)| !cells.is_empty())
            .collect()
    }
}

impl Drop for Cells {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for number in 0..CELLS {
                let log = fs::read_to_string(self.file(number, "log")).unwrap_or_default();
                eprintln!("--- the log of cell {number}\n{log}");
            }
        }
        let _ = self.call(["cluster", "down"]).run();
    }
}

/// A cell's answer to a claim.
struct Claim {
    cell: usize,
    name: String,
    outcome: Outcome,
}

enum Outcome {
    /// The place is the claimer's as long as the connection lasts.
    Won {
        _held: UnixStream,
    },
    Refused(String),
}

/// The latencies between 24 cells as between the first 24 nodes of the recorded machine. Ten of distance are
/// 140 ns (`docs/guide/knowledge.md`).
#[track_caller]
fn asserted() -> String {
    let machine = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../crates/knowledge/machines/sixty-four-nodes.facts"
    );
    let facts = fs::read_to_string(machine).expect("a recorded machine");
    let mut asserted = String::new();
    for line in facts.lines().filter(|line| line.starts_with("distance(")) {
        let terms = line.trim_end_matches(')').split(", ").skip(1);
        let terms: Vec<usize> = terms.map(|term| term.parse().expect("a number")).collect();
        let [from, to, distance] = terms[..] else {
            panic!("{line}");
        };
        if from != to && from.max(to) < CELLS {
            writeln!(asserted, "message_ns({from}, {to}, \"ring\", {})", distance * 14).expect("a string");
        }
    }
    asserted
}

/// Each name is won once, by a cell that claimed it, and the other claimers receive the number of the cell
/// that has it or wants it.
#[track_caller]
fn expect_one_winner_each(wanted: &[(String, Vec<usize>)], claims: &[Claim]) {
    for (name, cells) in wanted {
        let of_name = || claims.iter().filter(|claim| claim.name == *name);
        assert_eq!(of_name().count(), cells.len());
        let winners: Vec<usize> = of_name()
            .filter(|claim| matches!(claim.outcome, Outcome::Won { .. }))
            .map(|claim| claim.cell)
            .collect();
        let refusals: Vec<(usize, &String)> = of_name()
            .filter_map(|claim| match &claim.outcome {
                Outcome::Refused(why) => Some((claim.cell, why)),
                Outcome::Won { .. } => None,
            })
            .collect();
        assert_eq!(
            winners.len(),
            1,
            "{name}: won by {winners:?}, refused: {refusals:?}"
        );
        for (cell, why) in refusals {
            let named = why.contains("cell ") && why.contains(name.as_str());
            assert!(named, "{name} in cell {cell}: {why}");
        }
    }
}

/// Whether the tables have exactly the names that were won, each in its cell.
fn has_exactly(claims: &[Claim]) -> impl Fn(&[Value]) -> bool {
    let won = claims.iter().filter_map(|claim| match claim.outcome {
        Outcome::Won { .. } => Some((claim.cell, claim.name.clone())),
        Outcome::Refused(_) => None,
    });
    let mut won: Vec<(usize, String)> = won.collect();
    won.sort();
    move |table| {
        let rows = table.iter().enumerate().flat_map(|(number, row)| {
            let vms = row["vms"].as_array().into_iter().flatten();
            vms.map(move |name| (number, name.as_str().unwrap_or_default().to_owned()))
        });
        let mut known: Vec<(usize, String)> = rows.collect();
        known.sort();
        known == won
    }
}

/// Lets the next hold begin before the last one ends, so that no step of the process is missed.
#[track_caller]
fn step(points: &FaultPoints, held: Held) -> Held {
    let next = points.hold("message_sent");
    drop(held);
    next.reached(REACH_LIMIT);
    next
}

#[test]
fn names_are_won_once_though_two_relays_are_killed_in_the_midst_of_a_vote() {
    let cells = Cells::up();
    cells.agree("24 cells meet", |table| {
        table.len() == CELLS && table.iter().all(|row| row["life"] == 1)
    });
    let relays = cells.relays(SOURCE);
    assert!(relays.len() >= 2, "cell {SOURCE} has the relays {relays:?}");

    for round in 0..ROUNDS {
        let claimers = |name: usize| {
            (0..4)
                .map(|place| (name * 4 + place * 7 + round) % CELLS)
                .collect()
        };
        let wanted: Vec<(String, Vec<usize>)> = (0..NAMES)
            .map(|name| (format!("calm{round}-{name}"), claimers(name)))
            .collect();
        let claims = cells.claim_all(&wanted);
        expect_one_winner_each(&wanted, &claims);
        cells.agree("all know the winners", has_exactly(&claims));
        drop(claims);
        cells.agree("all names are free again", has_exactly(&[]));
    }
    std::thread::sleep(QUIET);

    // The first one dies before all cells below it have the request, the second one with their votes.
    let [(first, _), (second, below)] = &relays[..2] else {
        unreachable!("two at least");
    };
    let pids = [*first, *second].map(|cell| cells.pid(cell));
    let points = pids.map(|pid| FaultPoints::of(&[pid]));
    let held = points.each_ref().map(|points| points.hold("message_sent"));
    let bystanders: Vec<usize> = (1..CELLS)
        .filter(|cell| cell != first && cell != second)
        .collect();
    let name = "contested".to_owned();
    let mut wanted = vec![(name.clone(), vec![SOURCE, bystanders[4], bystanders[12]])];
    let claims = std::thread::scope(|scope| {
        let claim = scope.spawn(|| cells.claim(SOURCE, &name));
        for held in &held {
            held.reached(REACH_LIMIT);
        }
        // The vote is under way when others want the same name, and other names.
        wanted.extend((0..NAMES).map(|index| {
            let claimers = (0..2).map(|place| bystanders[index * 3 + place]).collect();
            (format!("beside-{index}"), claimers)
        }));
        let late: Vec<(String, Vec<usize>)> = wanted
            .iter()
            .map(|(name, cells)| {
                let others = cells
                    .iter()
                    .filter(|cell| wanted[0].0 != *name || **cell != SOURCE);
                (name.clone(), others.copied().collect())
            })
            .collect();
        let (cells, points) = (&cells, &points);
        let others = scope.spawn(move || cells.claim_all(&late));
        let [at_first, mut at_second] = held;
        host::kill9(pids[0]);
        drop(at_first);
        for _ in 1..below.len() {
            at_second = step(&points[1], at_second);
        }
        host::kill9(pids[1]);
        drop(at_second);
        let mut claims = others.join().expect("claims are answered");
        claims.push(claim.join().expect("the claim is answered"));
        claims
    });
    points.into_iter().for_each(FaultPoints::wait);
    expect_one_winner_each(&wanted, &claims);

    let table = cells.agree("the cells agree again", has_exactly(&claims));
    for (number, row) in table.iter().enumerate() {
        let died = number == *first || number == *second;
        assert_eq!(row["life"], 1 + u64::from(died), "cell {number}: {table:?}");
    }
    // The output of the command.
    let shown = cells.call(["cluster", "status", "--json"]).ok().json();
    let shown: Vec<&Value> = shown.as_array().expect("an array").iter().collect();
    assert!(
        shown
            .iter()
            .zip(&table)
            .all(|(shown, row)| shown["vms"] == row["vms"])
    );
    drop(claims);
    cells.agree("all names are free again", has_exactly(&[]));
}
