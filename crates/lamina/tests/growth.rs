//! Growth and time to full: a server takes samples, and commands compute rates from them.

#![allow(clippy::unwrap_used)]

use serde_json::{Value, json};
use std::fmt::Write;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};
use testkit::nbd::Client;
use testkit::process::{Store, until};

const HOUR: u64 = 3600;

/// The CRC32C of bytes, computed bit by bit from its definition.
fn crc32c(bytes: &[u8]) -> u32 {
    let step = |sum: u32| (0..8).fold(sum, |sum, _| sum >> 1 ^ if sum & 1 == 1 { 0x82f6_3b78 } else { 0 });
    !bytes.iter().fold(!0, |sum, byte| step(sum ^ u32::from(*byte)))
}

fn record(store: &Path) -> Value {
    let text = std::fs::read_to_string(store.join("growth")).unwrap();
    let (head, body) = text.split_once('\n').unwrap();
    assert_eq!(head, format!("lamina growth 1 crc32c={:08x}", crc32c(body.as_bytes())));
    serde_json::from_str(body).unwrap()
}

/// Replaces the samples by one each hour, in which the datastore grows by a GiB and each disk by a MiB.
fn pretend(store: &Path, uuids: &[String], hours: u64) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let samples =
        |unit: u64| (0..=hours).map(|hour| json!([now - (hours - hour) * HOUR, hour * unit])).collect::<Vec<_>>();
    let disks: serde_json::Map<String, Value> =
        uuids.iter().map(|uuid| (uuid.clone(), json!(samples(1 << 20)))).collect();
    let body = json!({ "datastore": samples(1 << 30), "disks": disks }).to_string();
    let mut text = String::new();
    write!(text, "lamina growth 1 crc32c={:08x}\n{body}", crc32c(body.as_bytes())).unwrap();
    std::fs::write(store.join("growth"), text).unwrap();
}

#[test]
fn rates_are_shown_with_and_without_a_server() {
    let store = Store::new();
    let create = |name: &str, format: &str| {
        let made = store.run(&format!("disk create {name} 64M --format {format} --json")).json();
        made["uuid"].as_str().unwrap().to_owned()
    };
    let uuids = [create("a", "native"), create("b", "thin")];
    assert_eq!(store.run("status --json").json()["growth"], Value::Null);
    assert!(!store.run("disk list --space").ok().contains("FULL IN"));

    let mut server = store.serve("");
    let mut clients = ["a", "b"].map(|name| Client::connect(&store.socket(), name).unwrap());
    for client in &mut clients {
        client.write(0, &[7; 1 << 20]).unwrap();
        client.flush().unwrap();
    }
    drop(clients);
    until("the data is in the map", || store.run("disk show a --json").json()["blocks_allocated"] == 256);
    assert_eq!(server.stop("TERM"), Some(0));
    let found = record(&store.path());
    assert!(!found["datastore"].as_array().unwrap().is_empty());
    for uuid in &uuids {
        let last = found["disks"][uuid].as_array().unwrap().last().unwrap()[1].as_u64().unwrap();
        assert!((1 << 20..2 << 20).contains(&last), "{found}");
    }

    pretend(&store.path(), &uuids, 48);
    for served in [false, true] {
        let server = served.then(|| store.serve(""));
        let growth = store.run("status --json").json()["growth"].clone();
        let day = &growth["day"];
        let (bytes, seconds) = (day["bytes"].as_i64().unwrap(), day["seconds"].as_u64().unwrap());
        assert!(day["full_in"].is_u64() || bytes <= 0, "{growth}");
        assert!((23 * HOUR..=24 * HOUR).contains(&seconds), "{growth}");
        assert_eq!(growth["week"], Value::Null, "48 hours are less than half of a week");
        let text = store.run("status").ok();
        assert!(text.contains("growth:") && text.contains("full in:"), "{text}");
        let space = store.run("disk list --space --json").json();
        for disk in space["disks"].as_array().unwrap() {
            let day = &disk["growth"]["day"];
            assert!((22 << 20..=24 << 20).contains(&day["bytes"].as_i64().unwrap()), "{disk}");
            // 63 of 64 MiB are not mapped; the space of a flat disk is counted in blocks of 1 MiB.
            let full = day["full_in"].as_u64().unwrap();
            assert!((60 * HOUR..=70 * HOUR).contains(&full), "{disk}");
        }
        let table = store.run("disk list --space").ok();
        assert!(table.contains("GROWTH") && table.contains("FULL IN") && table.contains("MiB/day"), "{table}");
        drop(server);
    }

    // Samples that cannot be read are replaced.
    std::fs::write(store.path().join("growth"), "x").unwrap();
    let done = store.run("status --json");
    assert_eq!((done.code, &serde_json::from_str::<Value>(&done.stdout).unwrap()["growth"]), (0, &Value::Null));
    assert_eq!(store.serve("").stop("TERM"), Some(0));
    record(&store.path());
    store.is_clean();
}
