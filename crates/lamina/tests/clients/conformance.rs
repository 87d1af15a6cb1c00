//! The properties that libnbd's own tests expect of a server, in every style, with and without TLS: each option of the
//! handshake, chunks of reads, block status, errors, many requests at once, and the end of a connection by either side.

use crate::operation::{DATA_END, SIZE, STYLES, Style};
use crate::program::Generation;
use crate::served::Served;
use testkit::nbd::Client;

/// A capacity that a reply with 32-bit lengths cannot express.
const LARGE: u64 = 1 << 40;

/// Runs every check in one style; returns the failed ones and the number of checks.
fn checks(generation: Generation, style: Style, tls: bool) -> (Vec<String>, usize) {
    let mut served = Served::start();
    served.make("vm1");
    served.make("work");
    served.store.run(&format!("disk create large {LARGE}")).ok();
    served.store.run("snapshot create vm1@before").ok();
    let mut client = Client::connect(&served.store.socket(), "vm1").unwrap();
    client.write((1 << 20) + (64 << 10), &[0x55; 64 << 10]).unwrap();
    let mut client = Client::connect(&served.store.socket(), "large").unwrap();
    client.write(LARGE / 2, &[0x66; 4096]).unwrap();
    client.flush().unwrap();

    let task = serde_json::json!({
        "style": format!("{style:?}"),
        "tls": tls,
        "socket": served.store.socket(),
        "port": served.port,
        "certificates": served.certificates(),
        "size": SIZE,
        "data_end": DATA_END,
        "large_size": LARGE,
        "exports": ["large", "vm1", "vm1@before", "work"],
        "pid": served.server.pid(),
    });
    let text = generation.run("python3", &["-c", include_str!("conformance.py"), &task.to_string()]);
    let version = generation.version("python3");
    let connection = if tls { "TLS" } else { "unix" };
    let name = |check: &str| format!("libnbd {version}, {style:?}, {connection}: {check}");
    let text = text.unwrap_or_else(|message| panic!("{}", name(&message)));
    assert!(text.contains(" the server dies"), "{}", name(&text));
    let failed = text.lines().filter_map(|line| line.strip_prefix("failed ")).map(name).collect();

    // The last check kills the server. After that, the check of the datastore must find no problems.
    served.server.kill();
    served.store.is_clean();
    (failed, text.lines().count())
}

fn every_style(generation: Generation) {
    let known = STYLES.into_iter().filter(|style| *style != Style::Extended || generation.libnbd_style() == *style);
    let (mut failures, mut count) = (Vec::new(), 0);
    for (style, tls) in known.flat_map(|style| [(style, false), (style, true)]) {
        let (failed, checked) = checks(generation, style, tls);
        failures.extend(failed);
        count += checked;
    }
    assert!(failures.is_empty(), "{} of {count} checks failed:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn installed_libnbd() {
    every_style(Generation::Installed);
}

#[test]
fn newest_libnbd() {
    every_style(Generation::Newest);
}
