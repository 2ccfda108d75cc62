//! `mirrorball check`: reads VM files and says what is wrong with them.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use config::{HostFacts, VmFile};
use miette::{Result, miette};

/// Checks VM files.
pub fn check(paths: &[PathBuf]) -> Result<ExitCode> {
    for file in read(paths)? {
        println!("{}: good", file.source_name);
    }
    Ok(ExitCode::SUCCESS)
}

/// Reads and checks VM files. Relative paths in a file start at the file's folder.
pub fn read(paths: &[PathBuf]) -> Result<Vec<VmFile>> {
    let mut files = Vec::new();
    for path in paths {
        let text = std::fs::read_to_string(path)
            .map_err(|error| miette!(help = "check the path", "VM file {}: {error}", path.display()))?;
        let source_name = path.display().to_string();
        let mut spec = config::parse(&source_name, &text)?;
        let folder = path.parent().unwrap_or(Path::new("."));
        if let Some(kernel) = &mut spec.kernel {
            kernel.path = folder.join(&kernel.path);
            kernel.initrd = kernel.initrd.as_ref().map(|initrd| folder.join(initrd));
        }
        for disk in &mut spec.disks {
            disk.path = folder.join(&disk.path);
        }
        files.push(VmFile {
            source_name,
            text,
            spec,
        });
    }
    config::duplicate_names(&files)?;
    let facts = HostFacts::of_this_host();
    for file in &files {
        config::check_host(&file.spec, Some(file), &facts)?;
    }
    Ok(files)
}
