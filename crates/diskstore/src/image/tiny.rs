//! The image `tiny`: a kernel and an initramfs with the agent and busybox, no root disk. Boots in seconds;
//! for tests.

use std::fs;
use std::path::{Path, PathBuf};

use super::apt::{self, Apt};
use super::modules::Modules;
use super::sources::Sources;
use super::store::{Building, file_digest};
use super::{ImageError, ImageStore, KernelFlavour, Progress, Record, SUITE, failed, initrd, payload};

/// Parameters of a build.
#[derive(Clone, Debug)]
pub struct TinyRequest {
    /// The image's name.
    pub name: String,
    /// Debian's kernel package to take the kernel from.
    pub kernel: KernelFlavour,
    /// Archives of the packages.
    pub sources: Sources,
    /// The agent's program, static.
    pub agent: PathBuf,
}

/// Kernel command line of the image.
///
/// It disables the self-tests of ciphers and the files of the kernel's tracers, which take 29% of a start
/// (4.5 s instead of 6.3 s, emulated, 2026-11-24) and 9 MB of memory with Debian's 6.1 cloud kernel.
pub const TINY_CMDLINE: &str = "console=ttyS0 cryptomgr.notests \
    initcall_blacklist=tracer_init_tracefs,init_kprobe_trace,\
                                init_uprobe_trace,init_dynamic_event";

/// Builds the image.
pub fn build_tiny(
    store: &ImageStore,
    request: &TinyRequest,
    progress: &mut dyn FnMut(Progress),
) -> Result<Record, ImageError> {
    let mut step = |step: usize, what: &str| {
        progress(Progress {
            step,
            steps: 4,
            what: what.into(),
        })
    };
    check_agent(&request.agent)?;
    let build = store.begin(&request.name)?;
    step(1, "package lists");
    let apt = Apt::open(&store.cache(), &request.sources, &mut |line| step(1, line))?;
    step(2, "kernel and busybox packages");
    let busybox = apt.download("busybox-static", &mut |_| {})?;
    let unpacked = build.folder.join("unpacked");
    apt::unpack(&busybox, &unpacked)?;
    let mut record = Record::new(&request.name, String::new());
    let kernel = fetch_kernel(&apt, request.kernel)?;
    step(3, "kernel and initramfs");
    let busybox = unpacked.join("bin/busybox");
    add_kernel(&build, &kernel, &request.agent, Some(&busybox), &mut record)?;
    step(4, "checksums");
    fs::remove_dir_all(&unpacked).map_err(failed("remove", &unpacked))?;
    record.built_from = format!("Debian {SUITE}: {}, busybox", kernel.package);
    record.cmdline = TINY_CMDLINE.into();
    build.publish(&record)?;
    Ok(record)
}

/// A downloaded kernel package.
pub(super) struct KernelPackage {
    pub package: String,
    pub file: PathBuf,
}

pub(super) fn fetch_kernel(apt: &Apt, flavour: KernelFlavour) -> Result<KernelPackage, ImageError> {
    let package = apt.behind(flavour.package(), "linux-image-")?;
    let file = apt.download(&package, &mut |_| {})?;
    Ok(KernelPackage { package, file })
}

pub(super) fn check_agent(agent: &Path) -> Result<(), ImageError> {
    let bytes = fs::metadata(agent).map(|meta| meta.len());
    if bytes.is_ok_and(|bytes| bytes > 0) {
        return Ok(());
    }
    let reason = "the agent's program is not here; build it with `cargo build -p agent`".into();
    Err(ImageError::File {
        path: agent.into(),
        reason,
    })
}

/// Version text of an agent for the image's record: another program gives another text.
pub fn agent_version(agent: &Path) -> Result<String, ImageError> {
    check_agent(agent)?;
    let digest = file_digest(agent, false)?;
    let digest = digest.rsplit(':').next().unwrap_or_default();
    let short = digest.get(..12).unwrap_or(digest);
    Ok(format!("{}+{short}", env!("CARGO_PKG_VERSION")))
}

/// Adds the kernel (as an ELF when it can be extracted) and the initramfs to the build and its record.
pub(super) fn add_kernel(
    build: &Building,
    kernel: &KernelPackage,
    agent: &Path,
    busybox: Option<&Path>,
    record: &mut Record,
) -> Result<(), ImageError> {
    let unpacked = build.folder.join("kernel");
    apt::unpack(&kernel.file, &unpacked)?;
    let release = kernel.package.trim_start_matches("linux-image-");
    let vmlinuz = unpacked.join(format!("boot/vmlinuz-{release}"));
    let bytes = fs::read(&vmlinuz).map_err(failed("read", &vmlinuz))?;
    let write = |name: &str, bytes: &[u8]| {
        let path = build.folder.join(name);
        fs::write(&path, bytes).map_err(failed("write", path))
    };
    let name = match payload::extract(&bytes) {
        Some(elf) => {
            write("vmlinux", &elf)?;
            "vmlinux"
        }
        None => {
            write("vmlinuz", &bytes)?;
            "vmlinuz"
        }
    };
    let modules = Modules::find(&unpacked.join("lib/modules").join(release))?.needed()?;
    write("initrd", &initrd::make(agent, &modules, busybox)?)?;
    record.kernel = Some(build.file(name, false)?);
    record.initrd = Some(build.file("initrd", false)?);
    record.agent = Some(agent_version(agent)?);
    fs::remove_dir_all(&unpacked).map_err(failed("remove", &unpacked))
}
