//! The screen and keyboard of machines: screenshots, keys, and VNC on a socket, and on a TCP port
//! with a password, also with certificates.

#![allow(clippy::unwrap_used)]

use flate2::read::ZlibDecoder;
use serde_json::json;
use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use testkit::authority::authority;
use testkit::fleet::{Fleet, MEMORY};
use testkit::machines::Room;

/// A decoded picture: width, height, and its bytes without compression.
fn picture(path: &Path) -> (u32, u32, Vec<u8>) {
    let bytes = fs::read(path).unwrap();
    assert_eq!(&bytes[..8], b"\x89PNG\r\n\x1a\n", "a PNG");
    let number = |at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap());
    let (mut at, mut data, mut size) = (8, Vec::new(), (0, 0));
    loop {
        let (length, kind) = (number(at) as usize, &bytes[at + 4..at + 8]);
        match kind {
            b"IHDR" => size = (number(at + 8), number(at + 12)),
            b"IDAT" => data.extend_from_slice(&bytes[at + 8..at + 8 + length]),
            b"IEND" => break,
            _ => {}
        }
        at += 12 + length;
    }
    let mut plain = Vec::new();
    ZlibDecoder::new(&data[..]).read_to_end(&mut plain).unwrap();
    // Each row begins with the number of its filter.
    assert!(plain.len() as u32 > size.0 * size.1, "{size:?}: {}", plain.len());
    (size.0, size.1, plain)
}

#[test]
fn a_guest_is_seen_and_gets_keys() {
    let room = Room::new();
    let folder = tempfile::tempdir().unwrap();
    room.boot("web", "192M", "");
    let file = |name: &str| folder.path().join(name);
    let shoot = |name: &str| room.run(&format!("vm screenshot web {}", file(name).display()));
    shoot("none.png").fails(1, "has no graphics card");
    room.run("vm edit web --vnc").fails(7, "stop it first");
    room.run("vm stop web --force").ok();
    shoot("off.png").fails(7, "does not run");
    room.run("vm edit web --vnc").ok();
    room.run("vm start web").ok();
    room.until_answers("web");
    shoot("screen.jpg").fails(2, "neither .png nor .ppm");
    assert!(!file("none.png").exists() && !file("screen.jpg").exists());

    // What the guest writes to its screen is in the next picture.
    room.shell("web", "echo before >/dev/tty1");
    shoot("before.png").ok();
    let (width, height, before) = picture(&file("before.png"));
    assert!(width >= 640 && height >= 400, "{width} x {height}");
    assert!(before.iter().collect::<BTreeSet<_>>().len() > 1, "the screen is not of one colour");
    room.shell("web", "for line in 1 2 3 4 5; do echo '######## lamina ########'; done >/dev/tty1");
    room.until("the picture changes", || {
        shoot("after.png").ok();
        picture(&file("after.png")).2 != before
    });
    shoot("screen.ppm").ok();
    assert!(fs::read(file("screen.ppm")).unwrap().starts_with(b"P6\n"));

    // A program in the guest reads lines from the first virtual terminal.
    room.shell("web", "(while read -r line; do echo \"$line\" >>/run/lines; done </dev/tty1) >/dev/null 2>&1 &");
    let text = "Hello, World! 0123456789 ~`@#$%^&*()-_=+[]{}|;:'\",.<>/?";
    let mut command = room.store.command("vm type web --enter");
    assert!(command.arg(text).status().unwrap().success());
    room.until("the guest has the line", || room.shell("web", "cat /run/lines 2>/dev/null || true") == text);
    room.run("vm send-key web a shift-b C 1 enter").ok();
    room.until("the guest has the keys", || room.shell("web", "tail -n 1 /run/lines") == "aBc1");
    room.run("vm send-key web no_such_key").fails(2, "no_such_key");
    room.run("vm send-key web a+b").fails(2, "no combination of keys");
    room.run("vm type web ä").fails(2, "keyboard of the USA");
    room.run("vm pause web").ok();
    room.run("vm send-key web a").fails(7, "resume it first");
    shoot("paused.png").ok();
    picture(&file("paused.png"));
    room.run("vm resume web").ok();

    // A machine with a screen is saved and cloned with its memory.
    room.run("vm snapshot create web@live --memory").ok();
    room.run("vm clone web twin --instant --identity required").ok();
    room.run(&format!("vm screenshot twin {}", file("twin.png").display())).ok();
    picture(&file("twin.png"));
    room.run("vm revert web@live").ok();
    room.until_answers("web");
    assert_eq!(room.shell("web", "tail -n 1 /run/lines"), "aBc1");
    let boots = || room.console("web").matches("guest: up").count();
    let before = boots();
    room.run("vm send-key web ctrl-alt-delete").ok();
    room.until("the guest starts again", || boots() > before);
    room.close();
}

