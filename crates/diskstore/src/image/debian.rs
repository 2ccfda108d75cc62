//! The image `debian-12`: a small Debian on an ext4 root disk, made by mmdebstrap from Debian's own packages.
//!
//! All code that writes into the root runs as mmdebstrap's hook: as root, or unprivileged in a user namespace
//! in which the caller is root. The kernel's package is unpacked and not installed: its installation would
//! build an initramfs that is never used.

use std::fs::{self, File};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use super::apt::Apt;
use super::command::run;
use super::sources::Sources;
use super::store::Building;
use super::tiny::{KernelPackage, add_kernel, check_agent, fetch_kernel};
use super::{ImageError, ImageStore, KernelFlavour, Progress, Record, SUITE, failed};

/// Minimum size of a root, in bytes: its content and some free space.
const ROOT_BYTES_MIN: u64 = 512 << 20;

/// Kernel command line of the image: its root, and no self-tests of ciphers, which cost 0.5 s of each start.
pub const DEBIAN_CMDLINE: &str = "console=ttyS0 root=/dev/vda rootfstype=ext4 rw cryptomgr.notests";

/// Packages that a guest needs to start, be reachable, and have a network.
const PACKAGES: [&str; 7] = [
    "systemd-sysv",
    "udev",
    "kmod",
    "iproute2",
    "procps",
    "systemd-resolved",
    "netbase",
];

/// Parameters of a build.
#[derive(Clone, Debug)]
pub struct DebianRequest {
    /// The image's name.
    pub name: String,
    /// Additional packages.
    pub packages: Vec<String>,
    /// Size of the root disk in bytes; it is sparse.
    pub size_bytes: u64,
    /// Debian's kernel package to install.
    pub kernel: KernelFlavour,
    /// Archives of the packages.
    pub sources: Sources,
    /// The agent's program, static.
    pub agent: PathBuf,
}

/// Stages in mmdebstrap's words, and in ours.
const STAGES: [(&str, &str); 7] = [
    ("running apt-get update", "package lists"),
    ("downloading packages with apt", "downloading packages"),
    ("extracting archives", "unpacking the essential packages"),
    (
        "installing essential packages",
        "installing the essential packages",
    ),
    ("installing remaining packages", "installing the other packages"),
    ("cleaning package lists", "cleaning up"),
    ("running --customize-hook", "the guest's own settings"),
];

const STEPS: usize = STAGES.len() + 4;

/// Builds the image.
pub fn build_debian(
    store: &ImageStore,
    request: &DebianRequest,
    progress: &mut dyn FnMut(Progress),
) -> Result<Record, ImageError> {
    let mut tell = |step: usize, what: &str| {
        progress(Progress {
            step,
            steps: STEPS,
            what: what.into(),
        })
    };
    check(request)?;
    let mode = mode()?;
    let build = store.begin(&request.name)?;
    tell(1, "kernel package");
    let apt = Apt::open(&store.cache(), &request.sources, &mut |_| {})?;
    let kernel = fetch_kernel(&apt, request.kernel)?;
    tell(2, "kernel and initramfs");
    let mut record = Record::new(&request.name, String::new());
    add_kernel(&build, &kernel, &request.agent, None, &mut record)?;

    let root = build.folder.join("root.raw");
    let file = File::create(&root).map_err(failed("write", &root))?;
    file.set_len(request.size_bytes).map_err(failed("write", &root))?;
    if mode == "unshare" {
        // The namespace's root is another user.
        file.set_permissions(fs::Permissions::from_mode(0o666))
            .map_err(failed("write", &root))?;
        build.open_to_namespace()?;
    }
    let overlay = build.folder.join("overlay");
    settings(&overlay, &request.agent).map_err(failed("write", &overlay))?;
    let list = build.folder.join("debian.sources");
    fs::write(&list, &request.sources.text).map_err(failed("write", &list))?;
    let hook = build.folder.join("customize");
    fs::write(&hook, HOOK).map_err(failed("write", &hook))?;

    let include = PACKAGES
        .iter()
        .map(|name| name.to_string())
        .chain(request.packages.iter().cloned());
    let include: Vec<String> = include.collect();
    let mut mmdebstrap = mmdebstrap(&build, mode, &include, &list, &hook, &kernel)?;
    run(&mut mmdebstrap, "mmdebstrap", &mut |line| {
        if let Some(index) = STAGES.iter().position(|(words, _)| line.contains(words)) {
            tell(3 + index, STAGES[index].1);
        } else if line.contains("mirrorball: file system") {
            tell(STEPS - 1, "the root's file system");
        }
    })?;
    tell(STEPS, "checksums");
    fs::remove_dir_all(&overlay).map_err(failed("remove", &overlay))?;
    for file in [&list, &hook] {
        fs::remove_file(file).map_err(failed("remove", file))?;
    }
    drop(file);
    record.disk = Some(build.file("root.raw", true)?);
    record.format = Some("raw".into());
    record.cmdline = DEBIAN_CMDLINE.into();
    record.packages = request.packages.clone();
    record.built_from = format!("Debian {SUITE}: {}, {}", kernel.package, include.join(", "));
    build.publish(&record)?;
    Ok(record)
}

