//! Idempotency records: a request that is repeated under its client's id gets the result of the first.
//!
//! A record is a file in `requests/` of the runtime directory, named after the user and the id. It is written
//! and locked before the request is carried out; its result is written beside it afterwards. The lock shows
//! whether the process that carries out the request is alive. So a request is never carried out twice, and no
//! client waits forever, whichever process dies in between.
//!
//! Records are removed ten minutes after the result. The first process that finds a record of a dead process
//! ends it without a result; it is removed ten minutes later, however long it ran. Time is the host's uptime,
//! which no user can set.
//!
//! A result's file begins with a line that has the time. The results of other users are long and are read no
//! further.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use data_encoding::HEXLOWER;
use hostfiles::lock::{self, Flock, Share};
use hostfiles::{private, replace_volatile_file};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::runtime;

/// Retention time of a result.
pub const KEPT: Duration = Duration::from_secs(600);
/// Maximum length of an id, in bytes.
pub const ID_BYTES_MAX: usize = 255;
/// Maximum length of a stored result, in bytes.
pub const RESULT_BYTES_MAX: usize = 64 << 10;
/// Maximum records of one user.
const RECORDS_MAX: usize = 128;

const FOLDER: &str = "requests";
const GUARD: &str = ".lock";
const RESULT: &str = "result";
/// Hexadecimal digits of a SHA-256.
const DIGEST_DIGITS: usize = 64;
/// Maximum length of the first line of a result's file, in bytes.
const END_BYTES_MAX: usize = 128;

/// The records of this user's runtime directory.
#[derive(Debug)]
pub struct RequestRecords {
    folder: PathBuf,
    kept: Duration,
}

/// A request with an id.
#[derive(Clone, Copy, Debug)]
pub struct KeyedRequest<'a> {
    /// User; none if unknown.
    pub uid: Option<u32>,
    /// Id chosen by the client.
    pub id: &'a str,
    /// All content of the request.
    pub content: &'a [u8],
}

/// State of a request.
#[derive(Debug)]
pub enum Lookup {
    /// The request is new and must be carried out now.
    New(InProgress),
    /// The request was carried out; none if its result was too long to be stored.
    Done(Option<Value>),
    /// The request is being carried out.
    InProgress,
    /// The process that carried it out ended without a result. The request arrived at this time, in seconds
    /// since 1970.
    Lost(u64),
    /// The id belongs to another request.
    Different,
    /// The user has too many records.
    Full,
}

/// A request that this process carries out. Dropping it without a result makes it [`Lookup::Lost`].
#[derive(Debug)]
pub struct InProgress {
    path: PathBuf,
    _lock: Flock<File>,
}

#[derive(Serialize, Deserialize)]
struct Begin {
    content: String,
    /// Only processes of earlier versions read it.
    begun_s: u64,
    begun_unix_s: u64,
}

/// The first line of a result's file. The result follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct End {
    ended_s: u64,
    how: How,
}

/// Outcome of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum How {
    /// Carried out, and its result is stored.
    Kept,
    /// Carried out, and its result was too long to be stored.
    TooLong,
    /// The process that carried it out died.
    Lost,
}

impl RequestRecords {
    /// Opens the records of this user's runtime directory.
    ///
    /// # Errors
    /// If the directory can't be made.
    pub fn open() -> io::Result<Self> {
        Self::at(&runtime::directory()?, KEPT)
    }

    fn at(runtime: &Path, kept: Duration) -> io::Result<Self> {
        let folder = runtime.join(FOLDER);
        private::directories(&folder)?;
        Ok(Self { folder, kept })
    }

    /// Looks a request up, and begins it if it is new.
    ///
    /// # Errors
    /// If the records can't be read or written.
    pub fn begin(&self, request: KeyedRequest<'_>) -> io::Result<Lookup> {
        let guard = self.folder.join(GUARD);
        let _guard = lock::within(&guard, private::lock_file(&guard)?, Share::Exclusive, lock::LIMIT)?;
        let now = uptime()?;
        let user = request
            .uid
            .map_or_else(|| "none".to_owned(), |uid| uid.to_string());
        let path = self
            .folder
            .join(format!("{user}-{}", digest(request.id.as_bytes())));
        let others = self.tidy(&user, now)?;
        let content = digest(request.content);
        if let Some(begin) = read::<Begin>(&path)? {
            if begin.content != content {
                return Ok(Lookup::Different);
            }
            return Ok(match end_of(&path, now)?.map(|end| end.how) {
                None => Lookup::InProgress,
                Some(How::Lost) => Lookup::Lost(begin.begun_unix_s),
                Some(How::TooLong) => Lookup::Done(None),
                Some(How::Kept) => Lookup::Done(kept(&result(&path))?),
            });
        }
        if others >= RECORDS_MAX {
            return Ok(Lookup::Full);
        }
        // A record without a begin is left from a process that died before it acted.
        remove(&path)?;
        let file = private::new_file(&path)?;
        let Some(lock) = lock::at_once(file.try_clone()?, Share::Exclusive)? else {
            return Ok(Lookup::InProgress);
        };
        let begin = Begin {
            content,
            begun_s: now,
            begun_unix_s: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .unwrap_or_default()
                .as_secs(),
        };
        (&file).write_all(&serde_json::to_vec(&begin)?)?;
        Ok(Lookup::New(InProgress { path, _lock: lock }))
    }