/// The beginning of the protocol (RFC 6143): returns the kinds of authentication that the server offers.
fn greet(stream: &mut (impl Read + Write)) -> Vec<u8> {
    let mut version = [0; 12];
    stream.read_exact(&mut version).unwrap();
    assert_eq!(&version, b"RFB 003.008\n");
    stream.write_all(&version).unwrap();
    let mut count = [0];
    stream.read_exact(&mut count).unwrap();
    let mut kinds = vec![0; usize::from(count[0])];
    stream.read_exact(&mut kinds).unwrap();
    kinds
}

/// The answer to a challenge of VNC: DES with the password as the key, in which the bits of each byte are reversed.
fn answer(challenge: &[u8], password: &str) -> Vec<u8> {
    let mut key = [0; 8];
    for (byte, character) in key.iter_mut().zip(password.bytes()) {
        *byte = character.reverse_bits();
    }
    let key: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
    let mut openssl = Command::new("openssl")
        .args(["enc", "-des-ecb", "-nopad", "-provider", "legacy", "-provider", "default", "-K", &key])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    openssl.stdin.take().unwrap().write_all(challenge).unwrap();
    openssl.wait_with_output().unwrap().stdout
}

/// Whether the server accepts a password.
fn accepts(port: u16, password: &str) -> bool {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    assert_eq!(greet(&mut stream), [2], "only with a password");
    stream.write_all(&[2]).unwrap();
    has_password(&mut stream, password).unwrap()
}

/// Answers the challenge of the server; returns whether the server accepts the password.
fn has_password(stream: &mut (impl Read + Write), password: &str) -> std::io::Result<bool> {
    let mut challenge = [0; 16];
    stream.read_exact(&mut challenge)?;
    stream.write_all(&answer(&challenge, password))?;
    let mut result = [0; 4];
    stream.read_exact(&mut result)?;
    Ok(result == [0; 4])
}

/// openssl as the TLS client of a connection.
struct Tls(Child);

impl Read for Tls {
    fn read(&mut self, bytes: &mut [u8]) -> std::io::Result<usize> {
        self.0.stdout.as_mut().unwrap().read(bytes)
    }
}

impl Write for Tls {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.stdin.as_mut().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.0.stdin.as_mut().unwrap().flush()
    }
}

