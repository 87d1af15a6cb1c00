//! A client with the certificate of one tenant tries to reach the disk of another tenant, over every interface of the
//! server.
//!
//! Every attempt is made twice: with the name of the other tenant's disk, and with a name of the same form that no disk
//! has. The server must give both the same answer. Afterwards the disk has the content that its owner wrote.
//!
//! `LAMINA_SEED` is the seed of the attempts, `LAMINA_ATTEMPTS` their number (default 1,000).

#![allow(clippy::unwrap_used)]

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;
use testkit::Random;
use testkit::authority::{authority, certify};
use testkit::environment::number;
use testkit::process::{Serving, Store, send, until};
use testkit::protocol::*;

const SIZE: u64 = 4 << 20;
/// The name of the other tenant's disk, and a name of the same length that no disk has.
const THEIRS: &str = "b-data";
const ABSENT: &str = "q-data";
const RULES: &str = "a.example a-* write\na.example shared read\nb.example b-* write\n";

/// Functions that derive forms of a name, some of which match the pattern in the attacker's rule.
const FORMS: [fn(&str) -> String; 34] = [
    |name| name.to_owned(),
    |name| format!("{name}@monday"),
    |name| format!("{name}@tuesday"),
    |name| format!("{name}@"),
    |name| format!("{name}@monday@a-data"),
    |name| format!("{name}@a-data"),
    |name| format!("a-data@{name}"),
    |name| format!("a-@{name}"),
    |name| format!("@{name}"),
    |name| name.to_uppercase(),
    |name| format!("{name} "),
    |name| format!(" {name}"),
    |name| format!("{name}\t"),
    |name| format!("{name}\n"),
    |name| format!("{name}\0"),
    |name| format!("a-data\0{name}"),
    |name| format!("a-data\n{name}"),
    |name| format!("a-data,{name}"),
    |name| format!("a-{name}"),
    |name| format!("/{name}"),
    |name| format!("./{name}"),
    |name| format!("../{name}"),
    |name| format!("a-/../{name}"),
    |name| format!("a-data/../{name}"),
    |name| format!("a-data@../{name}"),
    |name| format!("a-data@monday/../../{name}@monday"),
    |name| format!("{name}/"),
    |name| format!("disks/{name}"),
    |name| format!("{}-*", &name[..1]),
    |name| format!("{}-dat?", &name[..1]),
    |name| format!("%{:02x}-data", name.as_bytes()[0]),
    |name| name.replace('-', "\u{2010}"),
    |name| name.repeat(500),
    |name| format!("a-{}", name.repeat(1000)),
];

struct Tenants {
    store: Store,
    keys: tempfile::TempDir,
    rules: PathBuf,
    server: Serving,
    tcp: SocketAddr,
    receive: String,
}

impl Tenants {
    fn new() -> Self {
        let keys = tempfile::tempdir().unwrap();
        let [ours, foreign] = ["ours", "foreign"].map(|name| keys.path().join(name));
        authority(&ours);
        authority(&foreign);
        for name in ["a", "b"] {
            certify(&ours, name, &format!("DNS:{name}.example"), "clientAuth");
        }
        certify(&foreign, "b", "DNS:b.example", "clientAuth");
        let store = Store::new();
        for disk in ["a-data", THEIRS, "shared"] {
            store.run(&format!("disk create {disk} {SIZE}")).ok();
        }
        let rules = keys.path().join("rules");
        std::fs::write(&rules, RULES).unwrap();
        let file = |name: &str| ours.join(name).display().to_string();
        let server = store.serve(&format!(
            "--json --tcp 127.0.0.1:0 --tls-cert {} --tls-key {} --tls-client-ca {} --access {} --receive 127.0.0.1:0 \
             --receive-from sender.example",
            file("server-cert.pem"),
            file("server-key.pem"),
            file("ca-cert.pem"),
            rules.display()
        ));
        let ready: serde_json::Value = serde_json::from_str(&server.ready).unwrap();
        let tcp = ready["nbd"].as_array().unwrap().iter().find_map(|uri| uri.as_str().unwrap().strip_prefix("nbds://"));
        let tcp = tcp.unwrap().trim_end_matches('/').parse().unwrap();
        let receive = ready["receive"].as_str().unwrap().to_owned();
        for disk in ["a-data", THEIRS, "shared"] {
            let mut client = Client::open(&store.socket(), disk, Mode::Structured);
            client.write(0, &content(disk));
            client.leave();
        }
        for disk in ["a-data", THEIRS] {
            store.run(&format!("snapshot create {disk}@monday")).ok();
        }
        Self { store, keys, rules, server, tcp, receive }
    }

