//! TLS with certificates made by the test: which clients are accepted, which bytes are sent before TLS, and that data
//! is transferred.

use crate::memory_disk::{MemoryDisk, Random, Shelf};
use crate::{Folder, Running};
use connections::{Limits, Listen, TlsConfig};
use export::nbd::{Server, ServerConfig};
use rcgen::{BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use std::net::TcpStream;
use std::path::Path;
use std::sync::Arc;
use testkit::protocol::*;

const CAPACITY: u64 = 16 << 20;

/// A certificate authority, and the certificates of a server and a client in files named as GnuTLS clients expect.
pub struct Certificates {
    pub folder: Folder,
    issuer: Issuer<'static, KeyPair>,
}

impl Certificates {
    pub fn new() -> Self {
        let folder = Folder::new();
        let key = KeyPair::generate().unwrap();
        let mut authority = CertificateParams::new(Vec::new()).unwrap();
        authority.distinguished_name.push(rcgen::DnType::CommonName, "test authority");
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        authority.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let write = |name: &str, text: String| std::fs::write(folder.0.join(name), text).unwrap();
        write("ca-cert.pem", authority.self_signed(&key).unwrap().pem());
        let issuer = Issuer::new(authority, key);
        for (role, purpose) in
            [("server", ExtendedKeyUsagePurpose::ServerAuth), ("client", ExtendedKeyUsagePurpose::ClientAuth)]
        {
            let key = KeyPair::generate().unwrap();
            let names = vec!["localhost".to_owned(), "127.0.0.1".to_owned()];
            let mut params = CertificateParams::new(names).unwrap();
            params.distinguished_name.push(rcgen::DnType::CommonName, role);
            params.extended_key_usages = vec![purpose];
            params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
            write(&format!("{role}-cert.pem"), params.signed_by(&key, &issuer).unwrap().pem());
            write(&format!("{role}-key.pem"), key.serialize_pem());
        }
        Self { folder, issuer }
    }

    /// The configuration of a client whose certificate has this name.
    pub fn client_named(&self, name: &str) -> rustls::ClientConfig {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        let certificate = CertificateDer::from(params.signed_by(&key, &self.issuer).unwrap());
        let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
        self.trusting().with_client_auth_cert(vec![certificate], key).unwrap()
    }

    pub fn server(&self, clients: bool, required: bool) -> TlsConfig {
        TlsConfig {
            certificate: self.folder.0.join("server-cert.pem"),
            key: self.folder.0.join("server-key.pem"),
            client_authorities: clients.then(|| self.folder.0.join("ca-cert.pem")),
            required,
        }
    }

    /// The configuration of a client that trusts this authority.
    fn trusting(&self) -> rustls::ConfigBuilder<rustls::ClientConfig, rustls::client::WantsClientCert> {
        let mut roots = rustls::RootCertStore::empty();
        for authority in CertificateDer::pem_file_iter(self.folder.0.join("ca-cert.pem")).unwrap() {
            roots.add(authority.unwrap()).unwrap();
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        builder.unwrap().with_root_certificates(roots)
    }

    fn client(&self, identity: Option<&Certificates>) -> rustls::ClientConfig {
        let certificates = |folder: &Path, name| {
            let found = CertificateDer::pem_file_iter(folder.join(name)).unwrap();
            found.map(Result::unwrap).collect::<Vec<_>>()
        };
        let builder = self.trusting();
        match identity {
            None => builder.with_no_client_auth(),
            Some(own) => {
                let key = PrivateKeyDer::from_pem_file(own.folder.0.join("client-key.pem")).unwrap();
                builder.with_client_auth_cert(certificates(&own.folder.0, "client-cert.pem"), key).unwrap()
            }
        }
    }
}

fn start(tls: TlsConfig) -> Running {
    let config = ServerConfig {
        listen: vec![Listen::Tcp("127.0.0.1:0".parse().unwrap())],
        tls: Some(tls),
        handshake_timeout: std::time::Duration::from_secs(5),
        ..ServerConfig::default()
    };
    Running::with(config, Shelf::of(&[&MemoryDisk::new("vm", CAPACITY, 2)]))
}

/// Upgrades a connection after the greeting. The TLS handshake takes place when the first bytes are sent.
pub fn upgrade(mut stream: TcpStream, config: rustls::ClientConfig) -> Client {
    use std::io::{Read, Write};
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting).unwrap();
    stream.write_all(b"\0\0\0\x03IHAVEOPT\0\0\0\x05\0\0\0\0").unwrap();
    let mut acknowledgement = [0; 20];
    stream.read_exact(&mut acknowledgement).unwrap();
    assert_eq!(acknowledgement[15], 1);
    let name = rustls::pki_types::ServerName::try_from("localhost").unwrap();
    let session = rustls::ClientConnection::new(Arc::new(config), name).unwrap();
    Client::new(Box::new(rustls::StreamOwned::new(session, stream)))
}

#[test]
fn required_tls_precedes_all_other_options() {
    let certificates = Certificates::new();
    let running = start(certificates.server(true, true));
    let mut client = Client::tcp(running.tcp_address());
    client.greet(3);
    for (code, data) in [
        (OPT_LIST, Vec::new()),
        (OPT_INFO, Client::info_data("vm", &[])),
        (OPT_GO, Client::info_data("vm", &[])),
        (OPT_GO, Client::info_data("nothing", &[])),
        (OPT_STRUCTURED_REPLY, Vec::new()),
        (OPT_LIST_META, Client::meta_data("vm", &[])),
        (99, Vec::new()),
    ] {
        assert_eq!(client.verdict(code, &data), ERR_TLS_REQD, "{code}");
    }
    assert_eq!(client.verdict(OPT_STARTTLS, b"x"), ERR_INVALID);
    assert_eq!(client.verdict(OPT_ABORT, b""), REP_ACK);
    let mut client = Client::tcp(running.tcp_address());
    client.greet(3);
    client.send_option(OPT_EXPORT_NAME, b"vm");
    assert!(client.at_end());
    // On the unix socket of the same server, TLS is optional.
    Client::open(&running.socket, "vm", Mode::Structured).leave();
}

#[test]
fn every_request_works_over_tls() {
    let certificates = Certificates::new();
    let running = start(certificates.server(true, true));
    for mode in [Mode::Simple, Mode::Structured, Mode::Extended] {
        let stream = TcpStream::connect(running.tcp_address()).unwrap();
        let mut client = upgrade(stream, certificates.client(Some(&certificates)));
        assert_eq!(client.option(OPT_LIST, &[]).len(), 2);
        assert_eq!(client.verdict(OPT_STARTTLS, b""), ERR_INVALID, "TLS within TLS");
        client.choose(mode);
        assert_eq!(client.go("vm"), REP_ACK);
        let mut random = Random(8);
        let mut model = vec![0; CAPACITY as usize];
        for _ in 0..60 {
            let length = [1, 4096, 70_000, 3 << 20][random.below(4) as usize];
            let at = random.below(CAPACITY - length) as usize;
            let data = random.bytes(length as usize);
            model[at..at + data.len()].copy_from_slice(&data);
            client.write(at as u64, &data);
            let at = random.below(CAPACITY - length) as usize;
            assert!(client.read(at as u64, length) == model[at..at + length as usize]);
        }
        // Many replies are in progress at once.
        let mut batch = Vec::new();
        for n in 0..12 {
            batch.extend(client.encode(CMD_READ, 0, n << 20, 1 << 20, &[]).1);
        }
        client.stream.write_all(&batch).unwrap();
        client.stream.flush().unwrap();
        for _ in 0..12 {
            assert_eq!(client.receive().1.data.len(), 1 << 20);
        }
        assert!(client.read(0, CAPACITY) == model);
        client.write(0, &vec![0; CAPACITY as usize]);
        client.leave();
    }
}

#[test]
fn clients_with_unknown_certificates_are_refused() {
    let (ours, theirs) = (Certificates::new(), Certificates::new());
    let running = start(ours.server(true, true));
    for identity in [None, Some(&theirs)] {
        let stream = TcpStream::connect(running.tcp_address()).unwrap();
        let mut client = upgrade(stream, ours.client(identity));
        let refused = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| client.option(OPT_LIST, &[])));
        assert!(
            refused.is_err(),
            "a client with {} could connect",
            if identity.is_some() { "a false certificate" } else { "none" }
        );
    }
    let stream = TcpStream::connect(running.tcp_address()).unwrap();
    let mut client = upgrade(stream, ours.client(Some(&ours)));
    assert_eq!(client.option(OPT_LIST, &[]).len(), 2);
}

