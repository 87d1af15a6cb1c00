//! Latency of a local client while clients without a certificate (strangers) send load to the TCP port.
//!
//! The local client sends reads and writes over the unix socket at a steady rate. Slices without and with the load
//! alternate, in both orders, and the figure is the median of the ratios of their 99th percentiles. The clients run on
//! this machine, so their own processor time also affects the ratio. With clients on other hosts, the ratio is smaller.

use crate::bars::load::{Load, latencies, mixed};
use crate::bars::{BLOCK, Setting, fill, say};
use crate::datastore::{Datastore, Keys, OverTcp, Serving};
use crate::error::{Doing, Result};
use crate::process;
use crate::report::{Finding, Outcome};
use crate::statistics::{median, percentile, ratio};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const PROPERTY: &str = "many connections";
const DISK: u64 = 64 << 20;
/// Requests of the local client in a second.
const RATE: u32 = 1000;
/// Largest increase of the local client's 99th percentile, as a factor.
const P99_MAX: f64 = 1.2;
/// Number of connections that are held open: as many as a server allows by default.
const HELD: usize = 256;
/// TLS handshakes that are begun in a second.
const HELLOS: u32 = 200;
/// Connections that are opened and closed in a second, while as many connections as the server allows are open already.
const CONNECTS: u32 = 1000;
/// Longest wait of a stranger for the server.
const PATIENCE: Duration = Duration::from_secs(2);
const STARTTLS: &[u8] = b"\0\0\0\x03IHAVEOPT\0\0\0\x05\0\0\0\0";

/// The load of the clients without a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Strangers {
    /// The clients hold all connections, half of them in the middle of a TLS handshake.
    Held,
    /// The clients begin TLS handshakes, and close the connections.
    Hellos,
    /// The clients hold all connections, and open and close further ones.
    Connects,
}

pub(super) const EACH: [Strangers; 3] = [Strangers::Held, Strangers::Hellos, Strangers::Connects];

impl Strangers {
    pub(super) fn cell(self) -> &'static str {
        match self {
            Strangers::Held => "strangers-held",
            Strangers::Hellos => "strangers-hellos",
            Strangers::Connects => "strangers-connects",
        }
    }
}

pub(super) fn cells(setting: &Setting, kinds: &[Strangers], outcome: &mut Outcome) -> Result<Vec<Value>> {
    let plan = &setting.plan;
    let datastore = Datastore::init(&setting.lamina, &setting.scratch, "strangers")?;
    datastore.create("local", DISK)?;
    let over_tcp = Some((OverTcp::Nbd, Keys::make(&setting.scratch)?));
    let (server, _) = datastore.serve(&Serving { over_tcp, ..Serving::plain(plan.mode()) }, "local")?;
    let address = datastore.address(OverTcp::Nbd)?;
    fill(&server.endpoint, DISK)?;
    let mut raw = Vec::new();
    for kind in kinds {
        say(kind.cell());
        // The 99th percentiles in milliseconds, without and with load.
        let mut p99 = [Vec::new(), Vec::new()];
        let mut done = Vec::new();
        // The number of runs is doubled, so that both orders are measured equally often.
        for run in 0..2 * plan.runs {
            for turn in 0..2 {
                let loaded = (run + turn) % 2 == 1;
                let load = loaded.then(|| Attack::start(*kind, address)).transpose()?;
                process::pause(Duration::from_millis(500))?;
                let endpoints = std::slice::from_ref(&server.endpoint);
                let local =
                    Load::paced(endpoints, RATE, plan.seed + u64::from(run), |random| mixed(random, DISK / BLOCK))?;
                process::pause(Duration::from_millis(200))?;
                let from = Instant::now();
                process::pause(Duration::from_secs_f64(plan.seconds))?;
                let window = (from, Instant::now());
                p99[usize::from(loaded)].push(percentile(&latencies(&local.finish()?, window), 0.99));
                if let Some(load) = load {
                    done.push(load.finish()? as f64);
                }
            }
        }
        let [alone, beside] = &p99;
        let ratios: Vec<f64> = beside.iter().zip(alone).map(|(beside, alone)| ratio(*beside, *alone)).collect();
        let what = |text: &str| format!("{}: {text}", kind.cell());
        outcome.findings.extend([
            Finding::new(PROPERTY, what("p99 alone"), median(alone), "ms"),
            Finding::new(PROPERTY, what("p99 beside the load"), median(beside), "ms"),
            Finding::new(PROPERTY, what("connections of strangers in a run"), median(&done), ""),
            Finding::new(PROPERTY, what("p99 beside the load against alone"), median(&ratios), "").at_most(P99_MAX),
        ]);
        raw.push(json!({ "cell": kind.cell(), "alone_ms": alone, "beside_ms": beside, "connections": done }));
    }
    server.service.stop()?;
    setting.scratch.remove(datastore.path())?;
    Ok(raw)
}

