//! Arguments of `lamina serve` and `lamina export`.

use crate::cli::address::location;
use crate::cli::interval::{Interval, parse_interval};
use crate::cli::size::{memory, parse_size};
use backend::dirty::{BOUND_MIN, DirtyLimit};
use clap::{Args, Subcommand, ValueEnum};
use disk::{DEDUP_MEMORY_MIN, Location};
use error::text::size;
use export::nbd::limits::CONNECTIONS_DEFAULT;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// Largest limit of connections per class that can be set.
const CONNECTIONS_MAX: i64 = 16_384;
/// The smallest metadata cache: with less, the pages of one change and of concurrent reads evict each other.
const METADATA_CACHE_MIN: usize = 256 << 10;
/// The smallest write buffer: with less, every write waits until the previous write is written back.
const WRITE_BUFFER_MIN: usize = 1 << 20;

/// Show exports.
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
    /// With O_DIRECT, bypassing the page cache.
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

/// How overlapping I/O is submitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum QueueArgument {
    /// io_uring where the kernel allows it, otherwise threads.
    Auto,
    /// io_uring, or an error where the kernel does not allow it.
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

/// Parses permission bits as chmod does.
fn parse_mode(text: &str) -> Result<u32, String> {
    match u32::from_str_radix(text, 8) {
        Ok(mode) if mode <= 0o777 && !text.starts_with('+') => Ok(mode),
        _ => Err(format!("'{text}' are not permission bits such as 600 or 660")),
    }
}

/// `lamina serve`.
#[derive(Debug, Args)]
pub struct ServeArguments {
    /// Folder of the datastore, as an alternative to --datastore.
    #[arg(value_name = "PATH", value_parser = location())]
    pub location: Option<Location>,
    /// Unix socket for NBD clients; nbd.sock in the datastore by default.
    #[arg(long, value_name = "NBD_SOCKET")]
    pub socket: Option<PathBuf>,
    /// Permission bits of the unix socket for NBD clients, in octal. They decide which users may connect. Default: 600,
    /// or 660 with --socket-group or --machine-group.
    #[arg(long, value_name = "MODE", value_parser = parse_mode)]
    pub socket_mode: Option<u32>,
    /// Group whose members may connect to the unix socket for NBD clients and to the control socket: they may do
    /// everything with the datastore that its owner may.
    #[arg(long, value_name = "GROUP")]
    pub socket_group: Option<String>,
    /// Group of the users as which machines run (vm create --run-as). Its members may connect to the unix socket for
    /// NBD clients, each user only to the disks of the machines that run as this user.
    #[arg(long, value_name = "GROUP", conflicts_with = "socket_group")]
    pub machine_group: Option<String>,
    /// Also listen on this TCP address, such as 127.0.0.1:10809. Beyond loopback, TLS with client certificates is
    /// required.
    #[arg(long, value_name = "ADDRESS:PORT", value_parser = parse_socket_address)]
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
    /// File with the disks that each client over TCP may read or write, by the names in client certificates. Without
    /// it, every client with a certificate may write all disks.
    #[arg(long, value_name = "FILE", requires = "tcp", requires = "tls_client_ca", conflicts_with = "insecure_tcp")]
    pub access: Option<PathBuf>,
    /// Let every host that reaches the TCP port read and write every disk without encryption.
    #[arg(long, requires = "tcp")]
    pub insecure_tcp: bool,
    /// Limit of NBD connections over the unix socket.
    #[arg(long, value_name = "NUMBER", default_value_t = CONNECTIONS_DEFAULT as u16, value_parser = connections())]
    pub max_unix_connections: u16,
    /// Limit of NBD connections over TCP with a client certificate signed by an authority of --tls-client-ca.
    #[arg(long, value_name = "NUMBER", default_value_t = CONNECTIONS_DEFAULT as u16, value_parser = connections())]
    pub max_authenticated_connections: u16,
    /// Limit of other NBD connections over TCP, including those that have not completed the TLS handshake.
    #[arg(long, value_name = "NUMBER", default_value_t = CONNECTIONS_DEFAULT as u16, value_parser = connections())]
    pub max_unauthenticated_connections: u16,
    /// Also receive disks and machines from other lamina servers on this address, such as 127.0.0.1:10810. TLS is
    /// always required; beyond loopback, client certificates are too.
    #[arg(long, value_name = "ADDRESS:PORT", value_parser = parse_socket_address, requires = "tls_cert")]
    pub receive: Option<SocketAddr>,
    /// Receive only from clients whose certificate has this name. May be repeated.
    #[arg(long, value_name = "NAME", requires = "receive", requires = "tls_client_ca")]
    pub receive_from: Vec<String>,
    /// How data files are read and written.
    #[arg(long, value_enum, value_name = "MODE", default_value = "buffered")]
    pub io: IoModeArgument,
    /// How overlapping I/O is submitted.
    #[arg(long, value_enum, value_name = "ENGINE", default_value = "auto")]
    pub queue: QueueArgument,
    /// Memory limit of the metadata cache, 256K at the least.
    #[arg(long, value_name = "SIZE", default_value = "128M", value_parser = memory(METADATA_CACHE_MIN))]
    pub metadata_cache: usize,
    /// Memory limit of the write buffer, 1M at the least.
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = memory(WRITE_BUFFER_MIN))]
    pub write_buffer: usize,
    /// Memory limit of the read cache, which holds decompressed blocks, and with --io direct all blocks that were read.
    /// 0 for no cache. By default 64M, for decompressed blocks only.
    #[arg(long, value_name = "SIZE", value_parser = memory(0))]
    pub read_cache: Option<usize>,
    /// How long a disk counts as in use after a client's connection ended without a disconnect request. During this
    /// time the client may reconnect, for example after a restart of the server.
    #[arg(long, value_name = "SECONDS", default_value_t = 120, allow_hyphen_values = true,
          value_parser = clap::value_parser!(u64).range(..=export::clients::limits::CLIENT_GRACE_MAX.as_secs()))]
    pub client_grace: u64,
    /// Target latency of clients' requests during background work (copies, merges, checks, migrations). The work slows
    /// down, to 8 MiB/s at the least, until 99 % of the requests stay within this latency. 0 for work at full speed.
    #[arg(long, value_name = "MILLISECONDS", default_value = "2", value_parser = parse_milliseconds)]
    pub latency_target: Duration,
    /// How long data is not written until it is compressed, on disks with --compression, and compared with other data,
    /// on disks with --dedup; 'never' for neither by this server. A disk then rests for six times as long. Whether new
    /// data is reduced when it is written is a setting of each disk (--compress-at, --dedup-at).
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = parse_interval)]
    pub optimize_after: Interval,
    /// Memory of a deduplication, 144K at the least. With less memory it takes more rounds, each of which reads the
    /// maps of the data, and finds the same. One round needs 36 bytes for each 4 KiB of data: 9G for 1 TiB. Half of it
    /// is for finding new data that is stored already, on disks with --dedup-at write-back: 12 bytes for each 4 KiB.
    #[arg(long, value_name = "SIZE", default_value = "144M", value_parser = memory(DEDUP_MEMORY_MIN))]
    pub dedup_memory: usize,
    /// Limit of the data that this server leaves dirty in the page cache of each file system, 4M at the least. Beyond
    /// it writes are delayed, first those of background work. 0 or "off" for no limit but the kernel's, at which the
    /// kernel pauses all writes. "auto" for a little less than the amount at which the kernel does so.
    #[arg(long, value_name = "SIZE", default_value = "auto", value_parser = parse_dirty_limit)]
    pub dirty_limit: DirtyLimit,
    /// Serve the datastore even on a file system on which it may lose flushed writes or stop for lack of space, such as
    /// NFS, SMB, FUSE or ZFS.
    #[arg(long)]
    pub any_file_system: bool,
    /// Refuse writes of NBD clients. Commands that change disks still work.
    #[arg(long)]
    pub read_only: bool,
}

