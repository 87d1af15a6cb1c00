//! Tests of the NBD server through its sockets: with an independent client, hostile clients, and common tools.
#![allow(clippy::unwrap_used, clippy::new_without_default, missing_docs)]

mod abandoned;
mod access;
mod chained;
mod dirty;
mod fuzzed;
mod handshake;
mod hostile;
mod in_process;
#[allow(dead_code)]
#[path = "../../../chain/tests/chain/mock.rs"]
mod layer_mock;
mod malformed;
mod memory_disk;
mod model;
mod reference;
mod streams;
mod tls;
mod tools;
mod transmission;

use connections::{Address, Listen};
use export::exports::Exports;
use export::nbd::{Server, ServerConfig};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A folder that is removed at the end of the test.
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("lamina-nbd-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A server on a unix socket in a folder of its own.
pub struct Running {
    pub server: Server,
    pub socket: PathBuf,
    pub folder: Folder,
}

impl Running {
    pub fn start(exports: Arc<dyn Exports>) -> Self {
        Self::with(ServerConfig::default(), exports)
    }

    pub fn with(mut config: ServerConfig, exports: Arc<dyn Exports>) -> Self {
        let folder = Folder::new();
        let socket = folder.0.join("nbd.sock");
        config.listen.insert(0, Listen::Unix { path: socket.clone(), mode: 0o600, group: None });
        let server = Server::start(config, exports).unwrap();
        Self { server, socket, folder }
    }

    pub fn tcp_address(&self) -> std::net::SocketAddr {
        let tcp = self.server.addresses().iter().find_map(|address| match address {
            Address::Tcp(address) => Some(*address),
            Address::Unix(_) => None,
        });
        tcp.unwrap()
    }
}
