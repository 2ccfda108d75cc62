//! Byte streams between hosts: TCP with TLS, with mutual authentication of the hosts.
//!
//! A stream appears on either side as a socket of this host; a thread on each side moves bytes between the
//! socket and the network. So users of a stream are location-transparent, and see the end of the other
//! process, or of its host, as the end of the socket.
//! host, as the end of the socket.

mod deadline;
mod end;
mod keys;
mod pinned;
mod pump;
mod request;
mod revocation;
#[cfg(test)]
mod tests;

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{
    CertificateError, ClientConfig, ClientConnection, Connection, RootCertStore, ServerConfig,
    ServerConnection,
};

pub use deadline::{Deadline, Timed, Timeouts};
pub use end::in_days;
pub use keys::{
    JoinedTexts, KeyFiles, Subject, VALID, authority_digest, fingerprint, has_issued, make, renew, revoke,
    sign, write_joined,
};
pub use pinned::{Exchange, Inviter};
pub use request::KeyRequest;
pub use revocation::{Stamp, list as revocation_list, replace as replace_revocation_list};

use revocation::{Revocations, Revoked};

/// Reason why a stream could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file of keys is missing or invalid.
    #[error("{}: {why}; make keys with `mirrorball cluster keys`", path.display())]
    Keys {
        /// The file.
        path: PathBuf,
        /// Problem of the file.
        why: String,
    },
    /// The own certificate is no longer valid.
    #[error("{}: this certificate ended {days} days ago; {RENEW}", path.display())]
    Ended {
        /// The certificate.
        path: PathBuf,
        /// Number of days since its end.
        days: u64,
    },
    /// The other side's certificate is no longer valid.
    #[error("the certificate of {0} has ended; {RENEW}")]
    PeerEnded(String),
    /// The authority has revoked the certificate of a host.
    #[error("the certificate of {0} has been revoked; {REVOKED}")]
    Revoked(String),
    /// A folder of keys has no record of a certificate of this name.
    #[error("{}: no key of {name} has been made here; help: {UNKNOWN}", folder.display())]
    Unknown {
        /// Folder of the keys.
        folder: PathBuf,
        /// Host name for which a key was looked for.
        name: String,
    },
    /// A request for a certificate is invalid.
    #[error("the request for a certificate is refused: {0}")]
    Request(String),
    /// The text is no name that a host can have.
    #[error("{0:?} is no name of a host")]
    Name(String),
    /// The network failed, or the other side, which may have no key or a foreign one.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Advice about a certificate that has ended.
const RENEW: &str = "help: run `mirrorball cluster keys FILE --renew` where authority.key is, and give \
    each host its new keys";

/// Advice about a certificate that was revoked.
const REVOKED: &str = "help: if the host is to stay, run `mirrorball cluster keys FILE` where \
    authority.key is, and give it the new keys";
/// Advice about a name without certificates.
const UNKNOWN: &str = "check the name, and give the command where authority.key is";

/// Credentials of a host, and the authority that verifies its peers.
#[derive(Clone, Debug)]
pub struct Identity {
    /// File of the own certificate; the next field is the end of its validity.
    certificate: PathBuf,
    end: SystemTime,
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
    revocations: Arc<Revocations>,
}