impl ServeArguments {
    /// Permission bits of the socket for NBD clients.
    pub fn socket_mode(&self) -> u32 {
        let group = self.socket_group.is_some() || self.machine_group.is_some();
        self.socket_mode.unwrap_or(if group { 0o660 } else { 0o600 })
    }
}

/// Parser of connection limits; each connection has a thread.
fn connections() -> clap::builder::RangedI64ValueParser<u16> {
    clap::value_parser!(u16).range(1..=CONNECTIONS_MAX)
}

/// Parses a numeric address with a port. Names are not resolved, because a name can have several addresses.
fn parse_socket_address(text: &str) -> Result<SocketAddr, String> {
    let refused =
        |_| format!("'{text}' is no numeric address with a port up to 65535, such as 127.0.0.1:10809 or [::1]:10809");
    text.parse().map_err(refused)
}

/// Parses a limit of dirty data: a size, `auto` or `off`.
fn parse_dirty_limit(text: &str) -> Result<DirtyLimit, String> {
    match text {
        "auto" => return Ok(DirtyLimit::Auto),
        "off" => return Ok(DirtyLimit::Off),
        _ => {}
    }
    match parse_size(text)? {
        0 => Ok(DirtyLimit::Off),
        bytes @ BOUND_MIN.. => Ok(DirtyLimit::Bytes(bytes)),
        _ => Err(format!("the least is {}, or 'off' for no limit", size(BOUND_MIN))),
    }
}

/// Parses a time in milliseconds, up to a minute, with or without a fraction.
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
    fn a_tcp_address_is_numeric_and_has_a_port() {
        assert!(parse_socket_address("127.0.0.1:0").is_ok() && parse_socket_address("[::1]:10809").is_ok());
        for text in ["localhost:10809", "127.0.0.1", "127.0.0.1:99999", ""] {
            assert!(parse_socket_address(text).unwrap_err().contains("such as 127.0.0.1:10809"), "{text}");
        }
    }

    #[test]
    fn a_limit_of_dirty_data_is_a_size_or_a_word() {
        for (text, limit) in [
            ("auto", DirtyLimit::Auto),
            ("off", DirtyLimit::Off),
            ("0", DirtyLimit::Off),
            ("4M", DirtyLimit::Bytes(4 << 20)),
            ("2G", DirtyLimit::Bytes(2 << 30)),
        ] {
            assert_eq!(parse_dirty_limit(text), Ok(limit), "{text}");
        }
        assert!(parse_dirty_limit("4095K").unwrap_err().contains("the least is 4 MiB"));
        assert!(parse_dirty_limit("none").is_err());
    }

    #[test]
    fn milliseconds_outside_the_limits_are_refused() {
        for (text, microseconds) in [("0", 0), ("2", 2000), ("0.5", 500), ("60000", 60_000_000)] {
            assert_eq!(parse_milliseconds(text), Ok(Duration::from_micros(microseconds)), "{text}");
        }
        for text in ["", "-1", "60001", "2ms", "NaN", "inf", "1e9"] {
            assert!(parse_milliseconds(text).unwrap_err().contains("milliseconds"), "{text}");
        }
    }
}
