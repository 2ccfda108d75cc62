//! Keys of a cluster: its own authority, and certificates that the authority has signed, each with an end.

use std::collections::BTreeSet;
use std::fs;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use data_encoding::HEXLOWER;
use hostfiles::{private, replace_file};
use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, DistinguishedName, DnType,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyIdMethod, KeyPair, KeyUsagePurpose, RevocationReason,
    RevokedCertParams, SerialNumber,
};
use rustls::pki_types::CertificateDer;
use sha2::{Digest, Sha256};

use super::request::KeyRequest;
use super::{TlsError, certificates, revocation, wrong};

/// File of the authority's certificate, which all hosts have.
const AUTHORITY: &str = "authority.pem";
/// File of the authority's key, with which hosts can be added; no host needs it.
const AUTHORITY_KEY: &str = "authority.key";
/// File with the names and serial numbers of all certificates that the authority has issued, for revocation.
const ISSUED: &str = "issued.txt";
/// Validity of a certificate: a year.
pub const VALID: Duration = Duration::from_secs(365 * 24 * 3600);
/// Greatest difference of the hosts' clocks: a certificate is valid from that long before its creation.
const CLOCKS_DIFFER: Duration = Duration::from_secs(24 * 3600);

/// Names that a certificate is valid for, and the name of its files.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Subject {
    /// Name of its files, without `.pem` and `.key`.
    pub file: String,
    /// Host names and IP addresses of the subject.
    pub names: Vec<String>,
}

/// Files of a process's keys.
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
    /// Returns the files of a [`Subject`] in a folder.
    pub fn of(folder: &Path, file: &str) -> Self {
        Self {
            authority: folder.join(AUTHORITY),
            certificate: folder.join(format!("{file}.pem")),
            key: folder.join(format!("{file}.key")),
        }
    }
}

/// Creates the keys that a folder lacks: the authority's, and one for each subject.
///
/// # Errors
/// Fails with [`TlsError::Keys`] if the folder can't be written or has an invalid authority.
pub fn make<S: Into<Subject>>(folder: &Path, subjects: impl IntoIterator<Item = S>) -> Result<(), TlsError> {
    let subjects = subjects.into_iter().map(Into::into);
    let missing = |subject: &Subject| !KeyFiles::of(folder, &subject.file).certificate.exists();
    issue_all(folder, subjects.filter(missing))
}

/// Creates new keys for all subjects, with the same authority.
///
/// # Errors
/// Fails as [`make`].
pub fn renew<S: Into<Subject>>(folder: &Path, subjects: impl IntoIterator<Item = S>) -> Result<(), TlsError> {
    issue_all(folder, subjects.into_iter().map(Into::into))
}

fn issue_all(folder: &Path, subjects: impl Iterator<Item = Subject>) -> Result<(), TlsError> {
    private::directories(folder).map_err(|error| wrong(folder, error))?;
    let issuer = authority(folder)?;
    // An etcd that reads a list needs one from the start.
    if !revocation::list(folder).exists() {
        write_list(folder, &issuer, &BTreeSet::new())?;
    }
    let now = SystemTime::now();
    for subject in subjects {
        issue(folder, &issuer, &subject, now + VALID)?;
    }
    Ok(())
}

/// Creates a key and its certificate, which is valid until `end`.
pub(super) fn issue(
    folder: &Path,
    issuer: &Issuer<'static, KeyPair>,
    subject: &Subject,
    end: SystemTime,
) -> Result<(), TlsError> {
    let files = KeyFiles::of(folder, &subject.file);
    let path = &files.certificate;
    let params = params(path, subject, end)?;
    let key = KeyPair::generate().map_err(|error| wrong(path, error))?;
    let certificate = params
        .signed_by(&key, issuer)
        .map_err(|error| wrong(path, error))?;
    // A certificate without a record could not be revoked.
    record(folder, &subject.file, certificate.der())?;
    // The certificate is written last: without it the next call creates both again.
    replace(&files.key, &key.serialize_pem())?;
    replace(path, &certificate.pem())
}

/// Returns the parameters of a certificate that is valid until `end`.
fn params(path: &Path, subject: &Subject, end: SystemTime) -> Result<CertificateParams, TlsError> {
    let mut params = CertificateParams::new(subject.names.clone()).map_err(|error| wrong(path, error))?;
    params.distinguished_name = named(&subject.file);
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    // Servers also act as clients: hosts of one another, and etcd's HTTP interface of its own server.
    params.extended_key_usages = vec![
        ExtendedKeyUsagePurpose::ServerAuth,
        ExtendedKeyUsagePurpose::ClientAuth,
    ];
    let since_1970 = |time: SystemTime| time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let epoch = rcgen::date_time_ymd(1970, 1, 1);
    params.not_after = epoch + since_1970(end);
    params.not_before = epoch + since_1970(end - VALID - CLOCKS_DIFFER);
    Ok(params)
}

