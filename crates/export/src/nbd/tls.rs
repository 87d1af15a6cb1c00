//! TLS: who the server is, who may connect, and the encrypted transport.
//!
//! The session engine is rustls, which does no I/O of its own: ciphertext goes through the transport below, plaintext
//! through ours, and what could not be sent yet stays in rustls's buffers, which are bounded. The cryptography is
//! ring's; no process-wide provider is installed, so an embedding program keeps its own choice.

use super::transport::{Transport, Wait};
use error::{Error, ErrorKind, Result};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig, ServerConnection};
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Plaintext and ciphertext that rustls may hold for us on their way out.
const BUFFER_BYTES_MAX: usize = 512 << 10;

/// Where the keys are (PEM files), and how strict to be.
#[derive(Clone, Debug)]
pub struct TlsConfig {
    /// Certificate chain of the server, leaf first.
    pub certificate: PathBuf,
    /// Private key of the server.
    pub key: PathBuf,
    /// Authorities that sign clients. When given, a client without a certificate of theirs is turned away.
    pub client_authorities: Option<PathBuf>,
    /// Over TCP, nothing but `STARTTLS` and `ABORT` is answered before TLS (the protocol's FORCEDTLS). Without it,
    /// and always on unix sockets, whose file permissions say who may connect, TLS is the client's choice.
    pub required: bool,
}

/// What sessions need of it, loaded and checked.
#[derive(Clone)]
pub struct TlsIdentity {
    config: Arc<ServerConfig>,
}

impl TlsIdentity {
    /// Reads and checks the files.
    pub fn load(config: &TlsConfig) -> Result<Self> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let chain = certificates(&config.certificate, "certificate")?;
        let key = private_key(&config.key)?;
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(|error| Error::new(ErrorKind::Unsupported, format!("setting up TLS: {error}")))?;
        let builder = match &config.client_authorities {
            None => builder.with_no_client_auth(),
            Some(path) => {
                let mut roots = RootCertStore::empty();
                for authority in certificates(path, "client authorities")? {
                    roots.add(authority).map_err(|error| {
                        Error::new(
                            ErrorKind::Invalid,
                            format!(
                                "TLS client authorities {}: {error}; each must be a CA certificate",
                                path.display()
                            ),
                        )
                    })?;
                }
                let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build();
                builder.with_client_cert_verifier(verifier.map_err(|error| {
                    Error::new(ErrorKind::Invalid, format!("TLS client authorities {}: {error}", path.display()))
                })?)
            }
        };
        let server = builder.with_single_cert(chain, key).map_err(|error| {
            Error::new(
                ErrorKind::Invalid,
                format!(
                    "TLS certificate {} with key {}: {error}; the key must belong to the first certificate",
                    config.certificate.display(),
                    config.key.display()
                ),
            )
        })?;
        Ok(Self { config: Arc::new(server) })
    }

    /// For other protocols than this one.
    pub fn config(&self) -> &Arc<ServerConfig> {
        &self.config
    }
}

/// Reads a private key from a PEM file.
pub fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>> {
    PrivateKeyDer::from_pem_file(path).map_err(|error| {
        let text = format!("TLS key {}: {error}; give a PEM file with one unencrypted private key", path.display());
        Error::new(ErrorKind::Invalid, text)
    })
}

/// Reads certificates from a PEM file: at least one. `role` says in errors what they are for.
pub fn certificates(path: &Path, role: &str) -> Result<Vec<CertificateDer<'static>>> {
    let wrong = |what: String| Error::new(ErrorKind::Invalid, format!("TLS {role} {}: {what}", path.display()));
    let found = CertificateDer::pem_file_iter(path).map_err(|error| wrong(error.to_string()))?;
    let found: std::result::Result<Vec<_>, _> = found.collect();
    let found = found.map_err(|error| wrong(error.to_string()))?;
    if found.is_empty() { Err(wrong("holds no certificate in PEM form".to_owned())) } else { Ok(found) }
}

/// TLS over another transport, as the server. The TLS handshake happens within the first `receive`.
pub struct Tls {
    below: Box<dyn Transport>,
    session: Box<ServerConnection>,
    input: bool,
    ended: bool,
}

impl Tls {
    /// Begins a session; nothing is sent or received yet.
    pub fn accept(below: Box<dyn Transport>, identity: &TlsIdentity) -> io::Result<Self> {
        let mut session = ServerConnection::new(Arc::clone(&identity.config)).map_err(io::Error::other)?;
        session.set_buffer_limit(Some(BUFFER_BYTES_MAX));
        Ok(Self { below, session: Box::new(session), input: false, ended: false })
    }

    fn read_plaintext(&mut self, into: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let mut total = 0;
        for slice in into {
            let mut filled = 0;
            while filled < slice.len() {
                match self.session.reader().read(&mut slice[filled..]) {
                    Ok(0) => {
                        self.ended = true;
                        return Ok(total + filled);
                    }
                    Ok(bytes) => filled += bytes,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        self.input = false;
                        return Ok(total + filled);
                    }
                    // The peer left without saying goodbye. Nothing it sent can have been cut short unnoticed, because
                    // every message of the session says how long it is.
                    Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                        self.ended = true;
                        return Ok(total + filled);
                    }
                    Err(error) => return Err(error),
                }
            }
            total += filled;
        }
        Ok(total)
    }
}

/// Lets rustls read ciphertext from the transport below.
struct From<'a>(&'a mut dyn Transport, Wait);

impl Read for From<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.0.receive(&mut [IoSliceMut::new(into)], self.1)
    }
}

/// Lets rustls write ciphertext to the transport below.
struct To<'a>(&'a mut dyn Transport);

impl Write for To<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.send(&[IoSlice::new(bytes)])
    }
    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        self.0.send(slices)
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Transport for Tls {
    fn receive(&mut self, into: &mut [IoSliceMut<'_>], wait: Wait) -> io::Result<usize> {
        let wait = if wait == Wait::No { Wait::No } else { Wait::Some };
        loop {
            let bytes = self.read_plaintext(into)?;
            if bytes > 0 || self.ended {
                return Ok(bytes);
            }
            // Handshake messages and the like: the peer may be waiting for them before it sends anything.
            self.flush()?;
            match self.session.read_tls(&mut From(&mut *self.below, wait)) {
                Ok(0) => {
                    self.ended = true;
                    return Ok(0);
                }
                Ok(_) => {
                    let state = self.session.process_new_packets().map_err(|error| {
                        // rustls has queued the alert that tells the peer why.
                        io::Error::new(io::ErrorKind::InvalidData, error)
                    });
                    let state = match state {
                        Ok(state) => state,
                        Err(error) => {
                            let _ = self.flush();
                            return Err(error);
                        }
                    };
                    self.input = state.plaintext_bytes_to_read() > 0;
                    self.flush()?;
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn send(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        if !self.flush()? {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let bytes = self.session.writer().write_vectored(slices)?;
        self.flush()?;
        Ok(bytes)
    }

    fn flush(&mut self) -> io::Result<bool> {
        while self.session.wants_write() {
            match self.session.write_tls(&mut To(&mut *self.below)) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        self.below.flush()
    }

    fn has_input(&self) -> bool {
        self.input
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.below.descriptor()
    }

    fn close(&mut self) {
        self.session.send_close_notify();
        let _ = self.flush();
        self.below.close();
    }
}
