//! The NBD server: its configuration, and what it does with connections that the service accepts.
//!
//! Connections that are told to end for their clients to reconnect finish what they have taken up; new ones to the same
//! export begin after them ([`crate::clients`]).

use super::limits::{CONNECTIONS_DEFAULT, STOP_GRACE_DEFAULT, UNIX_SEND_BUFFER_BYTES};
use super::turns::Turns;
use super::{Terms, serve};
use crate::clients::{Clients, Whose};
use crate::exports::{Exports, ResizePolicy};
use backend::local::Thread;
use connections::limits::HANDSHAKE_TIMEOUT_DEFAULT;
use connections::transport::Socket;
use connections::{
    Access, Address, Connection, Drain, Limits, Listen, Protocol, Service, ServiceConfig, TlsConfig, TlsIdentity,
};
use error::Result;
use rustix::net::sockopt;
use std::sync::Arc;
use std::time::Duration;

/// What a server is to do.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// Places to listen, at least one.
    pub listen: Vec<Listen>,
    /// TLS, if any.
    pub tls: Option<TlsConfig>,
    /// Serve TCP beyond loopback without both TLS and client certificates.
    pub allow_insecure_tcp: bool,
    /// Open every export read-only.
    pub read_only: bool,
    /// Resizing by clients.
    pub resize: ResizePolicy,
    /// Connections at a time.
    pub limits: Limits,
    /// How long a client may take for its handshake.
    pub handshake_timeout: Duration,
    /// How long running requests may take when the server stops.
    pub stop_grace: Duration,
    /// Where clients are listed.
    pub clients: Arc<Clients>,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            listen: Vec::new(),
            tls: None,
            allow_insecure_tcp: false,
            read_only: false,
            resize: ResizePolicy::default(),
            limits: Limits::each(CONNECTIONS_DEFAULT),
            handshake_timeout: HANDSHAKE_TIMEOUT_DEFAULT,
            stop_grace: STOP_GRACE_DEFAULT,
            clients: Arc::default(),
        }
    }
}

/// A running server. Dropping it stops it.
pub struct Server {
    service: Service,
    clients: Arc<Clients>,
    stop_grace: Duration,
}

/// What the threads of connections share.
struct Nbd {
    exports: Arc<dyn Exports>,
    clients: Arc<Clients>,
    /// Of connections over unix sockets.
    terms: Terms,
    /// TCP connections begin with TLS.
    tls_required: bool,
    turns: Turns,
}

impl Protocol for Nbd {
    fn serve(&self, connection: &Arc<Connection>) {
        let _turn = self.turns.join(Thread::current());
        let peer = connection.peer();
        let span = tracing::info_span!("nbd", connection = connection.number(), %peer);
        let _entered = span.enter();
        if !connection.is_tcp() {
            // An improvement only.
            let _ = sockopt::set_socket_send_buffer_size(connection.socket(), UNIX_SEND_BUFFER_BYTES);
        }
        let tls_forced = connection.is_tcp() && self.tls_required;
        let terms = Terms { tls_forced, ..self.terms.clone() };
        let mut visit = self.clients.connected(Arc::clone(connection));
        // The session has logged its error itself, with the name of the export.
        let _ = serve(Box::new(Socket::new(Arc::clone(connection))), &*self.exports, &terms, &mut visit);
    }
}

impl Server {
    /// Listens and begins to accept. On return every address takes connections.
    ///
    /// # Errors
    /// Those of [`Service::start`], and `Invalid` for certificates and keys that cannot be used.
    pub fn start(config: ServerConfig, exports: Arc<dyn Exports>) -> Result<Self> {
        let identity = config.tls.as_ref().map(TlsIdentity::load).transpose()?;
        let protocol = Nbd {
            exports,
            clients: Arc::clone(&config.clients),
            turns: Turns::default(),
            tls_required: config.tls.as_ref().is_some_and(|tls| tls.required),
            terms: Terms {
                tls: identity,
                tls_forced: false,
                read_only: config.read_only,
                resize: config.resize,
                handshake_timeout: config.handshake_timeout,
            },
        };
        let service = ServiceConfig {
            name: "nbd",
            listen: config.listen,
            access: Access {
                tls: config.tls,
                insecure_tcp: config.allow_insecure_tcp,
                exposes: "read and change every disk",
                remedy: "listen on 127.0.0.1 or a unix socket, require TLS with client certificates, or allow insecure TCP \
                         explicitly",
            },
            limits: config.limits,
            drain: Drain { undisturbed: Duration::ZERO, finish: config.stop_grace, cut: Some(config.stop_grace) },
        };
        let service = Service::start(service, Arc::new(protocol))?;
        Ok(Self { service, clients: config.clients, stop_grace: config.stop_grace })
    }

    /// Where it listens, in the order of the configuration.
    pub fn addresses(&self) -> &[Address] {
        self.service.addresses()
    }

    /// Connections at this moment.
    pub fn connections(&self) -> usize {
        self.service.connections()
    }

    /// Ends connections to an export after what they have taken up is done and answered, so that their clients
    /// reconnect and learn what the export is now; those that outlast the grace time are cut off. How many there were.
    pub fn reconnect(&self, export: &str, whose: Whose) -> usize {
        let numbers = self.clients.retire(export, whose);
        let left = self.clients.wait_ended(&numbers, self.stop_grace);
        if !left.is_empty() {
            tracing::warn!(export, connections = left.len(), "cut off: their requests outlast the grace time");
            self.clients.cut(&left);
            let left = self.clients.wait_ended(&left, self.stop_grace);
            if !left.is_empty() {
                tracing::error!(export, connections = left.len(), "connections hang in the device");
            }
        }
        numbers.len()
    }

    /// Stops accepting, lets running requests finish within the grace time, closes all connections. Again is harmless.
    pub fn stop(&self) {
        self.service.stop();
    }
}
