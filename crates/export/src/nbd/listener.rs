//! Where clients arrive: sockets, the accept loops, and the register of connections.
//!
//! One thread accepts on each address, one thread serves each connection. Invariants:
//!
//! 1. The register holds exactly the connections whose threads run; its size never exceeds the limit. A thread leaves
//!    it however it ends.
//! 2. [`Server::stop`] returns within the grace time and a little: it stops accepting, tells sessions to finish what
//!    they have taken up, and cuts off those that do not. Only a thread that hangs inside the device outlives it.
//! 3. Connections that are told to end for their clients to reconnect are treated as in 2, one by one; new ones to the
//!    same export begin after them ([`super::clients`]).
//! 4. A unix socket is created with its final permissions, never wider for a moment; its file is removed on stop if
//!    it is still the one we made.

use super::clients::{Clients, Peer, Visit, Whose};
use super::limits::{ACCEPT_RETRY, CONNECTIONS_DEFAULT, HANDSHAKE_TIMEOUT_DEFAULT, STOP_GRACE_DEFAULT};
use super::tls::{TlsConfig, TlsIdentity};
use super::transport::Socket;
use super::{Terms, serve};
use crate::exports::{Exports, ResizePolicy};
use error::{Error, ErrorKind, IoContext, Result};
use parking_lot::{Condvar, Mutex};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A place to listen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Listen {
    /// A unix socket, made with the permission bits `mode`: they say who may connect.
    Unix {
        /// Path of the socket.
        path: PathBuf,
        /// Permission bits, `0o600` for the owner alone.
        mode: u32,
    },
    /// A TCP address; port 0 takes a free one.
    Tcp(SocketAddr),
}

/// A place listened on, as clients have to name it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A unix socket.
    Unix(PathBuf),
    /// A TCP address with its true port.
    Tcp(SocketAddr),
}

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
    pub connections_max: usize,
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
            connections_max: CONNECTIONS_DEFAULT,
            handshake_timeout: HANDSHAKE_TIMEOUT_DEFAULT,
            stop_grace: STOP_GRACE_DEFAULT,
            clients: Arc::default(),
        }
    }
}

/// A running server. Dropping it stops it.
pub struct Server {
    shared: Arc<Shared>,
    addresses: Vec<Address>,
    acceptors: Mutex<Vec<JoinHandle<()>>>,
    sockets: Mutex<Vec<SocketFile>>,
    stop_grace: Duration,
}

/// What the threads share.
struct Shared {
    exports: Arc<dyn Exports>,
    clients: Arc<Clients>,
    connections_max: usize,
    stop: AtomicBool,
    /// Becomes readable (hung up) when the server stops, to wake the accept loops: the other end is dropped.
    stopping: OwnedFd,
    stopper: Mutex<Option<OwnedFd>>,
    register: Mutex<Register>,
    left: Condvar,
}

#[derive(Default)]
struct Register {
    connections: HashMap<u64, Connection>,
}

struct Connection {
    descriptor: Arc<OwnedFd>,
    stop: Arc<AtomicBool>,
}

/// A socket file of ours, known by inode.
struct SocketFile {
    path: PathBuf,
    inode: (u64, u64),
}

struct Listener {
    descriptor: OwnedFd,
    address: Address,
    terms: Terms,
}

