//! TLS over TCP with client certificates made by openssl, used by libnbd and QEMU (both based on GnuTLS).

#![allow(clippy::unwrap_used)]

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Stdio};
use testkit::authority::authority;
use testkit::process::{Serving, Store, tool, until};

fn succeeds(program: &str, arguments: &[&str]) -> bool {
    let mut command = Command::new(program);
    let status = command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
    status.unwrap_or_else(|e| panic!("{program}: {e}; the tests need it")).success()
}

/// Sends bytes to a server after its greeting and the start of TLS, and waits until the server closes the connection.
fn fail_the_handshake(address: &str, options: &[u8], rubbish: &[u8]) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.read_exact(&mut [0; 18]).unwrap();
    stream.write_all(options).unwrap();
    if options.len() > 4 {
        stream.read_exact(&mut [0; 20]).unwrap();
    }
    let _ = stream.write_all(rubbish);
    let _ = std::io::copy(&mut stream, &mut std::io::sink());
}

#[test]
fn failed_handshakes_are_logged_at_a_bounded_rate_with_their_number() {
    let folder = tempfile::tempdir().unwrap();
    let keys = folder.path().join("keys");
    authority(&keys);
    let file = |name: &str| keys.join(name).display().to_string();
    let store = Store::new();
    let mut server = store.serve(&format!(
        "--tcp 127.0.0.1:0 --json --tls-cert {} --tls-key {}",
        file("server-cert.pem"),
        file("server-key.pem")
    ));
    let ready: serde_json::Value = serde_json::from_str(&server.ready).unwrap();
    let address = ready["nbd"].as_array().unwrap().iter().find_map(|uri| uri.as_str().unwrap().strip_prefix("nbds://"));
    let address = address.unwrap().trim_end_matches('/');
    const STARTTLS: &[u8] = b"\0\0\0\x03IHAVEOPT\0\0\0\x05\0\0\0\0";
    for _ in 0..100 {
        fail_the_handshake(address, STARTTLS, &[0xa5; 64]);
        fail_the_handshake(address, b"\0\0\0\x03", &[0xa5; 64]);
        fail_the_handshake(address, b"\xff\0\0\x03", &[]);
    }
    let lines = |server: &Serving| {
        let log = server.log();
        log.lines().filter(|line| line.contains("127.0.0.1")).map(str::to_owned).collect::<Vec<_>>()
    };
    let first = lines(&server);
    // The first failure is logged at once. If the load on this machine makes the test take longer than the interval of
    // ten seconds, a few more lines are due.
    assert!((1..=6).contains(&first.len()), "{first:#?}");
    assert!(first[0].contains("failed=1") && first[0].contains("in the handshake by errors"), "{}", first[0]);
    until("the failures of the interval are logged with their number", || {
        lines(&server).iter().map(|line| number_of_failures(line)).sum::<u64>() == 300
    });
    assert_eq!(server.stop("TERM"), Some(0));
}

fn number_of_failures(line: &str) -> u64 {
    let number = line.split("failed=").nth(1).and_then(|rest| rest.split(' ').next());
    number.and_then(|number| number.parse().ok()).unwrap_or(0)
}