#[test]
fn clients_with_certificates_have_a_separate_limit() {
    let certificates = Certificates::new();
    let listen = vec![Listen::Tcp("127.0.0.1:0".parse().unwrap())];
    let limits = Limits { unix: 1, authenticated: 4, unauthenticated: 1 };
    let tls = Some(certificates.server(true, true));
    let config = ServerConfig { listen, tls, limits, ..ServerConfig::default() };
    let running = Running::with(config, Shelf::of(&[&MemoryDisk::new("vm", CAPACITY, 2)]));
    let refused = |stream: &mut TcpStream| std::io::Read::read(stream, &mut [0; 18]).unwrap() == 0;
    let authenticated = || {
        let stream = TcpStream::connect(running.tcp_address()).unwrap();
        let mut client = upgrade(stream, certificates.client(Some(&certificates)));
        assert_eq!(client.go("vm"), REP_ACK);
        client
    };
    // The limit of unauthenticated clients is 1. It is available again after each completed handshake.
    let mut clients = [authenticated(), authenticated()];
    let mut idle = TcpStream::connect(running.tcp_address()).unwrap();
    std::io::Read::read_exact(&mut idle, &mut [0; 18]).unwrap();
    assert!(refused(&mut TcpStream::connect(running.tcp_address()).unwrap()));
    for client in &mut clients {
        assert_eq!(client.read(0, 10), [0; 10]);
    }
    drop(idle);
    let remain = |connections| {
        let begin = std::time::Instant::now();
        while running.server.connections() > connections {
            assert!(begin.elapsed().as_secs() < 60);
            std::thread::yield_now();
        }
    };
    remain(2);
    // A third client with the same certificate exceeds the share of its name, which is half of the limit.
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(authenticated)).is_err());
    let other = |name: &str| {
        let stream = TcpStream::connect(running.tcp_address()).unwrap();
        let mut client = upgrade(stream, certificates.client_named(name));
        assert_eq!(client.go("vm"), REP_ACK);
        client
    };
    remain(2);
    let _others = [other("b.example"), other("c.example")];
    // A fifth authenticated client exceeds the limit.
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| other("d.example"))).is_err());
    Client::open(&running.socket, "vm", Mode::Simple).leave();
}