    /// A connection that has begun TLS with the certificate of `identity`. The TLS handshake takes place when the first
    /// bytes are sent.
    fn starttls(&self, identity: Option<(&str, &str)>) -> Box<dyn Stream> {
        let mut stream = self.connect();
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting).unwrap();
        stream.write_all(b"\0\0\0\x03IHAVEOPT\0\0\0\x05\0\0\0\0").unwrap();
        let mut reply = [0; 20];
        stream.read_exact(&mut reply).unwrap();
        assert_eq!(reply[12..16], REP_ACK.to_be_bytes(), "TLS is refused");
        self.tls(stream, identity)
    }

    fn tls(&self, stream: TcpStream, identity: Option<(&str, &str)>) -> Box<dyn Stream> {
        let mut roots = rustls::RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(self.keys.path().join("ours/ca-cert.pem")).unwrap()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let versions = rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let builder = versions.unwrap().with_root_certificates(roots);
        let config = match identity {
            None => builder.with_no_client_auth(),
            Some((authority, name)) => {
                let folder = self.keys.path().join(authority);
                let certificate = CertificateDer::from_pem_file(folder.join(format!("{name}-cert.pem"))).unwrap();
                let key = PrivateKeyDer::from_pem_file(folder.join(format!("{name}-key.pem"))).unwrap();
                builder.with_client_auth_cert(vec![certificate], key).unwrap()
            }
        };
        let session = rustls::ClientConnection::new(Arc::new(config), ServerName::try_from("localhost").unwrap());
        Box::new(rustls::StreamOwned::new(session.unwrap(), stream))
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.tcp).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream
    }

    /// A client with the attacker's certificate, in a mode of replies.
    fn attacker(&self, mode: Mode) -> Client {
        let mut client = Client::new(self.starttls(Some(("ours", "a"))));
        client.choose(mode);
        client
    }
}

/// The content that the owner writes to a disk.
fn content(disk: &str) -> Vec<u8> {
    disk.bytes().cycle().take(64 << 10).collect()
}

/// The bytes of an option: its header and its data.
fn option(code: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = b"IHAVEOPT".to_vec();
    bytes.extend(code.to_be_bytes());
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
    bytes
}

/// Sends bytes; returns everything that the server sends until it closes the connection.
fn everything(stream: &mut dyn Stream, bytes: &[u8]) -> Vec<u8> {
    let mut received = Vec::new();
    // The server may have refused already by closing the connection, as expected.
    let _ = stream.write_all(bytes).and_then(|()| stream.flush());
    let mut part = [0; 4096];
    while let Ok(length) = stream.read(&mut part) {
        if length == 0 {
            break;
        }
        received.extend_from_slice(&part[..length]);
    }
    received
}

/// A reply in which the name of the other tenant's disk is replaced by the name that no disk has.
fn neutral(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes).into_owned();
    text.replace(THEIRS, ABSENT)
        .replace(&THEIRS.to_uppercase(), &ABSENT.to_uppercase())
        .replace("b\u{2010}data", "q\u{2010}data")
        .replace("b-*", "q-*")
        .replace("b-dat?", "q-dat?")
        .replace("%62", "%71")
}

/// The server cuts a reply with a long name in the middle of the name.
fn clipped(text: String) -> String {
    if text.len() < 1000 { text } else { text.replace('b', "q") }
}

/// The data of an option that names an export.
fn asks(code: u32, name: &str, random: &mut Random) -> Vec<u8> {
    match code {
        OPT_LIST_META | OPT_SET_META => {
            let queries = [&["base:allocation"][..], &[], &["lamina:"], &["lamina:dirty:monday", "base:"]];
            Client::meta_data(name, queries[random.index(queries.len())])
        }
        _ => Client::info_data(name, [&[][..], &[0, 1, 2, 3], &[1, 2, 9]][random.index(3)]),
    }
}

