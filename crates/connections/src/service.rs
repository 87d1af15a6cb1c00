//! Accepting, counting and refusing connections, a thread for each, and stopping.
//!
//! One thread accepts connections on each address, one thread serves each connection. Invariants:
//!
//! 1. The register has exactly the connections whose threads run, even if a thread panics. Each class of connections
//!    has its own limit ([`Limits`]), which is never exceeded.
//! 2. A TCP connection is unauthenticated until its client has presented a valid certificate. A holder of certificates,
//!    and a user of a unix socket other than root and the user of the server, gets no connection while it has as many
//!    as are free: one holder has at most half of its class, and leaves free ones.
//! 3. [`Service::stop`] stops accepting and ends the connections in the steps of [`Drain`]. A thread continues after
//!    that only if it is blocked by something other than its socket.
//! 4. Refusals and failed negotiations are logged at a bounded rate, no matter how often clients connect. Over TCP,
//!    refusals also happen at a bounded rate, so that clients without a certificate use little of the processors by
//!    connecting: further clients wait in the backlog of the kernel.

use crate::connection::Connection;
use crate::limits::{
    ACCEPT_RETRY, BACKLOG, Limits, REFUSAL_LOG_INTERVAL, REFUSAL_PAUSE, REFUSALS_AT_ONCE, SETTLE_LOOK,
};
use crate::listen::{Access, Address, Listen, Listener, SocketFile};
use crate::peer::Peer;
use crate::refusals::{Failures, Refusals};
use error::{Error, ErrorKind, IoContext, Result};
use parking_lot::{Condvar, Mutex};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SocketFlags, sockopt};
use rustix::process::geteuid;
use std::collections::HashMap;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A protocol that serves connections.
pub trait Protocol: Send + Sync {
    /// Serves a connection, on a thread of its own. The connection is closed when this method returns.
    fn serve(&self, connection: &Arc<Connection>);

    /// Called on each thread that accepts TCP connections, before the thread accepts the first connection.
    fn begins_accepting_tcp(&self) {}

    /// Sends the reason to a refused client. Called on the accepting thread, so it must not block.
    fn refuse(&self, _socket: &OwnedFd, _why: Refusal) {}
}

/// The reason why a client is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The limit for the client's class of connections is reached.
    Full(Class, usize),
    /// The client's user has this number of connections, and no more are free.
    Share(usize),
    /// The service is stopping.
    Stopping,
}

/// A class of connections, each with its own limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Over a unix socket; the permissions of its file decide who may connect.
    Unix,
    /// Over TCP, with a valid client certificate.
    Authenticated,
    /// Over TCP, without a valid client certificate, or before the end of the TLS handshake.
    Unauthenticated,
}

impl Class {
    const ALL: [Self; 3] = [Self::Unix, Self::Authenticated, Self::Unauthenticated];
}

impl fmt::Display for Class {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Unix => "unix",
            Self::Authenticated => "authenticated TCP",
            Self::Unauthenticated => "unauthenticated TCP",
        })
    }
}

/// How connections end when the service stops. A step ends early if no connection is open any more.
#[derive(Clone, Copy, Debug)]
pub struct Drain {
    /// How long connections continue before their end is requested.
    pub undisturbed: Duration,
    /// How long connections may take to finish their requests after their end was requested.
    pub finish: Duration,
    /// How long to wait for the threads of connections that were cut. `None` for no limit.
    pub cut: Option<Duration>,
}

/// Configuration of a service.
#[derive(Clone, Debug)]
pub struct ServiceConfig {
    /// The service's name, for the names of its threads and for the log.
    pub name: &'static str,
    /// Addresses to listen on.
    pub listen: Vec<Listen>,
    /// Whether TCP beyond loopback is allowed.
    pub access: Access,
    /// Limits of the number of connections.
    pub limits: Limits,
    /// How connections end when the service stops.
    pub drain: Drain,
}

/// A running service. Dropping it stops it.
pub struct Service {
    shared: Arc<Shared>,
    protocol: Arc<dyn Protocol>,
    addresses: Vec<Address>,
    acceptors: Mutex<Vec<JoinHandle<()>>>,
    files: Mutex<Vec<SocketFile>>,
    drain: Drain,
}