impl Server {
    /// Listens and begins to accept. On return every address takes connections.
    pub fn start(config: ServerConfig, exports: Arc<dyn Exports>) -> Result<Self> {
        if config.listen.is_empty() {
            return Err(Error::new(ErrorKind::Invalid, "the NBD server needs at least one address to listen on"));
        }
        let identity = config.tls.as_ref().map(TlsIdentity::load).transpose()?;
        let mut listeners = Vec::new();
        let mut sockets = Vec::new();
        for listen in &config.listen {
            let (descriptor, address) = match listen {
                Listen::Unix { path, mode } => {
                    let (descriptor, socket) = listen_unix(path, *mode)?;
                    sockets.push(socket);
                    (descriptor, Address::Unix(path.clone()))
                }
                Listen::Tcp(address) => {
                    may_listen(*address, &config)?;
                    listen_tcp(*address)?
                }
            };
            let terms = Terms {
                tls: identity.clone(),
                tls_forced: matches!(listen, Listen::Tcp(_)) && config.tls.as_ref().is_some_and(|tls| tls.required),
                read_only: config.read_only,
                resize: config.resize,
                handshake_timeout: config.handshake_timeout,
            };
            listeners.push(Listener { descriptor, address, terms });
        }
        let (stopping, stopper) = std::io::pipe().during(|| "making a pipe for the NBD server".to_owned())?;
        let shared = Arc::new(Shared {
            exports,
            clients: Arc::clone(&config.clients),
            connections_max: config.connections_max,
            stop: AtomicBool::new(false),
            stopping: stopping.into(),
            stopper: Mutex::new(Some(stopper.into())),
            register: Mutex::new(Register::default()),
            left: Condvar::new(),
        });
        let addresses = listeners.iter().map(|listener| listener.address.clone()).collect();
        let server = Self {
            shared: Arc::clone(&shared),
            addresses,
            acceptors: Mutex::new(Vec::new()),
            sockets: Mutex::new(sockets),
            stop_grace: config.stop_grace,
        };
        for listener in listeners {
            let shared = Arc::clone(&shared);
            let thread = std::thread::Builder::new().name("nbd-accept".to_owned());
            // On failure the server is dropped, which stops the threads that have begun.
            let thread = thread
                .spawn(move || accept_loop(&shared, &listener))
                .during(|| "starting a thread for the NBD server".to_owned())?;
            server.acceptors.lock().push(thread);
        }
        Ok(server)
    }

    /// Where it listens, in the order of the configuration.
    pub fn addresses(&self) -> &[Address] {
        &self.addresses
    }

    /// Connections at this moment.
    pub fn connections(&self) -> usize {
        self.shared.register.lock().connections.len()
    }

    /// Ends connections to an export after what they have taken up is done and answered, so that their clients
    /// reconnect and learn what the export is now; those that outlast the grace time are cut off. How many there were.
    pub fn reconnect(&self, export: &str, whose: Whose) -> usize {
        let numbers = self.shared.clients.retire(export, whose);
        let shut_down = |numbers: &[u64], how: Shutdown| {
            let register = self.shared.register.lock();
            for connection in numbers.iter().filter_map(|number| register.connections.get(number)) {
                // Fails when the client is gone already.
                let _ = rustix::net::shutdown(&connection.descriptor, how);
            }
        };
        shut_down(&numbers, Shutdown::Read);
        let left = self.shared.clients.wait_ended(&numbers, self.stop_grace);
        if !left.is_empty() {
            tracing::warn!(export, connections = left.len(), "cut off: their requests outlast the grace time");
            shut_down(&left, Shutdown::Both);
            let left = self.shared.clients.wait_ended(&left, self.stop_grace);
            if !left.is_empty() {
                tracing::error!(export, connections = left.len(), "connections hang in the device");
            }
        }
        numbers.len()
    }

