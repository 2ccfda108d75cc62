//! The disks of a VM: the image's root disk, and those of the spec.

use config::vm::{DiskDevice, DiskFormatSpec, DiskMode, DiskSpec};
use diskstore::disk::{DiskRequest, Format, Layer, Mode, OpenDisk, allocate_whole};
use diskstore::image::{Image, ImageStore};
use hostfiles::private;
use shard_api::launch::{DiskFormat, DiskLaunch, LayerLaunch, OnFull, Share};

use super::files::{mappable, readable, scratch_directory};
use super::launch::{on_full, share};
use super::{OpenError, Opening};

/// Maximum number of queues of a disk for which the spec names no number.
const QUEUES_DEFAULT_MAX: u16 = 4;

/// A disk that is to be opened.
struct Wanted {
    request: DiskRequest,
    queues: u16,
    pmem: bool,
    share: Share,
    on_full: OnFull,
    /// Its number among the spec's disks; none for the root disk.
    number: Option<usize>,
}

/// The serial that the guest reads of the VM's `index`th disk; the image's root disk is the first.
pub fn disk_serial(index: usize) -> String {
    format!("disk{index}")
}

/// The disks of a VM.
#[derive(Default)]
pub(super) struct Disks {
    pub opened: Vec<OpenDisk>,
    pub launches: Vec<DiskLaunch>,
    /// Maximum length of a file that the disks write, bytes.
    pub file_bytes: u64,
    /// Whether writes to one outlive the VM.
    pub keeps_writes: bool,
}

impl Opening<'_> {
    /// Opens the root disk of the image, if it has one, and the spec's disks.
    pub fn disks(&mut self, image: Option<&Image>) -> Result<Disks, OpenError> {
        let root = image.and_then(|image| self.root_disk(image));
        let limits = &self.spec.root;
        if root.is_none() && (limits.bandwidth.is_some() || limits.operations.is_some()) {
            return Err(OpenError::NoRootDisk);
        }
        let others = self.spec.disks.iter().enumerate();
        let others = others.map(|(number, disk)| self.further_disk(number, disk));
        let wanted: Vec<Wanted> = root.into_iter().chain(others).collect();
        let mut disks = Disks::default();
        for (index, wanted) in wanted.into_iter().enumerate() {
            self.disk(index, wanted, &mut disks)?;
        }
        Ok(disks)
    }

    fn queues_default(&self) -> u16 {
        u16::from(self.spec.cpus).min(QUEUES_DEFAULT_MAX)
    }

    fn root_disk(&self, image: &Image) -> Option<Wanted> {
        let (path, format) = image.disk.as_ref()?;
        Some(Wanted {
            request: DiskRequest {
                path: path.clone(),
                format: Some(*format),
                mode: Mode::Private,
                persistent: self.spec.root.persistent,
                read_only: false,
                overlay_path: None,
                scratch_dir: scratch_directory(),
                vm_name: self.name.to_owned(),
                below: None,
            },
            queues: self.queues_default(),
            pmem: false,
            share: share(self.spec, self.spec.root.share),
            on_full: on_full(self.spec.root.on_full),
            number: None,
        })
    }

    fn further_disk(&self, number: usize, disk: &DiskSpec) -> Wanted {
        Wanted {
            request: DiskRequest {
                path: disk.path.clone(),
                format: disk.format.map(|format| match format {
                    DiskFormatSpec::Raw => Format::Raw,
                    DiskFormatSpec::Qcow2 => Format::Qcow2,
                }),
                mode: match disk.mode {
                    DiskMode::Private => Mode::Private,
                    DiskMode::Exclusive => Mode::Exclusive,
                },
                persistent: disk.persistent,
                read_only: disk.read_only,
                overlay_path: None,
                scratch_dir: scratch_directory(),
                vm_name: self.name.to_owned(),
                below: None,
            },
            queues: disk.queues.unwrap_or(self.queues_default()),
            pmem: disk.device == DiskDevice::Pmem,
            share: share(self.spec, disk.share),
            on_full: on_full(disk.on_full),
            number: Some(number),
        }
    }

    /// Opens one disk, the VM's `index`th.
    fn disk(&mut self, index: usize, mut wanted: Wanted, disks: &mut Disks) -> Result<(), OpenError> {
        // The root disk is the image store's.
        let mut is_named = wanted.number.is_some();
        let Wanted { request, pmem, .. } = &mut wanted;
        let pmem = *pmem;
        disks.keeps_writes |= request.persistent;
        if request.mode == Mode::Private {
            let (names, path) = (&mut self.names, request.path.as_path());
            let open = || match is_named {
                true => names.file("disk", path),
                false => readable("disk", path),
            };
            if let Some(copy) = self.grouped.copy("disk", path, open)? {
                (request.path, is_named) = (copy, false);
            }
        }
        if request.persistent && request.mode == Mode::Private {
            let overlays = ImageStore::open_default()?
                .data()
                .join("overlays")
                .join(self.name);
            private::directories(&overlays)?;
            request.overlay_path = Some(overlays.join(format!("{index}.qcow2")));
        }
        let allocate = pmem && request.persistent;
        let mut disk = match is_named {
            true => self.names.disk(request, allocate)?,
            false => diskstore::disk::open(request)?,
        };
        self.claim_disk(&disk, &mut wanted)?;
        let request = wanted.request;
        let is_allocated = is_named && self.names.are_opened_for_owner();
        if let (true, false, [own]) = (allocate && !is_allocated, disk.read_only, &disk.layers[..]) {
            // A write to a mapping that finds no room is not an error to the guest, but the end of the VM.
            allocate_whole(&own.file).map_err(|source| OpenError::File {
                what: "persistent memory",
                path: request.path.clone(),
                help: "make room for all of the file, or use the disk with `as = \"block\"`",
                source,
            })?;
        }
        disks.file_bytes = disks.file_bytes.max(disk.file_bytes_max()?);
        let layers = std::mem::take(&mut disk.layers).into_iter();
        disks.launches.push(DiskLaunch {
            id: disk_serial(index),
            layers: layers.map(|layer| self.layer(layer)).collect(),
            read_only: disk.read_only,
            scratch_limit: self.spec.scratch_limit.map(|limit| limit.0),
            queues: wanted.queues,
            pmem,
            share: wanted.share,
            on_full: wanted.on_full,
        });
        disks.opened.push(disk);
        Ok(())
    }

    /// Claims the files of a disk that the VM maps. Without the claim a block device shares nothing.
    fn claim_disk(&mut self, disk: &OpenDisk, wanted: &mut Wanted) -> Result<(), OpenError> {
        let mapped = mappable(disk, wanted.pmem).iter().map(|layer| &layer.file);
        let is_mapped = wanted.pmem || self.maps(wanted.share);
        if !is_mapped || self.claims.claim(mapped, &wanted.request.path) {
            return Ok(());
        }
        if wanted.pmem {
            return Err(OpenError::KeptApart {
                what: "pmem disk",
                path: wanted.request.path.clone(),
            });
        }
        wanted.share = Share::Never;
        match wanted.number {
            Some(number) => self.apart.disks.push(number),
            None => self.apart.root = true,
        }
        Ok(())
    }

    fn layer(&mut self, layer: Layer) -> LayerLaunch {
        LayerLaunch {
            file: self.files.add(layer.file),
            format: match layer.format {
                Format::Raw => DiskFormat::Raw,
                Format::Qcow2 => DiskFormat::Qcow2,
                Format::Scratch => DiskFormat::Scratch,
            },
        }
    }
}
