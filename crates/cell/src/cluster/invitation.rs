//! The invitation of a further host: the token, the request of the host that joins, and the reply of the host
//! with the authority's key.
//!
//! A token is for one host, one use and 15 minutes. It has the digest of the authority's certificate, by
//! which the host that joins authenticates the other side, and a secret, by which the other side
//! authenticates the host. The private key of the host never leaves it. Request and reply go over
//! [`urpc::tls::Exchange`].

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;
use std::time::Duration;

use config::cluster::CellSpec;
use data_encoding::BASE64URL_NOPAD;
use serde::{Deserialize, Serialize};
use urpc::tls::KeyRequest;

/// Time for which a token is valid.
pub const VALID: Duration = Duration::from_secs(15 * 60);
/// Maximum difference between the clocks of hosts. Certificates are valid from a day before they are made.
const CLOCKS_DIFFER: Duration = Duration::from_secs(3600);
/// The version of tokens and messages.
const VERSION: u8 = 1;

/// The text that a person copies to the host that joins.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Token {
    version: u8,
    /// The digest of the authority's certificate.
    pub authority: [u8; 32],
    /// Secret that only the two hosts have.
    pub secret: [u8; 16],
    /// Address that the host calls.
    pub address: SocketAddr,
    /// Name of the host that is invited.
    pub host: String,
}

impl Token {
    /// A token of these parts.
    pub fn new(authority: [u8; 32], secret: [u8; 16], address: SocketAddr, host: String) -> Self {
        Self {
            version: VERSION,
            authority,
            secret,
            address,
            host,
        }
    }
}

impl fmt::Display for Token {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut bytes = vec![self.version, 0];
        bytes.extend_from_slice(&self.authority);
        bytes.extend_from_slice(&self.secret);
        bytes.extend_from_slice(format!("{} {}", self.address, self.host).as_bytes());
        // A cut token has another length than a whole one. Names of hosts have 63 bytes at most.
        bytes[1] = u8::try_from(bytes.len()).map_err(|_| fmt::Error)?;
        out.write_str(&BASE64URL_NOPAD.encode(&bytes))
    }
}

/// The reason why a text is no token.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum TokenError {
    /// The text is cut, or no token.
    #[error(
        "this is no token: it is cut, or something else; copy all that `mirrorball cluster invite` printed"
    )]
    Nonsense,
    /// Another version of this program made the token.
    #[error("the token is of another version of this program; run the same on both hosts")]
    Version,
}

impl FromStr for Token {
    type Err = TokenError;

    fn from_str(text: &str) -> Result<Self, TokenError> {
        let bytes = BASE64URL_NOPAD
            .decode(text.trim().as_bytes())
            .map_err(|_| TokenError::Nonsense)?;
        if bytes.first().is_some_and(|version| *version != VERSION) {
            return Err(TokenError::Version);
        }
        read(&bytes).ok_or(TokenError::Nonsense)
    }
}

/// Parses the bytes of a token; they begin with the version.
fn read(bytes: &[u8]) -> Option<Token> {
    let (head, rest) = bytes.split_at_checked(2)?;
    let (authority, rest) = rest.split_first_chunk()?;
    let (secret, rest) = rest.split_first_chunk()?;
    let (address, host) = str::from_utf8(rest).ok()?.split_once(' ')?;
    let token = Token::new(*authority, *secret, address.parse().ok()?, host.to_owned());
    (usize::from(head[1]) == bytes.len()).then_some(token)
}

/// The request of the host that joins.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct JoinRequest {
    /// The token's secret.
    pub secret: [u8; 16],
    /// The host's name.
    pub host: String,
    /// The host's public key.
    pub public_key: Vec<u8>,
    /// The proof that the host has the private key ([`KeyRequest`]); bound to the secret.
    pub proof: Vec<u8>,
    /// The host's time, in seconds since 1970.
    pub unix_s: u64,
    /// The host's cells.
    pub cells: Vec<CellSpec>,
}

impl JoinRequest {
    /// The request for a certificate.
    pub fn key(&self) -> KeyRequest {
        KeyRequest {
            public_key: self.public_key.clone(),
            proof: self.proof.clone(),
        }
    }
}

/// The answer to a [`JoinRequest`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum JoinAnswer {
    /// The host is refused, with the reason.
    Refused(String),
    /// The host is a member of the cluster.
    Welcome {
        /// The host's certificate, as PEM.
        certificate: String,
        /// The authority's certificate, as PEM.
        authority: String,
        /// The list of revoked certificates, as PEM.
        revoked: String,
        /// The cluster file.
        file: String,
    },
}