impl Drop for Tls {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Negotiates TLS (VeNCrypt 0.2, X509Vnc), and begins TLS with the certificates of a folder: with its authority, and
/// with its client's certificate if `own`.
fn encrypt(port: u16, keys: &Path, own: bool) -> Tls {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    assert_eq!(greet(&mut stream), [19], "only VeNCrypt");
    stream.write_all(&[19]).unwrap();
    let mut version = [0; 2];
    stream.read_exact(&mut version).unwrap();
    assert_eq!(version, [0, 2]);
    stream.write_all(&version).unwrap();
    let mut kinds = [0; 6];
    stream.read_exact(&mut kinds).unwrap();
    assert_eq!(kinds, [0, 1, 0, 0, 1, 5], "accepted, and one kind, X509Vnc (261)");
    stream.write_all(&kinds[2..]).unwrap();
    let mut accepted = [0];
    stream.read_exact(&mut accepted).unwrap();
    assert_eq!(accepted, [1]);
    // openssl connects to a relay, which passes on the bytes that follow the negotiation.
    let relay = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let address = relay.local_addr().unwrap().to_string();
    let file = |name: &str| keys.join(name).display().to_string();
    let mut openssl = Command::new("openssl");
    openssl.args(["s_client", "-quiet", "-connect", &address, "-CAfile", &file("ca-cert.pem"), "-verify_return_error"]);
    openssl.args(["-verify_hostname", "localhost"]);
    if own {
        openssl.args(["-cert", &file("client-cert.pem"), "-key", &file("client-key.pem")]);
    }
    let child = openssl.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let (client, _) = relay.accept().unwrap();
    for (mut from, mut to) in [(client.try_clone().unwrap(), stream.try_clone().unwrap()), (stream, client)] {
        std::thread::spawn(move || {
            let _ = std::io::copy(&mut from, &mut to);
            let _ = to.shutdown(Shutdown::Both);
        });
    }
    Tls(child)
}

#[test]
fn vnc_with_certificates_is_encrypted_and_reached_from_other_hosts() {
    let folder = tempfile::tempdir().unwrap();
    let [ours, theirs] = ["ours", "theirs"].map(|name| folder.path().join(name));
    authority(&ours);
    authority(&theirs);
    let fleet = Fleet::new();
    let port = (5900..6000).find(|port| TcpListener::bind(("0.0.0.0", *port)).is_ok()).unwrap();
    let options = format!("--memory {MEMORY} --network none");
    let tls = format!("--vnc-tls {}", ours.display());
    fleet.run(&format!("create web {options} {tls}")).fails(2, "certificates of VNC need VNC on an address");
    fleet.run(&format!("create web {options} --vnc unix {tls}")).fails(2, "certificates of VNC need VNC on an address");
    fleet.run(&format!("create web {options} --vnc 0.0.0.0:{port} --vnc-tls /nowhere")).ok();
    fleet.run("start web").fails(3, "/nowhere/ca-cert.pem");
    fleet.run(&format!("edit web {tls}")).ok();
    fleet.run("start web").ok();
    let shown = fleet.show("web");
    assert_eq!(shown["vnc_tls"], json!({ "folder": ours, "clients": false }));
    assert!(fleet.run("show web").ok().contains("encrypted by "));
    let password = fs::read_to_string(shown["vnc_password"].as_str().unwrap()).unwrap().trim().to_owned();
    // A viewer that trusts the authority gets the screen with the password, and not without the password.
    let mut viewer = encrypt(port, &ours, false);
    assert!(has_password(&mut viewer, &password).unwrap());
    viewer.write_all(&[1]).unwrap();
    let mut screen = [0; 24];
    viewer.read_exact(&mut screen).unwrap();
    let mut name = vec![0; u32::from_be_bytes(screen[20..].try_into().unwrap()) as usize];
    viewer.read_exact(&mut name).unwrap();
    assert_eq!(String::from_utf8(name).unwrap(), "QEMU (web)");
    assert!(!has_password(&mut encrypt(port, &ours, false), "password").unwrap());
    // A viewer with another authority does not trust the host.
    has_password(&mut encrypt(port, &theirs, false), &password).unwrap_err();
    fleet.run(&format!("edit web {tls} --vnc-verify")).fails(7, "stop it first");

    // Viewers need a certificate too.
    fleet.run("stop web --force").ok();
    fleet.run(&format!("edit web {tls} --vnc-verify")).ok();
    fleet.run("start web").ok();
    assert!(has_password(&mut encrypt(port, &ours, true), &password).unwrap());
    has_password(&mut encrypt(port, &ours, false), &password).unwrap_err();
    fs::copy(ours.join("ca-cert.pem"), theirs.join("ca-cert.pem")).unwrap();
    has_password(&mut encrypt(port, &theirs, true), &password).unwrap_err();

    // A clone has VNC on a socket of its own. Without certificates, VNC on an address that other hosts reach is
    // refused.
    fleet.run("stop web --force").ok();
    fleet.run("clone web copy").ok();
    assert_eq!((&fleet.show("copy")["vnc"], &fleet.show("copy")["vnc_tls"]), (&json!("unix"), &json!(null)));
    fleet.run("edit web --no-vnc-tls").fails(2, "use a loopback address");
    fleet.run(&format!("edit web --no-vnc-tls --vnc 127.0.0.1:{port}")).ok();
    fleet.run("start web").ok();
    assert!(accepts(port, &password));
}

#[test]
fn vnc_is_on_a_private_socket_or_behind_a_password() {
    let fleet = Fleet::new();
    // A port of the host that is free now.
    let port = (5900..6000).find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok()).unwrap();
    let options = format!("--memory {MEMORY} --network none");
    fleet.run(&format!("create web {options} --vnc 0.0.0.0:5901")).fails(2, "use a loopback address");
    fleet.run(&format!("create web {options} --vnc 127.0.0.1:{port} --start")).ok();
    let shown = fleet.show("web");
    assert_eq!((&shown["vnc"], &shown["vnc_socket"]), (&json!(format!("127.0.0.1:{port}")), &json!(null)));
    let file = Path::new(shown["vnc_password"].as_str().unwrap());
    assert_eq!(fs::metadata(file).unwrap().permissions().mode() & 0o777, 0o600);
    let password = fs::read_to_string(file).unwrap().trim().to_owned();
    assert_eq!(password.len(), 8);
    assert!(accepts(port, &password) && !accepts(port, "") && !accepts(port, "password"));
    fleet.run("snapshot create web@live --memory").fails(1, "cannot both listen");
    assert_eq!(fleet.state("web"), "running");
    // The machine keeps the password in the file, also a password that the owner has written.
    fleet.run("stop web --force").ok();
    fs::write(file, "secret\n").unwrap();
    fleet.run("start web").ok();
    assert!(accepts(port, "secret") && !accepts(port, &password));
    // A frozen machine continues with VNC on its TCP port, and a clone has VNC on a socket.
    fleet.run("freeze web").ok();
    fleet.run("clone web twin --instant --identity keep").ok();
    fleet.run("start web").ok();
    assert!(accepts(port, "secret"));
    let shown = fleet.show("twin");
    assert_eq!((&shown["vnc"], &shown["vnc_password"]), (&json!("unix"), &json!(null)));
    let socket = Path::new(shown["vnc_socket"].as_str().unwrap());
    assert_eq!(greet(&mut UnixStream::connect(socket).unwrap()), [1], "without a password");
    let folder = fs::metadata(socket.parent().unwrap()).unwrap();
    assert_eq!(folder.permissions().mode() & 0o777, 0o700);
    assert!(fleet.run("show twin").ok().contains(socket.to_str().unwrap()));
    fleet.run("stop web --force").ok();
    fleet.run("edit web --vnc off").ok();
    assert_eq!(fleet.show("web")["vnc"], json!(null));
    fleet.run("start web").ok();
    assert!(TcpStream::connect(("127.0.0.1", port)).is_err());
}
