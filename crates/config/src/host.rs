//! What must hold of a VM's spec on this host: files that can be read, memory that exists, names given once.

use std::fs::File;
use std::path::Path;

use crate::error::ConfigError;
use crate::validate::{Fault, fault};
use crate::{VmFile, VmSpec};

/// What the checks need to know of the host.
#[derive(Clone, Copy, Debug)]
pub struct HostFacts {
    /// All of the host's memory.
    pub memory_bytes: u64,
}

impl HostFacts {
    /// Asks the host (`/proc/meminfo`); memory is unlimited when it does not say.
    pub fn of_this_host() -> Self {
        let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let kib = meminfo
            .lines()
            .find_map(|line| line.strip_prefix("MemTotal:"))
            .and_then(|rest| rest.split_whitespace().next())
            .and_then(|number| number.parse::<u64>().ok());
        Self {
            memory_bytes: kib.map_or(u64::MAX, |kib| kib.saturating_mul(1024)),
        }
    }
}

/// Checks a spec against the host. `file` is the text it came from, when it came from one.
pub fn check_host(spec: &VmSpec, file: Option<&VmFile>, facts: &HostFacts) -> Result<(), ConfigError> {
    host_fault(spec, facts).map_or(Ok(()), |fault| Err(placed(&fault, file)))
}

/// Finds the first name that two VMs have: one in `running`, or an earlier one of `files`.
pub fn duplicate_names(files: &[VmFile]) -> Result<(), ConfigError> {
    for (index, file) in files.iter().enumerate() {
        let Some(name) = &file.spec.name else { continue };
        if let Some(earlier) = files[..index]
            .iter()
            .find(|earlier| earlier.spec.name.as_ref() == Some(name))
        {
            let fault = fault(
                &["name"],
                format!("two VMs named {name:?}: {} has it too", earlier.source_name),
                "give each VM its own name",
            );
            return Err(placed(&fault, Some(file)));
        }
    }
    Ok(())
}

fn placed(fault: &Fault, file: Option<&VmFile>) -> ConfigError {
    match file {
        Some(file) => ConfigError::from_fault(&file.source_name, &file.text, fault),
        None => ConfigError::from_flags(fault),
    }
}

fn host_fault(spec: &VmSpec, facts: &HostFacts) -> Option<Fault> {
    if spec.memory.0 > facts.memory_bytes {
        let all = crate::Size(facts.memory_bytes >> 20 << 20);
        return Some(fault(
            &["memory"],
            format!("{} of memory is more than the host has ({all})", spec.memory),
            "give the VM less",
        ));
    }
    if let Some(kernel) = &spec.kernel {
        if let Some(why) = unreadable(&kernel.path) {
            return Some(fault(
                &["kernel", "path"],
                format!("kernel {}: {why}", kernel.path.display()),
                mend_of(&why),
            ));
        }
        if let Some(initrd) = &kernel.initrd
            && let Some(why) = unreadable(initrd)
        {
            return Some(fault(
                &["kernel", "initrd"],
                format!("initrd {}: {why}", initrd.display()),
                mend_of(&why),
            ));
        }
    }
    for (index, disk) in spec.disks.iter().enumerate() {
        if let Some(why) = unreadable(&disk.path) {
            let index = index.to_string();
            return Some(fault(
                &["disks", &index, "path"],
                format!("disk {}: {why}", disk.path.display()),
                mend_of(&why),
            ));
        }
    }
    None
}

fn unreadable(path: &Path) -> Option<String> {
    match std::fs::metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Some("no such file".to_owned()),
        Err(error) => return Some(error.to_string()),
        Ok(metadata) if metadata.is_dir() => return Some("is a directory".to_owned()),
        Ok(_) => {}
    }
    match File::open(path) {
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
            Some("no permission to read it".to_owned())
        }
        Err(error) => Some(error.to_string()),
        Ok(_) => None,
    }
}

fn mend_of(why: &str) -> &'static str {
    match why {
        "no such file" => "check the path; relative paths start at the VM file's folder",
        "no permission to read it" => "give your user permission to read it",
        _ => "name a file",
    }
}
