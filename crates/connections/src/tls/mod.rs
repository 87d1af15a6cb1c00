//! TLS: certificates and keys of both sides, and the encrypted streams.
//!
//! TLS is implemented by rustls, which does no I/O of its own, with the cryptography of ring. No process-wide provider
//! is installed, so that a program that embeds this crate can use another provider. [`Tls`] wraps a
//! [`Transport`](crate::transport), and blocks only if a call permits it; [`TlsStream`] blocks on its socket and
//! transfers bulk data with fewer copies. This module builds the TLS contexts of both streams.

mod stream;
mod transport;

pub use stream::TlsStream;
pub use transport::Tls;

use error::{Error, ErrorKind, Result};
use rustls::client::Resumption;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{CipherSuite, ClientConfig, RootCertStore, ServerConfig};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The most bytes of a PEM file.
const PEM_BYTES_MAX: u64 = 16 << 20;

/// TLS configuration of a server (PEM files).
#[derive(Clone, Debug)]
pub struct TlsConfig {
    /// Certificate chain of the server, leaf first.
    pub certificate: PathBuf,
    /// Private key of the server.
    pub key: PathBuf,
    /// Authorities that sign client certificates. If given, a client without a valid certificate is refused.
    pub client_authorities: Option<PathBuf>,
    /// If true, the server answers only the messages that begin TLS, until TLS is established on a TCP connection. If
    /// false, the client chooses whether to use TLS. On unix sockets the client always chooses, because the permissions
    /// of the socket's file decide which users may connect.
    pub required: bool,
}

/// TLS configuration of a server, loaded and checked.
#[derive(Clone)]
pub struct TlsIdentity {
    config: Arc<ServerConfig>,
}

/// TLS configuration of a client (PEM files).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientTls {
    /// Authorities that sign server certificates.
    pub authorities: PathBuf,
    /// Certificate chain and private key of the client.
    pub identity: Option<(PathBuf, PathBuf)>,
    /// The name that the server's certificate must have, if it differs from the host name.
    pub server_name: Option<String>,
}

/// TLS configuration of a client, loaded and checked.
#[derive(Clone)]
pub struct ClientIdentity {
    config: Arc<ClientConfig>,
}

