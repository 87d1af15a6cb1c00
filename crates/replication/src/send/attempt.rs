//! One attempt of a transfer: from connecting until the disks are complete, or until an error.

use super::plan::DiskPlan;
use super::{SendOptions, Sent, Shipment, stopped};
use crate::frame::{Head, Kind};
use crate::limits::{CONNECT_TIMEOUT, PIECE_SENT, PING_INTERVAL, SILENCE_MAX};
use crate::message::{Known, Message, Offer, VERSIONS};
use crate::remote::Remote;
use crate::stream::Conversation;
use connections::TlsStream;
use connections::limits::HANDSHAKE_TIMEOUT_DEFAULT;
use connections::tls::{CertificateName, ClientIdentity};
use disk::transfer::{Extent, NewArrival, SEGMENT};
use error::{Error, ErrorKind, Result};
use parking_lot::{Condvar, Mutex};
use rustix::net::Shutdown;
use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Instant;
use work::{Progress, Throttle, Throttled};

/// The kind of failure of an attempt.
pub enum Failed {
    /// Another attempt may succeed.
    Broken(Error),
    /// Another attempt would fail in the same way.
    Refused(Error),
}

impl Failed {
    /// Classifies an error that the receiver reported.
    fn told(error: Error) -> Self {
        match error.kind() {
            ErrorKind::Busy | ErrorKind::Stopped | ErrorKind::Io => Self::Broken(error),
            _ => Self::Refused(error),
        }
    }

    /// Classifies an error of a connection.
    fn happened(error: Error) -> Self {
        match error.kind() {
            ErrorKind::Io => Self::Broken(error),
            _ => Self::Refused(error),
        }
    }
}

type Line = Conversation<TlsStream>;
type Attempted<T> = std::result::Result<T, Failed>;

/// State shared by all attempts.
pub struct Attempt<'a> {
    shipment: &'a Shipment,
    remote: &'a Remote,
    options: &'a SendOptions,
    progress: &'a dyn Progress,
    identity: ClientIdentity,
    server: CertificateName,
    offer: Message,
    throttle: Throttle<Throttled<'a>>,
    /// Most bytes that the receiver has reported as received, recorded or not.
    arrived: u64,
    resumed: Option<u64>,
}

/// State shared by the threads of an attempt.
struct Shared<'a> {
    plans: &'a [DiskPlan],
    /// For each disk, the number of segments that the receiver had before or whose end was sent, and the bytes of data
    /// in them.
    complete: Mutex<Vec<(u64, u64)>>,
    /// The next segment: index of the disk, and index in its plan.
    next: Mutex<(usize, usize)>,
    sockets: Mutex<Vec<Arc<OwnedFd>>>,
    stop: AtomicBool,
    failed: Mutex<Option<Failed>>,
    running: Mutex<usize>,
    changed: Condvar,
    data: AtomicU64,
    wire: AtomicU64,
}

impl Shared<'_> {
    /// Stores the first error. Later errors are consequences of the first one.
    fn fail(&self, failed: Failed) {
        let mut first = self.failed.lock();
        if first.is_none() {
            *first = Some(failed);
        }
        drop(first);
        self.stop.store(true, Ordering::Release);
        self.changed.notify_all();
    }

    fn cut(&self) {
        self.stop.store(true, Ordering::Release);
        for socket in self.sockets.lock().iter() {
            // An error is ignored: it means that the connection is already broken.
            let _ = rustix::net::shutdown(socket, Shutdown::Both);
        }
    }

    fn take(&self) -> Option<(usize, u64)> {
        let mut next = self.next.lock();
        loop {
            let plan = self.plans.get(next.0)?;
            if let Some(segment) = plan.left.get(next.1) {
                next.1 += 1;
                return Some((next.0, *segment));
            }
            *next = (next.0 + 1, 0);
        }
    }

    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }
}

impl<'a> Attempt<'a> {
    /// Prepares the attempts of a transfer.
    pub fn new(
        shipment: &'a Shipment,
        remote: &'a Remote,
        options: &'a SendOptions,
        progress: &'a dyn Progress,
    ) -> Result<Self> {
        let name = options.tls.server_name.as_ref().unwrap_or(&remote.host);
        let server = CertificateName::parse(name).ok_or_else(|| {
            let text = format!("'{}' cannot be the name of a server's certificate", name.escape_debug());
            Error::new(ErrorKind::Invalid, text)
        })?;
        let offer = |disk: &super::ShippedDisk| {
            let outgoing = &disk.outgoing;
            NewArrival {
                name: disk.name.clone(),
                uuid: disk.uuid.clone(),
                capacity: outgoing.capacity(),
                provisioning: outgoing.provisioning(),
                point: outgoing.point().clone(),
                keep: shipment.keep,
                bases: if shipment.incremental { outgoing.bases().to_vec() } else { Vec::new() },
                update: shipment.update,
            }
        };
        let disks = shipment.disks.iter().map(offer).collect();
        let offer =
            Message::Offer(Offer { disks, attachment: shipment.attachment.clone(), resume_only: shipment.resume_only });
        let identity = options.tls.load()?;
        let throttle = Throttle::new(Throttled { progress, rate: options.rate });
        Ok(Self { shipment, remote, options, progress, identity, server, offer, throttle, arrived: 0, resumed: None })
    }