/// State shared by the service's threads.
pub(crate) struct Shared {
    name: &'static str,
    limits: Limits,
    stop: AtomicBool,
    /// Becomes readable (hang-up) when the service stops, which drops the other end.
    stopping: OwnedFd,
    stopper: Mutex<Option<OwnedFd>>,
    register: Mutex<Register>,
    /// Signalled when a connection has ended.
    left: Condvar,
}

#[derive(Default)]
struct Register {
    next: u64,
    places: HashMap<u64, Place>,
    /// Number of connections of each class.
    counts: [usize; 3],
    refusals: [Refusals; 3],
    failures: [Failures; 3],
}

impl Register {
    fn class(&self, connection: &Connection) -> Class {
        self.places.get(&connection.number).map_or(Class::Unauthenticated, |place| place.class)
    }

    /// Number of connections that a holder has in a class.
    fn held_by(&self, class: Class, holder: &[u8]) -> usize {
        let held = |place: &&Place| place.class == class && place.holder.as_deref() == Some(holder);
        self.places.values().filter(held).count()
    }
}

struct Place {
    connection: Arc<Connection>,
    class: Class,
    /// The holder of the client's certificate, or the client's user, if the share of the holder is limited.
    holder: Option<Vec<u8>>,
}

/// The holder of a connection over a unix socket. Root and the user of the server have none, because their share is not
/// limited.
fn user_of(peer: &Peer) -> Option<Vec<u8>> {
    match peer {
        Peer::Process { user, .. } if *user != 0 && *user != geteuid().as_raw() => Some(user.to_le_bytes().to_vec()),
        _ => None,
    }
}

/// A connection in the register, which is removed when this value is dropped.
struct RegisterEntry {
    // The fields are dropped in this order, so that all sockets are closed before the register is empty.
    connection: Arc<Connection>,
    registration: Registration,
}

struct Registration {
    shared: Arc<Shared>,
    number: u64,
}

impl Drop for Registration {
    fn drop(&mut self) {
        let mut register = self.shared.register.lock();
        if let Some(place) = register.places.remove(&self.number) {
            register.counts[place.class as usize] -= 1;
        }
        drop(register);
        self.shared.left.notify_all();
    }
}

impl Service {
    /// Listens and accepts connections. On return all addresses accept connections.
    ///
    /// # Errors
    /// `Invalid` without an address or for an address that is not allowed, `Busy` if another server listens there,
    /// `Exists` if the path of a unix socket has a file that is not a socket, and errors of the system.
    pub fn start(config: ServiceConfig, protocol: Arc<dyn Protocol>) -> Result<Self> {
        let name = config.name;
        if config.listen.is_empty() {
            return Err(Error::new(ErrorKind::Invalid, format!("the {name} server needs at least one address")));
        }
        let during = || format!("starting the {name} server");
        let (stopping, stopper) = io::pipe().during(during)?;
        let shared = Arc::new(Shared {
            name,
            limits: config.limits,
            stop: AtomicBool::new(false),
            stopping: stopping.into(),
            stopper: Mutex::new(Some(stopper.into())),
            register: Mutex::default(),
            left: Condvar::new(),
        });
        let mut service = Self {
            shared,
            protocol,
            addresses: Vec::new(),
            acceptors: Mutex::default(),
            files: Mutex::default(),
            drain: config.drain,
        };
        // If a step fails, the service is dropped, which removes the sockets and stops the threads that were started.
        let mut listeners = Vec::new();
        for listen in &config.listen {
            let mut listener = listen.bind(&config.access)?;
            service.files.lock().extend(listener.file.take());
            service.addresses.push(listener.address.clone());
            listeners.push(listener);
        }
        for listener in listeners {
            let (shared, protocol) = (Arc::clone(&service.shared), Arc::clone(&service.protocol));
            let thread = std::thread::Builder::new().name(format!("{name}-accept"));
            let thread = thread.spawn(move || accept(&shared, &protocol, &listener)).during(during)?;
            service.acceptors.lock().push(thread);
        }
        Ok(service)
    }

