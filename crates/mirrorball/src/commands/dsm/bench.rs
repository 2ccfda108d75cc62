//! `mirrorball dsm bench`: the cost of a remote page, and of its components, in one run.

mod streams;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use dsm::Meter;
use dsm_bench::baseline::{FaultResponder, WaitMode, faults_ns, memory};
use dsm_bench::work::kernels::Scale;
use dsm_bench::work::{AccessOrder, Job, JobResult, Touch};
use miette::{IntoDiagnostic, Result, bail, miette};
use serde::Serialize;

use self::streams::Stream;
use super::kernels::{self, Kernels};
use super::nodes::{Nodes, NodesArgs};

/// Pages per kind of fault.
const PAGES: u32 = 1024;
/// Numbers of threads that fault concurrently.
const THREADS: [u32; 4] = [1, 2, 4, 8];
/// Duration of contention for a page, in milliseconds.
const FIGHT_MS: u64 = 200;
/// Minimum residency of a page, in microseconds; the first is the calibrated one, the last is infinite.
const HOLDS_US: [u64; 5] = [0, 10, 50, 200, 1000];
/// Goal for the cost of a fetch relative to its components.
const GOAL: f64 = 1.3;

/// Arguments of `bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    #[command(flatten)]
    nodes: NodesArgs,
    /// How often everything is timed; the medians are shown
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Run small programs of high-performance computing on one node and on all instead
    #[arg(long)]
    kernels: bool,
    /// Programs of the sizes that a second host is meant for, a second or so each
    #[arg(long, requires = "kernels")]
    large: bool,
    /// Print the waits of each node of the programs, in each phase, for a model of other links; stops
    /// between phases take time
    #[arg(long, requires = "kernels")]
    phases: bool,
    /// As JSON
    #[arg(long)]
    json: bool,
    /// As JSON into this file too
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// All measurements.
#[derive(Debug, Default, Serialize)]
struct Figures {
    nodes: u16,
    method: String,
    rounds: u32,
    /// Medians, microseconds.
    bare_fault_same_cpu_us: f64,
    bare_fault_other_cpu_us: Option<f64>,
    bare_fault_other_cpu_polling_us: Option<f64>,
    bare_fault_signal_us: f64,
    bare_request_polling_us: f64,
    bare_request_sleeping_us: f64,
    /// Request time over shared memory, where nodes have it.
    bare_request_memory_us: Option<f64>,
    faults: Vec<Fault>,
    /// Remote read fetches, by threads.
    throughput: Vec<Throughput>,
    /// Many pages by one thread, with and without prefetching.
    streams: Vec<Stream>,
    fights: Vec<Fight>,
    /// Read fetch relative to the best bare fault and request.
    fetch_ratio: f64,
    /// Relative to the bare fault that is answered as the node answers it.
    fetch_ratio_same_way: f64,
}

/// One kind of fault.
#[derive(Debug, Serialize)]
struct Fault {
    kind: &'static str,
    median_us: f64,
    low_us: f64,
    high_us: f64,
    messages: f64,
    messages_least: f64,
    bytes: f64,
    bytes_least: f64,
}

#[derive(Debug, Serialize)]
struct Throughput {
    threads: u32,
    pages_per_second: f64,
}

/// Two nodes that write the same word.
#[derive(Debug, Serialize)]
struct Fight {
    hold_us: f64,
    writes_per_second: f64,
    transfers_per_second: f64,
}

