//! A VM that spans cells, in the process that serves the VM: a place in each cell, and the connections to the
//! hosts of remote ones. [`boot`] is one start of its shards.

pub mod boot;

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use config::VmSpec;
use config::cluster::SpanTransport;
use policy::span::Part;
use registry::cluster::files::Files;
use shard_api::Platform;

use crate::cluster::hosts::Hosts;
use crate::cluster::reservation::{
    LeftReservation, PartPlace, Reservation, ReservationError, ReservationHandle, begin_span, leave_span,
};
use crate::left::LeftFiles;
use crate::remote::connections::{connect, connect_first};
use crate::remote::guest_processor::GuestProcessor;
use crate::remote::part::RemotePart;
use crate::remote::protocol::Role;
use crate::remote::shared_memory::SlotResult;

/// The places of all shards, the home's first: a cell each, and the part of the VM that starts there.
#[derive(Debug)]
pub struct Span {
    places: Vec<(PartPlace, Part)>,
    /// The resources for places on other hosts, if there are any.
    over: Option<MultiHost>,
    /// Number of boots so far.
    boots: AtomicU32,
    platform: Platform,
}

impl Span {
    /// Requests the places of a VM; none for one that does not span cells.
    pub fn begin(name: &str, spec: &VmSpec, platform: Platform) -> Result<Option<Self>, ReservationError> {
        let places = begin_span(name, spec)?;
        if places.is_empty() {
            return Ok(None);
        }
        let leaves_host = places.iter().any(|(place, _)| place.here().is_none());
        match leaves_host
            .then(|| MultiHost::open(&places, platform))
            .transpose()
        {
            Ok(over) => Ok(Some(Self {
                places,
                over,
                boots: AtomicU32::new(0),
                platform,
            })),
            Err(error) => {
                leave_span(places);
                Err(error)
            }
        }
    }

    /// Takes over the places of a predecessor of this process, which left them to a successor.
    ///
    /// # Errors
    /// If the host has no threads left.
    pub(crate) fn adopt(
        places: Vec<(LeftReservation, Part)>,
        files: &mut LeftFiles,
        platform: Platform,
    ) -> io::Result<Self> {
        let adopt = |(place, part)| Ok((PartPlace::Here(Box::new(Reservation::adopt(place, files)?)), part));
        Ok(Self {
            places: places.into_iter().map(adopt).collect::<io::Result<_>>()?,
            over: None,
            boots: AtomicU32::new(0),
            platform,
        })
    }

    /// Handles of the places on this host, for other parts of the monitor.
    pub(crate) fn handles(&self) -> Vec<(ReservationHandle, Part)> {
        let here = |(place, part): &(PartPlace, Part)| Some((place.here()?.handle(), part.clone()));
        self.places.iter().filter_map(here).collect()
    }

    /// The range of the kernel in `file` in guest memory; empty if the kernel decides that itself.
    pub(crate) fn kernel_image(&self, file: &mut File) -> Range<u64> {
        (self.platform.kernel_image)(file)
    }

    /// The place of its home.
    pub fn home(&self) -> Option<&Reservation> {
        self.places.first()?.0.here()
    }

    /// The part of the VM in each cell.
    pub fn parts(&self) -> Vec<Part> {
        self.places.iter().map(|(_, part)| part.clone()).collect()
    }

    /// Frees the places of a VM that has ended.
    pub fn leave(self) {
        leave_span(self.places);
    }

    /// The CPUs of the cell that has most.
    pub fn cpus(&self) -> usize {
        let here = self.places.iter().filter_map(|(place, _)| place.here());
        here.map(Reservation::cpus).max().unwrap_or(1)
    }

    /// The cells, in the order of the shards.
    pub fn cells(&self) -> Vec<u16> {
        self.places.iter().map(|(place, _)| place.cell()).collect()
    }

    /// The reason why one of its places is lost permanently, if one is.
    pub fn lost(&self) -> Option<String> {
        self.places.iter().find_map(|(place, _)| place.lost())
    }

    /// Binds the calling thread, and the processes that it starts, to the cell of that shard, if it is on
    /// this host.
    pub fn settle(&self, shard: usize) -> Result<(), ReservationError> {
        let place = self.places.get(shard).and_then(|(place, _)| place.here());
        place.map_or(Ok(()), Reservation::settle)
    }

    /// The cell of each shard, for people, and its host if the VM is over several.
    pub(crate) fn places(&self) -> Vec<String> {
        let name = |place: &PartPlace| match (place, &self.over) {
            (PartPlace::There(remote), _) => remote.endpoint().to_string(),
            (PartPlace::Here(reservation), Some(over)) => {
                format!("cell {} on host {}", reservation.cell(), over.hosts.site().here)
            }
            (PartPlace::Here(reservation), None) => format!("cell {}", reservation.cell()),
        };
        self.places.iter().map(|(place, _)| name(place)).collect()
    }

    /// Whether threads of other processes encrypt the data that shards send to those on other hosts.
    pub(crate) fn is_encrypted(&self) -> bool {
        let way = self.over.as_ref().map(|over| over.hosts.site().spans);
        way == Some(SpanTransport::Tls)
    }

    /// Connects to the monitor of a shard on another host.
    pub(crate) fn call(&self, shard: usize, role: Role) -> io::Result<OwnedFd> {
        let called = self.remote(shard).zip(self.over.as_ref());
        let (remote, over) = called.ok_or(io::ErrorKind::NotFound)?;
        connect(&over.hosts, remote.endpoint(), role)
    }

    /// The same from a shard on this host, for the first connection of their lanes.
    pub(crate) fn call_first(
        &self,
        from: usize,
        shard: usize,
        role: Role,
    ) -> io::Result<(OwnedFd, SlotResult)> {
        let called = self.remote(shard).zip(self.over.as_ref());
        let ((remote, over), (here, _)) = called.zip(self.places.get(from)).ok_or(io::ErrorKind::NotFound)?;
        connect_first(&over.hosts, here.cell(), remote.endpoint(), role)
    }

    /// Whether a part of it is on another host.
    pub fn has_remote_parts(&self) -> bool {
        let mut places = self.places.iter();
        places.any(|(place, _)| matches!(place, PartPlace::There(_)))
    }

    /// The place of a shard on another host.
    pub fn remote(&self, shard: usize) -> Option<&Arc<RemotePart>> {
        match self.places.get(shard) {
            Some((PartPlace::There(remote), _)) => Some(remote),
            _ => None,
        }
    }
}

/// Additional resources of a VM over several hosts.
#[derive(Debug)]
struct MultiHost {
    /// The hosts of the cluster.
    hosts: Hosts,
    /// The processor that the guest finds.
    guest: GuestProcessor,
}

impl MultiHost {
    fn open(places: &[(PartPlace, Part)], platform: Platform) -> Result<Self, ReservationError> {
        let site = Files::open()?.site()?;
        let hosts = site.map(Hosts::open).transpose().map_err(io::Error::other)?;
        let home = (platform.processor)()?;
        let shards = places.iter().map(|(place, _)| match place {
            PartPlace::Here(_) => None,
            PartPlace::There(remote) => Some((remote.endpoint().to_string(), remote.processor())),
        });
        Ok(Self {
            hosts: hosts.ok_or(io::Error::from(io::ErrorKind::NotFound))?,
            guest: GuestProcessor::of(&home, shards)
                .map_err(|error| ReservationError::Refused(error.to_string()))?,
        })
    }
}