/// Tries both names by options, in the same state of two connections.
fn by_option(client: &mut Client, random: &mut Random) {
    let code = [OPT_INFO, OPT_GO, OPT_LIST_META, OPT_SET_META][random.index(4)];
    let form = FORMS[random.index(FORMS.len())];
    let before = random.below(6);
    let mut answers = [THEIRS, ABSENT].map(|name| {
        match before {
            0 => drop(client.option(OPT_INFO, &Client::info_data("a-data", &[1]))),
            1 => drop(client.option(OPT_SET_META, &Client::meta_data("a-data@monday", &["base:allocation"]))),
            2 => assert_ne!(client.verdict(99, b"unknown"), REP_ACK),
            3 => assert_ne!(client.verdict(OPT_LIST, name.as_bytes()), REP_ACK),
            4 => assert_eq!(client.verdict(OPT_INFO, &[0xff; 70_000]), ERR_TOO_BIG),
            _ => {}
        }
        let data = asks(code, &form(name), &mut random.clone());
        let replies = client.option(code, &data);
        assert!(replies.last().unwrap().0 >= 0x8000_0000, "{:?} was opened", form(name));
        replies.into_iter().map(|(kind, data)| (kind, clipped(neutral(&data)))).collect::<Vec<_>>()
    });
    random.next();
    let absent = answers[1].split_off(0);
    assert_eq!(answers[0], absent, "{:?}", form(THEIRS));
}

fn list(client: &mut Client) {
    let replies = client.option(OPT_LIST, &[]);
    let names: Vec<_> = replies.iter().filter(|(kind, _)| *kind == REP_SERVER).map(|(_, data)| &data[4..]).collect();
    assert_eq!(names.len(), 3, "a-data, a-data@monday and shared");
    assert!(!names.iter().any(|name| String::from_utf8_lossy(name).contains(THEIRS)));
}

/// Tries writes of every kind on an export that the attacker may only read.
fn changes_what_may_be_read(tenants: &Tenants, random: &mut Random) {
    let mut client = tenants.attacker([Mode::Structured, Mode::Extended][random.index(2)]);
    assert_eq!(client.go(["shared", "shared@", "a-data@monday"][random.index(3)].trim_end_matches('@')), REP_ACK);
    for _ in 0..8 {
        let (command, flags) = [
            (CMD_WRITE, [0, FUA][random.index(2)]),
            (CMD_TRIM, 0),
            (CMD_ZEROES, [0, NO_HOLE, FAST_ZERO, FUA][random.index(4)]),
            (CMD_RESIZE, 0),
        ][random.index(4)];
        let reply = match command {
            CMD_WRITE => client.ask_with(command, flags, 4096 * random.below(8), 4, b"mine"),
            CMD_RESIZE => client.ask(command, flags, 2 * SIZE, 0),
            _ => client.ask(command, flags, 4096 * random.below(8), 4096),
        };
        assert_ne!(reply.error, 0, "command {command} was carried out");
    }
    client.leave();
}

/// Tries requests beyond the end of the attacker's own disk.
fn beyond_its_own(tenants: &Tenants, random: &mut Random) {
    let mut client = tenants.attacker(Mode::Extended);
    assert_eq!(client.go("a-data"), REP_ACK);
    let end = client.size;
    for offset in [end, end - 1, end + 4096 * random.below(1 << 20), u64::MAX - random.below(8192), 1 << 63] {
        assert_ne!(client.ask(CMD_READ, 0, offset, 4096).error, 0, "{offset}");
        assert_ne!(client.ask_with(CMD_WRITE, 0, offset, 4, b"mine").error, u32::from(offset < end - 4), "{offset}");
        assert_ne!(client.ask(CMD_ZEROES, 0, offset, 4096).error, 0, "{offset}");
    }
    client.leave();
}

/// Tries the sockets of the server as a user without permission.
fn as_another_user(tenants: &Tenants, random: &mut Random) {
    let socket = tenants.store.path().join(["nbd.sock", "control.sock"][random.index(2)]);
    let script = "use IO::Socket::UNIX; exit !IO::Socket::UNIX->new(Peer => $ARGV[0])";
    let user = ["--reuid", "65534", "--regid", "65534", "--clear-groups", "/usr/bin/perl", "-e", script];
    let mut command = Command::new("setpriv");
    let status = command.args(user).arg(socket).stderr(Stdio::null()).status().unwrap();
    assert!(!status.success(), "another user reaches the server");
}

