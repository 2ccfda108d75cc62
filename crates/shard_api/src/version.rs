//! The versions of the protocol between a monitor and a shard. They go with the first message, and the shard
//! checks them before it parses anything else.
//!
//! Monitor and shard are separate programs. A shard lives as long as its VM, whatever replaces the monitor
//! meanwhile. So a monitor also starts, reboots and serves shards of the previous release. Launches, orders
//! and reports only grow from one version to the next ([`urpc::version`]), with two rules:
//!
//! - A shard sends a report of a new kind, or an answer of a new kind, only in reply to an order of a new
//!   kind.
//! - Values that both sides calculate (guest-physical addresses in [`crate::layout`], the guest's CPUID, its
//!   TSC, port numbers) do not change between two versions that work together. A release that changes them
//!   speaks no older version.
//!
//! The samples beside this file have a message of each kind in the form of each version. A test reads them,
//! so that an incompatible change is noticed before it is released.

use std::os::fd::BorrowedFd;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use urpc::version::{VersionMismatch, Versions};

use crate::control::ControlSocket;
use crate::launch::Launch;
use crate::message::{Files, ReceiveError};

/// The versions that this build speaks.
///
/// Since version 2 a shard acknowledges an order to quit ([`acknowledges_quit`]), and names its versions in
/// the report that it runs.
pub const VERSIONS: Versions = Versions::up_to(2);

/// The first version whose shards acknowledge [`crate::launch::Order::Quit`].
const ACKNOWLEDGES_QUIT: u16 = 2;

/// Whether a shard that speaks these versions acknowledges an order to quit.
pub fn acknowledges_quit(shard: Versions) -> bool {
    shard.newest >= ACKNOWLEDGES_QUIT
}

const PROTOCOL: &str = "the protocol of shards";

/// The first message as it is sent. This form is the same in all versions.
#[derive(Serialize)]
struct Sent<'a> {
    versions: Versions,
    launch: &'a Launch,
}

/// The first message as it is received: the launch is not parsed before the versions have been checked.
#[derive(Deserialize)]
struct Received {
    versions: Versions,
    launch: Box<RawValue>,
}

