//! The NBD server: its configuration, and how it serves the connections that the connection service accepts.
//!
//! When a session has to end so that its client reconnects, it finishes the requests it has begun. New sessions of the
//! same export wait until the session has ended ([`crate::clients`]).

use super::limits::{CONNECTIONS_DEFAULT, STOP_GRACE_DEFAULT, UNIX_SEND_BUFFER_BYTES};
use super::{Terms, serve};
use crate::access::{CurrentRules, Restricted, Rules, UserAccess};
use crate::clients::{ClientSelection, Clients};
use crate::exports::{Exports, ResizePolicy};
use backend::local::{Slice, Thread};
use connections::limits::HANDSHAKE_TIMEOUT_DEFAULT;
use connections::transport::Socket;
use connections::{
    Access, Address, Connection, Drain, Limits, Listen, Protocol, Service, ServiceConfig, TlsConfig, TlsIdentity,
};
use error::Result;
use rustix::net::sockopt;
use std::sync::Arc;
use std::time::Duration;

/// Configuration of a server.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// Addresses to listen on, at least one.
    pub listen: Vec<Listen>,
    /// TLS configuration, if TLS is offered.
    pub tls: Option<TlsConfig>,
    /// Whether to serve TCP beyond loopback without both TLS and client certificates.
    pub allow_insecure_tcp: bool,
    /// Which exports clients over TCP may open, depending on their certificates; `None` if they may open all.
    pub rules: Option<Rules>,
    /// Which exports clients over unix sockets may open, depending on their users; `None` if they may open all.
    pub user_access: Option<Arc<dyn UserAccess>>,
    /// Open every export read-only.
    pub read_only: bool,
    /// Whether clients may resize disks.
    pub resize: ResizePolicy,
    /// Limits of the number of connections.
    pub limits: Limits,
    /// How long a client may take for its handshake.
    pub handshake_timeout: Duration,
    /// How long running requests may take when the server stops.
    pub stop_grace: Duration,
    /// The list of clients.
    pub clients: Arc<Clients>,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            listen: Vec::new(),
            tls: None,
            allow_insecure_tcp: false,
            rules: None,
            user_access: None,
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
    rules: Option<Arc<CurrentRules>>,
    clients: Arc<Clients>,
    stop_grace: Duration,
}

/// State shared by the threads of all connections.
struct Nbd {
    exports: Arc<dyn Exports>,
    clients: Arc<Clients>,
    /// Configuration of sessions over unix sockets.
    terms: Terms,
    /// Whether sessions over TCP have to begin with TLS.
    tls_required: bool,
    /// Rules for sessions over TCP; `None` if there are none.
    rules: Option<Arc<CurrentRules>>,
    /// Rights of clients over unix sockets; `None` if they may open everything.
    user_access: Option<Arc<dyn UserAccess>>,
}

impl Protocol for Nbd {
    fn begins_accepting_tcp(&self) {
        // Clients without a certificate decide how often this thread wakes. With long slices, waking does not interrupt
        // the threads that serve clients.
        Thread::current().set_slice(Slice::Long);
    }

    fn serve(&self, connection: &Arc<Connection>) {
        let peer = connection.peer();
        let span = tracing::info_span!("nbd", connection = connection.number(), %peer);
        let _entered = span.enter();
        if connection.is_tcp() {
            // The thread has the long slice until the client has proven that it may open an export.
            Thread::current().set_slice(Slice::Long);
        } else {
            // A failure is ignored, because the larger buffer is only an optimization.
            let _ = sockopt::set_socket_send_buffer_size(connection.socket(), UNIX_SEND_BUFFER_BYTES);
        }
        let tls_forced = connection.is_tcp() && self.tls_required;
        let rules = self.rules.clone().filter(|_| connection.is_tcp());
        let terms = Terms { tls_forced, rules, ..self.terms.clone() };
        let exports = match &self.user_access {
            Some(access) if !connection.is_tcp() => Restricted::of(&self.exports, access, connection.peer()),
            _ => Arc::clone(&self.exports),
        };
        let mut visit = self.clients.connected(Arc::clone(connection));
        // The session has logged its error already, with the export's name.
        let _ = serve(Box::new(Socket::new(Arc::clone(connection))), &*exports, &terms, &mut visit);
    }
}