    /// Most bytes that the receiver has reported as received.
    pub fn arrived(&self) -> u64 {
        self.arrived
    }

    fn dial(&self) -> Result<Arc<OwnedFd>> {
        let (host, port) = (&self.remote.host, self.remote.port);
        let during = || format!("connecting to {host} port {port}");
        let addresses = (host.as_str(), port).to_socket_addrs().map_err(|error| Error::io(during(), error))?;
        let mut last = None;
        for address in addresses {
            match TcpStream::connect_timeout(&address, CONNECT_TIMEOUT) {
                Ok(socket) => {
                    // An error is ignored, because the option only improves the latency.
                    let _ = socket.set_nodelay(true);
                    let timed = socket.set_write_timeout(Some(SILENCE_MAX));
                    timed.map_err(|error| Error::io(during(), error))?;
                    return Ok(Arc::new(socket.into()));
                }
                Err(error) => last = Some(error),
            }
        }
        let none = || std::io::Error::new(std::io::ErrorKind::NotFound, "the name has no address");
        Err(Error::io(during(), last.unwrap_or_else(none)))
    }

    /// Connects, and exchanges `hello` and `welcome` over TLS.
    fn connect(&self) -> Attempted<(Line, Arc<OwnedFd>)> {
        let socket = self.dial().map_err(Failed::Broken)?;
        let stream = TlsStream::connect(Arc::clone(&socket), &self.identity, &self.server)
            .map_err(|error| Failed::Refused(Error::io("setting up TLS", error)))?;
        let mut line = Conversation::new(stream, format!("{}:{}", self.remote.host, self.remote.port));
        let mut introduce = || {
            line.set_deadline(Some(Instant::now() + HANDSHAKE_TIMEOUT_DEFAULT))?;
            let program = concat!("lamina ", env!("CARGO_PKG_VERSION")).to_owned();
            line.tell(&Message::Hello { versions: VERSIONS.to_vec(), program })?;
            line.hear()
        };
        match introduce().map_err(Failed::happened)? {
            Message::Welcome { version, .. } if VERSIONS.contains(&version) => {}
            Message::Welcome { version, program } => {
                let text = format!(
                    "'{program}' there supports version {version} of the protocol, this program supports {VERSIONS:?}"
                );
                return Err(Failed::Refused(Error::new(ErrorKind::Unsupported, text)));
            }
            other => return Err(Failed::told(other.into_error())),
        }
        line.establish();
        Ok((line, socket))
    }

    /// Sends a message, and waits for the reply as long as keep-alives arrive.
    fn ask(&self, line: &mut Line, message: &Message) -> Attempted<Message> {
        line.tell(message).map_err(Failed::happened)?;
        loop {
            line.set_deadline(Some(Instant::now() + SILENCE_MAX)).map_err(Failed::happened)?;
            match line.hear().map_err(Failed::happened)? {
                Message::Working if self.progress.cancelled() => return Err(Failed::Refused(stopped())),
                Message::Working => {}
                failure @ Message::Failure { .. } => return Err(Failed::told(failure.into_error())),
                answer => return Ok(answer),
            }
        }
    }

    fn out_of_turn(message: Message) -> Failed {
        Failed::Refused(message.into_error())
    }

