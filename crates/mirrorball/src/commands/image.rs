//! `mirrorball image`: builds, lists, checks, imports and removes images, and makes templates of them.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use config::Size;
use diskstore::image::{
    DEBIAN_CMDLINE, DebianRequest, FileKind, ImageError, ImageStore, ImportRequest, KernelFlavour, Mirror,
    Progress, SUITE, Sources, TINY_CMDLINE, TinyRequest, agent_version, build_debian, build_tiny, import,
};
use indicatif::{ProgressBar, ProgressStyle};
use miette::{Result, miette};

use super::template::{self, WarmArgs};
use crate::progress;

/// Subcommands of `mirrorball image`.
#[derive(Debug, Subcommand)]
pub enum ImageCommand {
    /// Build an image from Debian's own packages
    Build(BuildArgs),
    /// List images
    Ls {
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Remove images
    Rm {
        /// Names of the images
        #[arg(required = true)]
        names: Vec<String>,
    },
    /// Make an image of a disk (raw, qcow2) or a kernel (bzImage, ELF)
    Import(ImportArgs),
    /// Compare an image's files with their checksums
    Verify {
        /// Name of the image
        name: String,
    },
    /// Make a template of an image, from which `run --warm` starts VMs; list or remove templates
    Warm(WarmArgs),
}

/// Arguments of `build`.
#[derive(Debug, Args)]
pub struct BuildArgs {
    /// Which: a Debian with a root disk, or a kernel with busybox that boots in seconds
    what: Recipe,
    /// Packages to add, separated by commas (debian-12)
    #[arg(long, value_delimiter = ',')]
    packages: Vec<String>,
    /// Size of the root disk, which is sparse (debian-12)
    #[arg(long, default_value = "2G")]
    size: Size,
    /// Debian's kernel for virtual machines, or its general one
    #[arg(long, default_value = "cloud")]
    kernel: Kernel,
    /// Debian archive to take packages from, instead of those that this machine's apt is configured for
    #[arg(long, value_name = "URL", value_parser = Mirror::parse)]
    mirror: Option<Mirror>,
    /// Archive of security updates, when not the mirror's URL followed by `-security`
    #[arg(long, value_name = "URL", value_parser = Mirror::parse, requires = "mirror")]
    security_mirror: Option<Mirror>,
    /// The image's name, when not that of the recipe
    #[arg(long)]
    name: Option<String>,
    /// Do nothing when there is an image of this name with this program's agent and these packages
    #[arg(long)]
    if_missing: bool,
}

/// Images that can be built.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Recipe {
    #[value(name = "debian-12")]
    Debian12,
    Tiny,
}

/// Debian's kernels.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Kernel {
    Cloud,
    Generic,
}

/// Arguments of `import`.
#[derive(Debug, Args)]
pub struct ImportArgs {
    /// A disk or a kernel, detected by its content
    file: Option<PathBuf>,
    /// Kernel to go with it
    #[arg(long)]
    kernel: Option<PathBuf>,
    /// Initramfs to go with it
    #[arg(long)]
    initrd: Option<PathBuf>,
    /// Root disk to go with it
    #[arg(long)]
    disk: Option<PathBuf>,
    /// The guest's command line
    #[arg(long)]
    cmdline: Option<String>,
    /// The image's name, when not the file's
    #[arg(long)]
    name: Option<String>,
}

impl ImageCommand {
    /// Whether it changes nothing.
    pub fn only_prints(&self) -> bool {
        match self {
            Self::Ls { .. } | Self::Verify { .. } => true,
            Self::Warm(arguments) => arguments.only_prints(),
            Self::Build(_) | Self::Rm { .. } | Self::Import(_) => false,
        }
    }
}

impl Recipe {
    fn name(self) -> &'static str {
        match self {
            Self::Debian12 => "debian-12",
            Self::Tiny => "tiny",
        }
    }

    /// Kernel command line of its images.
    fn cmdline(self) -> &'static str {
        match self {
            Self::Debian12 => DEBIAN_CMDLINE,
            Self::Tiny => TINY_CMDLINE,
        }
    }
}

/// Runs a subcommand and prints the result.
pub fn run(command: ImageCommand) -> Result<ExitCode> {
    let failed = |error: ImageError| miette!("{error}");
    let store = ImageStore::open_default().map_err(failed)?;
    match command {
        ImageCommand::Build(arguments) => build(&store, arguments).map_err(failed)?,
        ImageCommand::Ls { json } => list(&store, json).map_err(failed)?,
        ImageCommand::Rm { names } => {
            for name in &names {
                store.remove(name).map_err(failed)?;
                template::remove_of_image(name)?;
            }
        }
        ImageCommand::Import(arguments) => run_import(&store, arguments).map_err(failed)?,
        ImageCommand::Verify { name } => {
            let bar = progress::spinner("reading");
            let verified = store.verify(&name);
            bar.finish_and_clear();
            verified.map_err(failed)?;
            println!("{name}: as it was made");
        }
        ImageCommand::Warm(arguments) => return template::warm(&arguments),
    }
    Ok(ExitCode::SUCCESS)
}

