//! User networks of machines by passt: a process outside of QEMU, with rights of its own, that forwards the guest's
//! connections to sockets of the host. QEMU's own user network (slirp) does the same within QEMU.
//!
//! 1. QEMU listens on a socket in the run folder for each card. passt receives the connection to this socket as an open
//!    file, so passt opens none of the machine's files. passt ends when QEMU closes the connection.
//! 2. The guest has the addresses that it has on QEMU's own network.
//! 3. If a process has QEMU's own network, the states that it saves contain the state of this network, and can be
//!    loaded only into a process with QEMU's own network. So a state records whether it can be loaded with passt. A
//!    state that was saved with passt can be loaded with passt and with QEMU's own network.
//! 4. passt of 2023 (Debian 12) acknowledges the guest's answer to a forwarded connection only with data of the client.
//!    So protocols in which the server speaks first hang, and passt is used only if its version is known to be newer.
//! 5. Instant clones have QEMU's own network, because a passt process takes more memory (30 MB) than most instant
//!    clones.

use super::command::RunFolder;
use super::features::Features;
use crate::definition::{Definition, Link, Network};
use backend::private;
use error::{Error, ErrorKind, IoContext, Result};
use std::fs;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// The name of the program.
const PROGRAM: &str = "passt";
/// The user that passt becomes if root starts it for a machine without a user of its own.
const USER: &str = "nobody";
/// The year of the first version that is known to forward ports as needed.
const FORWARDS_SINCE: u32 = 2025;
/// The guest's address and network, and the address that the host has for the guest, as on QEMU's own network.
const ADDRESSES: [&str; 6] = ["--address", "10.0.2.15", "--netmask", "24", "--gateway", "10.0.2.2"];
/// How long QEMU may take until it listens for passt.
const LISTEN_PATIENCE: Duration = Duration::from_secs(20);
/// Interval of attempts to connect.
const CONNECT_INTERVAL: Duration = Duration::from_millis(1);
/// Longest message of passt that is read, in bytes.
const COMPLAINT_MAX: u64 = 4096;
/// The beginning of a line that passt writes if the host has no system log; this line is not the reason of a failure.
const NO_SYSTEM_LOG: &str = "Failed to send ";

/// The installed passt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Passt {
    /// Path of the program.
    pub program: PathBuf,
    /// Whether this version of passt forwards ports as needed.
    pub forwards: bool,
}

impl Passt {
    /// Whether passt serves a card.
    pub fn serves(&self, network: &Network) -> bool {
        match network.link {
            Link::User => true,
            Link::Forward(_) => self.forwards,
            Link::None | Link::Bridge(_) | Link::Tap(_) => false,
        }
    }
}

/// Whether any card of a machine is on a user network.
pub fn has_user(definition: &Definition) -> bool {
    definition.networks.iter().any(|network| matches!(network.link, Link::User | Link::Forward(_)))
}

/// The installed passt, if it serves cards of a machine.
///
/// # Errors
/// Why passt serves no card.
pub fn find(features: &Features, definition: &Definition) -> std::result::Result<Passt, &'static str> {
    let passt = installed(features)?;
    match definition.networks.iter().any(|network| passt.serves(network)) {
        true => Ok(passt),
        false => Err("this version of passt does not forward ports as needed; use a version of 2025 or newer"),
    }
}

/// The installed passt.
///
/// # Errors
/// Why passt cannot be used.
pub fn installed(features: &Features) -> std::result::Result<Passt, &'static str> {
    if !features.stream_network {
        return Err("this QEMU has no network backend 'stream'; use version 7.2 or newer");
    }
    let found = std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default())
        .map(|folder| folder.join(PROGRAM))
        .find(|program| program.exists())
        .ok_or("passt is not installed")?;
    let read = |name: &str| fs::read_to_string(format!("/proc/self/net/{name}")).unwrap_or_default();
    if !has_default_route(&read("route"), &read("ipv6_route")) {
        return Err("the host has no default route, which passt needs");
    }
    let told = Command::new(&found).arg("--version").stdin(Stdio::null()).stderr(Stdio::null()).output();
    let told = told.map_err(|_| "passt cannot be started")?;
    let forwards = year(&String::from_utf8_lossy(&told.stdout)).is_some_and(|year| year >= FORWARDS_SINCE);
    match forwards {
        true => Ok(Passt { program: found, forwards }),
        false => Err("connections hang with versions of passt before 2025, or of unknown date"),
    }
}

/// The year in a version, such as `passt 2025_02_17.a1e48a0` or `passt 0.0~git20230309.7c7625d-1`.
fn year(version: &str) -> Option<u32> {
    let digits = |at: usize| version.get(at..at + 4).filter(|part| part.bytes().all(|byte| byte.is_ascii_digit()));
    let years = (0..version.len()).filter_map(|at| digits(at)?.parse::<u32>().ok());
    years.into_iter().find(|year| (2020..2100).contains(year))
}

