//! Arguments for sending disks and machines to another server, and for managing receptions.

use crate::cli::address::{StateAddress, absolute};
use crate::cli::size::parse_rate;
use clap::{Args, Subcommand};
use control::{ReceiveRequest, Request, SendHow, SendPoint, SendRequest, SendTls, SentDisk};
use disk::Point;
use replication::Remote;
use std::path::PathBuf;

/// Options of a transfer.
#[derive(Debug, Args)]
pub struct SendArguments {
    /// Send only the differences from the newest snapshot that both datastores have, and keep the sent state as a
    /// snapshot in both for the next transfer.
    #[arg(long)]
    pub incremental: bool,
    /// Number of parallel data connections.
    #[arg(long, value_name = "N", default_value = "4", value_parser = clap::value_parser!(u32).range(1..=16))]
    pub streams: u32,
    /// Limit of sent data in bytes per second, such as 100M. 0 is no limit.
    #[arg(long, value_name = "SIZE", value_parser = parse_rate, default_value = "0")]
    pub rate: u64,
    /// Certificates of the authorities that sign server certificates, PEM.
    #[arg(long, value_name = "FILE", env = "LAMINA_TLS_CA")]
    pub tls_ca: Option<PathBuf>,
    /// Certificate chain of this client, PEM.
    #[arg(long, value_name = "FILE", env = "LAMINA_TLS_CERT", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// Private key of this client, PEM.
    #[arg(long, value_name = "FILE", env = "LAMINA_TLS_KEY", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// The name that the server's certificate must have, if it differs from the host name.
    #[arg(long, value_name = "NAME")]
    pub tls_name: Option<String>,
}

impl SendArguments {
    /// The options with absolute paths, because the server has another working directory.
    pub fn how(&self) -> Result<SendHow, String> {
        let authorities = self.tls_ca.as_deref().ok_or(
            "the server cannot be authenticated: give --tls-ca FILE (or set LAMINA_TLS_CA), the certificates of the \
             authorities that sign its certificate",
        )?;
        Ok(SendHow {
            incremental: self.incremental,
            streams: self.streams,
            rate: self.rate,
            tls: SendTls {
                authorities: absolute(authorities)?,
                certificate: self.tls_cert.as_deref().map(absolute).transpose()?,
                key: self.tls_key.as_deref().map(absolute).transpose()?,
                server_name: self.tls_name.clone(),
            },
        })
    }
}

/// `lamina disk send`.
#[derive(Debug, Args)]
pub struct DiskSend {
    /// State to send: DISK@SNAPSHOT, or DISK for its current state.
    #[arg(value_name = "SOURCE")]
    pub source: StateAddress,
    /// Target server, and the name of the disk there: lamina://HOST:PORT/NAME. With --incremental an existing disk with
    /// that name is updated, unless it was changed there.
    #[arg(value_name = "TARGET")]
    pub target: Remote,
    /// Options of the transfer.
    #[command(flatten)]
    pub how: SendArguments,
}

impl DiskSend {
    /// The request.
    pub fn request(&self) -> Result<Request, String> {
        let disks = vec![SentDisk { disk: self.source.disk.clone(), name: self.target.name.clone() }];
        let point = match &self.source.at {
            Point::Snapshot(name) => SendPoint::Snapshots(vec![name.clone()]),
            Point::Head => SendPoint::Now,
        };
        let remote = self.target.to_string();
        Ok(Request::Send(Box::new(SendRequest { remote, disks, point, attachment: None, how: self.how.how()? })))
    }
}

/// Manage receptions: disks that other servers send here.
#[derive(Debug, Subcommand)]
pub enum ReceiveCommand {
    /// List disks that are being received, and incomplete ones that are kept until their sender resumes.
    List,
    /// Delete a reception and the data received so far.
    Delete {
        /// Id of the reception, as 'receive list' shows it.
        id: String,
    },
}

impl ReceiveCommand {
    /// The request.
    pub fn request(&self) -> Request {
        Request::Receive(match self {
            Self::List => ReceiveRequest::List,
            Self::Delete { id } => ReceiveRequest::Delete { id: id.clone() },
        })
    }
}
