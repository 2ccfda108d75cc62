//! The counters of a VM's shards.

use std::io;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use shard_api::launch::Order;

use super::VmHandle;
use super::state::State;
use crate::secondary_shards::SecondaryShards;

/// Time limit for a shard to report its counters.
const STATUS_LIMIT: Duration = Duration::from_secs(5);

impl VmHandle {
    /// The shards' counters, and the times of the vCPUs as the host counts them.
    ///
    /// # Errors
    /// If the VM does not run, or a shard does not answer in time.
    pub fn status(&self) -> io::Result<Value> {
        let mut status = self.counters()?;
        let vcpus = self.vcpu_times(&status);
        if let Some(status) = status.as_object_mut() {
            // From the host, whatever the shard sent under this name.
            status.insert("vcpus".to_owned(), vcpus.into());
            let promise = self.promise_status();
            status.insert("memory_promise".to_owned(), promise.unwrap_or_default());
        }
        Ok(status)
    }

    /// The shards' counters.
    pub(super) fn counters(&self) -> io::Result<Value> {
        let now = Instant::now();
        let (parts, clocks) = {
            let mut state = self.state();
            // One order serves all clients that request the status meanwhile: many orders would fill the
            // socket of a shard that is busy for a while.
            let is_asked = |(at, _)| now.saturating_duration_since(at) < STATUS_LIMIT;
            let mut parts = Vec::new();
            if state.orders.is_none() || !state.status_asked.is_some_and(is_asked) {
                // Sending never blocks, so the lock may be held: an answer finds the order that it belongs
                // to.
                let id = state.order(&Order::Status)?;
                (state.status, state.status_asked) = (None, Some((now, id)));
                parts = state
                    .parts
                    .as_ref()
                    .map_or_else(Vec::new, SecondaryShards::begin_status);
            }
            (parts, state.clocks.clone())
        };
        // This is not under the lock: the keeper of the clocks sends orders under its own, and a part on
        // another host may take a while.
        let clocks = clocks.map_or_else(Vec::new, |clocks| clocks.status());
        for part in parts {
            // A shard that is gone ends the VM.
            let _ = part.order(&Order::Status);
        }
        let all = |state: &State| {
            let parts = state.parts.as_ref();
            state.status.is_some() && parts.is_none_or(|parts| parts.statuses().is_some())
        };
        let state = self.wait(STATUS_LIMIT, |state| all(state) || state.over);
        let mut status = match &state.status {
            Some(Ok(status)) => status.clone(),
            Some(Err(why)) => return Err(io::Error::other(why.clone())),
            None => return Err(io::Error::other("the VM does not answer")),
        };
        let filtered = state.filtered.iter().map(|count| count.get());
        add_filtered(&mut status, filtered);
        if let Some(parts) = &state.parts {
            let statuses = parts
                .statuses()
                .ok_or_else(|| io::Error::other("a shard of the VM does not answer"))?;
            add_span(&mut status, &state.cells, clocks, statuses);
        }
        Ok(status)
    }
}

/// Adds to the home's status the number of frames of all cards that were kept from the host and the cluster.
/// A filter that a guest has taken over may count anything.
fn add_filtered(status: &mut Value, frames: impl Iterator<Item = u64>) {
    let frames = frames.fold(0, u64::saturating_add);
    if let Some(status) = status.as_object_mut() {
        status.insert("filtered_frames".to_owned(), frames.into());
    }
}

/// Adds to the home's status the cell of each vCPU, and the counters of the other shards.
fn add_span(status: &mut Value, cells: &[u16], clocks: Vec<Value>, parts: Vec<Value>) {
    let Some(status) = status.as_object_mut() else {
        return;
    };
    let cell = |shard: &Value| {
        let shard = shard.as_u64().and_then(|shard| usize::try_from(shard).ok());
        shard.and_then(|shard| cells.get(shard))
    };
    let shards = status.remove("vcpu_shards").unwrap_or_default();
    let vcpus: Vec<_> = shards.as_array().into_iter().flatten().map(cell).collect();
    let home = json!({
        "exits": status.get("exits"),
        "coherence": status.remove("coherence"),
        "clock": status.remove("clock"),
        "stops": status.remove("stops"),
    });
    let counted: Vec<_> = std::iter::once(home).chain(parts).collect();
    status.insert("stops".to_owned(), stops_in_all(&counted).into());
    let coherent = |(cell, shard)| Some((cell, coherence_of(shard)?));
    let (told, coherence): (Vec<_>, Vec<_>) = cells
        .iter()
        .zip(&counted)
        .filter_map(coherent)
        .map(|(cell, coherence)| (with_cell(coherence, *cell), coherence))
        .unzip();
    let mut shards: Vec<Value> = cells
        .iter()
        .zip(&counted)
        .map(|(cell, counted)| json!({ "cell": cell, "exits": counted.get("exits") }))
        .collect();
    // On one host there is one clock.
    for ((shard, mut clock), counted) in shards.iter_mut().zip(clocks).zip(&counted) {
        let made = counted.get("clock").and_then(Value::as_object).cloned();
        if let Some(steps) = clock.get_mut("steps").and_then(Value::as_object_mut) {
            steps.extend(made.unwrap_or_default());
        }
        shard["clock"] = clock;
    }
    let mut span = json!({ "cells": cells, "vcpus": vcpus, "shards": shards });
    if let (Some(span), false) = (span.as_object_mut(), coherence.is_empty()) {
        let heat = crate::coherence::hottest(&coherence);
        let told = json!({ "shards": told, "heat": heat });
        span.insert("coherence".to_owned(), told);
    }
    status.insert("span".to_owned(), span);
}