fn build(store: &ImageStore, arguments: BuildArgs) -> Result<(), ImageError> {
    let kernel = match arguments.kernel {
        Kernel::Cloud => KernelFlavour::Cloud,
        Kernel::Generic => KernelFlavour::Generic,
    };
    let own_name = arguments.what.name();
    let name = arguments.name.clone().unwrap_or_else(|| own_name.to_owned());
    let agent = agent_program();
    let mut packages = arguments.packages.clone();
    if matches!(arguments.what, Recipe::Tiny) && !packages.is_empty() {
        return Err(ImageError::Unable(
            "--packages: tiny has no packages; help: leave out the flag, or build debian-12".into(),
        ));
    }
    if arguments.if_missing
        && let Ok(image) = store.get(&name)
    {
        let had = &image.record;
        // Errors come before the old image is removed: also of a machine without a configured archive.
        let agent = agent_version(&agent)?;
        let Some(why) = had.outdated(&agent, arguments.what.cmdline(), &packages) else {
            return Ok(());
        };
        sources(&arguments)?;
        // The request for the packages that it has still stands.
        packages.extend(had.packages.iter().cloned());
        packages.sort();
        packages.dedup();
        println!("{name}: {why}, so it is built anew");
        drop(image);
        store.remove(&name)?;
    }
    let sources = sources(&arguments)?;
    let bar = ProgressBar::new(1).with_style(style("{elapsed:>4} [{bar:30}] {pos}/{len} {msg}"));
    bar.enable_steady_tick(Duration::from_millis(250));
    let mut progress = |now: Progress| {
        bar.set_length(now.steps as u64);
        bar.set_position(now.step as u64);
        bar.set_message(now.what);
    };
    let built = match arguments.what {
        Recipe::Debian12 => {
            let request = DebianRequest {
                name,
                packages,
                size_bytes: arguments.size.0,
                kernel,
                sources,
                agent,
            };
            build_debian(store, &request, &mut progress)
        }
        Recipe::Tiny => {
            let request = TinyRequest {
                name,
                kernel,
                sources,
                agent,
            };
            build_tiny(store, &request, &mut progress)
        }
    };
    let seconds = bar.elapsed().as_secs_f32();
    bar.finish_and_clear();
    let record = built?;
    println!(
        "{}: built in {seconds:.0} s from {}",
        record.name, record.built_from
    );
    Ok(())
}

/// Archives of packages: the one that the caller names, or those of this machine's apt.
fn sources(arguments: &BuildArgs) -> Result<Sources, ImageError> {
    match &arguments.mirror {
        Some(mirror) => {
            let security = arguments.security_mirror.clone();
            let security = security.unwrap_or_else(|| mirror.security());
            Ok(Sources::of_mirrors(mirror, &security, SUITE))
        }
        None => Sources::of_machine(Path::new("/etc/apt"), SUITE),
    }
}

fn list(store: &ImageStore, json: bool) -> Result<(), ImageError> {
    let records = store.list()?;
    if json {
        match serde_json::to_string_pretty(&records) {
            Ok(text) => println!("{text}"),
            Err(error) => return Err(ImageError::Unable(error.to_string())),
        }
        return Ok(());
    }
    println!("{:<20} {:>9}  {:<6} FROM", "NAME", "SIZE", "DISK");
    for record in records {
        let size = format!("{} MB", record.bytes() / 1_000_000);
        let disk = record.format.as_deref().unwrap_or("none");
        println!("{:<20} {size:>9}  {disk:<6} {}", record.name, record.built_from);
    }
    Ok(())
}

fn run_import(store: &ImageStore, arguments: ImportArgs) -> Result<(), ImageError> {
    let ImportArgs {
        file,
        mut kernel,
        initrd,
        mut disk,
        cmdline,
        name,
    } = arguments;
    let first = file.clone().or_else(|| disk.clone()).or_else(|| kernel.clone());
    if let Some(file) = file {
        let place = if FileKind::of(&file)? == FileKind::Kernel {
            &mut kernel
        } else {
            &mut disk
        };
        if place.replace(file).is_some() {
            return Err(ImageError::Unable(
                "two kernels, or two disks, for one image".into(),
            ));
        }
    }
    let stem = first
        .as_deref()
        .and_then(Path::file_stem)
        .map(|stem| stem.to_string_lossy().into_owned());
    let Some(name) = name.or(stem) else {
        return Err(ImageError::Unable("nothing to import: give a file".into()));
    };
    let bar = ProgressBar::new(1).with_style(style(
        "{elapsed:>4} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec}",
    ));
    let request = ImportRequest {
        name,
        kernel,
        initrd,
        disk,
        cmdline,
    };
    let imported = import(store, &request, &mut |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    });
    bar.finish_and_clear();
    println!("{}: imported", imported?.name);
    Ok(())
}

/// Path of the agent's program, which is built with this one and lies beside it.
fn agent_program() -> PathBuf {
    let own = std::env::current_exe().unwrap_or_default();
    own.with_file_name("mirrorball-agent")
}

fn style(template: &str) -> ProgressStyle {
    // The templates are literals of this file; an invalid one falls back to the default style.
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}