/// Reason for a launch that a shard does not perform.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// The message did not arrive whole, or is invalid.
    #[error(transparent)]
    Receive(#[from] ReceiveError),
    /// The monitor has no version in common with the shard.
    #[error(transparent)]
    VersionMismatch(#[from] VersionMismatch),
}

/// Compares the versions of a shard's program with those of this monitor.
///
/// # Errors
/// Fails if they have none in common. `program` names that program.
pub fn agree_with_shard(theirs: Versions, program: &str) -> Result<u16, VersionMismatch> {
    VERSIONS.agree(theirs, PROTOCOL, program)
}

/// Sends the first message to a shard: the counterpart of [`receive_launch`].
pub fn send_launch(
    socket: &ControlSocket,
    launch: &Launch,
    files: &[BorrowedFd<'_>],
) -> Result<(), ReceiveError> {
    let versions = VERSIONS;
    socket.send(&Sent { versions, launch }, files)
}

/// Receives the first message from a monitor, with its files.
pub fn receive_launch(socket: &ControlSocket) -> Result<(Launch, Files), LaunchError> {
    let (message, files) = socket.receive_with_files()?;
    let received: Received = serde_json::from_slice(&message).map_err(ReceiveError::from)?;
    VERSIONS.agree(received.versions, PROTOCOL, "the monitor")?;
    let launch = serde_json::from_str(received.launch.get()).map_err(ReceiveError::from)?;
    Ok((launch, files))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde::de::DeserializeOwned;
    use serde_json::Value;

    use super::*;
    use crate::launch::{HandoverReply, HandoverRequest, NumberedOrder, Order, Report};

    fn received(message: &str) -> Result<(Launch, Files), LaunchError> {
        let (monitor, shard) = ControlSocket::pair().unwrap();
        let message: Box<RawValue> = serde_json::from_str(message).unwrap();
        monitor.send(&message, &[]).unwrap();
        receive_launch(&shard)
    }

    #[test]
    fn launch_of_an_unlike_version_is_refused_before_it_is_parsed() {
        let message = |versions: Versions| {
            let versions = serde_json::to_string(&versions).unwrap();
            format!("{{\"versions\":{versions},\"launch\":{{\"unknown\":[1]}},\"added\":true}}")
        };
        let refused = received(&message(Versions::up_to(VERSIONS.newest + 2))).err();
        assert!(
            matches!(refused, Some(LaunchError::VersionMismatch(_))),
            "{refused:?}"
        );
        // The same launch of the next version is parsed, and is invalid.
        let refused = received(&message(Versions::up_to(VERSIONS.newest + 1))).err();
        assert!(
            matches!(refused, Some(LaunchError::Receive(ReceiveError::Json(_)))),
            "{refused:?}"
        );
    }

    /// A message of each kind, as a program of one version sends it.
    const SAMPLES: [(u16, &str); 2] = [
        (1, include_str!("version/samples-1.json")),
        (2, include_str!("version/samples-2.json")),
    ];

    /// Reads all samples under `key`. Fields that this version does not have are ignored; its own fields must
    /// reappear.
    fn read_all<T: DeserializeOwned + Serialize>(samples: &Value, key: &str) -> Vec<T> {
        let samples = samples[key].as_array().unwrap();
        let read = |sample: &Value| {
            let message: T =
                serde_json::from_value(sample.clone()).unwrap_or_else(|error| panic!("{sample}: {error}"));
            let again = serde_json::to_value(&message).unwrap();
            assert!(contains(&again, sample), "{sample} became {again}");
            message
        };
        samples.iter().map(read).collect()
    }

    /// Returns whether each value of `part` is in `whole`, which may have more fields.
    fn contains(whole: &Value, part: &Value) -> bool {
        match (whole, part) {
            (Value::Object(whole), Value::Object(part)) => part
                .iter()
                .all(|(key, part)| whole.get(key).is_some_and(|whole| contains(whole, part))),
            (Value::Array(whole), Value::Array(part)) => {
                whole.len() == part.len() && whole.iter().zip(part).all(|(whole, part)| contains(whole, part))
            }
            _ => whole == part,
        }
    }

    /// Returns the names of a message's kinds among `samples`. Each is the only key of an object, or a word.
    fn kinds(samples: &Value, key: &str) -> BTreeSet<String> {
        let name = |sample: &Value| match sample {
            Value::Object(fields) => fields.keys().next().cloned().unwrap(),
            word => word.as_str().unwrap().to_owned(),
        };
        samples[key].as_array().unwrap().iter().map(name).collect()
    }

    #[test]
    fn messages_of_each_version_are_understood() {
        let spoken: Vec<u16> = SAMPLES.iter().map(|(version, _)| *version).collect();
        assert_eq!(spoken, (VERSIONS.oldest..=VERSIONS.newest).collect::<Vec<_>>());
        for (_, samples) in SAMPLES {
            let samples: Value = serde_json::from_str(samples).unwrap();
            read_all::<Launch>(&samples, "launches");
            read_all::<Order>(&samples, "orders");
            read_all::<NumberedOrder>(&samples, "numbered_orders");
            read_all::<Report>(&samples, "reports");
            read_all::<HandoverRequest>(&samples, "handover_requests");
            read_all::<HandoverReply>(&samples, "handover_replies");
        }
    }

    /// Returns the name of an order. A new kind does not compile until it is added here, and fails until the
    /// samples have it.
    fn name_of(order: &Order) -> &'static str {
        match order {
            Order::PowerButton => "power-button",
            Order::Balloon { .. } => "balloon",
            Order::Status => "status",
            Order::VcpuStatistics { .. } => "vcpu-statistics",
            Order::Move { .. } => "move",
            Order::Step { .. } => "step",
            Order::Shared { .. } => "shared",
            Order::MemoryNodes { .. } => "memory-nodes",
            Order::PageMap { .. } => "page-map",
            Order::Resident { .. } => "resident",
            Order::LimitDisks(_) => "limit-disks",
            Order::Pause => "pause",
            Order::Resume => "resume",
            Order::StopVcpu { .. } => "stop-vcpu",
            Order::ContinueVcpu { .. } => "continue-vcpu",
            Order::Nmi => "nmi",
            Order::Reset => "reset",
            Order::Quit => "quit",
        }
    }

    #[test]
    fn only_a_shard_that_names_version_2_or_a_later_one_acknowledges_its_end() {
        let speaks = |report: &str| match serde_json::from_str(report).unwrap() {
            Report::Running { versions, .. } => acknowledges_quit(versions),
            other => panic!("{other:?}"),
        };
        assert!(!speaks(r#"{"running":{"sandbox_missing":[]}}"#));
        for (newest, acknowledges) in [(1, false), (2, true), (3, true)] {
            let versions = serde_json::to_string(&Versions::up_to(newest)).unwrap();
            let report = format!("{{\"running\":{{\"sandbox_missing\":[],\"versions\":{versions}}}}}");
            assert_eq!(speaks(&report), acknowledges, "version {newest}");
        }
    }

    #[test]
    fn samples_have_each_order_of_this_version() {
        let (_, samples) = SAMPLES[SAMPLES.len() - 1];
        let samples: Value = serde_json::from_str(samples).unwrap();
        let names: BTreeSet<String> = read_all::<Order>(&samples, "orders")
            .iter()
            .map(|order| name_of(order).to_owned())
            .collect();
        assert_eq!(names, kinds(&samples, "orders"));
        assert_eq!(names.len(), 18);
    }
}