    /// The addresses on which the service listens, in the order of the configuration.
    pub fn addresses(&self) -> &[Address] {
        &self.addresses
    }

    /// Current number of connections.
    pub fn connections(&self) -> usize {
        self.shared.register.lock().places.len()
    }

    /// Cuts all connections, as a network failure does.
    pub fn cut(&self) {
        self.shared.each(Connection::cut);
    }

    /// Stops accepting, and ends all connections in the steps of [`Drain`]. May be called again.
    pub fn stop(&self) {
        let (shared, name) = (&self.shared, self.shared.name);
        shared.stop.store(true, Ordering::SeqCst);
        drop(shared.stopper.lock().take());
        for thread in self.acceptors.lock().drain(..) {
            if thread.join().is_err() {
                tracing::error!(service = name, "the thread that accepts connections had panicked");
            }
        }
        for file in self.files.lock().drain(..) {
            file.remove();
        }
        if shared.emptied(Some(self.drain.undisturbed)) {
            return;
        }
        if !self.drain.undisturbed.is_zero() {
            tracing::info!(
                service = name,
                connections = self.connections(),
                "ending requests that are still under way"
            );
        }
        shared.each(Connection::finish);
        if shared.emptied(Some(self.drain.finish)) {
            return;
        }
        if !self.drain.finish.is_zero() {
            let connections = self.connections();
            tracing::warn!(
                service = name,
                connections,
                "connections are closed: their requests took longer than the grace time"
            );
        }
        self.cut();
        if !shared.emptied(self.drain.cut) {
            tracing::error!(
                service = name,
                connections = self.connections(),
                "connections do not end; the service stops without waiting for them"
            );
        }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    pub(crate) fn stops(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }

    pub(crate) fn stopping(&self) -> BorrowedFd<'_> {
        self.stopping.as_fd()
    }

    fn limit(&self, class: Class) -> usize {
        match class {
            Class::Unix => self.limits.unix,
            Class::Authenticated => self.limits.authenticated,
            Class::Unauthenticated => self.limits.unauthenticated,
        }
    }

    fn each(&self, act: impl Fn(&Connection)) {
        for place in self.register.lock().places.values() {
            act(&place.connection);
        }
    }

    /// Waits until no connection is open; false if one is still open after `patience`.
    fn emptied(&self, patience: Option<Duration>) -> bool {
        let deadline = patience.map(|patience| Instant::now() + patience);
        let mut register = self.register.lock();
        while !register.places.is_empty() {
            match deadline {
                None => self.left.wait(&mut register),
                Some(deadline) => {
                    if self.left.wait_until(&mut register, deadline).timed_out() {
                        return register.places.is_empty();
                    }
                }
            }
        }
        true
    }

    /// Waits until no open connection besides `asking` has a peer that has disconnected, or closed its side.
    pub(crate) fn settled(&self, asking: u64, patience: Duration, interrupted: impl Fn() -> bool) -> bool {
        let deadline = Instant::now() + patience;
        let mut register = self.register.lock();
        let others = |register: &Register| {
            let mut others = register.places.iter().filter(|(number, _)| **number != asking);
            others.any(|(_, place)| place.connection.peer_has_gone())
        };
        while others(&register) {
            if Instant::now() >= deadline || interrupted() {
                return false;
            }
            // The wait is limited to an interval, because a further client may disconnect while its connection stays
            // open.
            self.left.wait_for(&mut register, SETTLE_LOOK);
        }
        true
    }