/// Checks the agent, the size and the packages of a request.
fn check(request: &DebianRequest) -> Result<(), ImageError> {
    check_agent(&request.agent)?;
    if request.size_bytes < ROOT_BYTES_MIN {
        return Err(ImageError::Unable("a root disk needs 512M at least".into()));
    }
    let good = |name: &String| {
        name.chars()
            .all(|c| c.is_ascii_alphanumeric() || "+-.:".contains(c))
    };
    if let Some(bad) = request
        .packages
        .iter()
        .find(|name| name.is_empty() || name.starts_with('-') || !good(name))
    {
        return Err(ImageError::Unable(format!("{bad:?} is not a package's name")));
    }
    Ok(())
}

/// The command that makes the root disk in the build's folder, from the archives of `list`.
fn mmdebstrap(
    build: &Building,
    mode: &str,
    include: &[String],
    list: &Path,
    hook: &Path,
    kernel: &KernelPackage,
) -> Result<Command, ImageError> {
    let mut mmdebstrap = Command::new("mmdebstrap");
    mmdebstrap
        .args(["--variant=minbase", "--format=null"])
        .arg(format!("--mode={mode}"))
        .arg(format!("--include={}", include.join(",")))
        .arg("--architectures=amd64")
        .arg("--aptopt=APT::Install-Recommends \"false\"")
        .arg("--aptopt=Acquire::Languages \"none\"");
    for path in ["doc", "man", "locale", "info", "lintian", "bug"] {
        mmdebstrap.arg(format!("--dpkgopt=path-exclude=/usr/share/{path}/*"));
    }
    mmdebstrap
        .arg("--dpkgopt=path-include=/usr/share/doc/*/copyright")
        .arg("--dpkgopt=force-unsafe-io")
        .arg(format!("--customize-hook=sh {} \"$1\"", quoted(hook)?))
        .args([SUITE, "/dev/null"])
        .arg(list)
        .env("MIRRORBALL_BUILD", &build.folder)
        .env("MIRRORBALL_KERNEL", &kernel.file)
        .env(
            "MIRRORBALL_RELEASE",
            kernel.package.trim_start_matches("linux-image-"),
        );
    let path = std::env::var("PATH").unwrap_or_default();
    mmdebstrap.env("PATH", format!("{path}:/usr/sbin:/sbin"));
    Ok(mmdebstrap)
}

/// Mode of mmdebstrap: as root, or in a user namespace.
fn mode() -> Result<&'static str, ImageError> {
    if nix::unistd::Uid::effective().is_root() {
        return Ok("root");
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    if !std::env::split_paths(&path).any(|folder| folder.join("newuidmap").exists()) {
        return Err(ImageError::ProgramMissing {
            program: "newuidmap".into(),
            package: "uidmap",
        });
    }
    Ok("unshare")
}

/// Quotes a path as one word for a shell.
fn quoted(path: &Path) -> Result<String, ImageError> {
    match path.to_str() {
        Some(text) => Ok(format!("'{}'", text.replace('\'', "'\\''"))),
        None => Err(ImageError::File {
            path: path.into(),
            reason: "its name is not UTF-8".into(),
        }),
    }
}

/// Runs in the new root's place, with the root as `$1`.
const HOOK: &str = r#"set -e
root=$1
dpkg-deb --fsys-tarfile "$MIRRORBALL_KERNEL" \
    | tar -x -C "$root" --keep-directory-symlink --no-same-owner ./lib/modules
