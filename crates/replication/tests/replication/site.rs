//! Datastores with disks of random content, certificates, and a connection between them that can be cut.

use connections::{ClientTls, TlsConfig};
use disk::transfer::SEGMENT;
use disk::{
    CheckOptions, Datastore, Device, InitOptions, NewDisk, NoProgress, OpenOptions, Provisioning, QueueChoice,
    SnapshotOptions,
};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use replication::{NoAttachments, Receiver, ReceiverConfig, Remote, SendOptions, Shipment, ShippedDisk};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
pub use testkit::Random;

/// A certificate authority, and certificates of a server and two clients.
pub struct Keys {
    pub folder: tempfile::TempDir,
}

impl Keys {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let keys = Self { folder };
        for authority in ["ca", "other-ca"] {
            let key = KeyPair::generate().unwrap();
            let mut params = CertificateParams::default();
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            params.distinguished_name.push(rcgen::DnType::CommonName, authority);
            let certificate = params.self_signed(&key).unwrap();
            std::fs::write(keys.path(authority), certificate.pem()).unwrap();
            let issuer = Issuer::new(params, key);
            for name in ["server", "client", "guest"] {
                let key = KeyPair::generate().unwrap();
                let dns = if name == "server" { "localhost".to_owned() } else { format!("{name}.example") };
                let mut params = CertificateParams::new(vec![dns, "127.0.0.1".to_owned()]).unwrap();
                if name != "server" {
                    params = CertificateParams::new(vec![format!("{name}.example")]).unwrap();
                }
                let certificate = params.signed_by(&key, &issuer).unwrap();
                let prefix = if authority == "ca" { String::new() } else { format!("{authority}-") };
                std::fs::write(keys.path(&format!("{prefix}{name}")), certificate.pem()).unwrap();
                std::fs::write(keys.path(&format!("{prefix}{name}-key")), key.serialize_pem()).unwrap();
            }
        }
        keys
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn server(&self) -> TlsConfig {
        TlsConfig {
            certificate: self.path("server"),
            key: self.path("server-key"),
            client_authorities: Some(self.path("ca")),
            required: true,
        }
    }

    pub fn client(&self, name: &str) -> ClientTls {
        ClientTls {
            authorities: self.path("ca"),
            identity: Some((self.path(name), self.path(&format!("{name}-key")))),
            server_name: None,
        }
    }
}

/// A datastore in a temporary folder.
pub struct Site {
    pub folder: tempfile::TempDir,
    pub datastore: Arc<Datastore>,
}

const OPTIONS: OpenOptions = OpenOptions {
    mode: backend::IoMode::Buffered,
    queue: QueueChoice::Threads,
    metadata_cache: 16 << 20,
    write_buffer: 8 << 20,
    read_cache: Some(1 << 20),
};

pub fn open(path: &Path) -> Arc<Datastore> {
    Datastore::open(path, OPTIONS).unwrap()
}

impl Site {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("datastore");
        Datastore::init(&path, InitOptions { journal_size: 16 << 20 }).unwrap();
        let datastore = open(&path);
        Self { folder, datastore }
    }

    pub fn path(&self) -> PathBuf {
        self.folder.path().join("datastore")
    }

    /// Closes the datastore and opens it again.
    pub fn reopen(self) -> Self {
        self.datastore.close().unwrap();
        let Self { folder, datastore } = self;
        drop(datastore);
        let datastore = open(&folder.path().join("datastore"));
        Self { folder, datastore }
    }

    pub fn disk(&self, name: &str, capacity: u64) -> Arc<dyn Device> {
        self.disk_of(name, capacity, Provisioning::Thin)
    }

    pub fn disk_of(&self, name: &str, capacity: u64, provisioning: Provisioning) -> Arc<dyn Device> {
        self.datastore.create_disk(name, &NewDisk::native(capacity, provisioning), &NoProgress).unwrap();
        self.datastore.device(name, false).unwrap()
    }

    pub fn snapshot(&self, disk: &str, name: &str) {
        let of = [(disk.to_owned(), name.to_owned())];
        self.datastore.create_snapshots(&of, &SnapshotOptions::default()).unwrap();
    }

    pub fn content(&self, name: &str) -> Vec<u8> {
        let device = self.datastore.device(name, true).unwrap();
        device.read(0, device.capacity() as usize).unwrap()
    }

    /// Checks that the datastore is undamaged, and that no part of a transfer remains.
    pub fn check(&self) {
        let report = self.datastore.check(CheckOptions { data: true, repair: false }, &NoProgress).unwrap();
        assert!(report.findings.is_empty(), "{:?}", report.findings);
    }

    pub fn receiver(&self, keys: &Keys) -> Receiver {
        self.receiver_for(keys, &[])
    }

    pub fn receiver_for(&self, keys: &Keys, clients: &[&str]) -> Receiver {
        let clients = clients.iter().map(|name| (*name).to_owned()).collect();
        let config = ReceiverConfig { listen: "127.0.0.1:0".parse().unwrap(), tls: keys.server(), clients };
        Receiver::start(&config, Arc::clone(&self.datastore), Arc::new(NoAttachments)).unwrap()
    }

    pub fn shipment(&self, disks: &[(&str, &str, &str)]) -> Shipment {
        let disks = disks.iter().enumerate().map(|(number, (disk, snapshot, name))| ShippedDisk {
            outgoing: self.datastore.outgoing(disk, snapshot).unwrap(),
            name: (*name).to_owned(),
            uuid: format!("0f0e0d0c-0b0a-4908-8706-{:012x}", hash(name) as u64 + number as u64),
        });
        Shipment {
            disks: disks.collect(),
            attachment: None,
            keep: true,
            incremental: false,
            update: false,
            resume_only: false,
        }
    }
}

