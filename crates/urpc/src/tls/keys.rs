//! Keys for the hosts of a cluster: an authority of its own, and a certificate for each host that it has signed.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose,
};

use super::{TlsError, wrong};

/// The authority's certificate, which all hosts have.
pub const AUTHORITY: &str = "authority.pem";
/// Its key, with which hosts can be added; no host needs it.
const AUTHORITY_KEY: &str = "authority.key";

/// A host's certificate.
pub fn certificate_of(host: &str) -> String {
    format!("{host}.pem")
}

/// A host's key.
pub fn key_of(host: &str) -> String {
    format!("{host}.key")
}

/// Makes the keys that are missing in a folder: the authority's, and one for each host.
///
/// # Errors
/// [`TlsError::Keys`] if the folder can't be written or has an authority that makes no sense.
pub fn make<'a>(folder: &Path, hosts: impl IntoIterator<Item = &'a str>) -> Result<(), TlsError> {
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)
        .map_err(|error| wrong(folder, error))?;
    let issuer = authority(folder)?;
    for host in hosts {
        let path = folder.join(certificate_of(host));
        if path.exists() {
            continue;
        }
        let mut params = CertificateParams::new([host.to_owned()]).map_err(|error| wrong(&path, error))?;
        params.distinguished_name = named(host);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ];
        let key = KeyPair::generate().map_err(|error| wrong(&path, error))?;
        let certificate = params
            .signed_by(&key, &issuer)
            .map_err(|error| wrong(&path, error))?;
        write(&folder.join(key_of(host)), &key.serialize_pem())?;
        write(&path, &certificate.pem())?;
    }
    Ok(())
}

fn authority(folder: &Path) -> Result<Issuer<'static, KeyPair>, TlsError> {
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
    write(&key_path, &key.serialize_pem())?;
    write(&path, &certificate.pem())?;
    Ok(Issuer::new(params, key))
}

fn named(name: &str) -> DistinguishedName {
    let mut distinguished = DistinguishedName::new();
    distinguished.push(DnType::CommonName, name);
    distinguished
}

/// Only for its owner.
fn write(path: &Path, text: &str) -> Result<(), TlsError> {
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .and_then(|mut file| file.write_all(text.as_bytes()))
        .map_err(|error| wrong(path, error))
}