/// Tries to send a disk in place of the other tenant's disk, or under a name that no disk has.
fn by_replication(tenants: &Tenants, from: &Store, random: &mut Random) {
    let certificate = ["a", "client"][random.index(2)];
    let file = |name: &str| tenants.keys.path().join("ours").join(name).display().to_string();
    let more = ["", "--incremental"][random.index(2)];
    let answers = [THEIRS, ABSENT].map(|name| {
        let done = from.run(&format!(
            "disk send mine {}{name} --tls-ca {} --tls-cert {} --tls-key {} {more}",
            tenants.receive,
            file("ca-cert.pem"),
            file(&format!("{certificate}-cert.pem")),
            file(&format!("{certificate}-key.pem"))
        ));
        assert_ne!(done.code, 0, "{name} was sent");
        (done.code, neutral(done.stderr.as_bytes()))
    });
    assert_eq!(answers[0], answers[1]);
}

/// Sends bytes to the port of the receiver, without a certificate that the receiver accepts.
fn at_the_receiver(tenants: &Tenants, random: &mut Random) {
    let address = tenants.receive.trim_start_matches("lamina://").trim_end_matches('/').to_owned();
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let noise: Vec<u8> = (0..random.between(1, 200)).map(|_| random.next() as u8).collect();
    let received = match random.below(3) {
        0 => everything(&mut { stream }, &[b"LMRP\0\x01", THEIRS.as_bytes(), &noise].concat()),
        1 => everything(&mut tenants.tls(stream, None), &[b"LMRP\0\x01", &noise[..]].concat()),
        _ => everything(&mut tenants.tls(stream, Some(("foreign", "b"))), &noise),
    };
    assert!(!String::from_utf8_lossy(&received).contains(THEIRS));
    assert!(!received.windows(4).any(|bytes| bytes == b"LMRP"), "the receiver answers");
}

fn attempt(tenants: &Tenants, client: &mut Client, from: &Store, random: &mut Random) {
    let go = |name: &str| option(OPT_GO, &Client::info_data(name, &[]));
    match random.below(40) {
        // EXPORT_NAME has no error reply, so the server ends the connection.
        0..=2 => {
            let form = FORMS[random.index(FORMS.len())];
            for name in [THEIRS, ABSENT] {
                let mut stream = tenants.starttls(Some(("ours", "a")));
                assert_eq!(everything(&mut stream, &option(OPT_EXPORT_NAME, form(name).as_bytes())), b"", "{name}");
            }
        }
        3..=4 => list(client),
        // A client without a certificate, and a client with a certificate of another authority and the other tenant's
        // name.
        5..=7 => assert_eq!(everything(&mut tenants.starttls(None), &go(THEIRS)), b""),
        8..=10 => assert_eq!(everything(&mut tenants.starttls(Some(("foreign", "b"))), &go(THEIRS)), b""),
        // In plain text: options before TLS, the choice of an export, and requests without a chosen export.
        11..=13 => {
            let code = [OPT_INFO, OPT_GO, OPT_LIST, OPT_LIST_META, OPT_SET_META, OPT_STRUCTURED_REPLY][random.index(6)];
            let mut plain = Client::new(Box::new(tenants.connect()));
            plain.greet(3);
            let answers = [THEIRS, ABSENT].map(|name| plain.option(code, &Client::info_data(name, &[])));
            assert_eq!(answers[0], answers[1]);
            assert_eq!(answers[0][0].0, ERR_TLS_REQD);
            assert_eq!(everything(&mut *plain.stream, &option(OPT_EXPORT_NAME, THEIRS.as_bytes())), b"");
        }
        14..=15 => {
            let mut plain = Client::new(Box::new(tenants.connect()));
            plain.greet([0, 1, 3][random.index(3)]);
            let (_, request) = plain.encode(CMD_READ, 0, 0, 4096, &[]);
            assert_eq!(everything(&mut *plain.stream, &request), b"");
        }
        // Options in plain text, sent together with STARTTLS.
        16..=17 => {
            let mut plain = Client::new(Box::new(tenants.connect()));
            plain.greet(3);
            let sent = everything(&mut *plain.stream, &[option(OPT_STARTTLS, &[]), go(THEIRS)].concat());
            assert!(sent.len() < 60 && !sent[20..].starts_with(&sent[..4]), "{sent:?}");
        }
        18..=20 => changes_what_may_be_read(tenants, random),
        21 => beyond_its_own(tenants, random),
        22 => as_another_user(tenants, random),
        23 => by_replication(tenants, from, random),
        24..=25 => at_the_receiver(tenants, random),
        _ => by_option(client, random),
    }
}