    /// Stops accepting, lets running requests finish within the grace time, closes all connections. Again is harmless.
    pub fn stop(&self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        drop(self.shared.stopper.lock().take());
        for thread in self.acceptors.lock().drain(..) {
            let _ = thread.join();
        }
        for socket in self.sockets.lock().drain(..) {
            socket.remove();
        }
        for connection in self.shared.register.lock().connections.values() {
            connection.stop.store(true, Ordering::SeqCst);
        }
        // A session that waits for its client wakes up to the end of its input, finishes and leaves.
        self.shared.shut_down(Shutdown::Read);
        if !self.shared.wait_until_empty(self.stop_grace) {
            tracing::warn!(connections = self.connections(), "clients cut off: their requests outlast the grace time");
            self.shared.shut_down(Shutdown::Both);
            if !self.shared.wait_until_empty(self.stop_grace) {
                tracing::error!(connections = self.connections(), "connections hang in the device; left behind");
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    fn shut_down(&self, how: Shutdown) {
        for connection in self.register.lock().connections.values() {
            // Fails when the client is gone already.
            let _ = rustix::net::shutdown(&connection.descriptor, how);
        }
    }

    fn wait_until_empty(&self, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        let mut register = self.register.lock();
        while !register.connections.is_empty() {
            if self.left.wait_until(&mut register, deadline).timed_out() {
                return register.connections.is_empty();
            }
        }
        true
    }

    /// Takes a connection into the register; `None` when the server is full or stopping.
    fn enter(self: &Arc<Self>, descriptor: &Arc<OwnedFd>, peer: Peer) -> Option<Entry> {
        let mut register = self.register.lock();
        if register.connections.len() >= self.connections_max || self.stop.load(Ordering::SeqCst) {
            return None;
        }
        let visit = self.clients.arrive(peer);
        let (number, shared) = (visit.number(), Arc::clone(self));
        let connection = Connection { descriptor: Arc::clone(descriptor), stop: visit.stop() };
        register.connections.insert(number, connection);
        Some(Entry { visit, place: Place { shared, number } })
    }
}

/// A place in the register, given back when dropped.
struct Entry {
    // Dropped in this order: when the register is empty, no client is listed as connected.
    visit: Visit,
    place: Place,
}

impl Drop for Entry {
    fn drop(&mut self) {
        if self.place.shared.stop.load(Ordering::SeqCst) {
            self.visit.ends_with_server();
        }
    }
}

struct Place {
    shared: Arc<Shared>,
    number: u64,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.shared.register.lock().connections.remove(&self.number);
        self.shared.left.notify_all();
    }
}

impl SocketFile {
    fn remove(&self) {
        if inode(&self.path) == Some(self.inode)
            && let Err(error) = std::fs::remove_file(&self.path)
        {
            tracing::warn!(%error, path = %self.path.display(), "the NBD socket could not be removed");
        }
    }
}

fn inode(path: &Path) -> Option<(u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    std::fs::symlink_metadata(path).ok().map(|metadata| (metadata.dev(), metadata.ino()))
}

/// Refuses addresses that would show disks to a network without saying who may see them.
fn may_listen(address: SocketAddr, config: &ServerConfig) -> Result<()> {
    let protected = config.tls.as_ref().is_some_and(|tls| tls.required && tls.client_authorities.is_some());
    if address.ip().to_canonical().is_loopback() || protected || config.allow_insecure_tcp {
        return Ok(());
    }
    let missing = match &config.tls {
        None => "there is no TLS, so anyone on the network could read and change every disk",
        Some(tls) if !tls.required => "TLS is not required, so anyone on the network could connect without it",
        Some(_) => "no client certificates are asked for, so anyone on the network could connect",
    };
    Err(Error::new(
        ErrorKind::Invalid,
        format!(
            "not listening on {address}: {missing}; listen on 127.0.0.1 or a unix socket, require TLS with client \
             certificates, or allow insecure TCP explicitly"
        ),
    ))
}

fn listen_unix(path: &Path, mode: u32) -> Result<(OwnedFd, SocketFile)> {
    let what = || format!("listening on unix socket {}", path.display());
    let name = SocketAddrUnix::new(path).map_err(|error| {
        let hint = "a socket path may have 107 bytes at most";
        Error::new(ErrorKind::Invalid, format!("unix socket {}: {error}; {hint}", path.display()))
    })?;
    let attempt = || -> std::result::Result<OwnedFd, Errno> {
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        // Linux gives the file the permissions of the socket, so there is no moment in which it is open to others.
        rustix::fs::fchmod(&socket, rustix::fs::Mode::from_raw_mode(mode))?;
        rustix::net::bind(&socket, &name)?;
        rustix::net::listen(&socket, 128)?;
        Ok(socket)
    };
    let socket = match attempt() {
        Err(Errno::ADDRINUSE) if is_abandoned(path, &name) => {
            std::fs::remove_file(path).during(what)?;
            attempt()
        }
        Err(Errno::ADDRINUSE) => {
            let message = format!("{}: another server listens there, or the file is no socket of ours", what());
            return Err(Error::new(ErrorKind::Busy, message));
        }
        other => other,
    };
    let socket = socket.map_err(|error| Error::io(what(), error.into()))?;
    // The umask has taken bits away that were asked for.
    rustix::fs::chmod(path, rustix::fs::Mode::from_raw_mode(mode)).map_err(|error| Error::io(what(), error.into()))?;
    let inode = inode(path).ok_or_else(|| Error::new(ErrorKind::Io, format!("{}: it vanished", what())))?;
    Ok((socket, SocketFile { path: path.to_owned(), inode }))
}

/// True when the file is a socket on which no process listens: left by a server that was killed.
fn is_abandoned(path: &Path, name: &SocketAddrUnix) -> bool {
    use std::os::unix::fs::FileTypeExt;
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket());
    let probe = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None);
    is_socket && probe.is_ok_and(|probe| rustix::net::connect(&probe, name) == Err(Errno::CONNREFUSED))
}

