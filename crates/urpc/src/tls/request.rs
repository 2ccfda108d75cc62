//! The request of a host for a certificate: its public key, and a proof that it has the private key, which
//! stays on the host.

use rcgen::{KeyPair, PKCS_ECDSA_P256_SHA256, PublicKeyData, SignatureAlgorithm, SigningKey};
use rustls::SignatureScheme;

use super::{TlsError, provider};

/// Length of a point of the curve P-256 as in a certificate, in bytes.
const POINT_BYTES: usize = 65;
/// Purpose of the proof (domain separation).
const PURPOSE: &[u8] = b"mirrorball: a host asks for a certificate\0";

/// A public key, and the proof of its private key.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct KeyRequest {
    /// Point of the curve.
    pub public_key: Vec<u8>,
    /// Signature by the private key, for this host and context.
    pub proof: Vec<u8>,
}

impl KeyRequest {
    /// Creates a key for `host`; returns its private key as PEM, and the request. The proof is also bound to
    /// `context`.
    ///
    /// # Errors
    /// Fails with [`TlsError::Request`] if this host has no randomness.
    pub fn make(host: &str, context: &[u8]) -> Result<(String, Self), TlsError> {
        let wrong = |error: rcgen::Error| TlsError::Request(error.to_string());
        let key = KeyPair::generate().map_err(wrong)?;
        let public_key = key.der_bytes().to_vec();
        let proof = key.sign(&signed(host, context, &public_key)).map_err(wrong)?;
        Ok((key.serialize_pem(), Self { public_key, proof }))
    }

    /// Returns whether the sender has the private key, and the proof is for this host and context.
    pub(super) fn check(&self, host: &str, context: &[u8]) -> Result<(), TlsError> {
        let message = signed(host, context, &self.public_key);
        let wrong = |why: &str| TlsError::Request(why.to_owned());
        if self.public_key.len() != POINT_BYTES {
            return Err(wrong("the key is none of the curve P-256"));
        }
        let algorithms = provider().signature_verification_algorithms;
        let all = algorithms.mapping.iter();
        let mut of_scheme = all.filter(|(scheme, _)| *scheme == SignatureScheme::ECDSA_NISTP256_SHA256);
        let proves = of_scheme.any(|(_, algorithms)| {
            let mut algorithms = algorithms.iter();
            algorithms.any(|one| {
                one.verify_signature(&self.public_key, &message, &self.proof)
                    .is_ok()
            })
        });
        match proves {
            true => Ok(()),
            false => Err(wrong("it does not prove that its sender has the key")),
        }
    }
}

/// Returns the signed bytes.
fn signed(host: &str, context: &[u8], public_key: &[u8]) -> Vec<u8> {
    let mut message = PURPOSE.to_vec();
    for part in [host.as_bytes(), context, public_key] {
        // Lengths keep one part from being taken for another.
        message.extend_from_slice(&(part.len() as u64).to_le_bytes());
        message.extend_from_slice(part);
    }
    message
}

impl PublicKeyData for KeyRequest {
    fn der_bytes(&self) -> &[u8] {
        &self.public_key
    }

    fn algorithm(&self) -> &'static SignatureAlgorithm {
        &PKCS_ECDSA_P256_SHA256
    }
}