/// Signs the key of a host that joins, by the authority of a folder, for a year. The certificate is recorded
/// as those of other hosts are, and returned as text.
///
/// # Errors
/// Fails with [`TlsError::Request`] if the request does not prove that its sender has the key, or
/// [`TlsError::Keys`].
pub fn sign(folder: &Path, host: &str, request: &KeyRequest, context: &[u8]) -> Result<String, TlsError> {
    request.check(host, context)?;
    let path = KeyFiles::of(folder, host).certificate;
    let params = params(&path, &Subject::from(host), SystemTime::now() + VALID)?;
    let certificate = params
        .signed_by(request, &existing_authority(folder)?)
        .map_err(|error| wrong(&path, error))?;
    record(folder, host, certificate.der())?;
    Ok(certificate.pem())
}

/// Returns whether the authority of a folder has ever signed a certificate of this name.
///
/// # Errors
/// Fails with [`TlsError::Keys`].
pub fn has_issued(folder: &Path, name: &str) -> Result<bool, TlsError> {
    Ok(!issued(folder, name)?.is_empty())
}

/// Returns the authority of a folder that has one.
pub(super) fn existing_authority(folder: &Path) -> Result<Issuer<'static, KeyPair>, TlsError> {
    let key = folder.join(AUTHORITY_KEY);
    match key.exists() {
        true => authority(folder),
        false => Err(wrong(&key, "there is no key of the authority here")),
    }
}

/// Writes the files of a host that has joined.
///
/// # Errors
/// Fails with [`TlsError::Keys`] if the folder has keys of another cluster, or can't be written.
pub fn write_joined(folder: &Path, host: &str, key: &str, texts: &JoinedTexts<'_>) -> Result<(), TlsError> {
    let files = KeyFiles::of(folder, host);
    let other = fs::read_to_string(&files.authority).is_ok_and(|there| there != texts.authority);
    if other {
        return Err(wrong(&files.authority, "it is of another cluster; move it away"));
    }
    private::directories(folder).map_err(|error| wrong(folder, error))?;
    replace(&files.authority, texts.authority)?;
    replace(&revocation::list(folder), texts.revoked)?;
    replace(&files.key, key)?;
    replace(&files.certificate, texts.certificate)
}

/// Files of a joining host, each as PEM.
#[derive(Clone, Copy, Debug)]
pub struct JoinedTexts<'a> {
    /// The host's certificate.
    pub certificate: &'a str,
    /// Certificate of the authority.
    pub authority: &'a str,
    /// List of revoked certificates.
    pub revoked: &'a str,
}

/// Returns the authority of a folder, which is created if it is missing.
pub(super) fn authority(folder: &Path) -> Result<Issuer<'static, KeyPair>, TlsError> {
    let (path, key_path) = (folder.join(AUTHORITY), folder.join(AUTHORITY_KEY));
    // Identical each time except for the key.
    let mut params = CertificateParams::default();
    params.distinguished_name = named("mirrorball cluster");
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
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
    replace_file(path, private::FILE_MODE, text.as_bytes()).map_err(|error| wrong(path, error))
}

/// Returns the SHA-256 digest of a certificate.
pub(super) fn digest(certificate: &[u8]) -> [u8; 32] {
    Sha256::digest(certificate).into()
}

/// Returns the digest of the authority's certificate in a folder, and its text.
///
/// # Errors
/// Fails with [`TlsError::Keys`].
pub fn authority_digest(folder: &Path) -> Result<([u8; 32], String), TlsError> {
    let path = folder.join(AUTHORITY);
    let all = certificates(&path)?;
    let first = all.first().ok_or_else(|| wrong(&path, "it has no certificate"))?;
    let text = fs::read_to_string(&path).map_err(|error| wrong(&path, error))?;
    Ok((digest(first), text))
}

/// Returns the SHA-256 fingerprint of a certificate's file, as `openssl x509 -fingerprint -sha256` writes it.
///
/// # Errors
/// Fails with [`TlsError::Keys`].
pub fn fingerprint(path: &Path) -> Result<String, TlsError> {
    let all = certificates(path)?;
    let first = all.first().ok_or_else(|| wrong(path, "it has no certificate"))?;
    let bytes: Vec<String> = digest(first).iter().map(|byte| format!("{byte:02X}")).collect();
    Ok(bytes.join(":"))
}

