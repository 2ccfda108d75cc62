//! Threads in the roles of a VM's shards, for tests. Each shard's process is one that does nothing.

use std::process::Command;
use std::sync::Arc;

use shard_api::control::ControlSocket;
use shard_api::launch::{Answer, NumberedOrder, Order, Report};

use super::VmHandle;
use crate::secondary_shards::{SecondaryShard, SecondaryShards};
use crate::shard_process::ShardProcess;

/// Effect of an order on a shard.
pub(super) enum Reaction {
    /// The shard answers.
    Answer(Answer),
    /// The shard never answers.
    Silence,
    /// The shard ends without an answer.
    End,
}

/// Decision of one shard about each order that it receives.
pub(super) type Role = Box<dyn Fn(Order) -> Reaction + Send>;

/// The shards of a running VM. Dropping it ends their processes.
pub(super) struct ShardThreads(VmHandle);

/// Serves orders until the shard ends.
fn serve(socket: &ControlSocket, role: &Role, report: impl Fn(Report)) {
    while let Ok((message, _)) = socket.receive_with_files() {
        let NumberedOrder { id: to, order } = serde_json::from_slice(&message).expect("an order");
        match role(order) {
            Reaction::Answer(answer) => report(Report::Answer { to, answer }),
            Reaction::Silence => {}
            Reaction::End => return,
        }
    }
}

impl ShardThreads {
    /// Starts the home and the secondary shards, each of those with its cell.
    pub(super) fn start(handle: &VmHandle, home: Role, parts: impl IntoIterator<Item = (u16, Role)>) -> Self {
        let parts = parts.into_iter().map(|(cell, role)| {
            let (process, socket) = ShardProcess::of(Command::new("sleep").arg("100"));
            std::thread::spawn(move || {
                let report = |report| socket.send(&report, &[]).expect("its monitor reads");
                serve(&socket, &role, report);
            });
            SecondaryShard::Here { cell, process }
        });
        let (changed, ended) = (handle.clone(), handle.clone());
        let parts = SecondaryShards::watch(
            parts.collect(),
            move || changed.changed(),
            move || ended.part_ended(),
        );
        let (process, socket) = ShardProcess::of(Command::new("sleep").arg("100"));
        {
            let mut state = handle.state();
            state.start(Arc::new(process), Some(parts.unwrap()));
            state.runs = true;
        }
        let vm = handle.clone();
        std::thread::spawn(move || {
            // As the thread that reads the home's reports.
            let report = |report| {
                let Report::Answer { to, answer } = report else {
                    return;
                };
                let _ = vm.state().paused_by(to, &answer);
                vm.state().note_answer(to, answer);
                vm.changed();
            };
            serve(&socket, &home, report);
            vm.end_orders();
        });
        Self(handle.clone())
    }
}

impl Drop for ShardThreads {
    fn drop(&mut self) {
        let (home, parts) = {
            let mut state = self.0.state();
            (state.home.take(), state.parts.take())
        };
        drop(parts);
        home.iter().for_each(|home| _ = home.kill());
    }
}
