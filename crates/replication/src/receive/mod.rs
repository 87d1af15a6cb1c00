//! The receiver: accepts connections of senders.
//!
//! 1. A connection is not used until TLS is established and the client's certificate is accepted.
//! 2. When [`Receiver::stop`] ends a session, the received data is recorded first.

mod session;
mod taking;

use crate::limits::{CONNECTIONS_MAX, SILENCE_MAX, STOP_GRACE};
use connections::tls::CertificateName;
use connections::{
    Access, Address, Connection, Drain, Limits, Listen, Protocol, Service, ServiceConfig, TlsConfig, TlsIdentity,
    TlsStream,
};
use disk::Datastore;
use error::{Error, ErrorKind, IoContext, Result};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

pub use session::{Sessions, converse};
pub use taking::take;

/// Handles attachments. An attachment is the definition of a machine that is sent with its disks.
pub trait Attachments: Send + Sync {
    /// Refuses disks whose names no disk can get now. Called before data is received, and before the disks get their
    /// names, with or without an attachment.
    fn check_names(&self, _disks: &[String]) -> Result<()> {
        Ok(())
    }

    /// Refuses an attachment that cannot be used, before any data is received for it.
    fn check(&self, text: &str, disks: &[String]) -> Result<()>;

    /// Prepares a machine before its disks are complete. If the result is dropped, the machine and its disks are
    /// removed.
    fn begin(&self, text: &str, disks: &[String]) -> Result<Box<dyn Making>>;

    /// Called after disks were received or updated, with or without an attachment.
    fn arrived(&self, _disks: &[String]) {}
}

/// A prepared machine, which is not complete yet.
pub trait Making: Send {
    /// Completes the machine and makes it durable. After that, a sender that offers the machine again learns that it
    /// has arrived.
    fn finish(self: Box<Self>) -> Result<()>;
}

/// Refuses all attachments, so that only disks are received.
pub struct NoAttachments;

impl Attachments for NoAttachments {
    fn check(&self, _: &str, _: &[String]) -> Result<()> {
        Err(Error::new(ErrorKind::Unsupported, "this server receives disks only, not machines"))
    }

    fn begin(&self, text: &str, disks: &[String]) -> Result<Box<dyn Making>> {
        self.check(text, disks)?;
        Err(Error::new(ErrorKind::Unsupported, "no machines"))
    }
}

/// Options of a receiver.
#[derive(Clone, Debug)]
pub struct ReceiverConfig {
    /// Address to listen on; port 0 selects a free port.
    pub listen: SocketAddr,
    /// The server's certificate, and the authorities that sign clients.
    pub tls: TlsConfig,
    /// Names of which a client's certificate must have one. If empty, every certificate that `tls` accepts is accepted.
    pub clients: Vec<String>,
}

/// A running receiver. Dropping it stops it.
pub struct Receiver {
    service: Service,
    address: SocketAddr,
}

/// State shared by the threads of connections.
struct Receiving {
    sessions: Sessions,
    identity: TlsIdentity,
    clients: Vec<CertificateName>,
}

impl Receiver {
    /// Listens and accepts connections.
    ///
    /// # Errors
    /// `Invalid` for certificates, keys and names that cannot be used, and the errors of [`Service::start`].
    pub fn start(
        config: &ReceiverConfig,
        datastore: Arc<Datastore>,
        attachments: Arc<dyn Attachments>,
    ) -> Result<Self> {
        if !config.clients.is_empty() && config.tls.client_authorities.is_none() {
            let text = "clients can only be distinguished by certificates: name the authorities that sign them \
                        (--tls-client-ca)";
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        let name = |name: &String| {
            CertificateName::parse(name).ok_or_else(|| {
                let text = format!("'{}' cannot be the name of a certificate", name.escape_debug());
                Error::new(ErrorKind::Invalid, text)
            })
        };
        let protocol = Receiving {
            sessions: Sessions::new(datastore, attachments),
            identity: TlsIdentity::load(&config.tls)?,
            clients: config.clients.iter().map(name).collect::<Result<_>>()?,
        };
        let service = ServiceConfig {
            name: "receive",
            listen: vec![Listen::Tcp(config.listen)],
            access: Access {
                // The protocol requires TLS.
                tls: Some(TlsConfig { required: true, ..config.tls.clone() }),
                insecure_tcp: false,
                exposes: "fill the datastore",
                remedy: "receive on 127.0.0.1, or name the authorities that sign clients (--tls-client-ca)",
            },
            limits: Limits::each(CONNECTIONS_MAX),
            // Connections may be cut at once, because a sender can resume.
            drain: Drain { undisturbed: Duration::ZERO, finish: Duration::ZERO, cut: Some(STOP_GRACE) },
        };
        let service = Service::start(service, Arc::new(protocol))?;
        let address = service.addresses().iter().find_map(|address| match address {
            Address::Tcp(address) => Some(*address),
            Address::Unix(_) => None,
        });
        let address = address.ok_or_else(|| Error::new(ErrorKind::Invalid, "disks are received over TCP only"))?;
        Ok(Self { service, address })
    }

    /// The address on which the receiver listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Current number of connections.
    pub fn connections(&self) -> usize {
        self.service.connections()
    }

    /// Cuts all connections, as a network failure does: for tests.
    pub fn cut(&self) {
        self.service.cut();
    }

    /// Stops accepting and ends all sessions. May be called again.
    pub fn stop(&self) {
        self.service.stop();
    }
}

impl Protocol for Receiving {
    fn serve(&self, connection: &Arc<Connection>) {
        let peer = connection.peer();
        let span = tracing::info_span!("receive", connection = connection.number(), %peer);
        let _entered = span.enter();
        if let Err(error) = self.converse(connection) {
            match connection.is_authenticated() {
                true => tracing::info!(%error, "connection ended by an error"),
                false => connection.log_failure(&error),
            }
        }
        // The connection is closed explicitly, because other threads may still refer to the socket.
        connection.close();
        connection.cut();
    }
}

impl Receiving {
    fn converse(&self, connection: &Arc<Connection>) -> Result<()> {
        let peer = connection.peer();
        let during = || format!("setting up TLS with {peer}");
        connection.set_timeouts(None, Some(SILENCE_MAX)).during(during)?;
        let stream = TlsStream::accept(Arc::clone(connection.socket()), &self.identity).during(during)?;
        let admitted = |stream: &TlsStream| {
            if !self.clients.is_empty() && !stream.client_is(&self.clients) {
                let text =
                    "the certificate is valid, but not for a name from which disks are received (--receive-from)";
                return Err(Error::new(ErrorKind::Invalid, text));
            }
            match stream.has_certificate() {
                true => connection.authenticate(None).map_err(|error| Error::new(ErrorKind::Busy, error.to_string())),
                false => Ok(()),
            }
        };
        session::serve(&self.sessions, stream, Some(connection), peer.to_string(), &admitted)
    }
}