/// A name in a certificate: a DNS name or an IP address.
#[derive(Clone, Debug)]
pub struct CertificateName(ServerName<'static>);

/// The certificate of a peer, which was valid when the connection began.
#[derive(Clone, Debug)]
pub struct PeerCertificate(Arc<CertificateDer<'static>>);

impl PeerCertificate {
    /// Whether the certificate has this name.
    pub fn has(&self, name: &CertificateName) -> bool {
        name.is_of(&self.0)
    }
}

impl TlsIdentity {
    /// Reads and checks the files.
    ///
    /// # Errors
    /// `Invalid`, naming the file that cannot be used.
    pub fn load(config: &TlsConfig) -> Result<Self> {
        let provider = Arc::new(ring::default_provider());
        let chain = certificates(&config.certificate, "certificate")?;
        let key = private_key(&config.key)?;
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(unsupported)?;
        let builder = match &config.client_authorities {
            None => builder.with_no_client_auth(),
            Some(path) => {
                let roots = authorities(path, "client authorities")?;
                let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build();
                builder.with_client_cert_verifier(verifier.map_err(|error| {
                    Error::new(ErrorKind::Invalid, format!("TLS client authorities {}: {error}", path.display()))
                })?)
            }
        };
        let server = builder.with_single_cert(chain, key);
        let mut server = server.map_err(|error| mismatch(&config.certificate, &config.key, &error))?;
        // Session resumption is disabled, because there are few connections and they last long.
        server.send_tls13_tickets = 0;
        Ok(Self { config: Arc::new(server) })
    }
}

impl ClientTls {
    /// Reads and checks the files.
    ///
    /// # Errors
    /// `Invalid`, naming the file that cannot be used.
    pub fn load(&self) -> Result<ClientIdentity> {
        let builder = ClientConfig::builder_with_provider(bulk_provider())
            .with_safe_default_protocol_versions()
            .map_err(unsupported)?
            .with_root_certificates(authorities(&self.authorities, "authorities")?);
        let mut config = match &self.identity {
            None => builder.with_no_client_auth(),
            Some((certificate, key)) => {
                let chain = certificates(certificate, "certificate")?;
                let client = builder.with_client_auth_cert(chain, private_key(key)?);
                client.map_err(|error| mismatch(certificate, key, &error))?
            }
        };
        config.resumption = Resumption::disabled();
        Ok(ClientIdentity { config: Arc::new(config) })
    }
}

impl CertificateName {
    /// Parses a name; `None` if it is not a valid DNS name or IP address.
    pub fn parse(name: &str) -> Option<Self> {
        ServerName::try_from(name.to_owned()).ok().map(Self)
    }

    /// Whether a certificate has this name.
    fn is_of(&self, certificate: &CertificateDer<'_>) -> bool {
        webpki::EndEntityCert::try_from(certificate)
            .is_ok_and(|certificate| certificate.verify_is_valid_for_subject_name(&self.0).is_ok())
    }
}

/// Identifies the holder of a certificate: by the DNS names, which a renewed certificate has too, or by the whole
/// certificate if it has no DNS name.
fn holder(certificate: &CertificateDer<'_>) -> Vec<u8> {
    let names = webpki::EndEntityCert::try_from(certificate)
        .map(|certificate| certificate.valid_dns_names().map(str::to_ascii_lowercase).collect::<Vec<String>>());
    let mut names = names.unwrap_or_default();
    names.sort();
    if names.is_empty() { certificate.to_vec() } else { names.join(",").into_bytes() }
}

/// The cipher suites, the fastest first, because the order of the client decides which is used. All of them are strong.
fn bulk_provider() -> Arc<CryptoProvider> {
    let mut provider = ring::default_provider();
    provider.cipher_suites.sort_by_key(|suite| suite.suite() != CipherSuite::TLS13_AES_128_GCM_SHA256);
    Arc::new(provider)
}

fn unsupported(error: rustls::Error) -> Error {
    Error::new(ErrorKind::Unsupported, format!("setting up TLS: {error}"))
}

fn mismatch(certificate: &Path, key: &Path, error: &rustls::Error) -> Error {
    let (certificate, key) = (certificate.display(), key.display());
    let text =
        format!("TLS certificate {certificate} with key {key}: {error}; the key must belong to the first certificate");
    Error::new(ErrorKind::Invalid, text)
}

/// Reads a private key from a PEM file.
fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>> {
    let wrong = |what: String| {
        let text = format!("TLS key {}: {what}; give a PEM file with one unencrypted private key", path.display());
        Error::new(ErrorKind::Invalid, text)
    };
    PrivateKeyDer::from_pem_slice(&pem(path).map_err(wrong)?).map_err(|error| wrong(error.to_string()))
}

/// Reads at least one certificate from a PEM file. `role` states their purpose in error messages.
fn certificates(path: &Path, role: &str) -> Result<Vec<CertificateDer<'static>>> {
    let wrong = |what: String| Error::new(ErrorKind::Invalid, format!("TLS {role} {}: {what}", path.display()));
    let bytes = pem(path).map_err(wrong)?;
    let found: std::result::Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes).collect();
    let found = found.map_err(|error| wrong(error.to_string()))?;
    if found.is_empty() { Err(wrong("holds no certificate in PEM form".to_owned())) } else { Ok(found) }
}

/// Reads a PEM file. Devices and pipes are refused, because reading them may never end.
fn pem(path: &Path) -> std::result::Result<Vec<u8>, String> {
    let metadata = std::fs::metadata(path).map_err(|error| error.to_string())?;
    if !metadata.is_file() {
        return Err("is not a regular file".to_owned());
    }
    if metadata.len() > PEM_BYTES_MAX {
        return Err(format!("has {} bytes; the limit is {PEM_BYTES_MAX}", metadata.len()));
    }
    std::fs::read(path).map_err(|error| error.to_string())
}

/// Reads the certificates of authorities from a PEM file.
fn authorities(path: &Path, role: &str) -> Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    for authority in certificates(path, role)? {
        roots.add(authority).map_err(|error| {
            let text = format!("TLS {role} {}: {error}; each must be a CA certificate", path.display());
            Error::new(ErrorKind::Invalid, text)
        })?;
    }
    Ok(roots)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn devices_and_huge_files_are_refused_as_pem_files() {
        let folder = tempfile::tempdir().unwrap();
        let huge = folder.path().join("huge");
        std::fs::File::create(&huge).unwrap().set_len(PEM_BYTES_MAX + 1).unwrap();
        for (path, why) in [(Path::new("/dev/zero"), "is not a regular file"), (&huge, "the limit is 16777216")] {
            for refused in [private_key(path).err(), certificates(path, "certificate").err()] {
                let error = refused.unwrap().to_string();
                assert!(error.contains(why) && error.contains(&path.display().to_string()), "{error}");
            }
        }
    }
}
