//! A frozen VM in a directory, which `mirrorball snapshot` writes and `mirrorball restore` resumes.
//!
//! ```text
//! snapshot.json       version of this format, spec of the VM, length of every other file
//! state.json          the machine (`shard::snapshot::MachineState`, which has a version of its own)
//! memory              guest page g at offset g; holes where a page is zero, or stands for an image's page
//! disk-D-N.overlay    the N-th temporary overlay of disk D, the newest first
//!                     (`diskstore::disk::Format::Scratch`)
//! working-set.json    after the first restore: the pages that restores touch in their first seconds
//! ```
//!
//! Restores of one snapshot touch nearly the same pages, scattered over all memory. So the set is read as a
//! whole when the next one starts, instead of page by page at each fault.
//!
//! Images, kernel and initramfs are not in it: the VM is resumed only where they are the same files,
//! unchanged. The directory appears whole or not at all.
//!
//! A snapshot may be another user's work: [`directory`] opens its files, [`trust`] decides which other files
//! of the host it gets.

pub mod directory;
pub mod trust;
mod working_set;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use config::VmSpec;
use diskstore::disk::copy_scratch;
use page::PAGE_BYTES;
use registry::share_group::ShareGroup;
use serde::{Deserialize, Serialize};
use shard_api::message::FILES_MAX;
use shard_api::saved::{self, FrozenMap, NOTHING, STATE_BYTES_MAX, SavedMachine};

use self::directory::Directory;
use self::working_set::prefetch;
use crate::frozen::FrozenVm;

pub use self::working_set::record;

/// The version of this format.
pub(crate) const VERSION: u32 = 1;
const MANIFEST: &str = "snapshot.json";
const STATE: &str = "state.json";
const MEMORY: &str = "memory";
/// Maximum number of temporary overlays in a snapshot, of all disks: the number of files that a shard takes.
const OVERLAYS_MAX: usize = FILES_MAX;
/// Bytes that are copied at once.
const CHUNK_BYTES: usize = 1 << 20;

/// The reason why a directory is no snapshot to resume.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// The directory exists already.
    #[error("{0} exists; name a directory that does not")]
    Exists(PathBuf),
    /// The directory is no snapshot.
    #[error("{path} is not a snapshot: {why}; name a directory made by `mirrorball snapshot`")]
    Foreign {
        /// The directory.
        path: PathBuf,
        /// The defect.
        why: String,
    },
    /// The snapshot has another version.
    #[error("{path} has version {version}; this program reads version {VERSION}: make it anew")]
    Version {
        /// The directory.
        path: PathBuf,
        /// Version of the snapshot's format.
        version: u32,
    },
    /// The file has another length than the manifest says.
    #[error(
        "{path} has {bytes} bytes instead of {wanted}: the snapshot was cut off or changed; make it anew"
    )]
    Length {
        /// The file.
        path: PathBuf,
        /// The file's length, bytes.
        bytes: u64,
        /// The length in the manifest, bytes.
        wanted: u64,
    },
    /// The path is a link, or not in the directory.
    #[error("{0} is a link or lies outside of the snapshot; name a directory made by `mirrorball snapshot`")]
    Outside(PathBuf),
    /// The path is a pipe, a device or a directory.
    #[error("{0} is no regular file; name a directory made by `mirrorball snapshot`")]
    Kind(PathBuf),
    /// The file is another user's.
    #[error(
        "{path} belongs to user {user}, who could change it under the running VM; copy the snapshot (`cp -r \
         --sparse=always`) and restore the copy"
    )]
    Owner {
        /// The file.
        path: PathBuf,
        /// User id of its owner.
        user: u32,
    },
    /// Other users than its owner may write the file.
    #[error(
        "{0} can be changed by others than its owner under the running VM; take that right away (`chmod -R \
         go-w`)"
    )]
    Writable(PathBuf),
    /// The file is longer than any of a snapshot.
    #[error("{path} is longer than {limit} bytes; name a directory made by `mirrorball snapshot`")]
    TooLong {
        /// The file.
        path: PathBuf,
        /// Greatest length, bytes.
        limit: u64,
    },
    /// The host refused the access.
    #[error("{path}: {source}")]
    Host {
        /// The file.
        path: PathBuf,
        /// Error of the system call.
        #[source]
        source: io::Error,
    },
}

#[derive(Serialize, Deserialize)]
struct Manifest {
    version: u32,
    /// The name the VM had.
    name: String,
    spec: VmSpec,
    /// The share group of the VM.
    #[serde(default)]
    share_group: Option<ShareGroup>,
    /// Number of overlays of each disk.
    overlays: Vec<usize>,
    /// Length of each file.
    files: Vec<(String, u64)>,
}

