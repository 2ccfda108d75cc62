//! Certificates that the authority has revoked, and the streams that end with them.
//!
//! The list is a file beside the keys (a CRL, RFC 5280), which the authority has signed. A process reads it
//! again at each handshake if it has changed, and checks it for changes while it has streams.

use std::fs;
use std::io;
use std::net::{Shutdown, TcpStream};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use locks::IgnorePoison;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, TrustAnchor, UnixTime};
use webpki::{
    BorrowedCertRevocationList, CertRevocationList, EndEntityCert, KeyUsage, OwnedCertRevocationList,
    RevocationCheckDepth, RevocationOptionsBuilder, UnknownStatusPolicy,
};

use super::{TlsError, provider, wrong};

/// File name of the list among the keys.
const LIST: &str = "revoked.crl";
/// Interval of the checks of the list while streams are open. A revoked host's streams end within two
/// intervals.
const POLL_INTERVAL: Duration = Duration::from_millis(400);

/// Returns the path of the list in a folder of keys.
pub fn list(folder: &Path) -> PathBuf {
    folder.join(LIST)
}

/// State of a file. Writing or replacing the file changes it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Stamp {
    inode: u64,
    bytes: u64,
    changed: (i64, i64),
}

impl Stamp {
    /// Returns the present state of a file; none if the file is missing.
    ///
    /// # Errors
    /// Fails with the error of the kernel.
    pub fn of(path: &Path) -> io::Result<Option<Self>> {
        match fs::metadata(path) {
            Ok(about) => Ok(Some(Self {
                inode: about.ino(),
                bytes: about.size(),
                changed: (about.ctime(), about.ctime_nsec()),
            })),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// Returns the serial numbers on a list; none without a list.
pub(super) fn serials(path: &Path) -> Result<Vec<Vec<u8>>, TlsError> {
    let mut serials = Vec::new();
    for list in read(path)? {
        let list = BorrowedCertRevocationList::from_der(&list).map_err(|error| wrong(path, error))?;
        for revoked in &list {
            let revoked = revoked.map_err(|error| wrong(path, error))?;
            serials.push(revoked.serial_number.to_vec());
        }
    }
    Ok(serials)
}

fn read(path: &Path) -> Result<Vec<CertificateRevocationListDer<'static>>, TlsError> {
    if !path.exists() {
        return Ok(Vec::new());
    }
    let lists: Vec<_> = CertificateRevocationListDer::pem_file_iter(path)
        .and_then(Iterator::collect)
        .map_err(|error| wrong(path, error))?;
    match lists.is_empty() {
        true => Err(wrong(path, "it has no list of revoked certificates")),
        false => Ok(lists),
    }
}

/// Replaces the list of `host` by one that another host has sent, unless they are equal.
///
/// # Errors
/// Fails with [`TlsError::Keys`] if the host's authority has not signed it, or it lacks a certificate that is
/// revoked here.
pub fn replace(folder: &Path, host: &str, text: &str) -> Result<(), TlsError> {
    let path = list(folder);
    let refused =
        |why: &dyn std::fmt::Display| wrong(&path, format!("the list that replaces it is refused: {why}"));
    if fs::read_to_string(&path).is_ok_and(|there| there == text) {
        return Ok(());
    }
    let lists: Vec<_> = CertificateRevocationListDer::pem_slice_iter(text.as_bytes())
        .collect::<Result<_, _>>()
        .map_err(|error| refused(&error))?;
    let [only] = &lists[..] else {
        return Err(refused(&"it is not one list"));
    };
    let files = super::KeyFiles::of(folder, host);
    let (authority, own) = (
        super::certificates(&files.authority)?,
        super::certificates(&files.certificate)?,
    );
    if !has_signed(&authority, only, own.first()).map_err(|error| refused(&error))? {
        return Err(refused(&"the cluster's authority has not signed it"));
    }
    let parsed = BorrowedCertRevocationList::from_der(only).map_err(|error| refused(&error))?;
    let revoked: Vec<Vec<u8>> = parsed
        .into_iter()
        .map(|revoked| revoked.map(|revoked| revoked.serial_number.to_vec()))
        .collect::<Result<_, _>>()
        .map_err(|error| refused(&error))?;
    if serials(&path)?.iter().any(|serial| !revoked.contains(serial)) {
        return Err(refused(&"it is older than the one that is here"));
    }
    hostfiles::replace_file(&path, hostfiles::private::FILE_MODE, text.as_bytes())
        .map_err(|error| wrong(&path, error))
}

/// Returns whether the authority has signed a list: verification against a list with a valid signature yields
/// a result for any certificate of the authority, revoked or not.
fn has_signed(
    authority: &[CertificateDer<'_>],
    list: &CertificateRevocationListDer<'_>,
    own: Option<&CertificateDer<'_>>,
) -> Result<bool, webpki::Error> {
    let anchors = authority.iter().map(webpki::anchor_from_trusted_cert);
    let anchors: Vec<TrustAnchor<'_>> = anchors.collect::<Result<_, _>>()?;
    let list = CertRevocationList::from(OwnedCertRevocationList::from_der(list)?);
    let lists = [&list];
    let options = RevocationOptionsBuilder::new(&lists).map_err(|_| webpki::Error::BadDer)?;
    let options = options
        .with_depth(RevocationCheckDepth::EndEntity)
        .with_status_policy(UnknownStatusPolicy::Deny)
        .build();
    let own = EndEntityCert::try_from(own.ok_or(webpki::Error::BadDer)?)?;
    let algorithms = provider().signature_verification_algorithms.all;
    let verify = |time| {
        let usage = KeyUsage::client_auth();
        let verified = own.verify_for_usage(algorithms, &anchors, &[], time, usage, Some(options), None);
        verified.map(|_| ())
    };
    let mut verified = verify(UnixTime::now());
    if let Err(webpki::Error::CertExpired { not_after, .. }) = verified {
        verified = verify(not_after);
    }
    match verified {
        Ok(()) | Err(webpki::Error::CertRevoked) => Ok(true),
        Err(
            webpki::Error::InvalidCrlSignatureForPublicKey
            | webpki::Error::UnknownRevocationStatus
            | webpki::Error::UnknownIssuer,
        ) => Ok(false),
        Err(error) => Err(error),
    }
}

/// The list of one authority in one process, and the streams of the process.
#[derive(Debug)]
pub(super) struct Revocations {
    path: PathBuf,
    anchors: Vec<TrustAnchor<'static>>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    stamp: Option<Stamp>,
    lists: Vec<CertRevocationList<'static>>,
    streams: Vec<Stream>,
    is_watched: bool,
}

/// An open connection, and the certificate of its other end.
#[derive(Debug)]
struct Stream {
    peer: CertificateDer<'static>,
    tcp: Weak<TcpStream>,
}

impl Revocations {
    /// Loads the list in a folder, which `authority` has signed.
    pub(super) fn load(folder: &Path, authority: &[CertificateDer<'_>]) -> Result<Arc<Self>, TlsError> {
        let path = list(folder);
        let anchors = authority.iter().map(webpki::anchor_from_trusted_cert);
        let anchors = anchors.map(|anchor| anchor.map(|anchor| anchor.to_owned()));
        let revocations = Self {
            anchors: anchors
                .collect::<Result<_, _>>()
                .map_err(|error| wrong(folder, error))?,
            path,
            state: Mutex::default(),
        };
        revocations.refresh(&mut revocations.lock())?;
        Ok(Arc::new(revocations))
    }

    /// Returns whether the list has this certificate.
    pub(super) fn is_revoked(&self, certificate: &CertificateDer<'_>) -> Result<bool, TlsError> {
        let mut state = self.lock();
        self.refresh(&mut state)?;
        self.is_on(&state.lists, certificate)
    }

    /// Admits a connection whose other end has proven that it has the key of `peer`. The connection is closed
    /// as soon as the list has that certificate.
    ///
    /// # Errors
    /// Fails with `PermissionDenied` if the list has it already, or with the error of reading the list.
    pub(super) fn admit(
        self: &Arc<Self>,
        peer: &CertificateDer<'static>,
        tcp: &Arc<TcpStream>,
    ) -> io::Result<()> {
        let mut state = self.lock();
        self.refresh(&mut state).map_err(io::Error::other)?;
        if self.is_on(&state.lists, peer).map_err(io::Error::other)? {
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, Revoked));
        }
        state.streams.retain(|stream| stream.tcp.strong_count() > 0);
        state.streams.push(Stream {
            peer: peer.clone(),
            tcp: Arc::downgrade(tcp),
        });
        if !state.is_watched {
            let watched = Arc::downgrade(self);
            std::thread::Builder::new()
                .name("revocations".into())
                .spawn(move || watch(&watched))?;
            state.is_watched = true;
        }
        Ok(())
    }

    /// Reads the list if it has changed, and closes connections with certificates that are on it now. If the
    /// file is missing, the last list stays in force.
    fn refresh(&self, state: &mut State) -> Result<(), TlsError> {
        let stamp = Stamp::of(&self.path).map_err(|error| wrong(&self.path, error))?;
        if stamp.is_none() || stamp == state.stamp {
            return Ok(());
        }
        let lists = read(&self.path)?.into_iter().map(|list| {
            let list = OwnedCertRevocationList::from_der(&list).map_err(|error| wrong(&self.path, error));
            list.map(CertRevocationList::from)
        });
        state.lists = lists.collect::<Result<_, _>>()?;
        state.stamp = stamp;
        for stream in &state.streams {
            if let (Some(tcp), Ok(true)) = (stream.tcp.upgrade(), self.is_on(&state.lists, &stream.peer)) {
                let _ = tcp.shutdown(Shutdown::Both);
            }
        }
        Ok(())
    }

    fn is_on(
        &self,
        lists: &[CertRevocationList<'_>],
        certificate: &CertificateDer<'_>,
    ) -> Result<bool, TlsError> {
        let lists: Vec<&CertRevocationList<'_>> = lists.iter().collect();
        let Ok(options) = RevocationOptionsBuilder::new(&lists) else {
            return Ok(false);
        };
        let options = options
            .with_depth(RevocationCheckDepth::EndEntity)
            .with_status_policy(UnknownStatusPolicy::Allow)
            .build();
        let verify = |time| {
            let certificate = EndEntityCert::try_from(certificate)?;
            let algorithms = provider().signature_verification_algorithms.all;
            let usage = KeyUsage::client_auth();
            let verified = certificate.verify_for_usage(
                algorithms,
                &self.anchors,
                &[],
                time,
                usage,
                Some(options),
                None,
            );
            verified.map(|_| ())
        };
        let mut checked = verify(UnixTime::now());
        // A connection may outlast its certificate.
        if let Err(webpki::Error::CertExpired { not_after, .. }) = checked {
            checked = verify(not_after);
        }
        match checked {
            Ok(()) => Ok(false),
            Err(webpki::Error::CertRevoked) => Ok(true),
            // The handshake refuses these, and reports why.
            Err(webpki::Error::CertNotValidYet { .. } | webpki::Error::UnknownIssuer) => Ok(false),
            Err(error) => Err(wrong(&self.path, error)),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().ignore_poison()
    }
}

/// Error of a handshake whose other end has a revoked certificate.
#[derive(Debug, thiserror::Error)]
#[error("the certificate has been revoked")]
pub(super) struct Revoked;

/// Checks the list repeatedly until there are no streams.
fn watch(revocations: &Weak<Revocations>) {
    loop {
        std::thread::sleep(POLL_INTERVAL);
        let Some(revocations) = revocations.upgrade() else {
            return;
        };
        let mut state = revocations.lock();
        // A list that is being copied is invalid for a moment; handshakes fail meanwhile, and streams stay
        // open.
        let _ = revocations.refresh(&mut state);
        state.streams.retain(|stream| stream.tcp.strong_count() > 0);
        if state.streams.is_empty() {
            state.is_watched = false;
            return;
        }
    }
}
