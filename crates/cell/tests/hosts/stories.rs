//! Stories of the two hosts. Each is a separate process, whose runtime directory is alpha's.

mod boots;
mod ends;
mod pages;
mod places;
mod vcpus;

use std::fs::File;
use std::process::{Command, ExitCode};

use cell::cluster::membership::server;
use config::cluster::SpanTransport;
use registry::runtime::VARIABLE;
use shard::memory::replica::USERFAULT_DEVICE;

use super::etcd::Etcd;
use super::site::{self, Memory};
use super::two::Two;

/// The time after which a silent host is dead, by the cluster's file; longer than usual, since other tests
/// keep the machine busy.
const SILENCE_MS: u64 = 4000;

/// The same where cells watch one another, too, and a suspicion is final.
const REAL_SILENCE_MS: u64 = 20_000;
/// The story with real cells.
const REAL: &str = "real_cells_hold_the_places_and_their_next_processes_find_them";

/// The stories whose hosts share memory.
const SHARING: [&str; 4] = [
    "pages_come_by_memory_that_both_hosts_share",
    "doorbells_use_plain_connections_too",
    "part_that_boots_repeatedly_by_shared_memory_leaves_nothing",
    "slot_in_shared_memory_belongs_to_one_vm_at_a_time",
];
/// The story whose hosts are configured to share memory, and do not.
const NOT_SHARING: &str = "pages_come_by_streams_where_hosts_see_different_memory";

type Story = (&'static str, SpanTransport, fn(&Two));

const STORIES: [Story; 27] = [
    (
        "vm_without_coherent_memory_is_refused_before_any_place_is_taken",
        SpanTransport::Tls,
        places::not_coherent,
    ),
    (
        "home_that_cannot_start_leaves_nothing_on_other_hosts",
        SpanTransport::Tls,
        places::no_kernel,
    ),
    (
        "all_shards_connect_on_each_lane_at_each_boot",
        SpanTransport::Tls,
        boots::all_meet,
    ),
    (
        "all_shards_connect_by_plain_connections",
        SpanTransport::Plain,
        boots::all_meet,
    ),
    (
        "part_that_boots_repeatedly_leaves_nothing",
        SpanTransport::Tls,
        boots::again_and_again,
    ),
    (
        "connections_are_plain_where_the_cluster_file_requests_it",
        SpanTransport::Plain,
        boots::again_and_again,
    ),
    (
        "killed_shard_is_reported_to_the_home",
        SpanTransport::Tls,
        ends::killed_shard,
    ),
    (
        "late_order_to_end_ends_no_later_boot",
        SpanTransport::Tls,
        boots::late_order,
    ),
    (
        "protocol_violation_ends_the_part_before_its_place_is_free",
        SpanTransport::Tls,
        ends::second_start,
    ),
    (
        "killed_monitor_is_reported_and_leaves_nothing",
        SpanTransport::Tls,
        ends::killed_monitor,
    ),
    (
        "silent_host_is_reported_as_lost_to_the_home",
        SpanTransport::Tls,
        ends::silent_host,
    ),
    (
        "silent_home_leaves_nothing_on_other_hosts",
        SpanTransport::Tls,
        ends::silent_home,
    ),
    (
        "home_that_dies_leaves_nothing_on_other_hosts",
        SpanTransport::Tls,
        ends::dead_home,
    ),
    (
        "lost_connections_end_the_shard_with_the_reason",
        SpanTransport::Tls,
        ends::lost_connections,
    ),
    (
        "unknown_callers_are_refused_and_a_full_host_gives_no_place",
        SpanTransport::Tls,
        places::strangers,
    ),
    (REAL, SpanTransport::Tls, places::real_cells),
    (
        "two_parts_are_linked_to_one_another_too",
        SpanTransport::Tls,
        boots::two_parts,
    ),
    (
        "part_that_dies_while_its_home_loads_ends_the_vm",
        SpanTransport::Tls,
        ends::deaf_home,
    ),
    (
        "pages_come_from_another_host_until_that_is_gone",
        SpanTransport::Tls,
        pages::pages_come,
    ),
    (
        "pages_come_by_plain_connections_too",
        SpanTransport::Plain,
        pages::pages_come,
    ),
    (
        "part_that_dies_on_another_host_is_named_as_the_reason",
        SpanTransport::Tls,
        ends::witness_home,
    ),
    (
        "vcpus_of_a_part_are_stopped_counted_pinned_and_limited_on_its_host",
        SpanTransport::Tls,
        vcpus::acted_on,
    ),
    (SHARING[0], SpanTransport::Tls, pages::pages_come_by_memory),
    (SHARING[1], SpanTransport::Plain, pages::pages_come_by_memory),
    (SHARING[2], SpanTransport::Tls, boots::again_and_again_by_memory),
    (SHARING[3], SpanTransport::Tls, places::one_vm_at_a_time),
    (NOT_SHARING, SpanTransport::Tls, pages::pages_come_without_memory),
];

/// Runs all stories, or those whose names have `part` in them.
pub fn tell_all(part: Option<&str>) -> ExitCode {
    for device in ["/dev/kvm", USERFAULT_DEVICE] {
        if let Err(error) = File::options().read(true).write(true).open(device) {
            for (name, _, _) in STORIES {
                println!("test {name} ... ignored, {device}: {error}");
            }
            return ExitCode::SUCCESS;
        }
    }
    let own = std::env::current_exe().expect("this program");
    let mut failed = 0;
    let chosen = STORIES
        .iter()
        .filter(|(name, _, _)| part.is_none_or(|part| part.starts_with('-') || name.contains(part)));
    for (name, spans, _) in chosen {
        let folder = tempfile::tempdir().expect("a directory");
        let start = |url: &str| server::command(url, &site::keys(folder.path())?, folder.path());
        let etcd = (*name == REAL).then(|| Etcd::start(start));
        let urls: Vec<String> = etcd.iter().map(|etcd| etcd.url.clone()).collect();
        let silence_ms = if etcd.is_some() {
            REAL_SILENCE_MS
        } else {
            SILENCE_MS
        };
        let memory = match *name {
            name if SHARING.contains(&name) => Memory::Same,
            NOT_SHARING => Memory::Different,
            _ => Memory::None,
        };
        site::write(folder.path(), *spans, memory, silence_ms, &urls).expect("files of two hosts");
        let status = Command::new(&own)
            .args(["story", name])
            .env(VARIABLE, folder.path().join("alpha"))
            .status();
        let is_good = status.is_ok_and(|status| status.success());
        println!("test {name} ... {}", if is_good { "ok" } else { "FAILED" });
        failed += usize::from(!is_good);
    }
    println!("test result: {failed} failed");
    ExitCode::from(u8::from(failed > 0))
}

/// Runs one story, in a process that has alpha's runtime directory.
pub fn tell(name: &str) -> ExitCode {
    let Some((_, _, story)) = STORIES.iter().find(|story| story.0 == name) else {
        return ExitCode::FAILURE;
    };
    story(&Two::up(name == REAL));
    ExitCode::SUCCESS
}