impl Server {
    /// Listens and accepts connections. On return all addresses accept connections.
    ///
    /// # Errors
    /// Errors of [`Service::start`], and `Invalid` for certificates and keys that cannot be used.
    pub fn start(config: ServerConfig, exports: Arc<dyn Exports>) -> Result<Self> {
        let identity = config.tls.as_ref().map(TlsIdentity::load).transpose()?;
        let rules = config.rules.map(|rules| Arc::new(CurrentRules::new(rules)));
        let protocol = Nbd {
            exports,
            clients: Arc::clone(&config.clients),
            rules: rules.clone(),
            user_access: config.user_access,
            tls_required: config.tls.as_ref().is_some_and(|tls| tls.required),
            terms: Terms {
                tls: identity,
                tls_forced: false,
                rules: None,
                read_only: config.read_only,
                resize: config.resize,
                handshake_timeout: config.handshake_timeout,
                turns: Arc::default(),
            },
        };
        let service = ServiceConfig {
            name: "nbd",
            listen: config.listen,
            access: Access {
                tls: config.tls,
                insecure_tcp: config.allow_insecure_tcp,
                exposes: "read and change every disk",
                remedy: "listen on 127.0.0.1 or a unix socket, require TLS with client certificates (--tls-cert, \
                         --tls-key, --tls-client-ca), or allow such access (--insecure-tcp)",
            },
            limits: config.limits,
            drain: Drain { undisturbed: Duration::ZERO, finish: config.stop_grace, cut: Some(config.stop_grace) },
        };
        let service = Service::start(service, Arc::new(protocol))?;
        Ok(Self { service, rules, clients: config.clients, stop_grace: config.stop_grace })
    }

    /// The addresses on which the server listens, in the order of the configuration.
    pub fn addresses(&self) -> &[Address] {
        self.service.addresses()
    }

    /// Current number of connections.
    pub fn connections(&self) -> usize {
        self.service.connections()
    }

    /// Replaces the access rules, and ends the sessions that lose the permission for the export that they have open.
    /// Returns the number of these sessions; `None` if the server was started without rules: then rules cannot be set.
    ///
    /// The connections of these sessions are closed without further replies. Waits until the requests that the sessions
    /// have begun have ended, at most for the grace time.
    pub fn replace_rules(&self, rules: Rules) -> Option<usize> {
        let lost = self.rules.as_ref()?.replace(rules, |number| self.clients.export_of(number));
        let numbers = self.clients.revoke(&lost);
        let left = self.clients.wait_ended(&numbers, self.stop_grace);
        if !left.is_empty() {
            tracing::warn!(
                connections = left.len(),
                "connections without a right are closed, but requests that they had begun still wait for the device"
            );
        }
        Some(numbers.len())
    }

    /// Ends sessions of an export after their requests are done, so that their clients reconnect and see the export's
    /// new properties. Sessions that have not ended after the grace time are cut. Returns the number of sessions.
    pub fn reconnect(&self, export: &str, selection: ClientSelection) -> usize {
        let numbers = self.clients.retire(export, selection);
        let left = self.clients.wait_ended(&numbers, self.stop_grace);
        if !left.is_empty() {
            tracing::warn!(
                export,
                connections = left.len(),
                "connections were closed: their requests outlast the grace time"
            );
            self.clients.cut(&left);
            let left = self.clients.wait_ended(&left, self.stop_grace);
            if !left.is_empty() {
                tracing::error!(
                    export,
                    connections = left.len(),
                    "connections did not end: their requests wait for the device"
                );
            }
        }
        numbers.len()
    }

    /// Stops accepting, lets running requests finish within the grace time, and closes all connections. May be called
    /// again.
    pub fn stop(&self) {
        self.service.stop();
    }
}