/// The stops of each vCPU, with those in all shards that it was in. A shard of the release before has none.
fn stops_in_all(shards: &[Value]) -> Vec<Value> {
    let of_vcpus = |shard: &Value| shard["stops"].as_array().cloned().unwrap_or_default();
    let of_shards: Vec<Vec<Value>> = shards.iter().map(of_vcpus).collect();
    let vcpus = of_shards.iter().map(Vec::len).max().unwrap_or(0);
    let sum = |vcpu: usize, key: &str| {
        let stops = of_shards
            .iter()
            .filter_map(|stops| stops.get(vcpu)?[key].as_u64());
        stops.fold(0, u64::saturating_add)
    };
    let of_vcpu = |vcpu| json!({ "count": sum(vcpu, "count"), "stopped_ns": sum(vcpu, "stopped_ns") });
    (0..vcpus).map(of_vcpu).collect()
}

/// The counters of a shard's coherent memory; none if the shard did not answer.
fn coherence_of(shard: &Value) -> Option<&Value> {
    shard.get("coherence").filter(|coherence| coherence.is_object())
}

fn with_cell(coherence: &Value, cell: u16) -> Value {
    let mut told = coherence.clone();
    told["cell"] = cell.into();
    told
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_says_where_vcpus_are_and_what_clocks_are_worth() {
        let mut status = json!({ "exits": [1], "vcpu_shards": [0, 1, 1] });
        let clocks = vec![
            json!({ "steps": { "ordered": 2 } }),
            json!({ "error_ns": 15_000, "steps": { "ordered": 5 } }),
        ];
        let part = json!({ "exits": [2], "clock": { "made": 4, "late": 1 } });
        add_span(&mut status, &[3, 5], clocks, vec![part]);
        let shards = json!([
            { "cell": 3, "exits": [1], "clock": { "steps": { "ordered": 2 } } },
            { "cell": 5, "exits": [2], "clock": { "error_ns": 15_000, "steps": { "ordered": 5, "made": 4,
            "late": 1 } } },
        ]);
        assert_eq!(
            status["span"],
            json!({ "cells": [3, 5], "vcpus": [3, 5, 5], "shards": shards })
        );
    }

    #[test]
    fn stops_of_a_vcpu_are_counted_in_all_shards_that_it_was_in() {
        let stops =
            |count: u64| json!([{ "count": 0, "stopped_ns": 0 }, { "count": count, "stopped_ns": 5 }]);
        let mut status = json!({ "vcpu_shards": [0, 1], "stops": stops(2) });
        // The last shard's release does not count them.
        let parts = vec![json!({ "stops": stops(3) }), json!({ "exits": [] })];
        add_span(&mut status, &[3, 5, 8], Vec::new(), parts);
        assert_eq!(
            status["stops"],
            json!([{ "count": 0, "stopped_ns": 0 }, { "count": 5, "stopped_ns": 10 }])
        );
        // A shard that a guest has taken over may count anything.
        let parts = vec![json!({ "stops": [{ "count": u64::MAX, "stopped_ns": "x" }] })];
        let mut status = json!({ "vcpu_shards": [0], "stops": stops(1) });
        add_span(&mut status, &[3, 5], Vec::new(), parts);
        assert_eq!(status["stops"][0], json!({ "count": u64::MAX, "stopped_ns": 0 }));
    }

    #[test]
    fn a_status_counts_filtered_frames() {
        let mut status = json!({ "exits": [] });
        add_filtered(&mut status, [1, 2].into_iter());
        assert_eq!(status, json!({ "exits": [], "filtered_frames": 3 }));
        add_filtered(&mut status, [u64::MAX, 2].into_iter());
        assert_eq!(status["filtered_frames"], u64::MAX);
    }

    #[test]
    fn a_shard_that_did_not_answer_does_not_make_others_be_in_its_cell() {
        let mut status = json!({ "coherence": { "pages": 1 } });
        let parts = vec![Value::Null, json!({ "coherence": { "pages": 2 } })];
        add_span(&mut status, &[3, 5, 8], Vec::new(), parts);
        assert_eq!(
            status["span"]["coherence"]["shards"],
            json!([{ "cell": 3, "pages": 1 }, { "cell": 8, "pages": 2 }])
        );
    }
}