    /// Sends all missing segments, and returns the names of the disks on the receiver.
    pub fn run(&mut self, sent: &mut Sent) -> Attempted<Vec<String>> {
        let (mut line, socket) = self.connect()?;
        let (session, token, known) = match self.ask(&mut line, &self.offer)? {
            Message::Already { disks } => return Ok(disks),
            Message::Accept { session, token, disks } => (session, token, disks),
            other => return Err(Self::out_of_turn(other)),
        };
        let plans = self.plan_alive(&mut line, &known)?;
        let there: u64 = known.iter().map(|known| known.bytes).sum();
        self.arrived = self.arrived.max(there);
        sent.resumed = *self.resumed.get_or_insert(there);
        sent.incremental = known.iter().filter(|known| known.base.is_some()).count() as u64;
        let total = there + plans.iter().map(|plan| plan.left_bytes).sum::<u64>();
        let before = |known: &Known| (known.done.iter().map(|(from, to)| to - from).sum::<u64>(), known.bytes);
        let shared = Shared {
            plans: &plans,
            complete: Mutex::new(known.iter().map(before).collect()),
            next: Mutex::new((0, 0)),
            sockets: Mutex::new(vec![socket]),
            stop: AtomicBool::new(false),
            failed: Mutex::new(None),
            running: Mutex::new(0),
            changed: Condvar::new(),
            data: AtomicU64::new(0),
            wire: AtomicU64::new(0),
        };
        let mut arrived = there;
        let segments: usize = plans.iter().map(|plan| plan.left.len()).sum();
        let result = std::thread::scope(|scope| {
            let shared = &shared;
            let (session, token) = (&session, &token);
            for number in 0..self.options.streams.min(segments) {
                *shared.running.lock() += 1;
                let name = format!("send-{number}");
                let this = &*self;
                let work = move || {
                    if let Err(failed) = this.stream(session, token, shared) {
                        shared.fail(failed);
                    }
                    *shared.running.lock() -= 1;
                    shared.changed.notify_all();
                };
                if let Err(error) = std::thread::Builder::new().name(name).spawn_scoped(scope, work) {
                    *shared.running.lock() -= 1;
                    shared.fail(Failed::Refused(Error::io("starting a thread to send", error)));
                }
            }
            let watched = self.watch(&mut line, shared, &mut arrived, total);
            if watched.is_err() {
                shared.cut();
            }
            watched
        });
        self.arrived = self.arrived.max(arrived);
        sent.data += shared.data.load(Ordering::Relaxed);
        let finished = match result {
            Err(failed) => Err(failed),
            Ok(()) => {
                let disks = shared.complete.lock().clone();
                self.ask(&mut line, &Message::Finish { disks })
            }
        };
        sent.wire += shared.wire.load(Ordering::Relaxed) + line.stream.sent();
        match finished? {
            Message::Committed { disks } => Ok(disks),
            other => Err(Self::out_of_turn(other)),
        }
    }

