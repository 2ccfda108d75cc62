//! Keys of a cluster: its own authority, and certificates that the authority has signed, each with an end.

use std::fs::{self, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose,
};

use super::{TlsError, wrong};

/// The authority's certificate, which all hosts have.
const AUTHORITY: &str = "authority.pem";
/// Its key, with which hosts can be added; no host needs it.
const AUTHORITY_KEY: &str = "authority.key";
/// How long a certificate is valid: a year.
pub const VALID: Duration = Duration::from_secs(365 * 24 * 3600);
/// How far clocks of hosts may differ: a certificate is valid that long before it is made.
const CLOCKS_DIFFER: Duration = Duration::from_secs(24 * 3600);

/// Names that a certificate is valid for, and the name of its files.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Subject {
    /// The name of its files, without `.pem` and `.key`.
    pub file: String,
    /// Host names and IP addresses.
    pub names: Vec<String>,
}

/// Where a process finds its keys.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct KeyFiles {
    /// The authority's certificate.
    pub authority: PathBuf,
    /// The own certificate.
    pub certificate: PathBuf,
    /// The own key.
    pub key: PathBuf,
}

impl From<&str> for Subject {
    fn from(host: &str) -> Self {
        Self {
            file: host.to_owned(),
            names: vec![host.to_owned()],
        }
    }
}

impl KeyFiles {
    /// The files of a [`Subject`] in a folder.
    pub fn of(folder: &Path, file: &str) -> Self {
        Self {
            authority: folder.join(AUTHORITY),
            certificate: folder.join(format!("{file}.pem")),
            key: folder.join(format!("{file}.key")),
        }
    }
}

/// Makes the keys that a folder lacks: the authority's, and one for each subject.
///
/// # Errors
/// [`TlsError::Keys`] if the folder can't be written or has an authority that makes no sense.
pub fn make<S: Into<Subject>>(folder: &Path, subjects: impl IntoIterator<Item = S>) -> Result<(), TlsError> {
    let subjects = subjects.into_iter().map(Into::into);
    let missing = |subject: &Subject| !KeyFiles::of(folder, &subject.file).certificate.exists();
    issue_all(folder, subjects.filter(missing))
}

/// Makes new keys for all subjects, by the same authority.
///
/// # Errors
/// As [`make`].
pub fn renew<S: Into<Subject>>(folder: &Path, subjects: impl IntoIterator<Item = S>) -> Result<(), TlsError> {
    issue_all(folder, subjects.into_iter().map(Into::into))
}

fn issue_all(folder: &Path, subjects: impl Iterator<Item = Subject>) -> Result<(), TlsError> {
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)
        .map_err(|error| wrong(folder, error))?;
    let issuer = authority(folder)?;
    let now = SystemTime::now();
    for subject in subjects {
        issue(folder, &issuer, &subject, now + VALID)?;
    }
    Ok(())
}

/// Makes a key and its certificate, which is valid until `end`.
pub(super) fn issue(
    folder: &Path,
    issuer: &Issuer<'static, KeyPair>,
    subject: &Subject,
    end: SystemTime,
) -> Result<(), TlsError> {
    let files = KeyFiles::of(folder, &subject.file);
    let path = &files.certificate;
    let mut params = CertificateParams::new(subject.names.clone()).map_err(|error| wrong(path, error))?;
    params.distinguished_name = named(&subject.file);
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    // A server that is asked calls, too: hosts one another, and etcd's HTTP interface its own server.
    params.extended_key_usages = vec![
        ExtendedKeyUsagePurpose::ServerAuth,
        ExtendedKeyUsagePurpose::ClientAuth,
    ];
    let since_1970 = |time: SystemTime| time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let epoch = rcgen::date_time_ymd(1970, 1, 1);
    params.not_after = epoch + since_1970(end);
    params.not_before = epoch + since_1970(end - VALID - CLOCKS_DIFFER);
    let key = KeyPair::generate().map_err(|error| wrong(path, error))?;
    let certificate = params
        .signed_by(&key, issuer)
        .map_err(|error| wrong(path, error))?;
    // The certificate comes last: without it the next call makes both again.
    replace(&files.key, &key.serialize_pem())?;
    replace(path, &certificate.pem())
}

/// The authority of a folder, which is made if it is missing.
pub(super) fn authority(folder: &Path) -> Result<Issuer<'static, KeyPair>, TlsError> {
    let (path, key_path) = (folder.join(AUTHORITY), folder.join(AUTHORITY_KEY));
    // The same each time but for the key.
    let mut params = CertificateParams::default();
    params.distinguished_name = named("mirrorball cluster");
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    if path.exists() {
        let text = fs::read_to_string(&key_path).map_err(|error| wrong(&key_path, error))?;
        let key = KeyPair::from_pem(&text).map_err(|error| wrong(&key_path, error))?;
        return Ok(Issuer::new(params, key));
    }
    let key = KeyPair::generate().map_err(|error| wrong(&key_path, error))?;
    let certificate = params.self_signed(&key).map_err(|error| wrong(&path, error))?;
    replace(&key_path, &key.serialize_pem())?;
    replace(&path, &certificate.pem())?;
    Ok(Issuer::new(params, key))
}

fn named(name: &str) -> DistinguishedName {
    let mut distinguished = DistinguishedName::new();
    distinguished.push(DnType::CommonName, name);
    distinguished
}

/// Writes a file whole, for its owner only.
fn replace(path: &Path, text: &str) -> Result<(), TlsError> {
    let mut new = path.as_os_str().to_owned();
    new.push(".new");
    let new = PathBuf::from(new);
    let write = || {
        match fs::remove_file(&new) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&new)?;
        file.write_all(text.as_bytes())?;
        fs::rename(&new, path)
    };
    write().map_err(|error| wrong(path, error))
}
