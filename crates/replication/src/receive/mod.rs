//! The receiving side: where senders arrive.
//!
//! One thread accepts, one thread serves each connection. What holds:
//!
//! 1. A connection is worth nothing until TLS is up and the client's certificate is one of those that are wanted.
//! 2. The register holds exactly the connections whose threads run, and never more than the limit.
//! 3. [`Receiver::stop`] ends every session in an orderly way: what has arrived is recorded.

mod session;
mod taking;

use crate::limits::{ACCEPT_RETRY, CONNECTIONS_MAX, STOP_GRACE};
use crate::tls::{self, TlsStream};
use disk::Datastore;
use error::{Error, ErrorKind, Result};
use export::nbd::TlsConfig;
use parking_lot::{Condvar, Mutex};
use rustls::ServerConfig;
use rustls::pki_types::ServerName;

use error::IoContext;
use std::collections::HashMap;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;

pub use session::{Sessions, converse};
pub use taking::take;

/// What is done with the definition of a machine that comes with its disks.
pub trait Attachments: Send + Sync {
    /// Refuses what could not be used, before anything is received for it.
    fn check(&self, text: &str, disks: &[String]) -> Result<()>;

    /// Prepares it, before the disks are there. Dropped unfinished, it takes itself back, and the disks.
    fn begin(&self, text: &str, disks: &[String]) -> Result<Box<dyn Making>>;
}

/// Something that is about to be there.
pub trait Making: Send {
    /// It is there.
    fn finish(self: Box<Self>) -> Result<()>;
}

/// Takes disks alone.
pub struct NoAttachments;

impl Attachments for NoAttachments {
    fn check(&self, _: &str, _: &[String]) -> Result<()> {
        Err(Error::new(ErrorKind::Unsupported, "this server receives disks, and no machines"))
    }

    fn begin(&self, text: &str, disks: &[String]) -> Result<Box<dyn Making>> {
        self.check(text, disks)?;
        Err(Error::new(ErrorKind::Unsupported, "no machines"))
    }
}

/// Where and from whom disks are received.
#[derive(Clone, Debug)]
pub struct ReceiverConfig {
    /// Address; port 0 takes a free one.
    pub listen: SocketAddr,
    /// The server's certificate, and the authorities that sign clients.
    pub tls: TlsConfig,
    /// Names that a client's certificate has to be for: one of them. Empty admits every client that `tls` admits.
    pub clients: Vec<String>,
}

/// A running receiver. Dropping it stops it.
pub struct Receiver {
    shared: Arc<Shared>,
    address: SocketAddr,
    acceptor: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    sessions: Sessions,
    tls: Arc<ServerConfig>,
    clients: Vec<ServerName<'static>>,
    stop: AtomicBool,
    register: Mutex<Register>,
    left: Condvar,
}

#[derive(Default)]
struct Register {
    next: u64,
    connections: HashMap<u64, Arc<TcpStream>>,
}

/// A place in the register, given back when dropped.
struct Registration {
    shared: Arc<Shared>,
    number: u64,
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.shared.register.lock().connections.remove(&self.number);
        self.shared.left.notify_all();
    }
}