/// Certificate by which the other side was authenticated.
#[derive(Clone, Debug)]
pub struct Peer(CertificateDer<'static>);

impl Identity {
    /// Loads the identity of a host from a folder that [`make`] created.
    ///
    /// # Errors
    /// Fails with [`TlsError::Keys`], [`TlsError::Ended`] or [`TlsError::Revoked`].
    pub fn load(folder: &Path, host: &str) -> Result<Self, TlsError> {
        let files = KeyFiles::of(folder, host);
        let (authority, own, path) = (files.authority, files.certificate, files.key);
        let trusted = certificates(&authority)?;
        let mut roots = RootCertStore::empty();
        for certificate in &trusted {
            roots
                .add(certificate.clone())
                .map_err(|error| wrong(&authority, error))?;
        }
        let roots = Arc::new(roots);
        let chain = certificates(&own)?;
        let end = end::of(&chain, &trusted).map_err(|error| wrong(&own, error))?;
        let revocations = Revocations::load(folder, &trusted)?;
        if let Some(certificate) = chain.first()
            && revocations.is_revoked(certificate)?
        {
            return Err(TlsError::Revoked(host.to_owned()));
        }
        let key = PrivateKeyDer::from_pem_file(&path).map_err(|error| wrong(&path, error))?;
        let provider = provider();
        let versions = &[&rustls::version::TLS13];
        let verifier = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone())
            .build()
            .map_err(|error| wrong(&authority, error))?;
        let mut server = ServerConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(versions)
            .and_then(|builder| {
                builder
                    .with_client_cert_verifier(verifier)
                    .with_single_cert(chain.clone(), key.clone_key())
            })
            .map_err(|error| wrong(&own, error))?;
        // Sessions are not resumed.
        server.send_tls13_tickets = 0;
        let client = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(versions)
            .and_then(|builder| {
                builder
                    .with_root_certificates(roots)
                    .with_client_auth_cert(chain, key)
            })
            .map_err(|error| wrong(&own, error))?;
        let identity = Self {
            certificate: own,
            end,
            client: Arc::new(client),
            server: Arc::new(server),
            revocations,
        };
        identity.check_end()?;
        Ok(identity)
    }

    /// Returns the end of the own certificate's validity.
    pub fn end(&self) -> SystemTime {
        self.end
    }

    /// Checks the own certificate: the other side refuses an ended one without reporting the reason.
    fn check_end(&self) -> Result<(), TlsError> {
        let Ok(past) = SystemTime::now().duration_since(self.end) else {
            return Ok(());
        };
        Err(TlsError::Ended {
            path: self.certificate.clone(),
            days: in_days(past),
        })
    }

    /// Opens a stream to `host` at `address`, which must prove within `limit` that it is that host.
    ///
    /// # Errors
    /// Fails with [`TlsError::Io`], [`TlsError::Name`], [`TlsError::Ended`], [`TlsError::PeerEnded`] or
    /// [`TlsError::Revoked`].
    pub fn connect(&self, address: SocketAddr, host: &str, limit: Duration) -> Result<UnixStream, TlsError> {
        self.check_end()?;
        let deadline = Deadline::after(limit);
        let name = ServerName::try_from(host.to_owned()).map_err(|_| TlsError::Name(host.to_owned()))?;
        let tcp = TcpStream::connect_timeout(&address, limit)?;
        let tls = ClientConnection::new(self.client.clone(), name).map_err(io::Error::other)?;
        let (stream, _) = self
            .stream(tls.into(), tcp, deadline)
            .map_err(|error| of_peer(host, error))?;
        Ok(stream)
    }

    /// Accepts the stream of a caller, which must authenticate itself before `deadline`.
    ///
    /// # Errors
    /// Fails with [`TlsError::Io`], [`TlsError::Ended`], [`TlsError::PeerEnded`] or [`TlsError::Revoked`].
    pub fn accept(&self, tcp: TcpStream, deadline: Deadline) -> Result<(UnixStream, Peer), TlsError> {
        self.check_end()?;
        let tls = ServerConnection::new(self.server.clone()).map_err(io::Error::other)?;
        self.stream(tls.into(), tcp, deadline)
            .map_err(|error| of_peer("the caller", error))
    }

    /// Completes a handshake, and starts the thread that moves bytes.
    fn stream(
        &self,
        mut tls: Connection,
        tcp: TcpStream,
        deadline: Deadline,
    ) -> io::Result<(UnixStream, Peer)> {
        tcp.set_nodelay(true)?;
        let mut timed = deadline.over(&tcp);
        while tls.is_handshaking() {
            tls.complete_io(&mut timed)?;
        }
        // Sends the last part of a client's handshake.
        while tls.wants_write() {
            tls.write_tls(&mut timed)?;
        }
        let peer = tls.peer_certificates().and_then(|chain| chain.first());
        let peer = peer.ok_or(io::ErrorKind::PermissionDenied)?.clone().into_owned();
        let tcp = Arc::new(tcp);
        self.revocations.admit(&peer, &tcp)?;
        let (near, far) = UnixStream::pair()?;
        pump::start(tls, tcp, far)?;
        Ok((near, Peer(peer)))
    }
}

/// Returns unpredictable bytes.
///
/// # Errors
/// Fails if this host has no randomness.
pub fn secret() -> io::Result<[u8; 16]> {
    let mut bytes = [0; 16];
    let filled = provider().secure_random.fill(&mut bytes);
    filled.map_err(|_| io::Error::other("this host has no randomness"))?;
    Ok(bytes)
}

/// Returns the cryptography of all TLS of this program.
pub fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// Converts the error of a handshake with a host.
fn of_peer(host: &str, error: io::Error) -> TlsError {
    let cause = error.get_ref();
    let tls = cause.and_then(|cause| cause.downcast_ref());
    match tls {
        Some(rustls::Error::InvalidCertificate(
            CertificateError::Expired | CertificateError::ExpiredContext { .. },
        )) => TlsError::PeerEnded(host.to_owned()),
        _ if cause.is_some_and(|cause| cause.is::<Revoked>()) => TlsError::Revoked(host.to_owned()),
        _ => error.into(),
    }
}

impl Peer {
    /// Returns whether the peer is this host.
    pub fn is(&self, host: &str) -> bool {
        let Ok(name) = ServerName::try_from(host) else {
            return false;
        };
        webpki::EndEntityCert::try_from(&self.0)
            .is_ok_and(|certificate| certificate.verify_is_valid_for_subject_name(&name).is_ok())
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect)
        .map_err(|error| wrong(path, error))
}

fn wrong(path: &Path, error: impl std::fmt::Display) -> TlsError {
    TlsError::Keys {
        path: path.to_owned(),
        why: error.to_string(),
    }
}
