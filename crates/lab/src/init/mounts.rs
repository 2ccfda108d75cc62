//! The mounts of a lab host: the outer machine's `/` by 9p, and fresh kernel file systems over it.
//!
//! `cache=mmap` keeps no data between opens, so both sides see each other's files; directories of immutable
//! files get a second mount with `cache=loose`, which uses the page cache.

use std::fs;
use std::path::{Path, PathBuf};

use nix::mount::{MsFlags, mount};

use super::Failure;
use crate::boot::{BESIDE, BootConfig, PROGRAM};

/// Where the new root is put together.
const NEW: &str = "/root";

/// Kernel file systems that loading modules needs.
pub fn basic() -> Result<(), Failure> {
    plain("proc", "/proc", "")?;
    plain("sysfs", "/sys", "")?;
    plain("devtmpfs", "/dev", "")
}

/// Puts the new root together and moves into it.
///
/// The root is moved over the initramfs instead of pivoted, so that `pivot_root` works for programs of the
/// host.
pub fn change_root(boot: &BootConfig) -> Result<(), Failure> {
    share(NEW, "mmap")?;
    cached(&boot.cached);
    plain("tmpfs", &format!("{NEW}/run"), "mode=755")?;
    for directory in ["lab", "lock", "mirrorball", "user"] {
        fs::create_dir_all(format!("{NEW}/run/{directory}"))?;
    }
    bind("/init", &format!("{NEW}{PROGRAM}"))?;
    for name in BESIDE {
        let source = format!("/{name}");
        if Path::new(&source).exists() {
            let target = Path::new(PROGRAM).with_file_name(name);
            bind(&source, &format!("{NEW}{}", target.display()))?;
        }
    }
    names(boot)?;
    for directory in ["dev", "proc", "sys"] {
        let source = format!("/{directory}");
        let target = format!("{NEW}/{directory}");
        mount(
            Some(source.as_str()),
            target.as_str(),
            None::<&str>,
            MsFlags::MS_MOVE,
            None::<&str>,
        )
        .map_err(|error| format!("moving {source}: {error}"))?;
    }
    fs::create_dir_all(format!("{NEW}/dev/pts"))?;
    fs::create_dir_all(format!("{NEW}/dev/shm"))?;
    plain("devpts", &format!("{NEW}/dev/pts"), "ptmxmode=666,mode=620,gid=5")?;
    plain("tmpfs", &format!("{NEW}/dev/shm"), "mode=1777")?;
    let _ = plain("cgroup2", &format!("{NEW}/sys/fs/cgroup"), "");
    let _ = plain("debugfs", &format!("{NEW}/sys/kernel/debug"), "");
    for (link, target) in [
        ("fd", "/proc/self/fd"),
        ("stdin", "fd/0"),
        ("stdout", "fd/1"),
        ("stderr", "fd/2"),
    ] {
        let _ = std::os::unix::fs::symlink(target, format!("{NEW}/dev/{link}"));
    }
    std::env::set_current_dir(NEW)?;
    mount(Some("."), "/", None::<&str>, MsFlags::MS_MOVE, None::<&str>)?;
    nix::unistd::chroot(".")?;
    std::env::set_current_dir("/")?;
    Ok(())
}

fn share(target: &str, cache: &str) -> Result<(), Failure> {
    // 500 KiB is the most that QEMU's transport carries.
    let options = format!("trans=virtio,version=9p2000.L,msize=512000,cache={cache}");
    mount(
        Some("root"),
        target,
        Some("9p"),
        MsFlags::empty(),
        Some(options.as_str()),
    )
    .map_err(|error| format!("mounting this machine's root by 9p: {error}").into())
}

/// Lays the cached mount's view of directories over the plain one; without it things are slower, not wrong.
fn cached(directories: &[PathBuf]) {
    let options = "trans=virtio,version=9p2000.L,msize=512000,cache=loose";
    let through = "/sys";
    if directories.is_empty()
        || mount(
            Some("root-cached"),
            through,
            Some("9p"),
            MsFlags::empty(),
            Some(options),
        )
        .is_err()
    {
        return;
    }
    for directory in directories {
        let target = format!("{NEW}{}", directory.display());
        if Path::new(&target).is_dir() {
            let _ = bind(&format!("{through}{}", directory.display()), &target);
        }
    }
    // Only the binds keep the mount from here on.
    let _ = nix::mount::umount2(through, nix::mount::MntFlags::MNT_DETACH);
}

/// Gives the host names of the lab's hosts, and a resolver where the outer machine's is below `/run`.
fn names(boot: &BootConfig) -> Result<(), Failure> {
    let outer = fs::read_to_string(format!("{NEW}/etc/hosts")).unwrap_or_default();
    let mut hosts = format!("127.0.1.1 {}\n", boot.name);
    for (name, address) in &boot.names {
        hosts.push_str(&format!("{address} {name}\n"));
    }
    let own = format!("{NEW}/run/lab/hosts");
    fs::write(&own, hosts + &outer)?;
    let _ = bind(&own, &format!("{NEW}/etc/hosts"));
    if let Ok(target) = fs::read_link(format!("{NEW}/etc/resolv.conf")) {
        let target = Path::new("/etc").join(target);
        let text = target.to_string_lossy().replace("/etc/../", "/");
        if text.starts_with("/run/") {
            let inside = format!("{NEW}{text}");
            if let Some(parent) = Path::new(&inside).parent() {
                fs::create_dir_all(parent)?;
            }
            fs::write(inside, "nameserver 10.0.2.3\n")?;
        }
    }
    Ok(())
}

fn plain(kind: &str, target: &str, options: &str) -> Result<(), Failure> {
    match mount(Some(kind), target, Some(kind), MsFlags::empty(), Some(options)) {
        Ok(()) | Err(nix::errno::Errno::EBUSY) => Ok(()),
        Err(error) => Err(format!("mounting {kind} on {target}: {error}").into()),
    }
}

fn bind(source: &str, target: &str) -> Result<(), Failure> {
    if Path::new(source).is_file() && !Path::new(target).exists() {
        fs::write(target, "")?;
    }
    mount(Some(source), target, None::<&str>, MsFlags::MS_BIND, None::<&str>)
        .map_err(|error| format!("binding {source} to {target}: {error}").into())
}