fn listen_tcp(address: SocketAddr) -> Result<(OwnedFd, Address)> {
    let listener = std::net::TcpListener::bind(address).during(|| format!("listening on {address}"))?;
    let address = listener.local_addr().during(|| format!("listening on {address}"))?;
    Ok((listener.into(), Address::Tcp(address)))
}

fn accept_loop(shared: &Arc<Shared>, listener: &Listener) {
    loop {
        let mut waiting = [
            PollFd::new(&listener.descriptor, PollFlags::IN),
            PollFd::from_borrowed_fd(shared.stopping.as_fd(), PollFlags::IN),
        ];
        match poll(&mut waiting, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => {
                tracing::error!(%error, address = ?listener.address, "waiting for clients failed; retrying");
                std::thread::sleep(ACCEPT_RETRY);
            }
        }
        if shared.stop.load(Ordering::SeqCst) {
            return;
        }
        if waiting[0].revents().is_empty() {
            continue;
        }
        match rustix::net::accept_with(&listener.descriptor, SocketFlags::CLOEXEC) {
            Ok(descriptor) => welcome(shared, listener, descriptor),
            Err(Errno::INTR | Errno::AGAIN | Errno::CONNABORTED) => {}
            Err(error) => {
                tracing::warn!(%error, address = ?listener.address, "accepting a client failed; retrying");
                std::thread::sleep(ACCEPT_RETRY);
            }
        }
    }
}

fn welcome(shared: &Arc<Shared>, listener: &Listener, descriptor: OwnedFd) {
    let peer = peer_of(&descriptor);
    let descriptor = Arc::new(descriptor);
    let Some(mut entry) = shared.enter(&descriptor, peer.clone()) else {
        tracing::warn!(%peer, limit = shared.connections_max, "client turned away: too many connections");
        return;
    };
    tune(&descriptor, matches!(listener.address, Address::Tcp(_)));
    let (shared, terms) = (Arc::clone(shared), listener.terms.clone());
    let thread = std::thread::Builder::new().name(format!("nbd-{}", entry.visit.number()));
    let spawned = thread.spawn(move || {
        // With more connections than processors each gets its share within milliseconds, not within seconds.
        backend::local::wake_promptly();
        let span = tracing::info_span!("nbd", connection = entry.visit.number(), %peer);
        let _entered = span.enter();
        let transport = Box::new(Socket::new(descriptor));
        // The session has logged its error itself, with the name of the export.
        let _ = serve(transport, &*shared.exports, &terms, &mut entry.visit);
    });
    if let Err(error) = spawned {
        tracing::error!(%error, "client turned away: no thread for it");
    }
}

/// Socket options; each is an improvement only, so failures do not matter.
fn tune(descriptor: &OwnedFd, tcp: bool) {
    /// Asks for more than systems grant by default, and takes what it gets.
    const SOCKET_BUFFER_BYTES: usize = 1 << 20;
    if tcp {
        let _ = sockopt::set_tcp_nodelay(descriptor, true);
        // A peer that vanished without a word is noticed within minutes.
        let _ = sockopt::set_socket_keepalive(descriptor, true);
        let _ = sockopt::set_tcp_keepidle(descriptor, Duration::from_secs(60));
        let _ = sockopt::set_tcp_keepintvl(descriptor, Duration::from_secs(15));
        let _ = sockopt::set_tcp_keepcnt(descriptor, 8);
    } else {
        let _ = sockopt::set_socket_send_buffer_size(descriptor, SOCKET_BUFFER_BYTES);
    }
}

fn peer_of(descriptor: &OwnedFd) -> Peer {
    let address = rustix::net::getpeername(descriptor).ok().flatten();
    if let Some(Ok(address)) = address.map(SocketAddr::try_from) {
        return Peer::Address(address);
    }
    match sockopt::socket_peercred(descriptor) {
        Ok(peer) => Peer::Process { pid: peer.pid.as_raw_nonzero().get(), user: peer.uid.as_raw() },
        Err(_) => Peer::Unknown,
    }
}
