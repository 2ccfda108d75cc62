//! The lab hosts' kernel: Debian's generic one, fetched once by any user and kept in the cache directory.
//!
//! A fetch works in a separate directory, which is renamed into place when it is complete.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::LabError;
use crate::error::Context;
use crate::module;

/// A kernel and its modules.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// File of the kernel, a bzImage.
    pub image: PathBuf,
    /// `lib/modules/VERSION`, or as much of it as a lab host needs.
    pub modules: PathBuf,
}

/// Packages of the kernel series with which labs were reliable: of 6.12 one in ten guests failed.
const SERIES_PREFIX: &str = "linux-image-6.1.0-";

/// The package that depends on the newest generic kernel.
const META_PACKAGE: &str = "linux-image-amd64";

/// The kernel named by the environment, else the one in the cache, else Debian's, fetched.
pub fn find(cache: &Path) -> Result<Kernel, LabError> {
    let variable = |name| std::env::var_os(name).map(PathBuf::from);
    if let (Some(image), Some(modules)) = (
        variable("MIRRORBALL_LAB_KERNEL"),
        variable("MIRRORBALL_LAB_MODULES"),
    ) {
        return Ok(Kernel { image, modules });
    }
    let kernel = |directory: PathBuf| Kernel {
        image: directory.join("vmlinuz"),
        modules: directory.join("modules"),
    };
    // One that was fetched for another list of modules lacks some.
    let suffix = format!("+{}", module::wanted_name());
    let mut kept: Vec<PathBuf> = fs::read_dir(cache)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| {
            path.file_name().is_some_and(|name| {
                let name = name.to_string_lossy();
                name.starts_with("kernel-") && name.ends_with(&suffix)
            })
        })
        .collect();
    // The series known to work first, then the newest by name.
    kept.sort_by_key(|path| (path.to_string_lossy().contains(SERIES_PREFIX), path.clone()));
    match kept.pop() {
        Some(directory) => Ok(kernel(directory)),
        None => fetch(cache).map(kernel),
    }
}

fn fetch(cache: &Path) -> Result<PathBuf, LabError> {
    eprintln!("mirrorball: fetching a kernel for lab hosts (70 MB, once)");
    let package = package()?;
    let work = cache.join(format!(".fetch-{}", std::process::id()));
    fs::create_dir_all(&work).on("make", &work)?;
    let result = fetch_into(
        &work,
        &package,
        &cache.join(format!("kernel-{package}+{}", module::wanted_name())),
    );
    let _ = fs::remove_dir_all(&work);
    result
}

/// Returns the newest of the packages that are known to work, else the distribution's.
fn package() -> Result<String, LabError> {
    let known = run(Command::new("apt-cache").args(["pkgnames", SERIES_PREFIX]))?;
    if let Some(name) = newest(&known) {
        return Ok(name);
    }
    let output = run(Command::new("apt-cache").args(["depends", META_PACKAGE]))?;
    let name = output
        .lines()
        .filter_map(|line| line.trim().strip_prefix("Depends: "))
        .find(|name| name.starts_with("linux-image-"))
        .map(str::to_string)
        .ok_or_else(|| LabError::NoKernel {
            reason: format!(
                "apt knows no {META_PACKAGE} (is this Debian, and has `apt-get update` been run?)"
            ),
        })?;
    eprintln!(
        "mirrorball: no Linux 6.1 for lab hosts in apt's lists: {name}, with which labs were less reliable"
    );
    Ok(name)
}

/// `linux-image-6.1.0-N-amd64` of the greatest N.
fn newest(names: &str) -> Option<String> {
    names
        .lines()
        .filter_map(|name| {
            let build = name.strip_prefix(SERIES_PREFIX)?.strip_suffix("-amd64")?;
            Some((build.parse::<u32>().ok()?, name.to_string()))
        })
        .max()
        .map(|(_, name)| name)
}

fn fetch_into(work: &Path, package: &str, place: &Path) -> Result<PathBuf, LabError> {
    // apt verifies the package against the signed lists.
    run(Command::new("apt-get")
        .args(["download", package])
        .current_dir(work))?;
    let archive = first(work, |name| name.ends_with(".deb"))?;
    let tree = work.join("tree");
    run(Command::new("dpkg-deb").arg("-x").arg(&archive).arg(&tree))?;
    let modules = first(&tree.join("lib/modules"), |_| true)?;
    let ready = work.join("ready");
    let kept = ready.join("modules");
    fs::create_dir_all(&kept).on("make", &kept)?;
    for module in module::in_order(&modules)? {
        let target = kept.join(format!("{}.ko", module.name));
        fs::copy(&module.path, &target).on("write", &target)?;
    }
    let image = first(&tree.join("boot"), |name| name.starts_with("vmlinuz-"))?;
    let target = ready.join("vmlinuz");
    fs::copy(image, &target).on("write", &target)?;
    match fs::rename(&ready, place) {
        Ok(()) => {}
        // Another process was faster.
        Err(_) if place.join("vmlinuz").exists() => {}
        Err(error) => return Err(error).on("make", place),
    }
    Ok(place.to_path_buf())
}

fn first(directory: &Path, wanted: impl Fn(&str) -> bool) -> Result<PathBuf, LabError> {
    fs::read_dir(directory)
        .on("read", directory)?
        .flatten()
        .find(|entry| wanted(&entry.file_name().to_string_lossy()))
        .map(|entry| entry.path())
        .ok_or_else(|| LabError::NoKernel {
            reason: format!("{} lacks files that a kernel package has", directory.display()),
        })
}

fn run(command: &mut Command) -> Result<String, LabError> {
    let name = command.get_program().to_string_lossy().into_owned();
    // SAFETY: prctl is async-signal-safe and touches nothing of the parent.
    unsafe {
        command.pre_exec(|| {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            Ok(())
        });
    }
    let no_kernel = |reason| LabError::NoKernel { reason };
    let output = command
        .output()
        .map_err(|error| no_kernel(format!("{name} can't be run: {error}")))?;
    if !output.status.success() {
        let words = String::from_utf8_lossy(&output.stderr);
        return Err(no_kernel(format!(
            "{name} failed: {}",
            words.trim().lines().last().unwrap_or_default()
        )));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    #[test]
    fn newest_plain_kernel_of_the_series_is_selected() {
        let names = "linux-image-6.1.0-9-amd64\nlinux-image-6.1.0-56-cloud-amd64\n\
            linux-image-6.1.0-56-amd64\n\
                     linux-image-6.1.0-56-amd64-dbg\nlinux-image-6.1.0-50-rt-amd64\n";
        assert_eq!(
            super::newest(names).as_deref(),
            Some("linux-image-6.1.0-56-amd64")
        );
        assert_eq!(super::newest(""), None);
    }
}
