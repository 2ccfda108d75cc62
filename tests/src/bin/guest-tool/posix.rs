//! Operations on files and their outcomes, a line each, so that two file systems can be compared. The areas
//! are those of the test suite pjdfstest.

use std::fmt::Display;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;

use crate::Fault;

/// Longest name of a file, bytes.
const NAME_BYTES: usize = 255;
/// Longer than the steps of the kernel's clock for files.
const CLOCK_STEP: Duration = Duration::from_millis(30);
const MIB: u64 = 1 << 20;
/// Most passes over a directory that is removed.
const PASSES_MAX: usize = 100;

/// A directory, and the outcomes so far.
struct Trial {
    root: PathBuf,
    lines: Vec<String>,
}

/// Does all operations in a new directory of `folder`; returns the outcomes.
pub fn compare(folder: &str) -> Result<String, Fault> {
    let root = Path::new(folder).join("posix");
    fs::create_dir(&root)?;
    let mut trial = Trial {
        root: root.clone(),
        lines: Vec::new(),
    };
    trial.open()?;
    trial.directories()?;
    trial.links()?;
    trial.renames()?;
    trial.sizes()?;
    trial.attributes()?;
    trial.open_files()?;
    remove(&root)?;
    Ok(trial.lines.join("\n"))
}

/// Removes a directory. Before Linux 6.6, tmpfs numbers entries anew as some are removed, so that a reader by
/// number, as a folder's server is, misses some.
fn remove(root: &Path) -> io::Result<()> {
    for _ in 0..PASSES_MAX {
        match fs::remove_dir_all(root) {
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {}
            removed => return removed,
        }
    }
    fs::remove_dir_all(root)
}