#[test]
fn tls_discards_earlier_negotiation_and_bytes_sent_before_it() {
    let certificates = Certificates::new();
    let running = start(certificates.server(false, false));
    let mut stream = TcpStream::connect(running.tcp_address()).unwrap();
    {
        use std::io::{Read, Write};
        let mut bytes = [0; 18];
        stream.read_exact(&mut bytes).unwrap();
        // Handshake flags, structured replies, and STARTTLS followed by an option in the same packet.
        stream.write_all(b"\0\0\0\x03IHAVEOPT\0\0\0\x08\0\0\0\0").unwrap();
        let mut reply = [0; 20];
        stream.read_exact(&mut reply).unwrap();
        stream.write_all(b"IHAVEOPT\0\0\0\x05\0\0\0\0IHAVEOPT\0\0\0\x03\0\0\0\0").unwrap();
        stream.read_exact(&mut reply).unwrap();
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
        assert!(!rest.windows(2).any(|two| two == b"vm"), "an option sent in the clear was answered after STARTTLS");
    }
    // Structured replies negotiated before TLS are reset: contexts, which require them, are refused.
    let stream = TcpStream::connect(running.tcp_address()).unwrap();
    stream.set_nodelay(true).unwrap();
    let mut plain = Client::new(Box::new(stream.try_clone().unwrap()));
    plain.greet(3);
    plain.choose(Mode::Structured);
    plain.set_meta("vm", &["base:allocation"]);
    assert_eq!(plain.verdict(OPT_STARTTLS, b""), REP_ACK);
    let name = rustls::pki_types::ServerName::try_from("localhost").unwrap();
    let session = rustls::ClientConnection::new(Arc::new(certificates.client(None)), name).unwrap();
    let mut client = Client::new(Box::new(rustls::StreamOwned::new(session, stream)));
    assert_eq!(client.verdict(OPT_SET_META, &Client::meta_data("vm", &["base:allocation"])), ERR_INVALID);
    assert_eq!(client.go("vm"), REP_ACK);
    assert_eq!(client.flags & 1 << 7, 0, "DF needs structured replies");
    assert_eq!(client.read(0, 10), [0; 10]);
}

#[test]
fn open_tcp_needs_tls_and_client_certificates() {
    let certificates = Certificates::new();
    let listen = vec![Listen::Tcp("0.0.0.0:0".parse().unwrap())];
    let try_with = |clients, required| {
        let tls = Some(certificates.server(clients, required));
        let config = ServerConfig { listen: listen.clone(), tls, ..ServerConfig::default() };
        Server::start(config, Shelf::of(&[&MemoryDisk::new("vm", 4096, 1)]))
    };
    let message = |result: error::Result<Server>| result.err().unwrap().to_string();
    assert!(message(try_with(true, false)).contains("TLS is not required"));
    assert!(message(try_with(false, true)).contains("no client certificates are asked for"));
    assert!(try_with(true, true).is_ok());
}

#[test]
fn errors_name_the_wrong_tls_file() {
    let (ours, theirs) = (Certificates::new(), Certificates::new());
    let mut wrong = ours.server(true, true);
    wrong.key = theirs.folder.0.join("server-key.pem");
    let start = |tls| {
        let listen = vec![Listen::Tcp("127.0.0.1:0".parse().unwrap())];
        let config = ServerConfig { listen, tls: Some(tls), ..ServerConfig::default() };
        Server::start(config, Shelf::of(&[])).err().unwrap().to_string()
    };
    assert!(start(wrong).contains("the key must belong to the first certificate"));
    let mut wrong = ours.server(true, true);
    wrong.client_authorities = Some(ours.folder.0.join("server-key.pem"));
    assert!(start(wrong).contains("holds no certificate"));
}
