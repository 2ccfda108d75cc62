//! The program that the tests run inside a guest: it writes and checks patterns, computes on chosen CPUs,
//! sends and receives.
//!
//! It prints one line of results on stdout. A wrong pattern or a failed call is a line on stderr and exit
//! status
//! 1. Started under the name of the program of shards, it plays one that lies, or one of another version.

#[path = "guest-tool/churn.rs"]
mod churn;
#[path = "guest-tool/clock.rs"]
mod clock;
#[path = "guest-tool/dax.rs"]
mod dax;
#[path = "guest-tool/disk.rs"]
mod disk;
#[path = "guest-tool/files.rs"]
mod files;
#[path = "guest-tool/ipi.rs"]
mod ipi;
#[path = "guest-tool/load.rs"]
mod load;
#[path = "guest-tool/memory.rs"]
mod memory;
#[path = "guest-tool/nodes.rs"]
mod nodes;
#[path = "guest-tool/order.rs"]
mod order;
#[path = "guest-tool/peer.rs"]
mod peer;
#[path = "guest-tool/pinned.rs"]
mod pinned;
#[path = "guest-tool/posix.rs"]
mod posix;
#[path = "guest-tool/reclaim.rs"]
mod reclaim;
#[path = "guest-tool/shard.rs"]
mod shard;
#[path = "guest-tool/works.rs"]
mod works;

const USAGE: &str = "usage: guest-tool memory MIB | hold MIB SECONDS | pinned CPUS | nodes MIB \
     | clock CPUS COUNT | ipi CPUS SECONDS | churn CPUS SECONDS | reclaim PAGES ROUNDS \
     | disk-write DEVICE SEED COUNT | disk-digest DEVICE | disk-mark DEVICE COUNT | disk-marks DEVICE \
     | disk-load DEVICE SEED SECONDS \
     | posix FOLDER | fill FILE SEED BYTES | digest FILE | mount DEVICE PLACE | umount PLACE | works CPU:WORK... | litmus NODES CPUS MILLISECONDS \
     | dax-dma FILE DEVICE MIB \
     | send ADDRESS SEED BYTES | receive PORT | fetch ADDRESS | serve PORT SEED BYTES | reflect PORT COUNT";

/// Any error of this tool.
type Fault = Box<dyn std::error::Error>;

fn main() -> std::process::ExitCode {
    if std::env::args()
        .next()
        .is_some_and(|name| name == "mirrorball-shard")
    {
        return shard::play(&std::env::args().nth(1).unwrap_or_default());
    }
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match run(&words) {
        Ok(line) => {
            println!("{line}");
            std::process::ExitCode::SUCCESS
        }
        Err(fault) => {
            eprintln!("guest-tool {}: {fault}", words.join(" "));
            std::process::ExitCode::FAILURE
        }
    }
}

fn run(words: &[&str]) -> Result<String, Fault> {
    match words {
        ["memory", mib] => memory::check(mib.parse()?),
        ["hold", mib, seconds] => memory::hold(mib.parse()?, seconds.parse()?),
        ["pinned", cpus] => pinned::work_on_each(cpus.parse()?),
        ["nodes", mib] => nodes::check(mib.parse()?),
        ["clock", cpus, count] => clock::hand_over(cpus.parse()?, count.parse()?),
        ["ipi", cpus, seconds] => ipi::storm(cpus.parse()?, seconds.parse()?),
        ["churn", cpus, seconds] => churn::churn(cpus.parse()?, seconds.parse()?),
        ["reclaim", pages, rounds] => reclaim::storm(pages.parse()?, rounds.parse()?),
        ["quit", status] => std::process::exit(status.parse()?),
        ["disk-write", device, seed, count] => disk::write(device, seed.parse()?, count.parse()?),
        ["disk-digest", device] => disk::read_digest(device),
        ["disk-mark", device, count] => disk::mark(device, count.parse()?),
        ["disk-marks", device] => disk::marks(device),
        ["disk-load", device, seed, seconds] => load::load(device, seed.parse()?, seconds.parse()?),
        ["posix", folder] => posix::compare(folder),
        ["fill", file, seed, bytes] => files::fill(file, seed.parse()?, bytes.parse()?),
        ["digest", file] => files::read_digest(file),
        ["mount", device, place] => files::attach(device, place),
        ["umount", place] => files::detach(place),
        ["litmus", nodes, cpus, millis] => order::litmus(nodes.parse()?, cpus.parse()?, millis.parse()?),
        ["works", works @ ..] => works::run(works),
        ["dax-dma", file, device, mib] => dax::through_a_device(file, device, mib.parse()?),
        ["send", address, seed, bytes] => peer::send(address, seed.parse()?, bytes.parse()?),
        ["receive", port] => peer::receive(port.parse()?),
        ["fetch", address] => peer::fetch(address),
        ["reflect", port, count] => peer::reflect(port.parse()?, count.parse()?),
        ["serve", port, seed, bytes] => peer::serve(port.parse()?, seed.parse()?, bytes.parse()?),
        _ => Err(USAGE.into()),
    }
}
