//! Connections to a host that has no certificate yet: the caller has only the digest of the authority's
//! certificate.
//!
//! The side with the authority's key presents a certificate made for this purpose, and the authority's own.
//! The caller is not authenticated here; its messages must carry a proof.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rcgen::{
    CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, KeyPair, KeyUsagePurpose,
};
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{
    CertificateError, ClientConfig, ClientConnection, Connection, DigitallySignedStruct, RootCertStore,
    ServerConfig, ServerConnection, SignatureScheme,
};

use super::{Deadline, TlsError, authority_digest, certificates, keys, provider, wrong};

/// Name in the certificate of the answering side. No host can have it, as names of hosts have no dot.
const NAME: &str = "invitation.mirrorball";
/// Difference of clocks beyond which the certificate is invalid.
const VALID: Duration = Duration::from_secs(24 * 3600);
/// Greatest length of a message, bytes.
const MESSAGE_BYTES_MAX: u32 = 4 << 20;
/// Number of bytes that are written or read at once.
const PIECE_BYTES: usize = 16 << 10;

/// The side with the authority's key.
#[derive(Clone, Debug)]
pub struct Inviter {
    server: Arc<ServerConfig>,
    /// Digest of the authority's certificate.
    pub authority: [u8; 32],
}

/// A connection on which both sides send whole messages.
#[derive(Debug)]
pub struct Exchange {
    tls: Connection,
    tcp: TcpStream,
    deadline: Deadline,
}

impl Inviter {
    /// Creates the side of a folder with the authority's key.
    ///
    /// # Errors
    /// Fails with [`TlsError::Keys`].
    pub fn open(folder: &Path) -> Result<Self, TlsError> {
        let path = keys::KeyFiles::of(folder, NAME).authority;
        let failed = |error: &dyn std::fmt::Display| wrong(&path, error);
        let issuer = keys::existing_authority(folder)?;
        let mut params = CertificateParams::new([NAME.to_owned()]).map_err(|error| failed(&error))?;
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, NAME);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let at = |time: Duration| rcgen::date_time_ymd(1970, 1, 1) + time;
        (params.not_before, params.not_after) = (at(now.saturating_sub(VALID)), at(now + VALID));
        let key = KeyPair::generate().map_err(|error| failed(&error))?;
        let own = params.signed_by(&key, &issuer).map_err(|error| failed(&error))?;
        let mut chain = vec![own.der().clone()];
        chain.extend(certificates(&path)?);
        let key = PrivateKeyDer::try_from(key.serialize_der()).map_err(|error| failed(&error))?;
        let server = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, key))
            .map_err(|error| failed(&error))?;
        Ok(Self {
            server: Arc::new(server),
            authority: authority_digest(folder)?.0,
        })
    }

    /// Accepts the connection of a caller and completes the handshake.
    ///
    /// # Errors
    /// Fails if the caller disconnects, or the deadline passes.
    pub fn accept(&self, tcp: TcpStream, deadline: Deadline) -> io::Result<Exchange> {
        let tls = ServerConnection::new(self.server.clone()).map_err(io::Error::other)?;
        Exchange::begin(tls.into(), tcp, deadline)
    }
}