impl Trial {
    fn path(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    /// Makes a file with a text.
    fn file(&self, name: &str, text: &str) -> io::Result<PathBuf> {
        let path = self.path(name);
        fs::write(&path, text)?;
        Ok(path)
    }

    fn note<T: Display>(&mut self, what: &str, outcome: io::Result<T>) {
        let outcome = match outcome {
            Ok(value) => value.to_string(),
            Err(error) => match error.raw_os_error() {
                Some(number) => format!("{:?}", Errno::from_raw(number)),
                None => error.to_string(),
            },
        };
        self.lines.push(format!("{what}: {outcome}"));
    }

    fn done(&mut self, what: &str, outcome: io::Result<()>) {
        self.note(what, outcome.map(|()| "done"));
    }

    fn open(&mut self) -> io::Result<()> {
        let file = self.file("file", "content")?;
        fs::create_dir(self.path("directory"))?;
        symlink("file", self.path("link"))?;
        symlink("round", self.path("round"))?;
        let with = |flags: i32| {
            let mut options = OpenOptions::new();
            options.read(true).custom_flags(flags);
            options
        };
        let text = |mut file: File| {
            let mut text = String::new();
            file.read_to_string(&mut text).map(|_| text)
        };
        for (name, flags) in [
            ("file", 0),
            ("missing", 0),
            ("file/below", 0),
            ("link", 0),
            ("link", libc::O_NOFOLLOW),
            ("round", 0),
            ("file", libc::O_DIRECTORY),
            ("file/", 0),
        ] {
            let opened = with(flags).open(self.path(name)).and_then(text);
            self.note(&format!("open {name} {flags:#o}"), opened);
        }
        let written = OpenOptions::new().write(true).open(self.path("directory"));
        self.done("open a directory for writing", written.map(drop));
        let made = OpenOptions::new().write(true).create_new(true).open(&file);
        self.done("create a file that exists", made.map(drop));
        for length in [NAME_BYTES, NAME_BYTES + 1] {
            let made = File::create(self.path(&"n".repeat(length)));
            self.done(&format!("create a name of {length} bytes"), made.map(drop));
        }
        let cut = OpenOptions::new().write(true).truncate(true).open(&file)?;
        self.note("length after O_TRUNC", cut.metadata().map(|known| known.len()));
        let (mut one, mut two) = (
            OpenOptions::new().append(true).open(&file)?,
            OpenOptions::new().append(true).open(&file)?,
        );
        one.write_all(b"one")?;
        two.write_all(b"two")?;
        one.write_all(b"three")?;
        self.note("appended by two", fs::read_to_string(&file));
        Ok(())
    }

    fn directories(&mut self) -> io::Result<()> {
        let (full, file) = (self.path("full"), self.file("plain", "")?);
        let links = |path: &Path| fs::metadata(path).map(|known| known.nlink());
        self.done("mkdir", fs::create_dir(&full));
        self.done("mkdir that exists", fs::create_dir(&full));
        self.done(
            "mkdir below a missing one",
            fs::create_dir(self.path("none/below")),
        );
        self.done("mkdir below a file", fs::create_dir(file.join("below")));
        fs::create_dir(full.join("inner"))?;
        self.note("links of a directory with one", links(&full));
        self.done("rmdir of a full one", fs::remove_dir(&full));
        self.done("rmdir of a file", fs::remove_dir(&file));
        self.done("rmdir of a missing one", fs::remove_dir(self.path("none")));
        self.done("unlink of a directory", fs::remove_file(&full));
        self.done("unlink of a missing one", fs::remove_file(self.path("none")));
        self.done("rmdir", fs::remove_dir(full.join("inner")));
        self.note("links of an empty directory", links(&full));
        for number in 0..300 {
            File::create(full.join(format!("{number}")))?;
        }
        let mut removed = 0;
        for entry in fs::read_dir(&full)? {
            fs::remove_file(entry?.path())?;
            removed += 1;
        }
        self.note("files removed while they are listed", Ok(removed));
        self.note("files left", fs::read_dir(&full).map(Iterator::count));
        Ok(())
    }

    fn links(&mut self) -> io::Result<()> {
        let (old, new) = (self.file("old", "text")?, self.path("new"));
        let links = |path: &Path| fs::metadata(path).map(|known| known.nlink());
        self.done("link", fs::hard_link(&old, &new));
        self.note("links", links(&old));
        self.done("link over a file", fs::hard_link(&old, &new));
        self.done(
            "link of a directory",
            fs::hard_link(self.path("full"), self.path("full-2")),
        );
        self.done(
            "link of a missing one",
            fs::hard_link(self.path("none"), self.path("none-2")),
        );
        self.done(
            "link of a symbolic one",
            fs::hard_link(self.path("link"), self.path("link-2")),
        );
        self.note(
            "what it is",
            fs::read_link(self.path("link-2")).map(|to| to.display().to_string()),
        );
        self.done("unlink", fs::remove_file(&old));
        self.note("links after it", links(&new));
        self.note("content after it", fs::read_to_string(&new));
        self.done("symlink over a file", symlink("to", &new));
        let long = "t".repeat(4000);
        self.done("symlink to a long name", symlink(&long, self.path("long")));
        self.note(
            "its length",
            fs::symlink_metadata(self.path("long")).map(|known| known.len()),
        );
        let read = fs::read_link(self.path("long"));
        self.note("its target is whole", read.map(|to| to == Path::new(&long)));
        self.done("readlink of a file", fs::read_link(&new).map(drop));
        for (name, kind) in [("pipe", libc::S_IFIFO), ("socket", libc::S_IFSOCK)] {
            let path = std::ffi::CString::new(self.path(name).into_os_string().into_encoded_bytes())?;
            // SAFETY: the path is a string with a zero byte that lives through the call.
            let made = Errno::result(unsafe { libc::mknod(path.as_ptr(), kind | 0o640, 0) });
            self.done(name, made.map(drop).map_err(io::Error::from));
            let mode = fs::symlink_metadata(self.path(name)).map(|known| format!("{:o}", known.mode()));
            self.note("its mode", mode);
        }
        Ok(())
    }

    fn renames(&mut self) -> io::Result<()> {
        for name in ["a", "b", "full-3"] {
            fs::create_dir(self.path(name))?;
        }
        self.file("full-3/file", "")?;
        self.file("x", "x")?;
        self.file("y", "y")?;
        fs::hard_link(self.path("x"), self.path("x-2"))?;
        for (from, to) in [
            ("x", "y"),
            ("x", "y"),
            ("y", "x-2"),
            ("a", "b"),
            ("b", "full-3"),
            ("b", "y"),
            ("y", "b"),
            ("b", "b/below"),
            ("none", "some"),
            ("b", "none/below"),
            ("b", "c"),
            ("link", "link-3"),
        ] {
            let moved = fs::rename(self.path(from), self.path(to));
            self.done(&format!("rename {from} to {to}"), moved);
        }
        self.note("content of y", fs::read_to_string(self.path("y")));
        self.file("one", "1")?;
        self.file("two", "2")?;
        for (what, flags) in [
            ("RENAME_NOREPLACE", libc::RENAME_NOREPLACE),
            ("RENAME_EXCHANGE", libc::RENAME_EXCHANGE),
        ] {
            let path = |name| std::ffi::CString::new(self.path(name).into_os_string().into_encoded_bytes());
            let (one, two) = (path("one")?, path("two")?);
            let at = libc::AT_FDCWD;
            // SAFETY: both paths are strings with a zero byte that live through the call.
            let moved = unsafe { libc::renameat2(at, one.as_ptr(), at, two.as_ptr(), flags) };
            self.done(what, Errno::result(moved).map(drop).map_err(io::Error::from));
        }
        self.note("content of one", fs::read_to_string(self.path("one")));
        Ok(())
    }

    fn sizes(&mut self) -> io::Result<()> {
        let path = self.file("size", "0123456789")?;
        let file = OpenOptions::new().read(true).write(true).open(&path)?;
        self.done("ftruncate", file.set_len(4));
        self.done("ftruncate to more", file.set_len(8));
        self.note("content", fs::read(&path).map(|bytes| format!("{bytes:?}")));
        self.done(
            "ftruncate of a file open for reading",
            File::open(&path)?.set_len(1),
        );
        // SAFETY: the call takes numbers only.
        let below = Errno::result(unsafe { libc::ftruncate(file.as_raw_fd(), -1) });
        self.done(
            "ftruncate to less than nothing",
            below.map(drop).map_err(io::Error::from),
        );
        // SAFETY: the call takes numbers only.
        let room = unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, MIB as i64) };
        self.note("posix_fallocate", Ok(format!("{:?}", Errno::from_raw(room))));
        self.note("length", file.metadata().map(|known| known.len()));
        self.done("write at a distance", file.write_all_at(b"end", 4 * MIB));
        self.note("length", file.metadata().map(|known| known.len()));
        let mut middle = [1; 3];
        file.read_exact_at(&mut middle, 3 * MIB)?;
        self.note("bytes between", Ok(format!("{middle:?}")));
        let read = file.read_at(&mut middle, 9 * MIB);
        self.note("bytes read beyond the end", read);
        Ok(())
    }

    fn attributes(&mut self) -> io::Result<()> {
        let path = self.file("attributes", "text")?;
        let directory = self.path("full");
        for (path, mode) in [(&path, 0o640), (&path, 0), (&path, 0o777), (&directory, 0o1755)] {
            self.done(
                "chmod",
                fs::set_permissions(path, fs::Permissions::from_mode(mode)),
            );
            self.note(
                "mode",
                fs::metadata(path).map(|known| format!("{:o}", known.mode())),
            );
        }
        let changed = fs::set_permissions(self.path("none"), fs::Permissions::from_mode(0o600));
        self.done("chmod of a missing one", changed);
        let file = OpenOptions::new().read(true).write(true).open(&path)?;
        let time = std::time::UNIX_EPOCH + Duration::new(1_000_000_007, 123_456_789);
        self.done(
            "utimensat",
            file.set_times(fs::FileTimes::new().set_accessed(time).set_modified(time)),
        );
        let times = fs::metadata(&path).map(|known| format!("{}.{}", known.mtime(), known.mtime_nsec()));
        self.note("time", times);
        let ctime = |path: &Path| fs::symlink_metadata(path).map(|known| (known.ctime(), known.ctime_nsec()));
        let other = self.path("attributes-2");
        let steps: [(&str, &dyn Fn() -> io::Result<()>); 5] = [
            ("write", &|| file.write_all_at(b"more", 0)),
            ("chmod", &|| {
                fs::set_permissions(&path, fs::Permissions::from_mode(0o600))
            }),
            ("link", &|| fs::hard_link(&path, &other)),
            ("unlink of a link", &|| fs::remove_file(&other)),
            ("ftruncate", &|| file.set_len(2)),
        ];
        for (what, step) in steps {
            let before = ctime(&path)?;
            std::thread::sleep(CLOCK_STEP);
            step()?;
            let after = ctime(&path)?;
            self.lines
                .push(format!("{what} changes the time: {}", after > before));
        }
        let mtime = |path: &Path| fs::metadata(path).map(|known| (known.mtime(), known.mtime_nsec()));
        let before = mtime(&directory)?;
        std::thread::sleep(CLOCK_STEP);
        File::create(directory.join("entry"))?;
        let after = mtime(&directory)?;
        self.lines.push(format!(
            "a new entry changes its directory's time: {}",
            after > before
        ));
        Ok(())
    }

    fn open_files(&mut self) -> io::Result<()> {
        let path = self.file("gone", "before")?;
        let mut file = OpenOptions::new().read(true).write(true).open(&path)?;
        fs::remove_file(&path)?;
        self.done("write to a file without a name", file.write_all(b"after!!"));
        file.seek(SeekFrom::Start(0))?;
        let mut text = String::new();
        file.read_to_string(&mut text)?;
        self.note("its content", Ok(text));
        self.note("its links", file.metadata().map(|known| known.nlink()));
        self.done(
            "fchmod of it",
            file.set_permissions(fs::Permissions::from_mode(0o604)),
        );
        self.done("ftruncate of it", file.set_len(3));
        self.note("its length", file.metadata().map(|known| known.len()));
        let path = self.file("locked", "")?;
        let (one, two) = (File::open(&path)?, File::open(&path)?);
        self.done("flock", one.lock());
        let taken = two.try_lock();
        self.note("flock by another", Ok(taken.is_err()));
        drop(one);
        self.note("flock after its end", Ok(two.try_lock().is_ok()));
        self.done("fsync", two.sync_all());
        Ok(())
    }
}
