//! Checks of paging.

use super::sharing::asked_to_share;
use crate::Size;
use crate::fault::{Fault, fault};
use crate::promise::RESIDENT_MIN_BYTES;
use crate::vm::{PagesSpec, VmSpec};

/// Minimum of `paging_disk`, bytes. `mkswap` refuses less than ten pages.
const DISK_MIN_BYTES: u64 = 1 << 20;
/// Maximum of `paging_disk`, as a multiple of the memory, and in bytes.
const DISK_MAX_MEMORIES: u64 = 4;
const DISK_MAX_BYTES: u64 = 8 << 40;
const PAGE_BYTES: u64 = 4096;

/// Guest memory that is paged is one file of 4 KiB pages, each of which the shard can unmap.
pub(super) fn check(spec: &VmSpec) -> Result<(), Fault> {
    let Some(resident) = spec.resident else {
        return match (&spec.paging_file, spec.paging_disk) {
            (Some(_), _) => Err(unpaged(
                "paging_file",
                "a paging file of a VM whose memory is not paged",
            )),
            (None, Some(_)) => Err(unpaged(
                "paging_disk",
                "a paging disk of a VM whose memory is not paged",
            )),
            (None, None) => Ok(()),
        };
    };
    if resident.0 < RESIDENT_MIN_BYTES {
        let least = Size(RESIDENT_MIN_BYTES);
        return Err(fault(
            &["resident"],
            format!("{resident} of memory for the guest's pages is too little"),
            format!("give it {least} or more"),
        ));
    }
    if spec.pages != PagesSpec::Small {
        return Err(fault(
            &["pages"],
            "memory is paged in pages of 4 KiB",
            "use `pages = \"4K\"`, or leave out `resident`",
        )
        .or_by_flag("use `--pages 4K`, or leave out `--resident`"));
    }
    if spec.prefault {
        return Err(fault(
            &["prefault"],
            "paged memory is allocated when it is used",
            "leave out `prefault`, or `resident`",
        ));
    }
    if spec.span.is_some() {
        return Err(fault(
            &["resident"],
            "the memory of a spanning VM is not paged",
            "leave out `resident`, or `span`",
        )
        .or_by_flag("leave out `--resident`, or `--span`"));
    }
    if let Some(path) = asked_to_share(spec) {
        let path: Vec<_> = path.iter().map(String::as_str).collect();
        return Err(fault(
            &path,
            "a VM whose memory is paged maps no pages of images",
            "leave out `share` or `resident`, or use `share = \"never\"`",
        )
        .or_by_flag("leave out `--share` or `--resident`, or use `--share never`"));
    }
    spec.paging_disk.map_or(Ok(()), |disk| check_disk(spec, disk))
}

fn unpaged(key: &str, cause: &str) -> Fault {
    fault(&[key], cause, "add `resident`, as \"256M\", or leave it out")
        .or_by_flag("add --resident, as 256M, or leave it out")
}

/// Checks the size of the paging disk.
fn check_disk(spec: &VmSpec, disk: Size) -> Result<(), Fault> {
    if disk.0 < DISK_MIN_BYTES || !disk.0.is_multiple_of(PAGE_BYTES) {
        return Err(fault(
            &["paging_disk"],
            format!("{disk} is no size of a paging disk"),
            "use a multiple of 4K from 1M on, as \"512M\"",
        )
        .or_by_flag("use a multiple of 4K from 1M on, as 512M"));
    }
    let most = spec
        .memory
        .0
        .saturating_mul(DISK_MAX_MEMORIES)
        .min(DISK_MAX_BYTES);
    if disk.0 > most {
        return Err(fault(
            &["paging_disk"],
            format!(
                "a paging disk of {disk} for {} of memory is too large",
                spec.memory
            ),
            format!("give it {} at most", Size(most)),
        ));
    }
    Ok(())
}
