//! `mirrorball disk`: commits, compares, compacts and checks unused disks, and lists and removes overlays.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Args, Subcommand, ValueEnum};
use diskstore::disk::maintenance::{self, Diff, Overlay, Overlays, Report, Target};
use diskstore::disk::{DiskError, Format};
use diskstore::image::data_directory;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use miette::{IntoDiagnostic, Result, miette};

use super::execution_site::in_lab;
use crate::exit;

/// Time before a progress bar appears.
const SILENT_MAX: Duration = Duration::from_secs(2);

/// Subcommands of `mirrorball disk`.
#[derive(Debug, Subcommand)]
pub enum DiskCommand {
    /// List the overlays that persistent private disks left
    Ls {
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Remove overlays, and with them what their VMs wrote
    Rm {
        /// VM, or VM/DISK
        #[arg(required = true)]
        names: Vec<String>,
    },
    /// Bring an overlay's changes into its base, or with everything below into a new file
    Commit {
        #[command(flatten)]
        disk: DiskArgs,
        /// A new file, instead of the base; qcow2 if its name ends so, else raw
        #[arg(long)]
        to: Option<PathBuf>,
    },
    /// List the ranges in which an overlay differs from its base
    Diff {
        #[command(flatten)]
        disk: DiskArgs,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Give back the space that a disk's content does not need
    Compact {
        #[command(flatten)]
        disk: DiskArgs,
    },
    /// Check that a disk's files are sound
    Check {
        #[command(flatten)]
        disk: DiskArgs,
    },
}

/// Argument that names a disk.
#[derive(Debug, Args)]
pub struct DiskArgs {
    /// A file, or the overlay VM/DISK that a VM left, or VM if it left one
    disk: String,
    /// The file's format, if it must not be detected by its content
    #[arg(long)]
    format: Option<FormatArg>,
}

/// Formats of disk files.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum FormatArg {
    Raw,
    Qcow2,
}

impl DiskCommand {
    /// Whether it changes nothing.
    pub fn only_prints(&self) -> bool {
        matches!(self, Self::Ls { .. } | Self::Diff { .. } | Self::Check { .. })
    }
}

/// Runs a subcommand and prints the result.
pub fn run(command: DiskCommand) -> Result<ExitCode> {
    // A lab host has its own locks: where a lab runs, only that host has the locks of its VMs.
    if let Some(code) = in_lab()? {
        return Ok(code);
    }
    let place = DataDirectory::find()?;
    match command {
        DiskCommand::Ls { json } => place.list(json)?,
        DiskCommand::Rm { names } => names.iter().try_for_each(|name| place.remove(name))?,
        DiskCommand::Commit { disk, to } => place.commit(&disk, to)?,
        DiskCommand::Diff { disk, json } => place.diff(&disk, json)?,
        DiskCommand::Compact { disk } => place.compact(&disk)?,
        DiskCommand::Check { disk } => return place.check(&disk),
    }
    Ok(ExitCode::SUCCESS)
}

/// The user's data directory.
struct DataDirectory {
    data: PathBuf,
    overlays: Overlays,
}

impl DataDirectory {
    fn find() -> Result<Self> {
        let data = data_directory()
            .ok_or_else(|| miette!(help = "set MIRRORBALL_DATA or HOME", "there is no data directory"))?;
        Ok(Self {
            overlays: Overlays::of(&data),
            data,
        })
    }

    fn list(&self, json: bool) -> Result<()> {
        let overlays = self.overlays.list().into_diagnostic()?;
        if json {
            println!("{}", serde_json::to_string_pretty(&overlays).into_diagnostic()?);
            return Ok(());
        }
        println!(
            "{:<24} {:>10} {:>10} {:>8}  BASE",
            "OVERLAY", "TAKES", "DISK", "USED BY"
        );
        for overlay in overlays {
            println!("{}", line(&overlay));
        }
        Ok(())
    }

    fn remove(&self, name: &str) -> Result<()> {
        let found = self.overlays.named(name).into_diagnostic()?;
        if found.is_empty() {
            return Err(no_overlay(name));
        }
        for overlay in found {
            self.overlays.remove(&overlay).map_err(with_help)?;
            println!("{}/{}: removed", overlay.vm, overlay.disk);
        }
        Ok(())
    }