    /// Adds a connection to the register. If it is refused, returns its socket and the reason.
    fn enter(
        self: &Arc<Self>,
        socket: OwnedFd,
        peer: Peer,
        class: Class,
    ) -> std::result::Result<RegisterEntry, (OwnedFd, Refusal)> {
        let mut register = self.register.lock();
        if self.stops() {
            return Err((socket, Refusal::Stopping));
        }
        let limit = self.limit(class);
        if register.counts[class as usize] >= limit {
            register.refusals[class as usize].count();
            return Err((socket, Refusal::Full(class, limit)));
        }
        let holder = if class == Class::Unix { user_of(&peer) } else { None };
        let held = holder.as_deref().map_or(0, |holder| register.held_by(class, holder));
        // Connections are not taken away from a holder, so a holder must leave some to others that connect later.
        if held >= limit - register.counts[class as usize] {
            register.refusals[class as usize].count();
            return Err((socket, Refusal::Share(held)));
        }
        let number = register.next;
        register.next += 1;
        let (socket, tcp, stop) = (Arc::new(socket), class != Class::Unix, Arc::default());
        let connection = Arc::new(Connection { number, peer, socket, tcp, stop, service: Arc::clone(self) });
        register.places.insert(number, Place { connection: Arc::clone(&connection), class, holder });
        register.counts[class as usize] += 1;
        Ok(RegisterEntry { connection, registration: Registration { shared: Arc::clone(self), number } })
    }

    /// Makes a connection count as authenticated, and as one of `holder`.
    pub(crate) fn authenticate(&self, connection: &Connection, holder: Option<&[u8]>) -> io::Result<()> {
        let mut register = self.register.lock();
        let limit = self.limits.authenticated;
        let free = limit.saturating_sub(register.counts[Class::Authenticated as usize]);
        let held = holder.map_or(0, |holder| register.held_by(Class::Authenticated, holder));
        let Some(place) = register.places.get_mut(&connection.number) else { return Ok(()) };
        if place.class != Class::Unauthenticated {
            return Ok(());
        }
        // As in `enter`, a holder must leave some connections to others that connect later.
        if held < free {
            place.class = Class::Authenticated;
            place.holder = holder.map(<[u8]>::to_vec);
            register.counts[Class::Unauthenticated as usize] -= 1;
            register.counts[Class::Authenticated as usize] += 1;
            return Ok(());
        }
        register.refusals[Class::Authenticated as usize].count();
        drop(register);
        self.log_due();
        let text = match free {
            0 => format!("all {limit} connections for clients with certificates are in use"),
            _ => format!(
                "certificates with this name have {held} connections already, and the last {free} of {limit} are kept \
                 for other names"
            ),
        };
        Err(io::Error::new(io::ErrorKind::ConnectionRefused, text))
    }

    pub(crate) fn class(&self, connection: &Connection) -> Class {
        self.register.lock().class(connection)
    }

    /// Counts a failed negotiation. Logs the counted failures, unless failures of this class were logged within the
    /// last [`REFUSAL_LOG_INTERVAL`].
    pub(crate) fn log_failure(&self, connection: &Connection, error: &Error) {
        let mut register = self.register.lock();
        let class = register.class(connection);
        let failures = &mut register.failures[class as usize];
        failures.count(format!("{}: {error}", connection.peer));
        let due = failures.due(Instant::now());
        drop(register);
        self.log_failures(class, due);
    }

    fn log_failures(&self, class: Class, due: Option<(u64, String)>) {
        if let Some((failed, last)) = due {
            tracing::info!(service = self.name, %class, failed, last, "connections ended in the handshake by errors");
        }
    }

    /// Logs the refusals and failures that are due; returns the time until the next can be due.
    fn log_due(&self) -> Option<Duration> {
        let now = Instant::now();
        let mut register = self.register.lock();
        let due = Class::ALL.map(|class| {
            let refused = register.refusals[class as usize].due(now);
            (class, refused, register.failures[class as usize].due(now))
        });
        let refusals = register.refusals.iter().filter_map(|refusals| refusals.wait(now)).min();
        let failures = register.failures.iter().filter_map(|failures| failures.wait(now)).min();
        // The negotiation of an open connection may fail later, without waking this thread. If the failure is not
        // logged at once, it becomes due within this interval.
        let later = (!register.places.is_empty()).then_some(REFUSAL_LOG_INTERVAL);
        drop(register);
        for (class, refused, failed) in due {
            if let Some(refused) = refused {
                let (service, limit) = (self.name, self.limit(class));
                tracing::warn!(service, %class, limit, refused, "clients refused: too many connections");
            }
            self.log_failures(class, failed);
        }
        [refusals, failures, later].into_iter().flatten().min()
    }
}

