//! `mirrorball cp`: files into a VM and out of it.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::ExitCode;

use hostfiles::{AtomicFile, private};
use indicatif::{ProgressBar, ProgressStyle};
use miette::{Result, miette};

use super::execution_site::{Found, find};
use crate::{guest, remote};

/// Copies `source` to `target`; one of them is `VM:PATH`.
pub fn cp(source: &str, target: &str) -> Result<ExitCode> {
    match (split(source), split(target)) {
        (None, Some((vm, path))) => put(vm, Path::new(source), path),
        (Some((vm, path)), None) => get(vm, path, Path::new(target)),
        _ => Err(miette!(
            help = "for example `mirrorball cp notes.txt web:/root/` or `mirrorball cp web:/etc/hostname .`",
            "one of source and target must be in a VM, as VM:PATH"
        )),
    }
}

/// Splits `VM:PATH`; a name with a slash before the colon is a file of this machine.
fn split(text: &str) -> Option<(&str, &str)> {
    text.split_once(':')
        .filter(|(vm, path)| !vm.is_empty() && !vm.contains('/') && !path.is_empty())
}

fn put(vm: &str, source: &Path, path: &str) -> Result<ExitCode> {
    let folder = match find(vm)? {
        Found::Here(folder) => folder,
        Found::Elsewhere(code) => return Ok(code),
    };
    let failed = |error| {
        miette!(
            help = "name a file that this user may read",
            "{}: {error}",
            source.display()
        )
    };
    let mut file = remote::open(source).map_err(failed)?;
    let facts = file.metadata().map_err(failed)?;
    if !facts.is_file() {
        return Err(miette!(
            help = "copy a directory as a tar file",
            "{}: not a file",
            source.display()
        ));
    }
    let name = source
        .file_name()
        .map(|name| name.to_string_lossy().into_owned())
        .unwrap_or_default();
    let bar = bar(facts.len());
    let agent = guest::connect_booting(vm, &folder, None)?;
    agent::client::put(agent, &mut file, &name, path, &mut |bytes| {
        bar.set_position(bytes)
    })
    .map_err(|error| guest::explain(vm, error))?;
    bar.finish_and_clear();
    Ok(ExitCode::SUCCESS)
}

fn get(vm: &str, path: &str, target: &Path) -> Result<ExitCode> {
    let folder = match find(vm)? {
        Found::Here(folder) => folder,
        Found::Elsewhere(code) => return Ok(code),
    };
    let failed = |error| {
        miette!(
            help = "name a place that this user may write",
            "{}: {error}",
            target.display()
        )
    };
    let name = Path::new(path).file_name().unwrap_or_default();
    let place = remote::new_place(target, Some(name)).map_err(failed)?;
    if place.path.metadata().is_ok_and(|about| !about.is_file()) {
        return Err(miette!(
            help = "name a file that may be replaced, or a directory",
            "{}: not a regular file",
            target.display()
        ));
    }
    let agent = guest::connect_booting(vm, &folder, None)?;
    let new = AtomicFile::beside(&place.path).map_err(failed)?;
    let bar = bar(0);
    let copied = agent::client::get(agent, path, new.file(), &mut |bytes| bar.set_position(bytes));
    bar.finish_and_clear();
    let copied = copied.map_err(|error| guest::explain(vm, error))?;
    // The guest chooses the bits, restricted by this user's umask.
    let mode = Permissions::from_mode(copied.mode & !private::umask());
    new.file()
        .set_permissions(mode)
        .and_then(|()| new.replace())
        .map_err(failed)?;
    Ok(ExitCode::SUCCESS)
}

fn bar(bytes: u64) -> ProgressBar {
    let style = ProgressStyle::with_template("{bytes}/{total_bytes} {bar:40} {bytes_per_sec}");
    let bar = if bytes > 0 {
        ProgressBar::new(bytes)
    } else {
        ProgressBar::new_spinner()
    };
    if let (true, Ok(style)) = (bytes > 0, style) {
        bar.set_style(style);
    }
    bar
}
