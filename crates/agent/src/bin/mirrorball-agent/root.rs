//! The root disk: finds the device that the kernel's command line names, mounts it, and runs its init.

use std::ffi::CString;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::time::{Duration, Instant};
use std::{fs, io};

use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use nix::unistd::{chdir, chroot, execv};

/// Time limit for the root's device to appear.
const DEVICE_WAIT: Duration = Duration::from_secs(15);

const NEW_ROOT: &str = "/root";

/// The reason why the root is not entered.
#[derive(Debug, thiserror::Error)]
pub enum RootError {
    #[error("root={0}: only a device, as root=/dev/vda, is understood")]
    NotADevice(String),
    #[error("the root {device} did not appear within 15 s; disks: {seen}")]
    Absent {
        device: String,
        /// Names of the disks that are there, or `none`.
        seen: String,
    },
    #[error("{NEW_ROOT}: {0}")]
    Folder(io::Error),
    #[error("can't mount the root {0} no file system to try")]
    NoFileSystem(String),
    #[error("can't mount the root {device} as {kind}: {error}")]
    Mount {
        device: String,
        /// The last file system that was tried.
        kind: String,
        error: Errno,
    },
    #[error("can't move /{place} into the root {device}: {error}")]
    Move {
        place: &'static str,
        device: String,
        error: Errno,
    },
    #[error("can't switch to the root {device}: {error}")]
    Switch { device: String, error: Errno },
    #[error("the root {0} has no init")]
    NoInit(String),
    #[error("can't start {init} of the root {device}: {error}")]
    Init {
        init: String,
        device: String,
        error: Errno,
    },
}

/// Options of the root on the command line.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct RootSpec {
    /// Device, from `root=`.
    device: Option<String>,
    /// Type of the file system, from `rootfstype=`.
    kind: Option<String>,
    /// Mount options, from `rootflags=` and `dax`.
    options: Vec<String>,
    /// Whether `rw` was the last of `ro` and `rw`.
    writable: bool,
    /// Path of init, from `init=`.
    init: Option<String>,
}

impl RootSpec {
    /// Reads the kernel's command line; the last of several options counts.
    pub fn parse(cmdline: &str) -> Self {
        let mut spec = Self::default();
        for word in cmdline.split_ascii_whitespace() {
            // The following words are for init.
            if word == "--" {
                break;
            }
            match word.split_once('=') {
                Some(("root", device)) => spec.device = Some(device.into()),
                Some(("rootfstype", kind)) => spec.kind = Some(kind.into()),
                Some(("rootflags", options)) => spec.options.extend(options.split(',').map(String::from)),
                Some(("init", init)) => spec.init = Some(init.into()),
                None if word == "rw" => spec.writable = true,
                None if word == "ro" => spec.writable = false,
                None if word == "dax" => spec.options.push("dax".into()),
                _ => {}
            }
        }
        spec
    }

    /// Returns whether the command line names a root.
    pub fn exists(&self) -> bool {
        self.device.as_ref().is_some_and(|device| !device.is_empty())
    }

    /// Mounts the root and runs its init. Returns the reason if that fails, and not at all otherwise.
    pub fn enter(&self) -> RootError {
        let device = self.device.clone().unwrap_or_default();
        if let Err(reason) = wait_for(&device) {
            return reason;
        }
        if let Err(reason) = self.mount(&device) {
            return reason;
        }
        for place in ["dev", "proc", "sys"] {
            let target = format!("{NEW_ROOT}/{place}");
            let moved = mount(
                Some(format!("/{place}").as_str()),
                target.as_str(),
                None::<&str>,
                MsFlags::MS_MOVE,
                None::<&str>,
            );
            if let Err(error) = moved {
                return RootError::Move { place, device, error };
            }
        }
        // The files of the initramfs are not needed any longer, and their memory is released.
        let _ = fs::remove_dir_all("/modules");
        for file in ["/init", "/bin/busybox"] {
            let _ = fs::remove_file(file);
        }
        let switched = chdir(NEW_ROOT)
            .and_then(|()| mount(Some("."), "/", None::<&str>, MsFlags::MS_MOVE, None::<&str>))
            .and_then(|()| chroot("."))
            .and_then(|()| chdir("/"));
        if let Err(error) = switched {
            return RootError::Switch { device, error };
        }
        let usual = ["/sbin/init", "/etc/init", "/bin/init", "/bin/sh"];
        let mut reason = RootError::NoInit(device.clone());
        for init in self.init.as_deref().into_iter().chain(usual) {
            if let Ok(program) = CString::new(init) {
                let Err(error) = execv(&program, &[&program]);
                if error != Errno::ENOENT {
                    reason = RootError::Init {
                        init: init.to_owned(),
                        device: device.clone(),
                        error,
                    };
                }
            }
        }
        reason
    }

    fn mount(&self, device: &str) -> Result<(), RootError> {
        fs::create_dir_all(NEW_ROOT).map_err(RootError::Folder)?;
        let flags = if self.writable {
            MsFlags::empty()
        } else {
            MsFlags::MS_RDONLY
        };
        let kinds: Vec<String> = match &self.kind {
            Some(kind) => kind.split(',').map(String::from).collect(),
            None => fs::read_to_string("/proc/filesystems")
                .unwrap_or_default()
                .lines()
                .filter_map(|line| line.strip_prefix('\t').map(String::from))
                .collect(),
        };
        let options = self.options.join(",");
        let mut last = None;
        for kind in &kinds {
            match mount(
                Some(device),
                NEW_ROOT,
                Some(kind.as_str()),
                flags,
                Some(options.as_str()),
            ) {
                Ok(()) => return Ok(()),
                Err(error) => last = Some((kind.clone(), error)),
            }
        }
        let device = device.to_owned();
        Err(match last {
            Some((kind, error)) => RootError::Mount { device, kind, error },
            None => RootError::NoFileSystem(device),
        })
    }
}

fn wait_for(device: &str) -> Result<(), RootError> {
    if !device.starts_with("/dev/") {
        return Err(RootError::NotADevice(device.to_owned()));
    }
    let deadline = Instant::now() + DEVICE_WAIT;
    while !fs::metadata(Path::new(device)).is_ok_and(|meta| meta.file_type().is_block_device()) {
        if Instant::now() >= deadline {
            let seen: Vec<String> = fs::read_dir("/sys/class/block")
                .into_iter()
                .flatten()
                .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
                .collect();
            let seen = if seen.is_empty() {
                "none".into()
            } else {
                seen.join(" ")
            };
            return Err(RootError::Absent {
                device: device.to_owned(),
                seen,
            });
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::RootSpec;

    #[test]
    fn last_word_counts_and_words_for_init_do_not() {
        let spec = RootSpec::parse(
            "ro root=/dev/vda root=/dev/pmem0 rootfstype=ext4 rw dax init=/x -- ro root=/no\n",
        );
        assert_eq!(spec.device.as_deref(), Some("/dev/pmem0"));
        assert_eq!(spec.kind.as_deref(), Some("ext4"));
        assert_eq!(spec.options, ["dax"]);
        assert_eq!(spec.init.as_deref(), Some("/x"));
        assert!(spec.writable && spec.exists());
    }

    #[test]
    fn no_root_word_means_no_root() {
        assert!(!RootSpec::parse("console=ttyS0 quiet").exists());
        assert!(!RootSpec::parse("root=").exists());
    }
}