fn accept(shared: &Arc<Shared>, protocol: &Arc<dyn Protocol>, listener: &Listener) {
    let (service, address) = (shared.name, &listener.address);
    let tcp = matches!(listener.address, Address::Tcp(_));
    if tcp {
        protocol.begins_accepting_tcp();
    }
    let mut refusals_left = REFUSALS_AT_ONCE;
    loop {
        let timeout = shared.log_due().and_then(|wait| Timespec::try_from(wait).ok());
        let mut waiting =
            [PollFd::new(&listener.socket, PollFlags::IN), PollFd::from_borrowed_fd(shared.stopping(), PollFlags::IN)];
        match poll(&mut waiting, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => {
                tracing::error!(%error, service, ?address, "waiting for connections failed; retrying");
                std::thread::sleep(ACCEPT_RETRY);
            }
        }
        if shared.stops() {
            break;
        }
        if waiting[0].revents().is_empty() {
            continue;
        }
        match rustix::net::accept_with(&listener.socket, SocketFlags::CLOEXEC) {
            Ok(socket) => {
                if !welcome(shared, protocol, listener, socket) && tcp {
                    refusals_left -= 1;
                }
                if refusals_left == 0 {
                    std::thread::sleep(REFUSAL_PAUSE);
                    refusals_left = REFUSALS_AT_ONCE;
                }
            }
            Err(Errno::INTR | Errno::AGAIN | Errno::CONNABORTED) => {}
            Err(error) => {
                // The connection stays in the backlog. A retry may succeed, because a descriptor may become free
                // meanwhile.
                tracing::warn!(%error, service, ?address, "accepting a connection failed; retrying");
                std::thread::sleep(ACCEPT_RETRY);
            }
        }
    }
    // Clients in the backlog get a reply that the service is stopping. The number of these replies is limited, because
    // further clients may connect meanwhile.
    for _ in 0..=BACKLOG {
        let Ok(socket) = rustix::net::accept_with(&listener.socket, SocketFlags::CLOEXEC) else { break };
        protocol.refuse(&socket, Refusal::Stopping);
    }
}

/// Starts a thread for a connection; false if the connection is refused.
fn welcome(shared: &Arc<Shared>, protocol: &Arc<dyn Protocol>, listener: &Listener, socket: OwnedFd) -> bool {
    let peer = Peer::of(&socket);
    let class = match listener.address {
        Address::Unix(_) => Class::Unix,
        Address::Tcp(_) => Class::Unauthenticated,
    };
    let entry = match shared.enter(socket, peer, class) {
        Ok(entry) => entry,
        Err((socket, why)) => {
            protocol.refuse(&socket, why);
            return false;
        }
    };
    if entry.connection.tcp {
        tune(&entry.connection.socket);
    }
    let protocol = Arc::clone(protocol);
    let thread = std::thread::Builder::new().name(format!("{}-{}", shared.name, entry.registration.number));
    let spawned = thread.spawn(move || {
        // Moved here so that the entry is dropped last, also after a panic.
        let entry = entry;
        protocol.serve(&entry.connection);
    });
    if let Err(error) = &spawned {
        tracing::error!(%error, service = shared.name, "client refused: no thread could be started for it");
    }
    spawned.is_ok()
}

/// Sets options of TCP sockets. Failures are ignored, because the options are only optimizations.
fn tune(socket: &OwnedFd) {
    let _ = sockopt::set_tcp_nodelay(socket, true);
    // With keepalive, a peer that has disappeared without closing the connection is detected within minutes.
    let _ = sockopt::set_socket_keepalive(socket, true);
    let _ = sockopt::set_tcp_keepidle(socket, Duration::from_secs(60));
    let _ = sockopt::set_tcp_keepintvl(socket, Duration::from_secs(15));
    let _ = sockopt::set_tcp_keepcnt(socket, 8);
}

#[cfg(test)]
mod tests;