chroot "$root" depmod "$MIRRORBALL_RELEASE"
cp -a --no-preserve=ownership "$MIRRORBALL_BUILD/overlay/." "$root/"
for unit in apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer fstrim.timer e2scrub_all.timer \
    e2scrub_reap.service systemd-networkd-wait-online.service systemd-timesyncd.service \
    systemd-hwdb-update.service systemd-pstore.service systemd-binfmt.service systemd-update-utmp.service \
    systemd-update-utmp-runlevel.service systemd-random-seed.service systemd-journal-flush.service \
    systemd-firstboot.service getty@tty1.service sys-kernel-debug.mount sys-kernel-tracing.mount \
    dev-hugepages.mount dev-mqueue.mount modprobe@drm.service modprobe@efi_pstore.service \
    modprobe@configfs.service modprobe@fuse.service modprobe@loop.service modprobe@dm_mod.service; do
    ln -sf /dev/null "$root/etc/systemd/system/$unit"
done
chroot "$root" systemctl -q enable systemd-networkd.service systemd-resolved.service \
    mirrorball-agent.service serial-getty@ttyS0.service
chroot "$root" passwd -q -d root
rm -rf "$root/var/cache/apt/"*.bin "$root/var/lib/apt/lists/"*
rm -rf "$root/var/log/"*.log "$root/var/cache/debconf/"*-old
: > "$root/etc/machine-id"
echo "mirrorball: file system" >&2
# Bound elsewhere without what is mounted in it: its /proc, /sys and /dev.
mount --bind "$root" "$root/mnt"
trap 'umount "$root/mnt"' EXIT
mke2fs -q -F -t ext4 -L root -m 0 -J size=16 -E lazy_itable_init=0,lazy_journal_init=0,root_owner=0:0 \
    -d "$root/mnt" "$MIRRORBALL_BUILD/root.raw"
"#;

/// Writes the files of the overlay on the root.
fn settings(overlay: &Path, agent: &Path) -> std::io::Result<()> {
    let write = |path: &str, text: &str| -> std::io::Result<()> {
        let path = overlay.join(path);
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        fs::write(path, text)
    };
    write("etc/hostname", "mirrorball\n")?;
    write("etc/hosts", "127.0.0.1 localhost mirrorball\n::1 localhost\n")?;
    write("etc/fstab", "# The root is mounted by the initramfs.\n")?;
    write("etc/systemd/network/10-dhcp.network", NETWORK)?;
    write(
        "etc/systemd/system/serial-getty@ttyS0.service.d/autologin.conf",
        AUTOLOGIN,
    )?;
    write("etc/systemd/system/mirrorball-agent.service", SERVICE)?;
    write(
        "etc/systemd/journald.conf.d/volatile.conf",
        "[Journal]\nStorage=volatile\nRuntimeMaxUse=8M\n",
    )?;
    write(
        "etc/systemd/system.conf.d/quick.conf",
        "[Manager]\nDefaultTimeoutStopSec=10s\n",
    )?;
    let program = overlay.join("usr/sbin/mirrorball-agent");
    fs::create_dir_all(overlay.join("usr/sbin"))?;
    fs::copy(agent, &program)?;
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
    symlink(
        "/usr/lib/systemd/system/multi-user.target",
        overlay.join("etc/systemd/system/default.target"),
    )
}

const NETWORK: &str = "[Match]\nName=en* eth*\n\n[Network]\nDHCP=yes\n";

/// The console belongs to the VM: its users own the VM, so it requires no password.
const AUTOLOGIN: &str = "[Service]\nExecStart=\nExecStart=-/sbin/agetty --autologin root --keep-baud \
                         115200,57600,38400,9600 - $TERM\n";

/// Starts early, so that the agent replies while other services still start.
const SERVICE: &str = "\
[Unit]
Description=Mirrorball agent
DefaultDependencies=no
After=systemd-remount-fs.service
Conflicts=shutdown.target
Before=shutdown.target

[Service]
ExecStart=/usr/sbin/mirrorball-agent
Restart=always
RestartSec=1
KillMode=process
Environment=HOME=/root

[Install]
WantedBy=sysinit.target
";