    /// Removes expired records. Returns the number that the user has left.
    fn tidy(&self, user: &str, now: u64) -> io::Result<usize> {
        let mut count = 0;
        for entry in fs::read_dir(&self.folder)? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().as_bytes();
            // The directory also has the guard, results, and files that are being written.
            if !is_record(name) {
                continue;
            }
            let is_there = match end_of(&path, now)? {
                None => true,
                // A time in the future is from before the host's start.
                Some(end) => end.ended_s <= now && now - end.ended_s < self.kept.as_secs(),
            };
            if !is_there {
                remove(&path)?;
                continue;
            }
            count += usize::from(name.starts_with(user.as_bytes()) && name.get(user.len()) == Some(&b'-'));
        }
        Ok(count)
    }
}

impl InProgress {
    /// Stores the result for repeated requests. For a result that is too long, only its existence is stored.
    ///
    /// # Errors
    /// If it can't be written.
    pub fn end(self, result_value: Value) -> io::Result<()> {
        let mut text = serde_json::to_vec(&result_value)?;
        let is_short = text.len() <= RESULT_BYTES_MAX;
        if !is_short {
            text.clear();
        }
        let end = End {
            ended_s: uptime()?,
            how: if is_short { How::Kept } else { How::TooLong },
        };
        write_end(&self.path, end, &text)
    }

    /// Abandons a request that had no effect: a repeated request is new.
    ///
    /// # Errors
    /// If the record can't be removed.
    pub fn abandon(self) -> io::Result<()> {
        remove(&self.path)
    }
}

/// Returns the end of a recorded request; none while a process carries it out, or before its begin is
/// written. A request whose process has died ends now.
fn end_of(path: &Path, now: u64) -> io::Result<Option<End>> {
    if let Some(end) = read_end(&result(path))? {
        return Ok(Some(end));
    }
    if held(path)? {
        return Ok(None);
    }
    // A process writes its result, or removes its record, before it releases the record's lock. It may have
    // done so since the first check.
    if let Some(end) = read_end(&result(path))? {
        return Ok(Some(end));
    }
    let lost = |ended_s| End {
        ended_s,
        how: How::Lost,
    };
    if read::<Begin>(path)?.is_none() {
        // The request had no effect, so its record is useless.
        return Ok(Some(lost(0)));
    }
    // On a full disk the next process repeats this.
    let _ = write_end(path, lost(now), &[]);
    Ok(Some(lost(now)))
}

/// Writes the end of the request with this record, followed by its result.
fn write_end(path: &Path, end: End, text: &[u8]) -> io::Result<()> {
    let line = serde_json::to_vec(&end)?;
    replace_volatile_file(
        &result(path),
        private::FILE_MODE,
        &[&line, &b"\n"[..], text].concat(),
    )
}

/// Reads the first line of a result's file. A missing or truncated one is none.
fn read_end(path: &Path) -> io::Result<Option<End>> {
    let file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    let mut start = [0; END_BYTES_MAX];
    let count = file.read_at(&mut start, 0)?;
    let line = start[..count].split(|byte| *byte == b'\n').next();
    Ok(line.and_then(|line| serde_json::from_slice(line).ok()))
}

/// Reads the result from a result's file.
fn kept(path: &Path) -> io::Result<Option<Value>> {
    let text = fs::read(path)?;
    let mut parts = text.splitn(2, |byte| *byte == b'\n');
    Ok(parts.nth(1).and_then(|text| serde_json::from_slice(text).ok()))
}

/// Path of a request's result.
fn result(path: &Path) -> PathBuf {
    path.with_extension(RESULT)
}

/// Whether this is the name of a record: a user, `-` and a digest.
fn is_record(name: &[u8]) -> bool {
    let digest = name.rsplit(|byte| *byte == b'-').next().unwrap_or_default();
    digest.len() == DIGEST_DIGITS && digest.iter().all(u8::is_ascii_hexdigit)
}

