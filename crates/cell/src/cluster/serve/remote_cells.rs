//! The cells of other hosts.

use std::io;
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};

use config::cluster::{OnLost, Site};
use protocol::CellId;
use registry::cluster::files::CellFiles;

use super::{Event, Events};
use crate::cluster::hosts::Hosts;
use crate::cluster::link::{CallTable, Link, is_version_mismatch};
use crate::cluster::lost;
use crate::cluster::membership::Membership;

/// The cells of other hosts, and the thread that reports their membership.
#[derive(Clone)]
pub(super) struct RemoteCells {
    hosts: Hosts,
    /// Those of them that lived when this one joined.
    members: Arc<Vec<CellId>>,
    pub suspects: Sender<CellId>,
}

/// The cells whose VMs' names this one does not have before their hello, where VMs of lost hosts end.
pub(super) fn expected(membership: &Membership, site: &Site) -> Vec<u16> {
    let had_lives = membership.lives.keys().copied();
    let remote_cells = had_lives.filter(|cell| site.is_elsewhere(*cell));
    remote_cells.filter(|_| site.on_lost == OnLost::Stop).collect()
}

impl RemoteCells {
    pub(super) fn start(
        hosts: Hosts,
        own: &CellFiles,
        listener: TcpListener,
        membership: Membership,
        calling: &Arc<CallTable>,
        events: &Events,
    ) -> io::Result<Self> {
        let of_others = |(number, life): (&u16, &u32)| {
            hosts.site().is_elsewhere(*number).then_some(CellId {
                number: *number,
                life: *life,
            })
        };
        let members = Arc::new(membership.members.iter().filter_map(of_others).collect());
        let (suspects, suspected) = mpsc::channel();
        let (changed, own) = (events.clone(), own.clone());
        let is_noted = hosts.site().on_lost == OnLost::Stop;
        let confirmed = move |at| {
            if is_noted && let Err(error) = lost::note(&own, at) {
                tracing::error!(%error, "it is not noted that the cell is a member");
            }
        };
        std::thread::Builder::new()
            .name("membership".into())
            .spawn(move || {
                membership.run(&suspected, |news| changed.post(Event::Changed(news)), confirmed)
            })?;
        let (taking, calling, linked) = (hosts.clone(), calling.clone(), events.clone());
        std::thread::Builder::new().name("hosts".into()).spawn(move || {
            taking.take(&listener, &calling, move |link| {
                linked.post(Event::Linked(Box::new(link)));
            });
        })?;
        Ok(Self {
            hosts,
            members,
            suspects,
        })
    }

    /// The current site of the cluster.
    pub(super) fn site(&self) -> Arc<Site> {
        self.hosts.site()
    }

    /// Replaces the site.
    pub(super) fn set_site(&self, site: Site) {
        self.hosts.set_site(site);
    }

    /// Sets the route costs, which count from the next link on.
    pub(super) fn set_route_costs(&self, costs: Arc<knowledge::RouteCosts>) {
        self.hosts.set_route_costs(costs);
    }

    /// Calls every cell that lived when this one joined. Returns those that are calling this one at the
    /// moment.
    ///
    /// # Errors
    /// If one of them has no version in common with this cell, which is no reason to take it for dead.
    pub(super) fn call_all(
        &self,
        me: CellId,
        calling: &CallTable,
        linked: &impl Fn(Link),
    ) -> io::Result<Vec<u16>> {
        let mut crossed = Vec::new();
        for cell in self.members.iter() {
            match self.hosts.call(me, cell.number, calling) {
                Ok(Some(link)) => linked(link),
                Ok(None) => crossed.push(cell.number),
                Err(error) if is_version_mismatch(&error) => return Err(error),
                // One of the two is cut off.
                Err(error) => {
                    tracing::warn!(%error, "no link to cell {cell}");
                    let _ = self.suspects.send(*cell);
                }
            }
        }
        Ok(crossed)
    }
}
