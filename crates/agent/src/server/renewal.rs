//! Gives a guest that resumed from a template an identity of its own: that of a clone, and the ids and keys
//! that a boot would have drawn: machine id, boot id, SSH host keys.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};

use super::{disks, identity};
use crate::protocol::Renewal;

/// The kernel's id of the boot, which it can't change.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// File that is mounted over [`BOOT_ID`].
const OWN_BOOT_ID: &str = "/run/mirrorball-boot-id";
/// Directory that exists while systemd is the init.
const SYSTEMD: &str = "/run/systemd/system";
/// Files with the machine's id, relative to the root.
const MACHINE_IDS: [&str; 2] = ["etc/machine-id", "var/lib/dbus/machine-id"];
/// Directory of the SSH host keys, relative to the root.
const SSH: &str = "etc/ssh";

/// Returns whether the guest has finished its start: by systemd's report, or true under another init, which
/// has started the agent last.
pub fn is_up() -> io::Result<bool> {
    if !Path::new(SYSTEMD).exists() {
        return Ok(true);
    }
    let state = Command::new("systemctl")
        .arg("is-system-running")
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output()?;
    Ok(has_started(&String::from_utf8_lossy(&state.stdout)))
}

/// Whether a state of systemd means that all services have started or failed.
fn has_started(state: &str) -> bool {
    matches!(state.trim(), "running" | "degraded")
}

/// Applies the renewal. Random numbers are first: keys are drawn from them.
pub fn renew(renewal: &Renewal) -> io::Result<()> {
    identity::assume(&renewal.identity)?;
    let root = Path::new("/");
    write_machine_id(root, &renewal.machine_id).map_err(in_step("the machine id"))?;
    replace_boot_id(&renewal.boot_id).map_err(in_step("the boot id"))?;
    disks::replace(&renewal.disks).map_err(in_step("the disks"))?;
    if !renewal.disks.is_empty() && Path::new(SYSTEMD).exists() {
        // Names of disks and partitions in /dev. A guest without udev has none.
        run_quietly("udevadm", &["settle", "--timeout=10"]);
    }
    let keys = draw_host_keys(root, &ssh_keygen).map_err(in_step("the SSH host keys"))?;
    if keys > 0 && Path::new(SYSTEMD).exists() {
        // A guest without the service has none to restart.
        run_quietly(
            "systemctl",
            &["--no-block", "try-restart", "ssh.service", "sshd.service"],
        );
    }
    Ok(())
}

/// Runs a program whose failure does not matter.
fn run_quietly(program: &str, arguments: &[&str]) {
    let _ = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
}

fn in_step(what: &'static str) -> impl FnOnce(io::Error) -> io::Error {
    move |error| io::Error::new(error.kind(), format!("{what}: {error}"))
}

/// Writes the machine's id into the files that exist below `root`. A link leads to a file that is written,
/// too.
fn write_machine_id(root: &Path, id: &str) -> io::Result<()> {
    for file in MACHINE_IDS.map(|file| root.join(file)) {
        if fs::symlink_metadata(&file).is_ok_and(|about| about.is_file()) {
            fs::write(&file, format!("{id}\n"))?;
        }
    }
    Ok(())
}

/// Mounts a file with another id over the kernel's.
fn replace_boot_id(id: &str) -> io::Result<()> {
    // That of an earlier renewal. Without one there is nothing to unmount.
    match umount2(BOOT_ID, MntFlags::MNT_DETACH) {
        Ok(()) | Err(Errno::EINVAL) => {}
        Err(error) => return Err(error.into()),
    }
    if let Err(error) = fs::remove_file(OWN_BOOT_ID)
        && error.kind() != io::ErrorKind::NotFound
    {
        return Err(error);
    }
    fs::write(OWN_BOOT_ID, format!("{id}\n"))?;
    fs::set_permissions(OWN_BOOT_ID, Permissions::from_mode(0o444))?;
    let none = None::<&str>;
    Ok(mount(Some(OWN_BOOT_ID), BOOT_ID, none, MsFlags::MS_BIND, none)?)
}