impl Exchange {
    /// Connects to the side whose authority's certificate has this digest.
    ///
    /// # Errors
    /// Fails if it can't be reached within `limit`, or has another authority.
    pub fn call(address: SocketAddr, authority: [u8; 32], limit: Duration) -> io::Result<Self> {
        let tcp = TcpStream::connect_timeout(&address, limit)?;
        let client = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(io::Error::other)?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(PinnedAuthority(authority)))
            .with_no_client_auth();
        let name = ServerName::try_from(NAME).map_err(io::Error::other)?;
        let tls = ClientConnection::new(Arc::new(client), name).map_err(io::Error::other)?;
        Self::begin(tls.into(), tcp, Deadline::after(limit)).map_err(explained)
    }

    fn begin(mut tls: Connection, tcp: TcpStream, deadline: Deadline) -> io::Result<Self> {
        tcp.set_nodelay(true)?;
        let mut timed = deadline.over(&tcp);
        while tls.is_handshaking() {
            tls.complete_io(&mut timed)?;
        }
        while tls.wants_write() {
            tls.write_tls(&mut timed)?;
        }
        Ok(Self { tls, tcp, deadline })
    }

    /// Continues with another deadline.
    #[must_use]
    pub fn until(self, deadline: Deadline) -> Self {
        Self { deadline, ..self }
    }

    /// Sends a message.
    ///
    /// # Errors
    /// Fails if the other side is gone, or the deadline passes.
    pub fn send(&mut self, message: &[u8]) -> io::Result<()> {
        let length = u32::try_from(message.len()).map_err(io::Error::other)?;
        let mut timed = self.deadline.over(&self.tcp);
        // In pieces that fit its buffer.
        for part in [&length.to_le_bytes()[..]]
            .into_iter()
            .chain(message.chunks(PIECE_BYTES))
        {
            self.tls.writer().write_all(part)?;
            while self.tls.wants_write() {
                self.tls.write_tls(&mut timed)?;
            }
        }
        Ok(())
    }

    /// Receives a message.
    ///
    /// # Errors
    /// Fails as [`Exchange::send`], and with `InvalidData` if the message is longer than 4 MiB.
    pub fn receive(&mut self) -> io::Result<Vec<u8>> {
        let mut length = [0; 4];
        self.read_exact(&mut length)?;
        let length = u32::from_le_bytes(length);
        if length > MESSAGE_BYTES_MAX {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut message = Vec::new();
        // Bytes that have not arrived take no memory.
        while message.len() < length as usize {
            let before = message.len();
            message.resize((before + PIECE_BYTES).min(length as usize), 0);
            self.read_exact(&mut message[before..])?;
        }
        Ok(message)
    }

    fn read_exact(&mut self, mut bytes: &mut [u8]) -> io::Result<()> {
        let mut timed = self.deadline.over(&self.tcp);
        while !bytes.is_empty() {
            match self.tls.reader().read(bytes) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => bytes = &mut bytes[read..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if self.tls.read_tls(&mut timed)? == 0 {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                    self.tls.process_new_packets().map_err(io::Error::other)?;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Returns the reason for which a handshake failed, in plain words.
fn explained(error: io::Error) -> io::Error {
    let tls = error.get_ref().and_then(|cause| cause.downcast_ref());
    let why = match tls {
        Some(rustls::Error::InvalidCertificate(
            CertificateError::Expired
            | CertificateError::ExpiredContext { .. }
            | CertificateError::NotValidYet
            | CertificateError::NotValidYetContext { .. },
        )) => "the clocks of the two hosts differ by more than a day; set them",
        Some(rustls::Error::InvalidCertificate(_)) => {
            "another cluster's authority answers there, or a host in between"
        }
        _ => return error,
    };
    io::Error::new(io::ErrorKind::PermissionDenied, why)
}

/// Trusts only the authority whose certificate has this digest.
#[derive(Debug)]
struct PinnedAuthority([u8; 32]);

impl ServerCertVerifier for PinnedAuthority {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let unknown = rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer);
        let mut authorities = intermediates.iter();
        let authority = authorities.find(|one| keys::digest(one) == self.0);
        let authority = authority.ok_or_else(|| unknown.clone())?;
        let mut roots = RootCertStore::empty();
        roots.add(authority.clone().into_owned())?;
        let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider())
            .build()
            .map_err(|_| unknown)?;
        verifier.verify_server_cert(end_entity, &[], server_name, ocsp_response, now)
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::Error::General("only TLS 1.3 is spoken".to_owned()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = provider().signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signature, &algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        provider().signature_verification_algorithms.supported_schemes()
    }
}