/// Revokes all certificates that the authority in a folder has issued under a name, and removes the files of
/// its key. Returns the path of the list of revoked certificates, which then has to reach all hosts.
///
/// # Errors
/// Fails with [`TlsError::Unknown`] if there are none, or [`TlsError::Keys`].
pub fn revoke(folder: &Path, name: &str) -> Result<PathBuf, TlsError> {
    let files = KeyFiles::of(folder, name);
    let mut serials: BTreeSet<Vec<u8>> = issued(folder, name)?.into_iter().collect();
    // Older versions kept no record.
    if files.certificate.exists()
        && let Some(certificate) = certificates(&files.certificate)?.first()
    {
        serials.insert(serial(certificate).map_err(|error| wrong(&files.certificate, error))?);
    }
    if serials.is_empty() {
        return Err(TlsError::Unknown {
            folder: folder.to_owned(),
            name: name.to_owned(),
        });
    }
    let list = revocation::list(folder);
    serials.extend(revocation::serials(&list)?);
    write_list(folder, &authority(folder)?, &serials)?;
    for path in [&files.certificate, &files.key] {
        match fs::remove_file(path) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(wrong(path, error)),
            _ => {}
        }
    }
    Ok(list)
}

/// Adds a line to the record of issued certificates.
fn record(folder: &Path, name: &str, certificate: &CertificateDer<'_>) -> Result<(), TlsError> {
    let path = folder.join(ISSUED);
    let serial = serial(certificate).map_err(|error| wrong(&path, error))?;
    let digits = HEXLOWER.encode(&serial);
    private::log(&path)
        .and_then(|mut file| file.write_all(format!("{name} {digits}\n").as_bytes()))
        .map_err(|error| wrong(&path, error))
}

/// Returns the serial numbers of all certificates that were issued under a name.
fn issued(folder: &Path, name: &str) -> Result<Vec<Vec<u8>>, TlsError> {
    let path = folder.join(ISSUED);
    let text = match fs::read_to_string(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        text => text.map_err(|error| wrong(&path, error))?,
    };
    let mut serials = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let record = line
            .split_once(' ')
            .and_then(|(of, digits)| Some((of, bytes(digits)?)));
        let (of, serial) =
            record.ok_or_else(|| wrong(&path, format!("line {number} is not a name and a serial number")))?;
        if of == name {
            serials.push(serial);
        }
    }
    Ok(serials)
}

/// Decodes an even number of hexadecimal digits.
fn bytes(digits: &str) -> Option<Vec<u8>> {
    let pairs = digits.as_bytes().chunks(2);
    let byte = |pair: &[u8]| match *pair {
        [high, low] => {
            let digit = |digit: u8| char::from(digit).to_digit(16);
            u8::try_from(digit(high)? << 4 | digit(low)?).ok()
        }
        _ => None,
    };
    (!digits.is_empty()).then(|| pairs.map(byte).collect())?
}

fn serial(certificate: &CertificateDer<'_>) -> Result<Vec<u8>, webpki::Error> {
    let certificate = webpki::EndEntityCert::try_from(certificate)?;
    Ok(certificate.serial().to_vec())
}

/// Writes the list of revoked certificates. Entries stay on it after their certificates have ended: the
/// hosts' clocks differ.
fn write_list(
    folder: &Path,
    issuer: &Issuer<'static, KeyPair>,
    serials: &BTreeSet<Vec<u8>>,
) -> Result<(), TlsError> {
    let path = revocation::list(folder);
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let now = rcgen::date_time_ymd(1970, 1, 1) + since_1970;
    let revoked = |serial: &Vec<u8>| RevokedCertParams {
        serial_number: SerialNumber::from_slice(serial),
        revocation_time: now,
        reason_code: Some(RevocationReason::CessationOfOperation),
        invalidity_date: None,
    };
    let params = CertificateRevocationListParams {
        this_update: now,
        // A list is valid until the next one, whenever that is written.
        next_update: rcgen::date_time_ymd(4096, 1, 1),
        crl_number: SerialNumber::from(since_1970.as_secs()),
        issuing_distribution_point: None,
        revoked_certs: serials.iter().map(revoked).collect(),
        key_identifier_method: KeyIdMethod::Sha256,
    };
    let list = params.signed_by(issuer).map_err(|error| wrong(&path, error))?;
    replace(&path, &list.pem().map_err(|error| wrong(&path, error))?)
}
