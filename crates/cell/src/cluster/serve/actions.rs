//! Carries out the actions that the cell's state has decided.

use std::io::{self, Write};

use fault_point::fault_point;
use protocol::CellId;
use registry::cluster::interface::{CellResponse, OF_CELL, owner_of};
use tracing::{error, warn};

use super::{Cell, Event, recovery};
use crate::cluster::limits::ORPHANS_LIMIT;
use crate::cluster::lost;
use crate::cluster::protocols::protocols;
use crate::cluster::state::{Action, CellMessage, Client};

impl Cell {
    /// Carries out actions, and those that follow from them. Returns whether the process is to end.
    pub(super) fn act(&mut self, mut acts: Vec<Action>) -> bool {
        while !acts.is_empty() {
            let mut next = Vec::new();
            for act in acts {
                let Some(more) = self.carry_out(act) else {
                    return true;
                };
                next.extend(more);
            }
            acts = next;
        }
        false
    }

    /// Carries out one action, and returns those that follow from it; `None` if the process is to end.
    fn carry_out(&mut self, act: Action) -> Option<Vec<Action>> {
        match act {
            Action::Send(to, message) => return Some(self.send(to, message)),
            Action::PersistLent(lent) => require("lent", self.own.keep_lent(&lent)),
            Action::PersistLentOnRequest(lent) => {
                require("requested", self.own.keep_lent_on_request(&lent));
            }
            Action::Answer(client, answer) => {
                if matches!(answer, CellResponse::Hosted(_)) && self.may_have_lost_names() {
                    // The process may have been suspended while its claim won. The effects that follow do
                    // not happen.
                    error!("the cell has not been a member for too long to give names, and starts anew");
                    std::process::exit(1);
                }
                self.answer(client, &answer);
            }
            Action::Adopt(client, name, again) => {
                let answer = match self.adoptions.begin(&name, again) {
                    Ok(()) => CellResponse::Done,
                    Err(error) => CellResponse::Refused {
                        why: format!("{name}: {error}"),
                    },
                };
                self.answer(client, &answer);
            }
            Action::ReportCpuLending(client) => {
                let answer = self.adoptions.report_lending();
                self.answer(client, &answer);
            }
            Action::ReportVcpus(client) => {
                let begun = self.adoptions.begin_to_list_vcpus(self.response_to(client));
                self.refuse_if_failed(client, begun);
            }
            Action::ArrangeWindows(client, report) => {
                let answer = self.adoptions.arrange_windows(report);
                self.answer(client, &answer);
            }
            Action::ReturnCpu {
                client,
                vm,
                vcpu,
                lender,
            } => {
                let told = self.response_to(client);
                let begun = self.adoptions.begin_to_return_cpu((vm, vcpu), lender, told);
                self.refuse_if_failed(client, begun);
            }
            Action::ReportProtocols(client) => self.answer(client, &CellResponse::Protocols(protocols())),
            Action::ReportAdopted(client) => {
                let begun = self.adoptions.begin_to_await_first(self.response_to(client));
                self.refuse_if_failed(client, begun);
            }
            Action::AwaitLeft(name, number) => {
                let event = Event::LeftLate(name, number);
                self.events.post_after(ORPHANS_LIMIT, event);
            }
            Action::EndVm { name, failed } => {
                warn!(vm = name, "the VM ends, since cell {failed} has failed");
                match owner_of(&name) {
                    None => self.adoptions.end(&name, failed),
                    Some(_) => recovery::end_user_vm(&self.files, name),
                }
            }
            Action::AwaitEnd(failed) => {
                let events = self.events.clone();
                let told = move || events.post(Event::NoDependents(failed));
                if let Err(error) = recovery::await_end(&self.files, failed, told) {
                    error!(%error, "the ends of the VMs of the failed cell {failed} are not awaited");
                }
            }
            act @ (Action::CreateRegion { .. }
            | Action::SendRegion { .. }
            | Action::SearchRegion { .. }
            | Action::ProbeRegion { .. }
            | Action::RecordLenders { .. }
            | Action::MoveRegionPages { .. }
            | Action::CloseRegion(_)) => return Some(self.act_on_region(act)),
            Action::End => return None,
        }
        Some(Vec::new())
    }

    /// Sends a message to a cell. A cell to which it can't be sent is given up.
    fn send(&mut self, to: CellId, message: CellMessage) -> Vec<Action> {
        let mut next = Vec::new();
        let link = self.peers.link(to);
        let sent = link.map(|link| link.send(&message));
        if let Some(Err(error)) = &sent {
            warn!(%error, "a message to cell {to} was not sent");
            if error.kind() == io::ErrorKind::BrokenPipe {
                self.parted(to);
            }
            next.extend(self.give_up(to));
        }
        fault_point!(message_sent);
        if !matches!(sent, Some(Ok(()))) {
            next.extend(self.state.handle_unsent(to, message));
        }
        next
    }

    /// Closure with which another thread responds to a client's request.
    fn response_to(&self, client: Client) -> impl FnOnce(CellResponse) + Send + use<> {
        let events = self.events.clone();
        move |answer| events.post(Event::Responded(client, answer))
    }

    fn refuse_if_failed(&mut self, client: Client, begun: io::Result<()>) {
        if let Err(error) = begun {
            let why = error.to_string();
            self.answer(client, &CellResponse::Refused { why });
        }
    }

    pub(super) fn answer(&mut self, client: Client, answer: &CellResponse) {
        let Some(stream) = self.clients.get_mut(&client) else {
            return;
        };
        if let CellResponse::Hosted(_) = answer {
            fault_point!(place_given);
        }
        if let Ok(line) = OF_CELL.write(answer) {
            // A client that does not read its answer has disconnected, and its event follows.
            let _ = stream.write_all(&line);
        }
    }

    /// Whether other cells may have given names of this one to their VMs, by `on_lost = "stop"`.
    fn may_have_lost_names(&self) -> bool {
        let remote_cells = self.remote_cells.as_ref();
        remote_cells.is_some_and(|remote_cells| lost::is_past_lease(&self.own, &remote_cells.site()))
    }
}

/// Ends the process if a record of memory was not written: the effects that follow must not happen. No other
/// process has seen any of them.
fn require(memory: &str, written: io::Result<()>) {
    if let Err(error) = written {
        error!(%error, "the record of {memory} memory cannot be written");
        std::process::exit(1);
    }
}