fn hash(text: &str) -> u32 {
    checksums::checksum(text.as_bytes())
}

/// Writes `count` random ranges of random bytes.
pub fn scribble(device: &dyn Device, random: &mut Random, count: usize, most: u64) {
    for _ in 0..count {
        let length = 1 + random.below(most.min(device.capacity()));
        let offset = random.below(device.capacity() - length + 1);
        write(device, offset, &random.bytes(length as usize));
    }
}

pub fn write(device: &dyn Device, offset: u64, bytes: &[u8]) {
    device.write(offset, backend::SharedSlice::copy_of(bytes), false).unwrap();
}

/// A disk of several segments, with data, holes and discarded ranges.
pub fn furnished(site: &Site, name: &str, seed: u64) -> Arc<dyn Device> {
    let device = site.disk(name, 6 * SEGMENT + 4096 * 3 + 512);
    let mut random = Random(seed);
    scribble(&*device, &mut random, 40, 1 << 20);
    device.discard(SEGMENT / 2, SEGMENT / 3, false).unwrap();
    scribble(&*device, &mut random, 20, 9000);
    let capacity = device.capacity();
    write(&*device, capacity - 700, &random.bytes(700));
    device
}

pub fn options(keys: &Keys, streams: usize) -> SendOptions {
    SendOptions { streams, rate: 0, tls: keys.client("client") }
}

pub fn remote(receiver: &Receiver) -> Remote {
    remote_at(receiver.address().port())
}

pub fn remote_at(port: u16) -> Remote {
    Remote { host: "127.0.0.1".into(), port, name: "unused".into() }
}

/// A proxy that repeatedly cuts its connections, each time after a number of bytes in both directions.
pub struct Line {
    pub port: u16,
    pub cuts: Arc<AtomicUsize>,
}

impl Line {
    /// A proxy to a server. The byte limits apply one after another; after the last one there is no limit.
    pub fn to(port: u16, budgets: Vec<u64>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let here = listener.local_addr().unwrap().port();
        let cuts = Arc::new(AtomicUsize::new(0));
        let mut budgets = budgets.into_iter();
        let left = Arc::new(AtomicI64::new(budgets.next().map_or(i64::MAX, |bytes| bytes as i64)));
        let budgets = Arc::new(parking_lot::Mutex::new(budgets));
        let open: Arc<parking_lot::Mutex<Vec<TcpStream>>> = Arc::default();
        let (counted, remaining) = (Arc::clone(&cuts), Arc::clone(&left));
        std::thread::spawn(move || {
            for from in listener.incoming() {
                let Ok(from) = from else { return };
                let Ok(to) = TcpStream::connect(("127.0.0.1", port)) else { continue };
                open.lock().extend([from.try_clone().unwrap(), to.try_clone().unwrap()]);
                for (mut source, mut sink) in
                    [(from.try_clone().unwrap(), to.try_clone().unwrap()), (to.try_clone().unwrap(), from)]
                {
                    let (left, cuts) = (Arc::clone(&remaining), Arc::clone(&counted));
                    let (open, budgets) = (Arc::clone(&open), Arc::clone(&budgets));
                    std::thread::spawn(move || {
                        let mut buffer = vec![0; 16 << 10];
                        while let Ok(count) = source.read(&mut buffer)
                            && count > 0
                        {
                            let before = left.fetch_sub(count as i64, Ordering::SeqCst);
                            let pass = (count as i64).min(before.max(0)) as usize;
                            if pass > 0 && sink.write_all(&buffer[..pass]).is_err() {
                                break;
                            }
                            // Also when a limit is reached exactly, the connection is closed, so that the next limit
                            // applies.
                            if before <= count as i64 {
                                let mut open = open.lock();
                                if before > 0 {
                                    // Only the thread that has reached the limit cuts the connections.
                                    cuts.fetch_add(1, Ordering::SeqCst);
                                    for socket in open.drain(..) {
                                        let _ = socket.shutdown(Shutdown::Both);
                                    }
                                    let next = budgets.lock().next().map_or(i64::MAX, |bytes| bytes as i64);
                                    left.store(next, Ordering::SeqCst);
                                }
                                break;
                            }
                        }
                        let _ = sink.shutdown(Shutdown::Both);
                    });
                }
            }
        });
        Self { port: here, cuts }
    }
}

/// Asserts that two contents are equal.
#[track_caller]
pub fn same(a: &[u8], b: &[u8]) {
    assert_eq!(a.len(), b.len());
    if let Some(at) = a.iter().zip(b).position(|(a, b)| a != b) {
        let differing = a.iter().zip(b).filter(|(a, b)| a != b).count();
        panic!("{differing} of {} bytes differ, the first at {at}: {} and {}", a.len(), a[at], b[at]);
    }
}