    fn commit(&self, disk: &DiskArgs, to: Option<PathBuf>) -> Result<()> {
        let (path, format) = self.disk(disk)?;
        let target = match to {
            Some(path) => Target::New {
                format: match path.extension() {
                    Some(extension) if extension == "qcow2" => Format::Qcow2,
                    _ => Format::Raw,
                },
                path,
            },
            None => {
                self.base_may_be_written(&path, format)?;
                Target::Base
            }
        };
        let bar = Bar::new();
        let done = maintenance::commit(&path, format, &target, &mut bar.report()).map_err(with_help)?;
        drop(bar);
        println!("{}: {} written", done.into.display(), size(done.written_bytes));
        Ok(())
    }

    /// Refuses bases that other overlays use.
    fn base_may_be_written(&self, overlay: &Path, format: Option<Format>) -> Result<()> {
        let base = maintenance::base(overlay, format).map_err(with_help)?;
        if let Some(image) = self.image_of(&base) {
            return Err(miette!(
                help = "commit into a new file (--to FILE), and make an image of that: mirrorball image \
                        import FILE",
                "{} is of the image {image}, which is never changed",
                base.display()
            ));
        }
        let others = self.overlays.standing_on(&base, overlay).into_diagnostic()?;
        if let Some(other) = others.first() {
            return Err(miette!(
                help = "remove it (mirrorball disk rm), or commit into a new file (--to FILE)",
                "{}: the overlay {}/{} stands on it too, and would be damaged",
                base.display(),
                other.vm,
                other.disk
            ));
        }
        Ok(())
    }

    fn diff(&self, disk: &DiskArgs, json: bool) -> Result<()> {
        let (path, format) = self.disk(disk)?;
        let bar = Bar::new();
        let diff = maintenance::diff(&path, format, &mut bar.report()).map_err(with_help)?;
        drop(bar);
        if json {
            println!("{}", serde_json::to_string_pretty(&diff).into_diagnostic()?);
        } else {
            print_diff(&diff).into_diagnostic()?;
        }
        Ok(())
    }

    fn compact(&self, disk: &DiskArgs) -> Result<()> {
        let (path, format) = self.disk(disk)?;
        if let Some(image) = self.image_of(&path) {
            return Err(miette!(
                help = "copy the file, and compact the copy",
                "{} is of the image {image}, which is never changed",
                path.display()
            ));
        }
        let bar = Bar::new();
        let done = maintenance::compact(&path, format, &mut bar.report()).map_err(with_help)?;
        drop(bar);
        let path = path.display();
        if done.after_bytes < done.before_bytes {
            let (before, after) = (size(done.before_bytes), size(done.after_bytes));
            println!("{path}: {after}, was {before}");
        } else {
            println!("{path}: {}, nothing to gain", size(done.after_bytes));
        }
        Ok(())
    }

    fn check(&self, disk: &DiskArgs) -> Result<ExitCode> {
        let (path, format) = self.disk(disk)?;
        let bar = Bar::new();
        let report = maintenance::check(&path, format, &mut bar.report()).map_err(with_help)?;
        drop(bar);
        Ok(print_report(&path, &report))
    }

    /// Returns the file that an argument names, and its format if that is certain.
    fn disk(&self, disk: &DiskArgs) -> Result<(PathBuf, Option<Format>)> {
        let name = &disk.disk;
        let path = Path::new(name);
        let said = disk.format.map(|format| match format {
            FormatArg::Raw => Format::Raw,
            FormatArg::Qcow2 => Format::Qcow2,
        });
        if path.is_file() || said.is_some() || path.is_absolute() {
            return Ok((path.to_owned(), said));
        }
        match &self.overlays.named(name).into_diagnostic()?[..] {
            // Made by Mirrorball: no guest can have written its header.
            [one] => Ok((one.path.clone(), Some(Format::Qcow2))),
            [] if path.exists() => Ok((path.to_owned(), said)),
            [] => Err(no_overlay(name)),
            several => {
                let names: Vec<_> = several
                    .iter()
                    .map(|overlay| format!("{}/{}", overlay.vm, overlay.disk))
                    .collect();
                Err(miette!(
                    help = format!("name one: {}", names.join(", ")),
                    "{name}: has {} overlays",
                    several.len()
                ))
            }
        }
    }