/// Refuses an address beyond loopback unless clients need certificates.
fn may_listen(config: &ReceiverConfig) -> Result<()> {
    let authorities = config.tls.client_authorities.is_some();
    if !config.clients.is_empty() && !authorities {
        let text =
            "clients can only be told apart by certificates: name the authorities that sign them (--tls-client-ca)";
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    if authorities || config.listen.ip().to_canonical().is_loopback() {
        return Ok(());
    }
    let text = format!(
        "not receiving on {}: no client certificates are asked for, so anyone on the network could fill the datastore; \
         listen on 127.0.0.1, or name the authorities that sign clients (--tls-client-ca)",
        config.listen
    );
    Err(Error::new(ErrorKind::Invalid, text))
}

impl Receiver {
    /// Listens and begins to accept.
    pub fn start(
        config: &ReceiverConfig,
        datastore: Arc<Datastore>,
        attachments: Arc<dyn Attachments>,
    ) -> Result<Self> {
        may_listen(config)?;
        let during = || format!("listening on {}", config.listen);
        let tls = tls::server_config(&config.tls)?;
        let clients = config.clients.iter().map(|name| tls::client_name(name)).collect::<Result<_>>()?;
        let listener = TcpListener::bind(config.listen).during(during)?;
        let address = listener.local_addr().during(during)?;
        let shared = Arc::new(Shared {
            sessions: Sessions::new(datastore, attachments),
            tls,
            clients,
            stop: AtomicBool::new(false),
            register: Mutex::default(),
            left: Condvar::new(),
        });
        let accepting = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("receive-accept".to_owned());
        let thread = thread.spawn(move || accept(&accepting, &listener)).during(during)?;
        Ok(Self { shared, address, acceptor: Mutex::new(Some(thread)) })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Connections at this moment.
    pub fn connections(&self) -> usize {
        self.shared.register.lock().connections.len()
    }

    /// Cuts every connection, as a network may: for tests.
    pub fn cut(&self) {
        for socket in self.shared.register.lock().connections.values() {
            // Fails where the client is gone already.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }

    /// Stops accepting and ends all sessions. Again is harmless.
    pub fn stop(&self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        if let Some(thread) = self.acceptor.lock().take() {
            // The acceptor sleeps in the kernel: a connection wakes it.
            let _ = TcpStream::connect(self.address);
            let _ = thread.join();
        }
        self.cut();
        let deadline = Instant::now() + STOP_GRACE;
        let mut register = self.shared.register.lock();
        while !register.connections.is_empty() {
            if self.shared.left.wait_until(&mut register, deadline).timed_out() {
                tracing::error!(connections = register.connections.len(), "senders hang in the datastore; left behind");
                return;
            }
        }
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.stop();
    }
}

fn accept(shared: &Arc<Shared>, listener: &TcpListener) {
    loop {
        let accepted = listener.accept();
        if shared.stop.load(Ordering::SeqCst) {
            return;
        }
        match accepted {
            Ok((socket, peer)) => welcome(shared, Arc::new(socket), peer),
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionAborted => {}
            Err(error) => {
                tracing::warn!(%error, "accepting a sender failed; retrying");
                std::thread::sleep(ACCEPT_RETRY);
            }
        }
    }
}

fn welcome(shared: &Arc<Shared>, socket: Arc<TcpStream>, peer: SocketAddr) {
    let entry = {
        let mut register = shared.register.lock();
        if register.connections.len() >= CONNECTIONS_MAX {
            tracing::warn!(%peer, limit = CONNECTIONS_MAX, "sender turned away: too many connections");
            return;
        }
        let number = register.next;
        register.next += 1;
        register.connections.insert(number, Arc::clone(&socket));
        Registration { shared: Arc::clone(shared), number }
    };
    let thread = std::thread::Builder::new().name(format!("receive-{}", entry.number));
    let spawned = thread.spawn(move || {
        let entry = entry;
        let span = tracing::info_span!("receive", connection = entry.number, %peer);
        let _entered = span.enter();
        if let Err(error) = serve(&entry.shared, &socket, peer) {
            tracing::info!(%error, "connection ended by an error");
        }
        // Ends the connection for the peer at once, although other threads may still hold the socket.
        let _ = socket.shutdown(Shutdown::Both);
    });
    if let Err(error) = spawned {
        tracing::error!(%error, "sender turned away: no thread for it");
    }
}

fn serve(shared: &Shared, socket: &Arc<TcpStream>, peer: SocketAddr) -> Result<()> {
    let during = || format!("setting up TLS with {peer}");
    // An improvement only.
    let _ = socket.set_nodelay(true);
    socket.set_write_timeout(Some(crate::limits::SILENCE_MAX)).during(during)?;
    let stream = TlsStream::accept(Arc::clone(socket), Arc::clone(&shared.tls)).during(during)?;
    let admitted = |stream: &TlsStream| {
        if shared.clients.is_empty() || stream.client_is(&shared.clients) {
            return Ok(());
        }
        let text = "the certificate is good, but for none of the names that disks are received from (--receive-from)";
        Err(Error::new(ErrorKind::Invalid, text))
    };
    session::serve(&shared.sessions, stream, Some(socket), peer.to_string(), &admitted)
}