#[test]
fn no_attempt_reaches_the_disk_of_another_tenant() {
    let (seed, attempts) = (number("LAMINA_SEED", 1), number("LAMINA_ATTEMPTS", 1000));
    let tenants = Tenants::new();
    let from = Store::new();
    from.run(&format!("disk create mine {SIZE}")).ok();
    let mut random = Random::new(seed);
    let mut client = tenants.attacker(Mode::Structured);
    let _from = from.serve("");
    for attempt_number in 0..attempts {
        if attempt_number % 25 == 0 {
            client = tenants.attacker([Mode::Simple, Mode::Structured, Mode::Extended][random.index(3)]);
        }
        let state = random.clone();
        let made = std::panic::AssertUnwindSafe(|| attempt(&tenants, &mut client, &from, &mut random));
        if let Err(why) = std::panic::catch_unwind(made) {
            eprintln!("attempt {attempt_number} of seed {seed}, {state:?}");
            std::panic::resume_unwind(why);
        }
    }
    // The disks and snapshots have the content that their owners wrote.
    for disk in ["a-data", THEIRS, "shared", "a-data@monday", "b-data@monday"] {
        let mut client = Client::open(&tenants.store.socket(), disk, Mode::Structured);
        let expected = content(disk.split('@').next().unwrap());
        assert_eq!(client.size, SIZE, "{disk}");
        assert!(client.read(0, expected.len() as u64) == expected, "{disk} has changed");
        client.leave();
    }
    let listed = tenants.store.run("--json disk list").json()["disks"].as_array().unwrap().len();
    assert_eq!(listed, 3);
    assert_eq!(tenants.store.run("--json receive list").json()["receptions"], serde_json::json!([]));
    drop(client);
    drop(tenants.server);
    tenants.store.is_clean();
}

#[test]
fn rules_are_read_again_on_sighup_and_a_mistake_in_them_changes_nothing() {
    let tenants = Tenants::new();
    let mut writer = tenants.attacker(Mode::Structured);
    assert_eq!(writer.go("a-data"), REP_ACK);
    let mut theirs = Client::new(tenants.starttls(Some(("ours", "b"))));
    theirs.choose(Mode::Structured);
    assert_eq!(theirs.go(THEIRS), REP_ACK);
    let read_again = |rules: &str, said: &str| {
        let before = tenants.server.log().matches(said).count();
        std::fs::write(&tenants.rules, rules).unwrap();
        send(tenants.server.pid(), "HUP");
        until(said, || tenants.server.log().matches(said).count() > before);
    };
    read_again("a.example a-* all\n", "those in use stay in force");
    std::fs::remove_file(&tenants.rules).unwrap();
    send(tenants.server.pid(), "HUP");
    until("a missing file is reported", || tenants.server.log().matches("stay in force").count() == 2);
    writer.write(0, b"still");
    read_again(RULES, "were read again");
    writer.write(0, b"and still");
    // The new rules withdraw the attacker's disk. The other tenant keeps its own disk.
    read_again("b.example b-* write\n", "were read again");
    assert!(writer.at_end());
    theirs.write(0, b"undisturbed");
    assert_ne!(tenants.attacker(Mode::Structured).go("a-data"), REP_ACK);
    // The disconnected client is no longer permitted to reconnect, so the disk is not in use.
    tenants.store.run("disk delete a-data").ok();
    // After write permission was withdrawn, the next connection opens the disk read-only.
    read_again("b.example b-* read\n", "were read again");
    assert!(theirs.at_end());
    let mut theirs = Client::new(tenants.starttls(Some(("ours", "b"))));
    theirs.choose(Mode::Structured);
    assert_eq!(theirs.go(THEIRS), REP_ACK);
    assert_eq!(theirs.ask_with(CMD_WRITE, 0, 0, 4, b"mine").error, EPERM);
    assert_eq!(theirs.read(0, 11), b"undisturbed");
    theirs.leave();
}