    /// Returns the image that a file belongs to.
    fn image_of(&self, path: &Path) -> Option<String> {
        let images = self.data.join("images").canonicalize().ok()?;
        let path = path.canonicalize().ok()?;
        let first = path.strip_prefix(images).ok()?.components().next()?;
        Some(first.as_os_str().to_string_lossy().into_owned())
    }
}

fn no_overlay(name: &str) -> miette::Report {
    miette!(
        help = "`mirrorball disk ls` lists the overlays",
        "{name}: no such file, and no overlay of a VM"
    )
}

/// Adds help for the user of this command to an error.
fn with_help(error: DiskError) -> miette::Report {
    match error {
        DiskError::UntrustedBacking { path, backing } => miette!(
            help = "if that is meant, say so with --format qcow2",
            "disk {}: looks like qcow2 and refers to {backing}",
            path.display()
        ),
        error => miette!("{error}"),
    }
}

fn line(overlay: &Overlay) -> String {
    let name = format!("{}/{}", overlay.vm, overlay.disk);
    let used = match &overlay.used_by[..] {
        [] => "-".to_owned(),
        [first, ..] => first.to_string(),
    };
    let base = match &overlay.base {
        Some(base) if overlay.base_is_there => base.display().to_string(),
        Some(base) => format!("{} (not there)", base.display()),
        None => "(damaged)".to_owned(),
    };
    let (takes, disk) = (size(overlay.taken_bytes), size(overlay.size_bytes));
    format!("{name:<24} {takes:>10} {disk:>10} {used:>8}  {base}")
}

fn print_diff(diff: &Diff) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{:>16} {:>16}", "OFFSET", "BYTES")?;
    for change in &diff.changes {
        writeln!(out, "{:>16} {:>16}", change.offset, change.bytes)?;
    }
    writeln!(
        out,
        "{} changed in {} ranges of {}, over {}",
        size(diff.changed_bytes),
        diff.changes.len(),
        size(diff.size_bytes),
        diff.base.display()
    )
}

fn print_report(path: &Path, report: &Report) -> ExitCode {
    let path = path.display();
    report.told.iter().for_each(|fault| println!("{path}: {fault}"));
    if report.faults > 0 {
        println!(
            "{path}: {} faults; copy what can be read (mirrorball disk commit --to NEW), or use a backup",
            report.faults
        );
        return ExitCode::from(exit::FAILED);
    }
    let files = match report.files {
        1 => String::new(),
        files => format!(", with the {} it stands on", files - 1),
    };
    match report.leaked_bytes {
        0 => println!("{path}: sound{files}"),
        leaked => println!(
            "{path}: sound{files}; {} belong to nothing: mirrorball disk compact gives them back",
            size(leaked)
        ),
    }
    if report.bitmaps {
        println!("{path}: holds bitmaps; space that belongs to nothing was not looked for");
    }
    ExitCode::SUCCESS
}

fn size(bytes: u64) -> String {
    match bytes {
        0..10_000 => format!("{bytes} B"),
        10_000..10_000_000 => format!("{} kB", bytes / 1000),
        _ => format!("{} MB", bytes / 1_000_000),
    }
}

/// A progress bar that appears after a while.
struct Bar {
    bar: ProgressBar,
    start: Instant,
}

impl Bar {
    fn new() -> Self {
        // The template is a literal; an invalid one falls back to the default style.
        let style = ProgressStyle::with_template("{elapsed:>4} [{bar:30}] {percent}%, {eta} to go")
            .unwrap_or_else(|_| ProgressStyle::default_bar());
        Self {
            bar: ProgressBar::with_draw_target(Some(1), ProgressDrawTarget::hidden()).with_style(style),
            start: Instant::now(),
        }
    }

    fn report(&self) -> impl FnMut(u64, u64) {
        let mut seen = false;
        move |done, total| {
            if !seen && self.start.elapsed() > SILENT_MAX {
                seen = true;
                self.bar.set_draw_target(ProgressDrawTarget::stderr());
            }
            self.bar.set_length(total);
            self.bar.set_position(done);
        }
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