fn at(path: &Path) -> impl Fn(io::Error) -> SnapshotError {
    let path = path.to_owned();
    move |source| SnapshotError::Host {
        path: path.clone(),
        source,
    }
}

fn overlay_name(disk: usize, number: usize) -> String {
    format!("disk-{disk}-{number}.overlay")
}

/// Writes a frozen VM, called `name`, into a new directory. Returns the bytes that it takes.
pub fn write(vm: &FrozenVm, name: &str, directory: &Path) -> Result<u64, SnapshotError> {
    if directory.exists() {
        return Err(SnapshotError::Exists(directory.to_owned()));
    }
    let mut partial = directory.as_os_str().to_owned();
    partial.push(format!(".partial-{}", std::process::id()));
    let partial = PathBuf::from(partial);
    fs::DirBuilder::new()
        .mode(0o700)
        .create(&partial)
        .map_err(at(&partial))?;
    let written = write_all(vm, name, &partial).and_then(|bytes| {
        fs::rename(&partial, directory)
            .map(|()| bytes)
            .map_err(at(directory))
    });
    if written.is_err() {
        // A part that can't be removed is named, so that it is not taken for a snapshot.
        let _ = fs::remove_dir_all(&partial);
    }
    written
}

fn write_all(vm: &FrozenVm, name: &str, directory: &Path) -> Result<u64, SnapshotError> {
    let mut files = Vec::new();
    let mut taken = 0;
    let mut add = |name: &str, fill: &dyn Fn(&mut File) -> io::Result<()>| -> Result<(), SnapshotError> {
        let path = directory.join(name);
        let host = at(&path);
        let mut file = create(&path).map_err(&host)?;
        fill(&mut file).map_err(&host)?;
        file.sync_all().map_err(&host)?;
        let about = file.metadata().map_err(&host)?;
        files.push((name.to_owned(), about.len()));
        taken += std::os::unix::fs::MetadataExt::blocks(&about) * 512;
        Ok(())
    };
    let mut state: SavedMachine = saved::read(&vm.state).map_err(at(directory))?;
    add(MEMORY, &|file| write_memory(vm, &state.memory, file))?;
    let images = state.memory.images.len();
    state
        .memory
        .runs
        .retain(|(_, run)| usize::from(run.image) < images);
    add(STATE, &|file| saved::write(&state, file))?;
    for (disk, overlays) in vm.overlays.iter().enumerate() {
        for (number, overlay) in overlays.iter().enumerate() {
            add(&overlay_name(disk, number), &|file| copy_scratch(overlay, file))?;
        }
    }
    let manifest = Manifest {
        version: VERSION,
        name: name.to_owned(),
        spec: vm.spec.clone(),
        share_group: vm.share_group.clone(),
        overlays: vm.overlays.iter().map(Vec::len).collect(),
        files: Vec::new(),
    };
    let manifest = Manifest { files, ..manifest };
    let path = directory.join(MANIFEST);
    let text = serde_json::to_vec_pretty(&manifest).map_err(|error| at(&path)(error.into()))?;
    let mut file = create(&path).map_err(at(&path))?;
    file.write_all(&text)
        .and_then(|()| file.sync_all())
        .map_err(at(&path))?;
    Ok(taken)
}

/// Makes a file that only its owner can open, whatever the umask is.
fn create(path: &Path) -> io::Result<File> {
    File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
}

/// Writes the memory that is in no image: the memory's own file where no layer covers it, and the layers.
fn write_memory(vm: &FrozenVm, map: &FrozenMap, to: &File) -> io::Result<()> {
    let own = vm.memory.first().ok_or(io::ErrorKind::InvalidInput)?;
    let bytes = own.metadata()?.len();
    to.set_len(bytes)?;
    let mut at = 0;
    for &(page, run) in &map.runs {
        let offset = |page: u64| page.checked_mul(PAGE_BYTES);
        let range = offset(page).zip(page.checked_add(run.pages).and_then(offset));
        let (start, end) = range
            .filter(|&(start, end)| start >= at && end <= bytes)
            .ok_or_else(|| {
                io::Error::new(
                    io::ErrorKind::InvalidData,
                    "the state names pages outside of memory",
                )
            })?;
        copy_data(own, to, at, start)?;
        let layer = usize::from(run.image).checked_sub(map.images.len());
        if let (Some(layer), true) = (layer, run.image != NOTHING) {
            let file = vm.memory.get(1 + layer).ok_or(io::ErrorKind::InvalidInput)?;
            copy_data(file, to, start, end)?;
        }
        at = end;
    }
    copy_data(own, to, at, bytes)
}

