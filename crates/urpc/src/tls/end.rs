//! The end of a certificate's validity.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustls::pki_types::{CertificateDer, UnixTime};

use super::provider;

/// A time after the end of every certificate: the year 9000.
const FAR: Duration = Duration::from_secs(7030 * 365 * 24 * 3600);

/// Returns the time until which the first of these certificates is valid.
///
/// `webpki` reveals the end of a certificate only when it refuses it, so the certificate is checked for a
/// time in the far future.
pub fn of(
    chain: &[CertificateDer<'_>],
    authority: &[CertificateDer<'_>],
) -> Result<SystemTime, webpki::Error> {
    let own = chain.first().ok_or(webpki::Error::BadDer)?;
    let own = webpki::EndEntityCert::try_from(own)?;
    let anchors = authority
        .iter()
        .map(webpki::anchor_from_trusted_cert)
        .collect::<Result<Vec<_>, _>>()?;
    let verified = own.verify_for_usage(
        provider().signature_verification_algorithms.all,
        &anchors,
        &[],
        UnixTime::since_unix_epoch(FAR),
        webpki::KeyUsage::client_auth(),
        None,
        None,
    );
    match verified {
        Err(webpki::Error::CertExpired { not_after, .. }) => {
            Ok(UNIX_EPOCH + Duration::from_secs(not_after.as_secs()))
        }
        Err(other) => Err(other),
        Ok(_) => Ok(UNIX_EPOCH + FAR),
    }
}

/// Returns the number of whole days.
pub fn in_days(time: Duration) -> u64 {
    time.as_secs() / (24 * 3600)
}