/// A kind of fault, with its minimum messages and pages.
type Kind = (&'static str, f64, f64);

/// Steps of a round over all pages: the node, whether it writes, and the resulting kind of fault.
const STEPS: [(u16, bool, Option<Kind>); 7] = [
    (1, true, None),
    (0, false, Some(("read fetch", 2.0, 1.0))),
    (1, true, Some(("invalidation", 2.0, 0.0))),
    (0, true, Some(("write fetch", 2.0, 1.0))),
    (1, true, None),
    (0, false, None),
    (0, true, Some(("upgrade without data", 2.0, 0.0))),
];

/// Runs all measurements.
pub fn bench(args: &BenchArgs) -> Result<ExitCode> {
    let scale = if args.large { Scale::Large } else { Scale::Small };
    let pages = if args.kernels {
        kernels::pages(scale)
    } else {
        4 * PAGES
    };
    let nodes = args.nodes.start(pages)?;
    let count = nodes.count;
    let method = format!("{:?}", nodes.session.node().method()).to_lowercase();
    if args.kernels {
        let kernels = Kernels {
            nodes: &nodes,
            scale,
            rounds: args.rounds,
        };
        if args.phases {
            let records = kernels.record(method)?;
            nodes.part()?;
            args.report(&records.lines()?, || records.print())?;
        } else {
            let programs = kernels.run(method)?;
            nodes.part()?;
            args.report(&pretty(&programs)?, || programs.print())?;
        }
    } else {
        let mut figures = Figures {
            nodes: count,
            method,
            rounds: args.rounds,
            ..Figures::default()
        };
        // Node 1 manages the second part of the pages.
        let first = (0..4 * PAGES)
            .find(|page| nodes.session.node().manager(*page) == 1)
            .ok_or_else(|| miette!("node 1 manages no page"))?;
        figures.bare(&nodes, args.rounds)?;
        figures.faults(&nodes, args.rounds, first)?;
        figures.throughput(&nodes, args.rounds, first)?;
        figures.streams = streams::measure(&nodes, args.rounds, first)?;
        figures.fights(&nodes, first)?;
        nodes.part()?;
        args.report(&pretty(&figures)?, || figures.print())?;
    }
    Ok(ExitCode::SUCCESS)
}

impl BenchArgs {
    /// Prints measurements, and writes them to the requested file.
    fn report(&self, text: &str, print: impl FnOnce()) -> Result<()> {
        if let Some(file) = &self.out {
            std::fs::write(file, format!("{text}\n")).map_err(|error| {
                miette!(
                    "--out {}: {error}; name a file that can be written",
                    file.display()
                )
            })?;
        }
        if self.json {
            println!("{text}");
        } else {
            print();
        }
        Ok(())
    }
}

impl Figures {
    /// Measures the components of a fetch.
    fn bare(&mut self, nodes: &Nodes, rounds: u32) -> Result<()> {
        let fault = |answers| -> Result<f64> {
            let times: Result<Vec<f64>> = (0..rounds)
                .map(|_| {
                    let times =
                        faults_ns(PAGES, answers, nodes.realtime).map_err(|error| miette!("{error}"))?;
                    Ok(median_us(times))
                })
                .collect();
            Ok(middle(times?))
        };
        self.bare_fault_same_cpu_us = fault(FaultResponder::SameCpu)?;
        self.bare_fault_signal_us = fault(FaultResponder::Itself)?;
        if let Some(cpu) = nodes.other_cpu {
            self.bare_fault_other_cpu_us = Some(fault(FaultResponder::OtherCpu(cpu))?);
            self.bare_fault_other_cpu_polling_us = Some(fault(FaultResponder::OtherCpuPolling(cpu))?);
        }
        let request = |waits| -> Result<f64> {
            let times: Result<Vec<f64>> = (0..rounds)
                .map(|_| {
                    let times = nodes.session.requests_ns(PAGES, waits, nodes.realtime);
                    Ok(median_us(times.map_err(|error| miette!("{error}"))?))
                })
                .collect();
            Ok(middle(times?))
        };
        self.bare_request_polling_us = request(WaitMode::Polling)?;
        self.bare_request_sleeping_us = request(WaitMode::Sleeping)?;
        if let Some(cpu) = nodes.other_cpu.filter(|_| nodes.by_memory) {
            let times: Result<Vec<f64>> = (0..rounds)
                .map(|_| {
                    Ok(median_us(
                        memory::requests_ns(PAGES, cpu, nodes.realtime).into_diagnostic()?,
                    ))
                })
                .collect();
            self.bare_request_memory_us = Some(middle(times?));
        }
        Ok(())
    }

    /// Measures faults of each kind, with the messages that they sent.
    fn faults(&mut self, nodes: &Nodes, rounds: u32, first: u32) -> Result<()> {
        let mut times: Vec<(Vec<f64>, Meter, u64)> =
            STEPS.iter().map(|_| (Vec::new(), Meter::default(), 0)).collect();
        // The first round creates the pages.
        for round in 0..=rounds {
            for (step, (times, sent, count)) in STEPS.iter().zip(&mut times) {
                let before = meter(nodes)?;
                let each_ns = touch(nodes, step.0, first..first + PAGES, step.1, 1)?.0;
                if round > 0 {
                    *count += each_ns.len() as u64;
                    *sent += meter(nodes)? - before;
                    times.push(median_us(each_ns));
                }
            }
        }
        for ((_, _, kind), (times, sent, count)) in STEPS.iter().zip(times) {
            let Some((kind, messages_least, pages_least)) = *kind else {
                continue;
            };
            let (low_us, high_us) = times.iter().fold((f64::MAX, f64::MIN), |(low, high), &time| {
                (low.min(time), high.max(time))
            });
            self.faults.push(Fault {
                kind,
                median_us: middle(times),
                low_us,
                high_us,
                messages: sent.messages as f64 / count as f64,
                messages_least,
                bytes: sent.bytes as f64 / count as f64,
                bytes_least: messages_least * 16.0 + pages_least * 4096.0,
            });
        }
        let fetch_us = self.faults[0].median_us;
        let others = [self.bare_fault_other_cpu_us, self.bare_fault_other_cpu_polling_us];
        let best_us = [self.bare_fault_same_cpu_us, self.bare_fault_signal_us]
            .into_iter()
            .chain(others.into_iter().flatten())
            .fold(f64::MAX, f64::min);
        // Over the same transport.
        let by_streams_us = self.bare_request_polling_us.min(self.bare_request_sleeping_us);
        let request_us = self.bare_request_memory_us.unwrap_or(by_streams_us);
        self.fetch_ratio = fetch_us / (best_us + request_us);
        self.fetch_ratio_same_way = fetch_us / (self.bare_fault_same_cpu_us + request_us);
        Ok(())
    }

    fn throughput(&mut self, nodes: &Nodes, rounds: u32, first: u32) -> Result<()> {
        for threads in THREADS {
            let mut rates = Vec::new();
            for _ in 0..rounds {
                touch(nodes, 1, first..first + PAGES, true, 1)?;
                let (each_ns, all_ns) = touch(nodes, 0, first..first + PAGES, false, threads)?;
                rates.push(each_ns.len() as f64 * 1e9 / all_ns as f64);
            }
            self.throughput.push(Throughput {
                threads,
                pages_per_second: middle(rates),
            });
        }
        Ok(())
    }

    /// Has both nodes add to one word, with different minimum residencies of a page.
    fn fights(&mut self, nodes: &Nodes, first: u32) -> Result<()> {
        let found_ns = nodes.session.node().enough_ns();
        for us in HOLDS_US {
            let hold_ns = if us == 0 { found_ns } else { us * 1000 };
            all(nodes, &Job::Hold(hold_ns))?;
            let before = meter(nodes)?;
            let job = Job::Add {
                page: first + PAGES,
                millis: FIGHT_MS,
            };
            let mut writes = 0;
            for answer in all(nodes, &job)? {
                if let JobResult::Count(count) = answer {
                    writes += count;
                }
            }
            let sent = meter(nodes)? - before;
            let per_second = 1e3 / FIGHT_MS as f64;
            self.fights.push(Fight {
                hold_us: hold_ns as f64 / 1e3,
                writes_per_second: writes as f64 * per_second,
                transfers_per_second: sent.pages as f64 * per_second,
            });
        }
        all(nodes, &Job::Hold(found_ns))?;
        Ok(())
    }

    fn print(&self) {
        let optional = |time: Option<f64>| time.map_or("-".into(), |time| format!("{time:.1}"));
        println!(
            "{} nodes, pages by {}, medians of {} rounds, us",
            self.nodes, self.method, self.rounds
        );
        println!();
        println!("bare userfaultfd");
        println!(
            "  by a thread on the same CPU       {:8.1}",
            self.bare_fault_same_cpu_us
        );
        println!(
            "  by a thread on another, sleeping  {:>8}",
            optional(self.bare_fault_other_cpu_us)
        );
        println!(
            "  by a thread on another, polling   {:>8}",
            optional(self.bare_fault_other_cpu_polling_us)
        );
        println!(
            "  on the thread itself (SIGBUS)     {:8.1}",
            self.bare_fault_signal_us
        );
        println!("bare request and 4 KiB back");
        println!(
            "  both poll before they sleep       {:8.1}",
            self.bare_request_polling_us
        );
        println!(
            "  both sleep                        {:8.1}",
            self.bare_request_sleeping_us
        );
        println!(
            "  by memory, both poll              {:>8}",
            optional(self.bare_request_memory_us)
        );
        println!();
        println!("fault                     us    (lowest - highest)    messages (least)      bytes (least)");
        for fault in &self.faults {
            println!(
                "{:22} {:6.1}    {:6.1} - {:6.1}         {:5.2} ({:.0})          {:6.0} ({:.0})",
                fault.kind,
                fault.median_us,
                fault.low_us,
                fault.high_us,
                fault.messages,
                fault.messages_least,
                fault.bytes,
                fault.bytes_least
            );
        }
        println!();
        println!("threads that fetch   pages/s");
        for throughput in &self.throughput {
            println!("{:18} {:9.0}", throughput.threads, throughput.pages_per_second);
        }
        println!();
        streams::print(&self.streams);
        println!();
        println!(
            "two writers of one word: a thread runs so long before its page goes, us   writes/s   transfers/s"
        );
        for fight in &self.fights {
            println!(
                "{:74.1} {:10.0} {:13.0}",
                fight.hold_us, fight.writes_per_second, fight.transfers_per_second
            );
        }
        println!();
        println!(
            "a read fetch takes {:.2} x the best bare fault and request (goal: at most {GOAL}), {:.2} x the \
             bare fault by a thread on the same CPU and request",
            self.fetch_ratio, self.fetch_ratio_same_way
        );
    }
}

fn pretty(figures: &impl Serialize) -> Result<String> {
    serde_json::to_string_pretty(figures).into_diagnostic()
}

/// Has a node use pages; returns the time of each page, and the total.
fn touch(
    nodes: &Nodes,
    node: u16,
    pages: std::ops::Range<u32>,
    write: bool,
    threads: u32,
) -> Result<(Vec<u64>, u64)> {
    // Faults one page at a time, so that no fault is served by another one's prefetch.
    let order = AccessOrder::Scattered;
    let touch = Touch {
        pages,
        write,
        threads,
        order,
    };
    touched(nodes, node, touch)
}

fn touched(nodes: &Nodes, node: u16, touch: Touch) -> Result<(Vec<u64>, u64)> {
    match nodes.session.run_on(node, Job::Touch(touch)) {
        Ok(JobResult::Touched { each_ns, all_ns }) => Ok((each_ns, all_ns)),
        Ok(answer) => bail!("node {node} answers {answer:?}"),
        Err(error) => bail!("{error}"),
    }
}

fn all(nodes: &Nodes, job: &Job) -> Result<Vec<JobResult>> {
    let jobs = vec![job.clone(); usize::from(nodes.count)];
    nodes.session.run_all(&jobs).map_err(|error| miette!("{error}"))
}

fn meter(nodes: &Nodes) -> Result<Meter> {
    nodes.session.meter().map_err(|error| miette!("{error}"))
}

fn median_us(times: Vec<u64>) -> f64 {
    middle(times.into_iter().map(|ns| ns as f64 / 1e3).collect())
}

/// Returns the median.
pub fn middle(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
