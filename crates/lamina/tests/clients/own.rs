//! RESIZE, which no public client supports, tested with the project's own client.

use crate::matrix::{Line, Matrix};
use crate::operation::{Operation, SIZE, STYLES, Style};
use crate::served::{Served, Target};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use testkit::protocol::{CMD_FLUSH, CMD_RESIZE, Client, EPERM, Mode, OPT_STARTTLS, REP_ACK};

/// A session over TLS with the certificate of the test authority.
fn secure(served: &Served) -> Client {
    let folder = served.certificates();
    let certificate = |name: &str| CertificateDer::from_pem_file(folder.join(name)).unwrap();
    let mut roots = rustls::RootCertStore::empty();
    roots.add(certificate("ca-cert.pem")).unwrap();
    let key = PrivateKeyDer::from_pem_file(folder.join("client-key.pem")).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let versions = rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let builder = versions.unwrap().with_root_certificates(roots);
    let config = builder.with_client_auth_cert(vec![certificate("client-cert.pem")], key).unwrap();

    let mut stream = TcpStream::connect(("127.0.0.1", served.port)).unwrap();
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting).unwrap();
    let mut request = 3u32.to_be_bytes().to_vec();
    request.extend(b"IHAVEOPT");
    request.extend(OPT_STARTTLS.to_be_bytes());
    request.extend(0u32.to_be_bytes());
    stream.write_all(&request).unwrap();
    let mut reply = [0; 20];
    stream.read_exact(&mut reply).unwrap();
    assert_eq!(reply[12..16], REP_ACK.to_be_bytes(), "TLS is refused");
    let session = rustls::ClientConnection::new(Arc::new(config), ServerName::try_from("localhost").unwrap());
    Client::new(Box::new(rustls::StreamOwned::new(session.unwrap(), stream)))
}

fn connect(target: &Target, style: Style) -> Client {
    let mut client = if target.tls {
        secure(target.served)
    } else {
        let mut client = Client::unix(&target.served.store.socket());
        client.greet(3);
        client
    };
    client.choose(match style {
        Style::Simple => Mode::Simple,
        Style::Structured => Mode::Structured,
        Style::Extended => Mode::Extended,
    });
    assert_eq!(client.go(&target.export), REP_ACK, "{}", target.export);
    client
}

fn resize(target: &Target, line: &Line) -> Result<(), String> {
    let mut client = connect(target, line.style);
    let larger = 2 * SIZE as u64;
    let reply = client.ask(CMD_RESIZE, 0, larger, 0);
    if reply.error != 0 {
        return Err(format!("resize: error {} {}", reply.error, reply.message));
    }
    if client.read(larger - 4096, 4096) != vec![0; 4096] {
        return Err("the added range is not zero".into());
    }
    client.write(larger - 1000, &[0x44; 1000]);
    if client.read(larger - 1001, 1001) != [&[0][..], &[0x44; 1000]].concat() {
        return Err("data written beyond the former end is missing".into());
    }
    let reply = client.ask(CMD_RESIZE, 0, SIZE as u64, 0);
    if reply.error != EPERM {
        return Err(format!("shrinking is answered with {}", reply.error));
    }
    if client.ask(CMD_FLUSH, 0, 0, 0).error != 0 {
        return Err("flush failed".into());
    }
    let size = connect(target, line.style).size;
    if size == larger { Ok(()) } else { Err(format!("the next client gets the size {size}")) }
}

#[test]
fn resize_in_every_style() {
    let mut matrix = Matrix::new();
    for (style, tls) in STYLES.into_iter().flat_map(|style| [(style, false), (style, true)]) {
        let client = "the project's own client".into();
        matrix.line(Line { client, style, tls, operation: Operation::Resize }, resize);
    }
    matrix.finish();
}