/// Copies the data between two offsets, each to its own; holes stay holes.
fn copy_data(from: &File, to: &File, start: u64, end: u64) -> io::Result<()> {
    let mut buffer = vec![0; CHUNK_BYTES];
    let mut at = start;
    while at < end {
        // SAFETY: takes no pointers.
        let data = unsafe { libc::lseek(from.as_raw_fd(), at as libc::off_t, libc::SEEK_DATA) };
        let Ok(data) = u64::try_from(data) else {
            return match io::Error::last_os_error() {
                error if error.raw_os_error() == Some(libc::ENXIO) => Ok(()),
                error => Err(error),
            };
        };
        // SAFETY: as above.
        let hole = unsafe { libc::lseek(from.as_raw_fd(), data as libc::off_t, libc::SEEK_HOLE) };
        let hole = u64::try_from(hole)
            .map_err(|_| io::Error::last_os_error())?
            .min(end);
        at = data;
        while at < hole {
            let count = (hole - at).min(CHUNK_BYTES as u64) as usize;
            from.read_exact_at(&mut buffer[..count], at)?;
            to.write_all_at(&buffer[..count], at)?;
            at += count as u64;
        }
    }
    Ok(())
}

/// The name and the spec of a snapshot's VM, as its manifest has them.
pub fn about(directory: &Directory) -> Result<(String, VmSpec), SnapshotError> {
    manifest(directory).map(|manifest| (manifest.name, manifest.spec))
}

fn manifest(directory: &Directory) -> Result<Manifest, SnapshotError> {
    let text = directory.read(MANIFEST).map_err(|error| match error {
        SnapshotError::Host { source, .. } => SnapshotError::Foreign {
            path: directory.path().to_owned(),
            why: format!("{MANIFEST}: {source}"),
        },
        error => error,
    })?;
    parse(directory.path(), &text)
}

/// Reads the manifest of the snapshot at `path`; returns the name and the spec of its VM.
pub fn parse_manifest(path: &Path, text: &[u8]) -> Result<(String, VmSpec), SnapshotError> {
    parse(path, text).map(|manifest| (manifest.name, manifest.spec))
}

fn parse(path: &Path, text: &[u8]) -> Result<Manifest, SnapshotError> {
    #[derive(Deserialize)]
    struct Version {
        version: u32,
    }
    let foreign = |why: String| SnapshotError::Foreign {
        path: path.to_owned(),
        why: format!("{MANIFEST}: {}", why.escape_debug()),
    };
    let Version { version } = serde_json::from_slice(text).map_err(|error| foreign(error.to_string()))?;
    if version != VERSION {
        return Err(SnapshotError::Version {
            path: path.to_owned(),
            version,
        });
    }
    let manifest: Manifest = serde_json::from_slice(text).map_err(|error| foreign(error.to_string()))?;
    let spec = VmSpec {
        name: Some(manifest.name.clone()),
        ..manifest.spec.clone()
    };
    config::check(&spec).map_err(|fault| foreign(fault.message))?;
    let overlays = manifest
        .overlays
        .iter()
        .try_fold(0_usize, |sum, count| sum.checked_add(*count));
    if overlays.is_none_or(|count| count > OVERLAYS_MAX) {
        return Err(foreign(format!("more than {OVERLAYS_MAX} overlays")));
    }
    Ok(manifest)
}

/// Opens a snapshot.
pub fn open(directory: &Directory) -> Result<FrozenVm, SnapshotError> {
    let manifest = manifest(directory)?;
    let mut files = BTreeMap::new();
    for (name, wanted) in manifest.files {
        let path = directory.path_of(&name);
        let file = directory.file(&name)?;
        let bytes = file.metadata().map_err(at(&path))?.len();
        if bytes != wanted {
            return Err(SnapshotError::Length { path, bytes, wanted });
        }
        if name == STATE && bytes > STATE_BYTES_MAX {
            let limit = STATE_BYTES_MAX;
            return Err(SnapshotError::TooLong { path, limit });
        }
        files.insert(name, file);
    }
    let mut take = |name: &str| {
        files.remove(name).ok_or_else(|| SnapshotError::Foreign {
            path: directory.path().to_owned(),
            why: format!("{MANIFEST} has no length of {name}"),
        })
    };
    let overlays = manifest
        .overlays
        .iter()
        .enumerate()
        .map(|(disk, count)| {
            (0..*count)
                .map(|number| take(&overlay_name(disk, number)))
                .collect()
        })
        .collect::<Result<_, _>>()?;
    let memory = take(MEMORY)?;
    prefetch(directory, &memory);
    Ok(FrozenVm {
        spec: manifest.spec,
        // Names of other groups are no secrets, so a snapshot of another user may not choose one.
        share_group: manifest.share_group.filter(ShareGroup::is_of_run),
        state: take(STATE)?,
        memory: vec![memory],
        overlays,
        paused_us: 0,
    })
}