/// Whether the tables of routes for IPv4 and IPv6, as procfs prints them, have a default route.
fn has_default_route(four: &str, six: &str) -> bool {
    let field = |line: &str, at: usize| line.split_whitespace().nth(at).map(str::to_owned);
    let by_four = four
        .lines()
        .skip(1)
        .any(|line| field(line, 1).as_deref() == Some("00000000") && field(line, 7).as_deref() == Some("00000000"));
    by_four
        || six.lines().any(|line| {
            let to_all = line.starts_with(&"0".repeat(32)) && field(line, 1).as_deref() == Some("00");
            to_all && field(line, 9).as_deref() != Some("lo")
        })
}

/// Connects the cards on user networks of a process that has started. `user` is the user of that process, if it differs
/// from the user of the calling process.
pub fn connect_all(passt: &Passt, definition: &Definition, run: &RunFolder, user: Option<&str>) -> Result<()> {
    let mut cards = definition.networks.iter().filter(|network| passt.serves(network));
    cards.try_for_each(|network| connect(passt, network, run, user))
}

/// Connects a card: starts a passt for it. On return passt serves the card.
pub fn connect(passt: &Passt, network: &Network, run: &RunFolder, user: Option<&str>) -> Result<()> {
    let socket = dial(&run.network(network.slot))?;
    let program = &passt.program;
    let mut command = Command::new(program);
    command.args(arguments(network)).args(["--fd", &socket.as_raw_fd().to_string()]);
    if rustix::process::geteuid().is_root() {
        command.args(["--runas", user.unwrap_or(USER)]);
    }
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let starting = || format!("starting '{}'", program.display());
    let mut child = private::spawn_with(&mut command, &[socket.as_fd()]).during(starting)?;
    drop(socket);
    // The started process starts a second process, and ends when the second process serves the card.
    let mut complaint = Vec::new();
    if let Some(errors) = child.stderr.take() {
        errors.take(COMPLAINT_MAX).read_to_end(&mut complaint).during(starting)?;
    }
    let status = child.wait().during(starting)?;
    if status.success() {
        return Ok(());
    }
    let complaint = String::from_utf8_lossy(&complaint);
    let lines: Vec<&str> = complaint.lines().filter(|line| !line.starts_with(NO_SYSTEM_LOG)).collect();
    let text = format!("network card {}: passt did not start ({status}): {}", network.mac, lines.join("; "));
    Err(Error::new(ErrorKind::Io, text))
}

fn dial(socket: &Path) -> Result<UnixStream> {
    let deadline = Instant::now() + LISTEN_PATIENCE;
    loop {
        match UnixStream::connect(socket) {
            Err(e)
                if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
                    && Instant::now() < deadline =>
            {
                thread::sleep(CONNECT_INTERVAL);
            }
            outcome => return outcome.during(|| format!("connecting to '{}'", socket.display())),
        }
    }
}

/// The arguments for a card, without its connection.
fn arguments(network: &Network) -> Vec<String> {
    let mut all: Vec<String> = ["--quiet", "--stderr"].iter().chain(&ADDRESSES).map(|one| (*one).to_owned()).collect();
    let Link::Forward(ports) = &network.link else { return all };
    for port in ports {
        let option = if port.udp { "--udp-ports" } else { "--tcp-ports" };
        all.extend([option.to_owned(), format!("{}/{}:{}", port.address, port.port, port.guest_port)]);
    }
    all
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::definition::Card;

    #[test]
    fn forwarded_ports_are_those_of_the_definition() {
        let link = Link::Forward(vec!["2222:22".parse().unwrap(), "0.0.0.0:5353:53/udp".parse().unwrap()]);
        let mut card = Network { mac: "52:54:00:12:34:56".parse().unwrap(), link, slot: 16, model: Card::Virtio };
        let all = arguments(&card).join(" ");
        assert!(all.contains("--address 10.0.2.15 --netmask 24 --gateway 10.0.2.2"), "{all}");
        assert!(all.ends_with("--tcp-ports 127.0.0.1/2222:22 --udp-ports 0.0.0.0/5353:53"), "{all}");
        let [old, new] = [false, true].map(|forwards| Passt { program: PROGRAM.into(), forwards });
        assert!(new.serves(&card) && !old.serves(&card));
        card.link = Link::User;
        assert!(old.serves(&card) && !arguments(&card).join(" ").contains("ports"));
        card.link = Link::None;
        assert!(!new.serves(&card));
    }

    #[test]
    fn versions_have_years() {
        for (version, expected) in [
            ("passt 2025_02_17.a1e48a0\nCopyright Red Hat", Some(2025)),
            ("passt 0.0~git20230309.7c7625d-1", Some(2023)),
            ("passt unknown version", None),
            ("", None),
        ] {
            assert_eq!(year(version), expected, "{version}");
        }
    }

    #[test]
    fn default_routes_are_found() {
        let head = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n";
        let default = format!("{head}eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n");
        let local = format!("{head}eth0\t000200C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n");
        let six = |prefix: &str, device: &str| {
            let zero = "0".repeat(32);
            format!("{zero} {prefix} {zero} 00 {zero} ffffffff 00000001 00000000 00200200 {device}\n")
        };
        assert!(has_default_route(&default, "") && has_default_route(&local, &six("00", "eth0")));
        assert!(!has_default_route(&local, &(six("00", "lo") + &six("40", "eth0"))) && !has_default_route("", ""));
    }
}
