//! TLS: certificates and keys of both ends, and the encrypted streams.
//!
//! The session engine is rustls, which does no I/O of its own. The cryptography is ring's; no process-wide provider is
//! installed, so an embedding program keeps its own choice. [`Tls`] lies over a [`Transport`](crate::transport) and
//! never waits unasked; [`TlsStream`] blocks on its socket and moves bulk data with fewer copies. The contexts of both
//! are built here.

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

/// The server's side: where its keys are (PEM files), and how strict it is.
#[derive(Clone, Debug)]
pub struct TlsConfig {
    /// Certificate chain of the server, leaf first.
    pub certificate: PathBuf,
    /// Private key of the server.
    pub key: PathBuf,
    /// Authorities that sign clients. When given, a client without a certificate of theirs is turned away.
    pub client_authorities: Option<PathBuf>,
    /// Over TCP, nothing of the protocol but what begins TLS is answered before TLS. Without it, and always on unix
    /// sockets, whose file permissions say who may connect, TLS is the client's choice.
    pub required: bool,
}

/// The server's side, loaded and checked.
#[derive(Clone)]
pub struct TlsIdentity {
    config: Arc<ServerConfig>,
}

/// The client's side: what it needs to be sure of the server, and to be known to it. PEM files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientTls {
    /// Authorities that sign servers.
    pub authorities: PathBuf,
    /// Certificate chain and private key of the client.
    pub identity: Option<(PathBuf, PathBuf)>,
    /// The name that the server's certificate has to be for, where it is not the one it is reached by.
    pub server_name: Option<String>,
}

/// The client's side, loaded and checked.
#[derive(Clone)]
pub struct ClientIdentity {
    config: Arc<ClientConfig>,
}

/// A name that a certificate is for: a DNS name or an IP address.
#[derive(Clone, Debug)]
pub struct CertificateName(ServerName<'static>);

impl TlsIdentity {
    /// Reads and checks the files.
    ///
    /// # Errors
    /// `Invalid` with the file that cannot be used.
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
        // Sessions are not resumed: connections are few and long.
        server.send_tls13_tickets = 0;
        Ok(Self { config: Arc::new(server) })
    }
}

impl ClientTls {
    /// Reads and checks the files.
    ///
    /// # Errors
    /// `Invalid` with the file that cannot be used.
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
    /// Reads a name; `None` when it cannot be one.
    pub fn parse(name: &str) -> Option<Self> {
        ServerName::try_from(name.to_owned()).ok().map(Self)
    }

    /// Whether a certificate is for this name.
    fn is_of(&self, certificate: &CertificateDer<'_>) -> bool {
        webpki::EndEntityCert::try_from(certificate)
            .is_ok_and(|certificate| certificate.verify_is_valid_for_subject_name(&self.0).is_ok())
    }
}

/// The algorithms, the fastest first: the client's order counts, and all of them are strong.
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
    PrivateKeyDer::from_pem_file(path).map_err(|error| {
        let text = format!("TLS key {}: {error}; give a PEM file with one unencrypted private key", path.display());
        Error::new(ErrorKind::Invalid, text)
    })
}

/// Reads certificates from a PEM file: at least one. `role` says in errors what they are for.
fn certificates(path: &Path, role: &str) -> Result<Vec<CertificateDer<'static>>> {
    let wrong = |what: String| Error::new(ErrorKind::Invalid, format!("TLS {role} {}: {what}", path.display()));
    let found = CertificateDer::pem_file_iter(path).map_err(|error| wrong(error.to_string()))?;
    let found: std::result::Result<Vec<_>, _> = found.collect();
    let found = found.map_err(|error| wrong(error.to_string()))?;
    if found.is_empty() { Err(wrong("holds no certificate in PEM form".to_owned())) } else { Ok(found) }
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