/// The reason why a host is not admitted, in words for the person at that host.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum AdmitError {
    /// A secret that is not the last token's.
    #[error("the token is not the one that was made here last; make a new one")]
    Secret,
    /// A token that a host has used.
    #[error("the token has been used; make a new one")]
    Used,
    /// A token of 15 minutes or more.
    #[error("the token has expired, after {} minutes; make a new one", VALID.as_secs() / 60)]
    Expired,
    /// A token of another host.
    #[error("the token is for host {invited}, and this is host {caller}")]
    Host {
        /// The token's host.
        invited: String,
        /// The caller's host.
        caller: String,
    },
    /// Clocks that differ by this many seconds.
    #[error("the clocks of the two hosts differ by {0} s; set them")]
    Clocks(u64),
    /// The joining host has no cells.
    #[error("a host without cells has no use")]
    NoCells,
}

/// The side that has made a token.
#[derive(Clone, Debug)]
pub struct Invitation {
    secret: [u8; 16],
    host: String,
    is_used: bool,
}

impl Invitation {
    /// The invitation of a token that is made now.
    pub fn new(token: &Token) -> Self {
        Self {
            secret: token.secret,
            host: token.host.clone(),
            is_used: false,
        }
    }

    /// Whether a request has the token's secret, compared in constant time.
    ///
    /// # Errors
    /// With the reason, in words for the person at the other host.
    pub fn recognize(&self, request: &JoinRequest) -> Result<(), AdmitError> {
        let pairs = self.secret.iter().zip(request.secret);
        if pairs.fold(0, |differs, (own, other)| differs | (own ^ other)) != 0 {
            return Err(AdmitError::Secret);
        }
        Ok(())
    }

    /// Whether a request is for this invitation. `age` is the token's, `unix_s` this host's time in seconds
    /// since 1970.
    ///
    /// # Errors
    /// With the reason, in words for the person at the other host. A caller with a wrong secret receives
    /// nothing else.
    pub fn admit(&self, request: &JoinRequest, age: Duration, unix_s: u64) -> Result<(), AdmitError> {
        self.recognize(request)?;
        if self.is_used {
            return Err(AdmitError::Used);
        }
        if age >= VALID {
            return Err(AdmitError::Expired);
        }
        if request.host != self.host {
            return Err(AdmitError::Host {
                invited: self.host.clone(),
                caller: request.host.clone(),
            });
        }
        let differ = request.unix_s.abs_diff(unix_s);
        if differ > CLOCKS_DIFFER.as_secs() {
            return Err(AdmitError::Clocks(differ));
        }
        if request.cells.is_empty() {
            return Err(AdmitError::NoCells);
        }
        Ok(())
    }

    /// Records that the host has its certificate.
    pub fn used(&mut self) {
        self.is_used = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: u64 = 1_800_000_000;

    fn token() -> Token {
        let address = "[2001:db8::1]:7464".parse().unwrap();
        Token::new([7; 32], [9; 16], address, "gamma".to_owned())
    }

    fn request() -> JoinRequest {
        let cell = r#"{"host":null,"cpus":"0","nodes":null,"memory":null}"#;
        JoinRequest {
            secret: [9; 16],
            host: "gamma".to_owned(),
            public_key: Vec::new(),
            proof: Vec::new(),
            unix_s: NOW,
            cells: vec![serde_json::from_str(cell).unwrap()],
        }
    }

    #[test]
    fn token_comes_back_whole_from_its_text_and_no_other_text_is_one() {
        let text = token().to_string();
        assert!(text.len() < 120 && !text.contains(char::is_whitespace), "{text}");
        assert_eq!(format!(" {text}\n").parse(), Ok(token()));
        for cut in 0..text.len() {
            assert!(text[..cut].parse::<Token>().is_err(), "{cut}");
        }
        assert_eq!(format!("{text}AAAA").parse::<Token>(), Err(TokenError::Nonsense));
        assert_eq!("gamma!".parse::<Token>(), Err(TokenError::Nonsense));
        let next = Token {
            version: 2,
            ..token()
        };
        assert_eq!(next.to_string().parse::<Token>(), Err(TokenError::Version));
    }

    #[test]
    fn one_host_is_admitted_once_within_the_tokens_time() {
        let mut invitation = Invitation::new(&token());
        let late = VALID.checked_sub(Duration::from_millis(1)).unwrap();
        invitation.admit(&request(), late, NOW).unwrap();
        let refused = |request: &JoinRequest, age, unix_s, why: &str| {
            let error = invitation.admit(request, age, unix_s).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        };
        refused(&request(), VALID, NOW, "has expired, after 15 minutes");
        refused(&request(), late, NOW + 3601, "differ by 3601 s");
        refused(&request(), late, NOW - 3601, "differ by 3601 s");
        let mut secret = request();
        secret.secret[15] = 8;
        secret.host = "delta".to_owned();
        refused(&secret, VALID, NOW, "not the one that was made here last");
        let mut host = request();
        host.host = "delta".to_owned();
        refused(&host, late, NOW, "is for host gamma, and this is host delta");
        let mut nothing = request();
        nothing.cells.clear();
        refused(&nothing, late, NOW, "without cells");
        invitation.used();
        let error = invitation.admit(&request(), late, NOW).unwrap_err();
        assert_eq!(error, AdmitError::Used);
    }
}
