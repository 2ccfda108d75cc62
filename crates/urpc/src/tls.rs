//! Byte streams between hosts: TCP with TLS, on which each side has proven by a key which host it is.
//!
//! A stream appears on either side as a socket of this host; a thread for each moves bytes between it and the network. So
//! whoever speaks over it need not know where the other end is, and sees the end of the other process, or of its host, as
//! the end of the socket.

mod keys;
mod pump;
#[cfg(test)]
mod tests;

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, ClientConnection, Connection, RootCertStore, ServerConfig, ServerConnection};

pub use keys::make;

/// Why there is no stream.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file of keys is missing or makes no sense.
    #[error("{}: {why}; make keys with `mirrorball cluster keys`", path.display())]
    Keys {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// Not a name that a host can have.
    #[error("{0:?} is no name of a host")]
    Name(String),
    /// The network, or the other side, which may have no key or another's.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// What a host proves itself with, and the others against.
#[derive(Clone, Debug)]
pub struct Identity {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
}

/// The other side's proof.
#[derive(Clone, Debug)]
pub struct Peer(CertificateDer<'static>);

impl Identity {
    /// A host's, from a folder that [`make`] made.
    ///
    /// # Errors
    /// [`TlsError::Keys`].
    pub fn load(folder: &Path, host: &str) -> Result<Self, TlsError> {
        let authority = folder.join(keys::AUTHORITY);
        let mut roots = RootCertStore::empty();
        for certificate in certificates(&authority)? {
            roots.add(certificate).map_err(|error| wrong(&authority, error))?;
        }
        let roots = Arc::new(roots);
        let own = folder.join(keys::certificate_of(host));
        let chain = certificates(&own)?;
        let path = folder.join(keys::key_of(host));
        let key = PrivateKeyDer::from_pem_file(&path).map_err(|error| wrong(&path, error))?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
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
        // Nothing is resumed.
        server.send_tls13_tickets = 0;
        let client = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(versions)
            .and_then(|builder| {
                builder
                    .with_root_certificates(roots)
                    .with_client_auth_cert(chain, key)
            })
            .map_err(|error| wrong(&own, error))?;
        Ok(Self {
            client: Arc::new(client),
            server: Arc::new(server),
        })
    }

    /// A stream to `host` at `address`, which proves that it is that host within `limit`.
    ///
    /// # Errors
    /// [`TlsError::Io`], [`TlsError::Name`].
    pub fn connect(&self, address: SocketAddr, host: &str, limit: Duration) -> Result<UnixStream, TlsError> {
        let name = ServerName::try_from(host.to_owned()).map_err(|_| TlsError::Name(host.to_owned()))?;
        let tcp = TcpStream::connect_timeout(&address, limit)?;
        let tls = ClientConnection::new(self.client.clone(), name).map_err(io::Error::other)?;
        Ok(stream(tls.into(), tcp, limit)?.0)
    }

    /// The stream of a caller who proves within `limit` who it is.
    ///
    /// # Errors
    /// [`TlsError::Io`].
    pub fn accept(&self, tcp: TcpStream, limit: Duration) -> Result<(UnixStream, Peer), TlsError> {
        let tls = ServerConnection::new(self.server.clone()).map_err(io::Error::other)?;
        let (stream, peer) = stream(tls.into(), tcp, limit)?;
        Ok((
            stream,
            peer.ok_or(io::Error::from(io::ErrorKind::PermissionDenied))?,
        ))
    }
}

impl Peer {
    /// Whether it is this host.
    pub fn is(&self, host: &str) -> bool {
        let Ok(name) = ServerName::try_from(host) else {
            return false;
        };
        webpki::EndEntityCert::try_from(&self.0)
            .is_ok_and(|certificate| certificate.verify_is_valid_for_subject_name(&name).is_ok())
    }
}

fn stream(
    mut tls: Connection,
    mut tcp: TcpStream,
    limit: Duration,
) -> io::Result<(UnixStream, Option<Peer>)> {
    tcp.set_nodelay(true)?;
    tcp.set_read_timeout(Some(limit))?;
    tcp.set_write_timeout(Some(limit))?;
    while tls.is_handshaking() {
        tls.complete_io(&mut tcp)?;
    }
    // The last of a client's handshake.
    while tls.wants_write() {
        tls.write_tls(&mut tcp)?;
    }
    let peer = tls.peer_certificates().and_then(|chain| chain.first());
    let peer = peer.map(|certificate| Peer(certificate.clone().into_owned()));
    let (near, far) = UnixStream::pair()?;
    pump::start(tls, tcp, far)?;
    Ok((near, peer))
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