/// Removes a record, and its result first, so that no result can belong to a later request.
fn remove(path: &Path) -> io::Result<()> {
    for path in [&result(path), path] {
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

/// Whether a process carries out the request.
fn held(path: &Path) -> io::Result<bool> {
    match File::open(path) {
        Ok(file) => Ok(lock::at_once(file, Share::Exclusive)?.is_none()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Reads a file of JSON. A missing or truncated one is none.
fn read<T: DeserializeOwned>(path: &Path) -> io::Result<Option<T>> {
    let mut text = Vec::new();
    match File::open(path).and_then(|mut file| file.read_to_end(&mut text)) {
        Ok(_) => Ok(serde_json::from_slice(&text).ok()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Uptime of the host, in seconds.
fn uptime() -> io::Result<u64> {
    let text = fs::read_to_string("/proc/uptime")?;
    let whole = text.split('.').next().and_then(|whole| whole.parse().ok());
    whole.ok_or_else(|| io::Error::other("/proc/uptime has no time"))
}

fn digest(bytes: &[u8]) -> String {
    HEXLOWER.encode(&Sha256::digest(bytes))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn request<'a>(id: &'a str, content: &'a str) -> KeyedRequest<'a> {
        KeyedRequest {
            uid: Some(1000),
            id,
            content: content.as_bytes(),
        }
    }

    fn new(known: Lookup) -> InProgress {
        match known {
            Lookup::New(in_progress) => in_progress,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn repeated_request_gets_the_first_result_and_is_carried_out_once() {
        let folder = tempfile::tempdir().unwrap();
        let requests = RequestRecords::at(folder.path(), KEPT).unwrap();
        let first = new(requests.begin(request("a", "start")).unwrap());
        assert!(matches!(
            requests.begin(request("a", "start")).unwrap(),
            Lookup::InProgress
        ));
        first.end(json!({"status": 201})).unwrap();
        // Reads the records as a later process does.
        let requests = RequestRecords::at(folder.path(), KEPT).unwrap();
        let again = requests.begin(request("a", "start")).unwrap();
        assert!(matches!(again, Lookup::Done(Some(result)) if result["status"] == 201));
        assert!(matches!(
            requests.begin(request("a", "stop")).unwrap(),
            Lookup::Different
        ));
        let others = KeyedRequest {
            uid: Some(1001),
            ..request("a", "stop")
        };
        new(requests.begin(others).unwrap());
    }

    #[test]
    fn request_whose_process_ended_without_a_result_is_known_as_lost() {
        let folder = tempfile::tempdir().unwrap();
        let requests = RequestRecords::at(folder.path(), KEPT).unwrap();
        drop(new(requests.begin(request("a", "start")).unwrap()));
        let lost = requests.begin(request("a", "start")).unwrap();
        assert!(matches!(lost, Lookup::Lost(unix_s) if unix_s > 1_700_000_000));
        // A process that died before it wrote its begin had no effect.
        let path = folder.path().join(FOLDER).join(format!("1000-{}", digest(b"b")));
        fs::write(path, "{\"content\"").unwrap();
        new(requests.begin(request("b", "start")).unwrap());
    }

    #[test]
    fn request_that_ran_for_long_and_whose_process_died_is_not_carried_out_again() {
        let folder = tempfile::tempdir().unwrap();
        let requests = RequestRecords::at(folder.path(), Duration::from_secs(1)).unwrap();
        let long = new(requests.begin(request("a", "start")).unwrap());
        std::thread::sleep(Duration::from_secs(2));
        assert!(matches!(
            requests.begin(request("a", "start")).unwrap(),
            Lookup::InProgress
        ));
        drop(long);
        let again = requests.begin(request("a", "start")).unwrap();
        assert!(matches!(again, Lookup::Lost(_)), "{again:?}");
        std::thread::sleep(Duration::from_secs(2));
        new(requests.begin(request("a", "start")).unwrap());
    }

    #[test]
    fn end_of_a_request_is_read_without_its_result() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("record");
        let end = End {
            ended_s: u64::MAX,
            how: How::TooLong,
        };
        // Bytes after the first line are not read.
        write_end(&path, end, &[b'\n'; 1 << 16]).unwrap();
        assert_eq!(read_end(&result(&path)).unwrap(), Some(end));
        assert_eq!(read_end(&path).unwrap(), None);
        fs::write(result(&path), "{\"ended_s\":1").unwrap();
        assert_eq!(read_end(&result(&path)).unwrap(), None);
    }

    #[test]
    fn abandoned_request_is_new_again_and_a_long_result_is_not_kept() {
        let folder = tempfile::tempdir().unwrap();
        let requests = RequestRecords::at(folder.path(), KEPT).unwrap();
        new(requests.begin(request("a", "x")).unwrap()).abandon().unwrap();
        let second = new(requests.begin(request("a", "x")).unwrap());
        second.end(Value::String("x".repeat(RESULT_BYTES_MAX))).unwrap();
        assert!(matches!(
            requests.begin(request("a", "x")).unwrap(),
            Lookup::Done(None)
        ));
    }

    #[test]
    fn records_of_one_user_are_bounded_and_expired_ones_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let requests = RequestRecords::at(folder.path(), KEPT).unwrap();
        let id = |number: usize| number.to_string();
        for number in 0..RECORDS_MAX {
            let in_progress = new(requests.begin(request(&id(number), "x")).unwrap());
            in_progress.end(Value::Null).unwrap();
        }
        let one_more = request("more", "x");
        assert!(matches!(requests.begin(one_more).unwrap(), Lookup::Full));
        assert!(matches!(
            requests.begin(request(&id(0), "x")).unwrap(),
            Lookup::Done(_)
        ));
        new(requests
            .begin(KeyedRequest {
                uid: None,
                ..one_more
            })
            .unwrap());
        // All have expired except the one in progress.
        let later = RequestRecords::at(folder.path(), Duration::ZERO).unwrap();
        let held = new(later.begin(one_more).unwrap());
        assert!(matches!(later.begin(one_more).unwrap(), Lookup::InProgress));
        assert_eq!(
            fs::read_dir(folder.path().join(FOLDER)).unwrap().count(),
            2,
            "its record and the guard"
        );
        drop(held);
    }

    #[test]
    fn records_are_closed_to_other_users() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let requests = RequestRecords::at(folder.path(), KEPT).unwrap();
        let done = new(requests.begin(request("a", "x")).unwrap());
        done.end(Value::Null).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&requests.folder), 0o700);
        for entry in fs::read_dir(&requests.folder).unwrap() {
            assert_eq!(mode(&entry.unwrap().path()), 0o600);
        }
    }

    #[test]
    fn record_from_before_the_hosts_start_has_expired() {
        let folder = tempfile::tempdir().unwrap();
        let requests = RequestRecords::at(folder.path(), KEPT).unwrap();
        new(requests.begin(request("a", "x")).unwrap())
            .end(Value::Null)
            .unwrap();
        let path = requests.folder.join(format!("1000-{}", digest(b"a")));
        let ended = read_end(&result(&path)).unwrap().expect("an end").ended_s;
        let left = |now| requests.tidy("1000", now).unwrap();
        assert_eq!(left(ended), 1);
        assert_eq!(left(ended + KEPT.as_secs() - 1), 1);
        // The host has started since, so its uptime is less.
        assert_eq!(left(ended - 1), 0);
        assert!(!path.exists() && !result(&path).exists());
    }

    #[test]
    fn record_expires_when_its_time_is_over_and_counts_for_its_own_user_alone() {
        let folder = tempfile::tempdir().unwrap();
        let requests = RequestRecords::at(folder.path(), KEPT).unwrap();
        new(requests.begin(request("a", "x")).unwrap())
            .end(Value::Null)
            .unwrap();
        let path = requests.folder.join(format!("1000-{}", digest(b"a")));
        let ended = read_end(&result(&path)).unwrap().expect("an end").ended_s;
        for other in ["100", "10001", "000", "none"] {
            assert_eq!(requests.tidy(other, ended).unwrap(), 0, "user {other}");
        }
        // A file of another kind of name is no record, and stays.
        let foreign = requests.folder.join("1000-notes");
        fs::write(&foreign, "").unwrap();
        assert_eq!(requests.tidy("1000", ended + KEPT.as_secs()).unwrap(), 0);
        assert!(!path.exists() && foreign.exists());
    }

    #[test]
    fn result_is_kept_up_to_the_greatest_length() {
        let folder = tempfile::tempdir().unwrap();
        let requests = RequestRecords::at(folder.path(), KEPT).unwrap();
        // With its quotation marks the text has two bytes more.
        for (id, length, is_kept) in [
            ("a", RESULT_BYTES_MAX - 2, true),
            ("b", RESULT_BYTES_MAX - 1, false),
        ] {
            let result = Value::String("x".repeat(length));
            new(requests.begin(request(id, "x")).unwrap())
                .end(result.clone())
                .unwrap();
            match requests.begin(request(id, "x")).unwrap() {
                Lookup::Done(kept) => assert_eq!(kept, is_kept.then_some(result), "{id}"),
                other => panic!("{other:?}"),
            }
        }
    }
}
