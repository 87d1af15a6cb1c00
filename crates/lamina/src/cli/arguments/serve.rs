//! `lamina serve`, and what it serves.

use crate::cli::address::location;
use crate::cli::size::parse_memory;
use clap::{Args, Subcommand, ValueEnum};
use disk::Location;
use export::nbd::limits::CONNECTIONS_DEFAULT;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// Most connections of one class that can be asked for.
const CONNECTIONS_MAX: i64 = 16_384;

/// Verbs of exports.
#[derive(Debug, Subcommand)]
pub enum ExportCommand {
    /// List the export names with their NBD URIs.
    List,
}

/// How data files are read and written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum IoModeArgument {
    /// Through the page cache.
    Buffered,
    /// Past the page cache.
    Direct,
}

impl From<IoModeArgument> for backend::IoMode {
    fn from(argument: IoModeArgument) -> Self {
        match argument {
            IoModeArgument::Buffered => Self::Buffered,
            IoModeArgument::Direct => Self::Direct,
        }
    }
}

/// What carries overlapping I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum QueueArgument {
    /// io_uring where it works, threads where it does not.
    Auto,
    /// io_uring, or an error.
    #[value(name = "io_uring")]
    Uring,
    /// A pool of threads.
    Threads,
}

impl From<QueueArgument> for disk::QueueChoice {
    fn from(argument: QueueArgument) -> Self {
        match argument {
            QueueArgument::Auto => Self::Auto,
            QueueArgument::Uring => Self::Uring,
            QueueArgument::Threads => Self::Threads,
        }
    }
}

/// Reads permission bits as chmod takes them.
fn parse_mode(text: &str) -> Result<u32, String> {
    match u32::from_str_radix(text, 8) {
        Ok(mode) if mode <= 0o777 && !text.starts_with('+') => Ok(mode),
        _ => Err(format!("'{text}' are not permission bits such as 600 or 660")),
    }
}

/// `lamina serve`.
#[derive(Debug, Args)]
pub struct ServeArguments {
    /// Folder of the datastore, when not given by --datastore.
    #[arg(value_name = "PATH", value_parser = location())]
    pub location: Option<Location>,
    /// Unix socket for NBD clients; nbd.sock in the datastore by default.
    #[arg(long, value_name = "NBD_SOCKET")]
    pub socket: Option<PathBuf>,
    /// Permission bits of that socket, octal: they decide which users may connect.
    #[arg(long, value_name = "MODE", default_value = "600", value_parser = parse_mode)]
    pub socket_mode: u32,
    /// Also listen on TCP, such as 127.0.0.1:10809. Beyond loopback it needs TLS with client certificates.
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub tcp: Option<SocketAddr>,
    /// Certificate chain of this server, PEM.
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// Private key of this server, PEM.
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// Certificates of the authorities that sign client certificates, PEM; clients must then have one.
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_client_ca: Option<PathBuf>,
    /// Let anyone who reaches the TCP port read and write every disk, in clear text.
    #[arg(long, requires = "tcp")]
    pub insecure_tcp: bool,
    /// Most NBD connections over the unix socket at a time.
    #[arg(long, value_name = "NUMBER", default_value_t = CONNECTIONS_DEFAULT as u16, value_parser = connections())]
    pub max_unix_connections: u16,
    /// Most NBD connections over TCP at a time whose clients have a certificate of the authorities of --tls-client-ca.
    #[arg(long, value_name = "NUMBER", default_value_t = CONNECTIONS_DEFAULT as u16, value_parser = connections())]
    pub max_authenticated_connections: u16,
    /// Most other NBD connections over TCP at a time, those whose TLS handshake is not at its end among them.
    #[arg(long, value_name = "NUMBER", default_value_t = CONNECTIONS_DEFAULT as u16, value_parser = connections())]
    pub max_unauthenticated_connections: u16,
    /// Also receive disks and machines that other lamina servers send, on this address, such as 127.0.0.1:10810; always
    /// over TLS. Beyond loopback it needs client certificates.
    #[arg(long, value_name = "ADDRESS:PORT", requires = "tls_cert")]
    pub receive: Option<SocketAddr>,
    /// Receive only from clients whose certificate is for this name; several times for several.
    #[arg(long, value_name = "NAME", requires = "receive", requires = "tls_client_ca")]
    pub receive_from: Vec<String>,
    /// How data files are read and written.
    #[arg(long, value_enum, value_name = "MODE", default_value = "buffered")]
    pub io: IoModeArgument,
    /// What carries overlapping I/O.
    #[arg(long, value_enum, value_name = "ENGINE", default_value = "auto")]
    pub queue: QueueArgument,
    /// Most memory for cached metadata.
    #[arg(long, value_name = "SIZE", default_value = "128M", value_parser = parse_memory)]
    pub metadata_cache: usize,
    /// Most memory for writes that are not written back yet.
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = parse_memory)]
    pub write_buffer: usize,
    /// How long a disk counts as in use after the connection of a client ended without a disconnect request: within
    /// that time the client may come back, as it does when the server is restarted.
    #[arg(long, value_name = "SECONDS", default_value_t = 120, allow_hyphen_values = true,
          value_parser = clap::value_parser!(u64).range(..=export::clients::limits::CLIENT_GRACE_MAX.as_secs()))]
    pub client_grace: u64,
    /// Latency that background work (copies, merges, checks, moves) leaves to 99 % of the requests of clients: the work
    /// slows down until it does, to 8 MiB/s at the least. 0 for work at full speed.
    #[arg(long, value_name = "MILLISECONDS", default_value = "2", value_parser = parse_milliseconds)]
    pub latency_target: Duration,
    /// Refuse writes of NBD clients. Verbs of this command line still work.
    #[arg(long)]
    pub read_only: bool,
}

/// How many connections may be allowed: each has a thread.
fn connections() -> clap::builder::RangedI64ValueParser<u16> {
    clap::value_parser!(u16).range(1..=CONNECTIONS_MAX)
}

/// Reads a time in milliseconds, up to a minute, with or without a fraction.
fn parse_milliseconds(text: &str) -> Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(time) if (0.0..=60_000.0).contains(&time) => Ok(Duration::from_secs_f64(time / 1000.0)),
        _ => Err(format!("'{text}' is no time from 0 to 60000 milliseconds")),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn milliseconds_have_bounds() {
        for (text, microseconds) in [("0", 0), ("2", 2000), ("0.5", 500), ("60000", 60_000_000)] {
            assert_eq!(parse_milliseconds(text), Ok(Duration::from_micros(microseconds)), "{text}");
        }
        for text in ["", "-1", "60001", "2ms", "NaN", "inf", "1e9"] {
            assert!(parse_milliseconds(text).unwrap_err().contains("milliseconds"), "{text}");
        }
    }
}
