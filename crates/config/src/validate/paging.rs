//! Checks of paging.

use super::sharing::asked_to_share;
use crate::Size;
use crate::fault::{Fault, fault};
use crate::vm::{PagesSpec, VmSpec};

/// Minimum of `resident`, bytes (`policy::memory::resident_set::LIMIT_MIN_PAGES`).
const RESIDENT_MIN_BYTES: u64 = 16 << 20;

/// Guest memory that is paged is one file of 4 KiB pages, each of which the shard can unmap.
pub(super) fn check(spec: &VmSpec) -> Result<(), Fault> {
    let Some(resident) = spec.resident else {
        return match &spec.paging_file {
            Some(_) => Err(fault(
                &["paging_file"],
                "a paging file of a VM whose memory is not paged",
                "add `resident`, as \"256M\", or leave it out",
            )
            .or_by_flag("add --resident, as 256M, or leave it out")),
            None => Ok(()),
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
            "a VM whose memory is paged shares no pages of images",
            "leave out `share` or `resident`, or use `share = \"never\"`",
        )
        .or_by_flag("leave out `--share` or `--resident`, or use `--share never`"));
    }
    Ok(())
}