/// Replaces each SSH host key below `root` by one of the same kind that `draw` makes; returns their number.
/// The old keys are removed first, so that none of them is left after a failure.
fn draw_host_keys(root: &Path, draw: &dyn Fn(&str, &Path) -> io::Result<()>) -> io::Result<usize> {
    let entries = match fs::read_dir(root.join(SSH)) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        Err(error) => return Err(error),
    };
    let mut keys: Vec<(String, PathBuf)> = Vec::new();
    for entry in entries {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str());
        let kind = name.and_then(|name| name.strip_prefix("ssh_host_")?.strip_suffix("_key"));
        if let Some(kind) = kind.map(str::to_owned) {
            keys.push((kind, path));
        }
    }
    for (_, key) in &keys {
        fs::remove_file(key)?;
        if let Err(error) = fs::remove_file(key.with_extension("pub"))
            && error.kind() != io::ErrorKind::NotFound
        {
            return Err(error);
        }
    }
    keys.iter().try_for_each(|(kind, key)| draw(kind, key))?;
    Ok(keys.len())
}

/// Makes a host key of this kind.
fn ssh_keygen(kind: &str, key: &Path) -> io::Result<()> {
    let made = Command::new("ssh-keygen")
        .args(["-q", "-t", kind, "-N", "", "-f"])
        .arg(key)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()?;
    match made.success() {
        true => Ok(()),
        false => Err(io::Error::other(format!("ssh-keygen -t {kind} failed"))),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn machine_id_is_written_where_there_is_one_and_nowhere_else() {
        let root = tempfile::tempdir().unwrap();
        let path = |file: &str| root.path().join(file);
        write_machine_id(root.path(), "one").unwrap();
        assert!(!path("etc").exists());
        fs::create_dir_all(path("etc")).unwrap();
        fs::create_dir_all(path("var/lib/dbus")).unwrap();
        fs::write(path("etc/machine-id"), "old\n").unwrap();
        symlink(path("etc/machine-id"), path("var/lib/dbus/machine-id")).unwrap();
        write_machine_id(root.path(), "two").unwrap();
        assert_eq!(fs::read_to_string(path("etc/machine-id")).unwrap(), "two\n");
        let link = fs::symlink_metadata(path("var/lib/dbus/machine-id")).unwrap();
        assert!(link.is_symlink());
    }

    #[test]
    fn each_host_key_is_drawn_again_and_no_old_one_is_left_when_that_fails() {
        let root = tempfile::tempdir().unwrap();
        let ssh = root.path().join(SSH);
        let none = draw_host_keys(root.path(), &|_, _| panic!("no keys to draw")).unwrap();
        assert_eq!(none, 0);
        fs::create_dir_all(&ssh).unwrap();
        let files = ["ssh_host_rsa_key", "ssh_host_ed25519_key", "sshd_config"];
        for file in files {
            fs::write(ssh.join(file), "old").unwrap();
        }
        fs::write(ssh.join("ssh_host_rsa_key.pub"), "old").unwrap();
        let drawn = RefCell::new(Vec::new());
        let count = draw_host_keys(root.path(), &|kind, key| {
            assert!(!key.exists() && !key.with_extension("pub").exists(), "{kind}");
            drawn.borrow_mut().push(kind.to_owned());
            fs::write(key, "new")
        });
        assert_eq!(count.unwrap(), 2);
        let mut drawn = drawn.into_inner();
        drawn.sort();
        assert_eq!(drawn, ["ed25519", "rsa"]);
        assert_eq!(fs::read_to_string(ssh.join("sshd_config")).unwrap(), "old");
        let failing = |_: &str, _: &Path| Err(io::Error::other("no program"));
        assert!(draw_host_keys(root.path(), &failing).is_err());
        assert!(!ssh.join("ssh_host_rsa_key").exists());
        assert!(!ssh.join("ssh_host_ed25519_key").exists());
    }

    #[test]
    fn guest_is_up_when_systemd_waits_for_nothing_more() {
        for (state, up) in [
            ("running\n", true),
            ("degraded\n", true),
            ("starting\n", false),
            ("initializing\n", false),
            ("maintenance\n", false),
            ("", false),
        ] {
            assert_eq!(has_started(state), up, "{state:?}");
        }
    }
}