#[test]
fn only_clients_with_a_certificate_of_the_given_authority_connect() {
    let folder = tempfile::tempdir().unwrap();
    let [ours, theirs, unknown] = ["ours", "theirs", "unknown"].map(|name| folder.path().join(name));
    authority(&ours);
    authority(&theirs);
    // A folder for a client that has the right authority's certificate but no certificate of its own.
    std::fs::create_dir(&unknown).unwrap();
    std::fs::copy(ours.join("ca-cert.pem"), unknown.join("ca-cert.pem")).unwrap();
    std::fs::copy(ours.join("ca-cert.pem"), theirs.join("ca-cert.pem")).unwrap();

    let store = Store::new();
    store.run("disk create vm1 16M").ok();
    let file = |name: &str| ours.join(name).display().to_string();
    let mut server = store.serve(&format!(
        "--json --tcp 127.0.0.1:0 --tls-cert {} --tls-key {} --tls-client-ca {}",
        file("server-cert.pem"),
        file("server-key.pem"),
        file("ca-cert.pem")
    ));
    let ready: serde_json::Value = serde_json::from_str(&server.ready).unwrap();
    let tcp = ready["nbd"].as_array().unwrap().iter().find_map(|uri| {
        let uri = uri.as_str().unwrap();
        uri.strip_prefix("nbds://").or(uri.strip_prefix("nbd://")).map(|rest| rest.trim_end_matches('/').to_string())
    });
    let tcp = tcp.unwrap();
    let port = tcp.rsplit(':').next().unwrap();
    let uri = |folder: &Path| format!("nbds://{tcp}/vm1?tls-certificates={}", folder.display());
    let object = |folder: &Path| format!("tls-creds-x509,id=tls0,endpoint=client,dir={}", folder.display());
    let image =
        format!("driver=nbd,server.type=inet,server.host=127.0.0.1,server.port={port},export=vm1,tls-creds=tls0");

    let image_path = folder.path().join("image");
    let image_text = image_path.to_str().unwrap();
    std::fs::write(&image_path, vec![0x5a; 16 << 20]).unwrap();
    tool("nbdcopy", &["--flush", image_text, &uri(&ours)]);
    assert_eq!(tool("nbdinfo", &["--size", &uri(&ours)]).trim(), (16 << 20).to_string());
    assert!(tool("nbdinfo", &[&uri(&ours)]).contains("TLS"));
    let io = ["--object", &object(&ours), "--image-opts", &image, "-c", "read -P 0x5a 0 16M", "-c", "write -P 1 0 64k"];
    let text = tool("qemu-io", &[&io[..], &["-c", "flush"]].concat());
    assert!(!text.contains("failed"), "{text}");
    tool("qemu-img", &["info", "--object", &object(&ours), "--image-opts", &image]);

    for folder in [&unknown, &theirs] {
        assert!(!succeeds("nbdinfo", &["--size", &uri(folder)]), "{}", folder.display());
        assert!(!succeeds("qemu-img", &["info", "--object", &object(folder), "--image-opts", &image]));
    }
    assert!(!succeeds("nbdinfo", &["--size", &format!("nbd://{tcp}/vm1")]), "no data is sent in clear text");
    drop(server);

    // The server's certificate has the name localhost.
    store.run("disk create vm2 16M").ok();
    store.run("snapshot create vm1@monday").ok();
    let rules = folder.path().join("rules");
    let serve = |text: &str| {
        std::fs::write(&rules, text).unwrap();
        store.serve(&format!(
            "--tcp {tcp} --tls-cert {} --tls-key {} --tls-client-ca {} --access {}",
            file("server-cert.pem"),
            file("server-key.pem"),
            file("ca-cert.pem"),
            rules.display()
        ))
    };
    let list = || {
        let uri = format!("nbds://{tcp}/?tls-certificates={}", ours.display());
        let text = tool("nbdinfo", &["--list", "--json", &uri]);
        let list: serde_json::Value = serde_json::from_str(&text).unwrap();
        let names =
            list["exports"].as_array().unwrap().iter().map(|one| one["export-name"].as_str().unwrap().to_owned());
        names.collect::<std::collections::BTreeSet<String>>()
    };
    let other = format!("nbds://{tcp}/vm2?tls-certificates={}", ours.display());
    server = serve("localhost vm1 read\nelsewhere.example * write\n");
    assert_eq!(list(), ["vm1", "vm1@monday"].map(str::to_owned).into());
    assert!(tool("nbdinfo", &[&uri(&ours)]).contains("is_read_only: true"));
    assert!(!succeeds("nbdinfo", &["--size", &other]));
    assert!(succeeds("nbdinfo", &["--size", &store.uri("vm2")]), "the rules are not for the unix socket");
    drop(server);
    server = serve("localhost vm? write\n");
    assert_eq!(list().len(), 3);
    tool("nbdcopy", &["--flush", image_text, &other]);
    std::fs::write(&rules, "localhost vm1 all\n").unwrap();
    let tls = format!(
        "--tls-cert {0} --tls-key {1} --tls-client-ca {2}",
        file("server-cert.pem"),
        file("server-key.pem"),
        file("ca-cert.pem")
    );
    let options = format!("serve --tcp 127.0.0.1:0 {tls} --access {}", rules.display());
    let elsewhere = Store::new();
    elsewhere.run(&options).fails(2, "line 1: 'all' is neither read nor write");
    elsewhere.run(&format!("{options} --receive 127.0.0.1:0")).fails(2, "--receive-from");
    // Permissions restrict the unix socket, so it needs no TLS.
    assert!(succeeds("nbdinfo", &["--size", &store.uri("vm1")]));
    assert_eq!(server.stop("TERM"), Some(0));
    store.is_clean();
}
