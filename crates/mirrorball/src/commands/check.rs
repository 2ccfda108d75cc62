//! `mirrorball check`: reads VM files and reports errors in them.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use cell::cluster::reservation;
use config::{Size, VmFile, cpulist};
use miette::{Result, miette};

use crate::remote;

/// Checks VM files.
pub fn check(paths: &[PathBuf]) -> Result<ExitCode> {
    for file in read(paths)? {
        println!("{}: good", file.source_name);
        match reservation::foresee(&file.spec) {
            Ok(parts) => {
                for part in parts.iter().flatten() {
                    let vcpus: Vec<usize> = part.vcpus.clone().map(usize::from).collect();
                    let (vcpus, memory) = (cpulist::write(&vcpus), Size(part.memory_bytes));
                    println!("  in cell {}: vCPUs {vcpus}, {memory} of memory", part.cell);
                }
            }
            // This depends on the present cluster; the file is valid.
            Err(error) => println!("  now it could not start: {error}"),
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Reads and checks VM files. Relative paths in a file are relative to the file's folder.
pub fn read(paths: &[PathBuf]) -> Result<Vec<VmFile>> {
    let mut files = Vec::new();
    for path in paths {
        let text = remote::open(path)
            .and_then(std::io::read_to_string)
            .map_err(|error| miette!(help = "check the path", "VM file {}: {error}", path.display()))?;
        let source_name = path.display().to_string();
        let mut spec = config::parse(&source_name, &text)?;
        let folder = path.parent().unwrap_or(Path::new("."));
        if let Some(kernel) = &mut spec.kernel {
            for file in [&mut kernel.path, &mut kernel.initrd].into_iter().flatten() {
                *file = folder.join(&*file);
            }
        }
        for disk in &mut spec.disks {
            disk.path = folder.join(&disk.path);
        }
        for shared in &mut spec.folders {
            shared.path = folder.join(&shared.path);
        }
        files.push(VmFile {
            source_name,
            text,
            spec,
        });
    }
    config::duplicate_names(&files)?;
    let facts = remote::host_facts()?;
    for file in &files {
        config::check_host(&file.spec, Some(file), &facts)?;
    }
    Ok(files)
}