    /// Makes the plans in another thread, and keeps the session alive meanwhile: the receiver ends a session in which
    /// it hears nothing for [`SILENCE_MAX`], and reading the maps of large disks may take longer.
    fn plan_alive(&self, line: &mut Line, known: &[Known]) -> Attempted<Vec<DiskPlan>> {
        let given_up = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let (done, planned) = mpsc::channel();
            let given_up = &given_up;
            let work = move || {
                // Sending the plans fails if the session has failed meanwhile.
                let _ = done.send(self.plan(known, given_up));
            };
            let spawned = std::thread::Builder::new().name("send-plan".to_owned()).spawn_scoped(scope, work);
            spawned.map_err(|error| Failed::Refused(Error::io("starting a thread to send", error)))?;
            loop {
                let answer = match planned.recv_timeout(PING_INTERVAL) {
                    Ok(plans) => return plans,
                    Err(mpsc::RecvTimeoutError::Timeout) => self.ask(line, &Message::Ping),
                    Err(mpsc::RecvTimeoutError::Disconnected) => {
                        let text = "a thread of the transfer failed: see the log of the process";
                        return Err(Failed::Refused(Error::new(ErrorKind::Io, text)));
                    }
                };
                let failed = match answer {
                    Ok(Message::Pong { .. }) => continue,
                    Ok(other) => Self::out_of_turn(other),
                    Err(failed) => failed,
                };
                given_up.store(true, Ordering::Release);
                // A refusal that this side has detected is more precise than a broken connection.
                return match planned.recv() {
                    Ok(Err(Failed::Refused(error))) if error.kind() != ErrorKind::Interrupted => {
                        Err(Failed::Refused(error))
                    }
                    _ => Err(failed),
                };
            }
        })
    }

    fn plan(&self, known: &[Known], given_up: &AtomicBool) -> Attempted<Vec<DiskPlan>> {
        if known.len() != self.shipment.disks.len() {
            let text = format!("the receiver answers for {} disks, not {}", known.len(), self.shipment.disks.len());
            return Err(Failed::Refused(Error::new(ErrorKind::Corrupt, text)));
        }
        let stopped = || given_up.load(Ordering::Acquire) || self.progress.cancelled();
        let plan = |(disk, known): (&super::ShippedDisk, &Known)| DiskPlan::of(&disk.outgoing, known, &stopped);
        self.shipment.disks.iter().zip(known).map(plan).collect::<Result<_>>().map_err(Failed::Refused)
    }

    /// Waits until all data connections have ended or the first one has failed; updates `arrived` from the receiver's
    /// replies.
    fn watch(&self, line: &mut Line, shared: &Shared<'_>, arrived: &mut u64, total: u64) -> Attempted<()> {
        let there = *arrived;
        loop {
            let (running, over) = {
                let mut running = shared.running.lock();
                if *running > 0 && !shared.stopped() {
                    shared.changed.wait_for(&mut running, PING_INTERVAL);
                }
                (*running, shared.stopped())
            };
            if self.progress.cancelled() {
                return Err(Failed::Refused(stopped()));
            }
            // The receiver is queried after a failure too, because it may report the reason.
            let answer = self.ask(line, &Message::Ping);
            let own = if over { shared.failed.lock().take() } else { None };
            match (answer, own) {
                (Ok(Message::Pong { bytes }), own) => {
                    *arrived = there.saturating_add(bytes).min(total);
                    self.progress.update(*arrived, total);
                    if let Some(failed) = own {
                        return Err(failed);
                    }
                }
                (Ok(other), _) => return Err(Self::out_of_turn(other)),
                // A refusal that this side has detected is more precise than the receiver's report of a broken
                // connection.
                (Err(Failed::Broken(_)), Some(refused @ Failed::Refused(_))) => return Err(refused),
                (Err(failed), _) => return Err(failed),
            }
            if running == 0 {
                return Ok(());
            }
        }
    }

    /// Runs one data connection.
    fn stream(&self, session: &str, token: &str, shared: &Shared<'_>) -> Attempted<()> {
        let (mut line, socket) = self.connect()?;
        shared.sockets.lock().push(socket);
        let sent = self.pour(&mut line, session, token, shared);
        shared.wire.fetch_add(line.stream.sent(), Ordering::Relaxed);
        sent
    }

    fn pour(&self, line: &mut Line, session: &str, token: &str, shared: &Shared<'_>) -> Attempted<()> {
        let join = Message::Join { session: session.to_owned(), token: token.to_owned() };
        match self.ask(line, &join)? {
            Message::Joined => {}
            other => return Err(Self::out_of_turn(other)),
        }
        let mut extents = Vec::new();
        while !shared.stopped()
            && let Some((disk, segment)) = shared.take()
        {
            self.send_segment(line, disk, segment, &mut extents, shared).map_err(Failed::happened)?;
        }
        if shared.stopped() {
            return Ok(());
        }
        let end = Head::of(Kind::End, 0, 0, &[]);
        line.send(&end, &[]).and_then(|()| line.flush()).map_err(Failed::happened)?;
        line.set_deadline(Some(Instant::now() + SILENCE_MAX)).map_err(Failed::happened)?;
        match line.hear().map_err(Failed::happened)? {
            Message::Pong { .. } => Ok(()),
            Message::Failure { kind, message } => Err(Failed::told(Message::Failure { kind, message }.into_error())),
            other => Err(Self::out_of_turn(other)),
        }
    }

    fn send_segment(
        &self,
        line: &mut Line,
        disk: usize,
        segment: u64,
        extents: &mut Vec<Extent>,
        shared: &Shared<'_>,
    ) -> Result<()> {
        let outgoing = &self.shipment.disks[disk].outgoing;
        let number = disk as u16;
        extents.clear();
        let base = shared.plans[disk].base.as_deref();
        outgoing.extents(base, segment * SEGMENT..(segment + 1) * SEGMENT, &mut |extent| {
            extents.push(extent);
            Ok(())
        })?;
        if extents.is_empty() {
            // Its blocks have got the same places as in the base since the plan was made. The receiver accepts no end
            // of a segment of which it has received nothing.
            return Ok(());
        }
        let mut data = 0;
        for extent in extents.iter() {
            if extent.zero {
                let length = extent.length.to_le_bytes();
                line.send(&Head::of(Kind::Zero, number, extent.offset, &length), &[&length])?;
                continue;
            }
            let end = extent.offset + extent.length;
            let mut at = extent.offset;
            while at < end {
                let length = (end - at).min(PIECE_SENT as u64);
                if shared.stopped() || !self.throttle.wait_unless(length, || shared.stopped()) {
                    return Ok(());
                }
                let plan = outgoing.read(at, length as usize)?;
                let slices = plan.slices();
                let checksum = plan.checksum();
                let head = Head { kind: Kind::Data, disk: number, offset: at, length: length as u32, checksum };
                line.send(&head, &slices)?;
                data += length;
                shared.data.fetch_add(length, Ordering::Relaxed);
                at += length;
            }
        }
        let sum = data.to_le_bytes();
        line.send(&Head::of(Kind::Segment, number, segment, &sum), &[&sum])?;
        let complete = &mut shared.complete.lock()[disk];
        *complete = (complete.0 + 1, complete.1 + data);
        line.flush()
    }
}
