//! Tests of disks by risk: lost or mixed-up bytes, ineffective locks, lost flushes, hostile headers.

mod crash;
mod full;
mod hostile;
mod locks;
mod maintenance;
mod model;
mod opening;
mod origin;
mod watch;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{DiskRequest, Format, Mode, Segments, Store};

/// A private, temporary use of `path` by the VM `vm`.
fn request(path: &Path, vm: &str) -> DiskRequest {
    DiskRequest {
        path: path.to_owned(),
        format: None,
        mode: Mode::Private,
        persistent: false,
        read_only: false,
        overlay_path: None,
        scratch_dir: path.parent().unwrap().to_owned(),
        vm_name: vm.to_owned(),
        below: None,
    }
}

/// Assembles the store of a request.
fn store(request: &DiskRequest) -> std::sync::Arc<dyn Store> {
    assemble_open(super::open(request).unwrap_or_else(|error| panic!("{error}")))
}

fn assemble_open(disk: super::OpenDisk) -> std::sync::Arc<dyn Store> {
    let read_only = disk.read_only;
    let layers = disk
        .layers
        .into_iter()
        .map(|layer| (layer.file, layer.format))
        .collect();
    super::assemble(layers, read_only).unwrap()
}

/// Segments over a buffer, in pieces of `piece` bytes. The buffer must outlive their use.
fn segments(buffer: &mut [u8], piece: usize) -> Segments {
    let mut segments = Segments::new();
    for part in buffer.chunks_mut(piece) {
        // SAFETY: the tests keep the buffer until the I/O has ended.
        unsafe { segments.push(part.as_mut_ptr(), part.len()) };
    }
    segments
}

fn read(store: &dyn Store, offset: u64, bytes: usize) -> Vec<u8> {
    let mut buffer = vec![0xee; bytes];
    store.read(&segments(&mut buffer, 4096), offset).unwrap();
    buffer
}

fn write(store: &dyn Store, offset: u64, bytes: &[u8]) {
    store.write(&segments(&mut bytes.to_vec(), 4096), offset).unwrap();
}

/// Runs qemu-img; fails the test with its output, or with the package that it comes from.
fn qemu_img(arguments: &[&str]) -> String {
    let output = Command::new("qemu-img")
        .args(arguments)
        .output()
        .unwrap_or_else(|error| panic!("cannot run qemu-img ({error}): install the package qemu-utils"));
    let text = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(output.status.success(), "qemu-img {arguments:?}: {text}");
    text
}

/// Creates a qcow2 file at `path` over a raw base.
fn create_qcow2_over(base: &str, path: &Path) {
    qemu_img(&["create", "-q", "-f", "qcow2", "-F", "raw", "-b", base, text(path)]);
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Creates a raw file of `bytes` with a pattern that identifies each position.
fn patterned(directory: &Path, name: &str, bytes: usize) -> PathBuf {
    let path = directory.join(name);
    std::fs::write(&path, pattern(bytes)).unwrap();
    path
}

fn pattern(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at / 512 * 7 + at % 251) as u8 | 1).collect()
}

fn open_rw(path: &Path) -> File {
    File::options().read(true).write(true).open(path).unwrap()
}

/// Runs the test `name` of this program in a separate process, with `value` in `DISK_TEST`.
fn in_subprocess(name: &str, value: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", name, "--nocapture", "--test-threads=1"])
        .env("DISK_TEST", value);
    command
}

/// Value passed by [`in_subprocess`]; `None` in an ordinary run.
fn subprocess_value() -> Option<String> {
    std::env::var("DISK_TEST").ok()
}

const FORMATS: [Format; 2] = [Format::Raw, Format::Qcow2];