#[cfg(test)]
mod tests {
    use super::directory::caller;
    use super::*;

    /// Writes a snapshot's directory that only this user can change.
    fn snapshot(manifest: &serde_json::Value, files: &[(&str, u64)]) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        let mut file = create(&directory.path().join(MANIFEST)).unwrap();
        file.write_all(manifest.to_string().as_bytes()).unwrap();
        for (name, bytes) in files {
            create(&directory.path().join(name))
                .unwrap()
                .set_len(*bytes)
                .unwrap();
        }
        directory
    }

    fn refusal(manifest: &serde_json::Value, files: &[(&str, u64)]) -> SnapshotError {
        let folder = snapshot(manifest, files);
        let directory = Directory::open(folder.path(), &[caller()]).unwrap();
        open(&directory).unwrap_err()
    }

    #[test]
    fn a_snapshot_opens_the_files_that_its_manifest_lists_and_no_others() {
        let manifest = |files: serde_json::Value| {
            let spec = serde_json::json!({ "image": "tiny" });
            serde_json::json!({ "version": 1, "name": "x", "spec": spec, "overlays": [1], "files": files })
        };
        let all = [(MEMORY, 4096), (STATE, 2), ("disk-0-0.overlay", 8)];
        let folder = snapshot(&manifest(serde_json::json!(all)), &all);
        let directory = Directory::open(folder.path(), &[caller()]).unwrap();
        let vm = open(&directory).unwrap();
        assert_eq!(vm.memory[0].metadata().unwrap().len(), 4096);
        assert_eq!(vm.overlays[0][0].metadata().unwrap().len(), 8);
        let error = refusal(&manifest(serde_json::json!(all[1..])), &all);
        assert!(error.to_string().contains("no length of memory"), "{error}");
        let error = refusal(&manifest(serde_json::json!([["/etc/passwd", 1]])), &all);
        assert!(matches!(error, SnapshotError::Outside(_)), "{error}");
        let long = [(MEMORY, 4096), (STATE, 1 << 40), ("disk-0-0.overlay", 8)];
        let error = refusal(&manifest(serde_json::json!(long)), &long);
        assert!(matches!(error, SnapshotError::TooLong { .. }), "{error}");
    }

    #[test]
    fn a_manifest_with_a_bad_name_or_too_many_overlays_is_refused() {
        let refused = |name: &str, overlays: &[usize]| {
            let spec = serde_json::json!({ "image": "tiny" });
            let manifest = serde_json::json!({
                "version": 1, "name": name, "spec": spec, "overlays": overlays, "files": []
            });
            let error = parse_manifest(Path::new("snap"), manifest.to_string().as_bytes()).unwrap_err();
            let text = error.to_string();
            assert!(!text.contains(['\n', '\u{1b}']), "{text:?}");
            text
        };
        refused("../../etc", &[]);
        refused("\u{1b}[2J", &[]);
        assert!(refused("x", &[usize::MAX, 2]).contains("overlays"));
        assert!(refused("x", &[OVERLAYS_MAX, 1]).contains("overlays"));
    }

    #[test]
    fn a_state_that_names_pages_outside_of_memory_is_not_written() {
        use shard_api::saved::Run;
        let frozen = |runs: Vec<(u64, u64)>| {
            let own = tempfile::tempfile().unwrap();
            own.set_len(8 * PAGE_BYTES).unwrap();
            let run = |(page, pages)| {
                (
                    page,
                    Run {
                        pages,
                        image: NOTHING,
                        first: page,
                    },
                )
            };
            let vm = FrozenVm {
                spec: serde_json::from_str("{\"image\": \"tiny\"}").unwrap(),
                share_group: None,
                state: tempfile::tempfile().unwrap(),
                memory: vec![own],
                overlays: Vec::new(),
                paused_us: 0,
            };
            let map = FrozenMap {
                images: Vec::new(),
                runs: runs.into_iter().map(run).collect(),
            };
            write_memory(&vm, &map, &tempfile::tempfile().unwrap())
        };
        frozen(vec![(0, 4), (6, 2)]).unwrap();
        for bad in [
            (8, 1),
            (0, 9),
            (u64::MAX, 2),
            (u64::MAX / 2, u64::MAX),
            (1 << 60, 1),
        ] {
            assert!(frozen(vec![bad]).is_err(), "{bad:?}");
        }
        assert!(frozen(vec![(4, 4), (0, 4)]).is_err());
    }
}