/// Clients without a certificate, which run until they are stopped.
struct Attack {
    stop: Arc<AtomicBool>,
    connections: Arc<AtomicU64>,
    thread: JoinHandle<()>,
}

impl Attack {
    fn start(kind: Strangers, address: SocketAddr) -> Result<Attack> {
        let (stop, connections) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stopping, counted) = (Arc::clone(&stop), Arc::clone(&connections));
        let thread = std::thread::Builder::new().name("strangers".into());
        let thread = thread.spawn(move || attack(kind, address, &stopping, &counted));
        Ok(Attack { stop, connections, thread: thread.doing(|| "starting the load".to_string())? })
    }

    /// Stops the clients; returns the number of connections that the server has accepted from them.
    fn finish(self) -> Result<u64> {
        self.stop.store(true, Ordering::Relaxed);
        if self.thread.join().is_err() {
            return Err(crate::error::Error::Answer("the load on the TCP port has failed".into()));
        }
        Ok(self.connections.load(Ordering::Relaxed))
    }
}

/// Refusals and timeouts by the server are part of the load, so they are not errors.
fn attack(kind: Strangers, address: SocketAddr, stop: &AtomicBool, counted: &AtomicU64) {
    let mut held = Vec::new();
    if kind != Strangers::Hellos {
        for number in 0..HELD {
            let stream =
                if number % 2 == 0 { connect(address) } else { half_handshake(address, &client_hello()[..40]) };
            counted.fetch_add(u64::from(stream.is_some()), Ordering::Relaxed);
            held.extend(stream);
        }
    }
    let per_second = match kind {
        Strangers::Held => 10,
        Strangers::Hellos => HELLOS,
        Strangers::Connects => CONNECTS,
    };
    let interval = Duration::from_secs(1) / per_second;
    let mut due = Instant::now();
    while !stop.load(Ordering::Relaxed) {
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        due += interval;
        let done = match kind {
            Strangers::Held => continue,
            Strangers::Hellos => half_handshake(address, &client_hello()).and_then(|mut stream| {
                // Reads the first bytes of the server's part of the handshake, for which it has computed a signature.
                let mut answer = [0; 16];
                stream.read_exact(&mut answer).ok()
            }),
            Strangers::Connects => TcpStream::connect(address).ok().map(drop),
        };
        counted.fetch_add(u64::from(done.is_some()), Ordering::Relaxed);
    }
}

fn connect(address: SocketAddr) -> Option<TcpStream> {
    let stream = TcpStream::connect(address).ok()?;
    stream.set_read_timeout(Some(PATIENCE)).ok()?;
    stream.set_write_timeout(Some(PATIENCE)).ok()?;
    Some(stream)
}

/// Opens a connection, requests TLS, and sends the bytes `hello` of the handshake.
fn half_handshake(address: SocketAddr, hello: &[u8]) -> Option<TcpStream> {
    let mut stream = connect(address)?;
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting).ok()?;
    stream.write_all(STARTTLS).ok()?;
    let mut acknowledgement = [0; 20];
    stream.read_exact(&mut acknowledgement).ok()?;
    stream.write_all(hello).ok()?;
    Some(stream)
}

/// The first message of TLS 1.3 (RFC 8446, section 4.1.2), for which the server computes a shared secret and a
/// signature. The key share is random: the client has no secret key for it.
fn client_hello() -> Vec<u8> {
    let extension =
        |kind: u16, body: &[u8]| [&kind.to_be_bytes()[..], &(body.len() as u16).to_be_bytes(), body].concat();
    let extensions = [
        extension(43, &[2, 3, 4]),
        extension(10, &[0, 2, 0, 0x1d]),
        extension(13, &[0, 4, 4, 3, 8, 4]),
        extension(51, &[&[0, 36, 0, 0x1d, 0, 32][..], &[9; 32]].concat()),
    ]
    .concat();
    let mut body = vec![3, 3];
    body.extend([7; 32]);
    // No session id, the cipher suite TLS_AES_128_GCM_SHA256, no compression.
    body.extend([0, 0, 2, 0x13, 1, 1, 0]);
    body.extend((extensions.len() as u16).to_be_bytes());
    body.extend(extensions);
    let handshake = [&[1, 0][..], &(body.len() as u16).to_be_bytes(), &body].concat();
    [&[22, 3, 1][..], &(handshake.len() as u16).to_be_bytes(), &handshake].concat()
}
