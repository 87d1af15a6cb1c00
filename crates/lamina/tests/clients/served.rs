//! A server with unencrypted connections on a unix socket and TLS with client certificates on TCP.

use crate::operation::{self, DATA_END, SIZE};
use std::path::{Path, PathBuf};
use testkit::authority::authority;
use testkit::nbd::Client;
use testkit::process::{Serving, Store};

pub struct Served {
    pub store: Store,
    pub server: Serving,
    pub port: u16,
    folder: tempfile::TempDir,
}

/// The way in which a client reaches an export.
pub struct Target<'a> {
    pub served: &'a Served,
    pub export: String,
    pub tls: bool,
}

impl Served {
    pub fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::new();
        authority(&folder.path().join("tls"));
        let server = store.serve(&options(folder.path(), 0));
        let ready: serde_json::Value = serde_json::from_str(&server.ready).unwrap();
        let uris = ready["nbd"].as_array().unwrap().iter().map(|uri| uri.as_str().unwrap());
        let port = uris.filter(|uri| uri.starts_with("nbds:")).find_map(|uri| {
            let port = uri.trim_end_matches('/').rsplit(':').next()?;
            port.parse().ok()
        });
        Self { store, server, port: port.unwrap(), folder }
    }

    /// Ends the server with a signal and serves the same disks at the same addresses again.
    pub fn restart(&mut self, signal: &str) {
        if signal == "KILL" {
            self.server.kill();
        } else {
            assert_eq!(self.server.stop(signal), Some(0), "{}", self.server.log());
        }
        self.server = self.store.serve(&options(self.folder.path(), self.port));
    }

    /// The folder with certificates in files named as GnuTLS clients expect.
    pub fn certificates(&self) -> PathBuf {
        self.folder.path().join("tls")
    }

    /// A folder for files of the test.
    pub fn scratch(&self) -> &Path {
        self.folder.path()
    }

    /// Creates a disk with the initial content of the operations.
    pub fn make(&self, disk: &str) {
        self.store.run(&format!("disk create {disk} {SIZE}")).ok();
        let mut client = Client::connect(&self.store.socket(), disk).unwrap();
        client.write(0, &operation::base()[..DATA_END]).unwrap();
        client.flush().unwrap();
    }

    /// The content of a disk, read with the project's own client.
    pub fn content(&self, disk: &str) -> Vec<u8> {
        Client::connect(&self.store.socket(), disk).unwrap().read(0, SIZE as u32).unwrap()
    }
}

fn options(folder: &Path, port: u16) -> String {
    let file = |name: &str| folder.join("tls").join(name).display().to_string();
    let [certificate, key, authority] = ["server-cert.pem", "server-key.pem", "ca-cert.pem"].map(file);
    format!("--json --tcp 127.0.0.1:{port} --tls-cert {certificate} --tls-key {key} --tls-client-ca {authority}")
}

impl Target<'_> {
    /// The export's URI, for clients based on libnbd.
    pub fn uri(&self) -> String {
        if !self.tls {
            return self.served.store.uri(&self.export);
        }
        let folder = self.served.certificates();
        format!("nbds://127.0.0.1:{}/{}?tls-certificates={}", self.served.port, self.export, folder.display())
    }

    /// Arguments that define the objects to which [`Target::image`] refers, for QEMU's programs.
    pub fn objects(&self) -> Vec<String> {
        let folder = self.served.certificates();
        let object = format!("tls-creds-x509,id=tls0,endpoint=client,dir={}", folder.display());
        if self.tls { vec!["--object".into(), object] } else { Vec::new() }
    }

    /// The export as a block device, for QEMU's programs.
    pub fn image(&self) -> String {
        let export = &self.export;
        if self.tls {
            let server = format!("server.type=inet,server.host=127.0.0.1,server.port={}", self.served.port);
            return format!("driver=nbd,export={export},{server},tls-creds=tls0");
        }
        format!("driver=nbd,export={export},server.type=unix,server.path={}", self.served.store.socket().display())
    }
}
