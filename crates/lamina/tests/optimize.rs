//! `lamina disk optimize` through the program, while clients have the disks open.

#![allow(clippy::unwrap_used)]

use std::os::unix::fs::MetadataExt;
use std::process::Stdio;
use std::time::{Duration, Instant};
use testkit::Random;
use testkit::nbd::Client;
use testkit::process::{self, PATIENCE, Store};

const MIB: usize = 1 << 20;

#[test]
fn equal_data_of_disks_in_use_is_stored_once() {
    let store = Store::new();
    let mut server = store.serve("");
    let mut random = Random::new(7);
    let data = random.bytes(2 * MIB);
    let mut clients: Vec<Client> = ["a", "b"]
        .into_iter()
        .map(|name| {
            store.run(&format!("disk create {name} 16M")).ok();
            let mut client = Client::connect(&store.socket(), name).unwrap();
            client.write(4 * MIB as u64, &data).unwrap();
            client.write(8 * MIB as u64, &data[..MIB]).unwrap();
            client.flush().unwrap();
            client
        })
        .collect();
    let shared = |arguments: &str| store.run(&format!("disk optimize {arguments} --json")).json()["shared"].as_u64();
    assert_eq!(shared("a --dedup disk --compression off"), Some(MIB as u64));
    // What `b` has itself twice, and what it has in common with `a`.
    assert_eq!(shared("b --dedup datastore --compression off"), Some(3 * MIB as u64));
    let shown = store.run("disk optimize a --dedup datastore").ok();
    assert!(shown.contains("disk a: 0 B of equal data removed") && shown.contains("compressed to"), "{shown}");
    // A guest overwrites its part of the data.
    let other = random.bytes(MIB / 2);
    clients[1].write(4 * MIB as u64, &other).unwrap();
    clients[1].flush().unwrap();
    let is_kept = |clients: &mut Vec<Client>| {
        for (number, client) in clients.iter_mut().enumerate() {
            let mut wanted = data.clone();
            if number == 1 {
                wanted[..other.len()].copy_from_slice(&other);
            }
            assert!(client.read(4 * MIB as u64, 2 * MIB as u32).unwrap() == wanted);
            assert!(client.read(8 * MIB as u64, MIB as u32).unwrap() == data[..MIB]);
        }
    };
    is_kept(&mut clients);
    drop(clients);
    server.kill();
    let mut server = store.serve("");
    let mut clients: Vec<Client> =
        ["a", "b"].into_iter().map(|name| Client::connect(&store.socket(), name).unwrap()).collect();
    is_kept(&mut clients);
    drop(clients);
    store.run("disk optimize a --compression off").fails(2, "nothing to do");
    store.run("disk optimize a --dedup vm").fails(2, "off, disk, label:KEY, datastore");
    assert_eq!(server.stop("TERM"), Some(0));
    store.is_clean();
}

/// Bytes that the data files occupy.
fn occupied(store: &Store) -> u64 {
    std::fs::metadata(store.path().join("data.0000")).map_or(0, |file| file.blocks() * 512)
}

/// Imports the disk `a`, in which every second block has the same content.
fn import_duplicates(store: &Store) {
    let (mut random, image) = (Random::new(8), store.path().with_extension("raw"));
    let repeated = random.bytes(4096);
    let bytes: Vec<u8> = (0..8192).flat_map(|_| [random.bytes(4096), repeated.clone()].concat()).collect();
    std::fs::write(&image, bytes).unwrap();
    store.run(&format!("disk import {} a --from raw", image.display())).ok();
    std::fs::remove_file(&image).unwrap();
}

/// Commands on a datastore that is not served have no threads that go on afterwards.
#[test]
fn a_command_without_a_server_returns_what_it_frees_before_it_ends() {
    let store = Store::new();
    import_duplicates(&store);
    let before = occupied(&store);
    assert!(before >= 64 << 20, "{before}");
    store.run("disk optimize a --dedup disk --compression off").ok();
    let reduced = occupied(&store);
    assert!(reduced < (33 << 20), "{reduced} of {before} bytes are left");
    store.run("disk delete a").ok();
    let left = occupied(&store);
    assert!(left < 1 << 20, "{left} bytes are left");
    store.is_clean();
}

#[test]
fn freed_single_blocks_are_returned_while_a_client_writes_all_the_time() {
    let store = Store::new();
    import_duplicates(&store);
    store.run("disk create busy 16M").ok();
    let mut server = store.serve("");
    let mut client = Client::connect(&store.socket(), "busy").unwrap();
    store.run("disk optimize a --dedup disk --compression off").ok();
    let begun = Instant::now();
    // Half of 64 MiB is needed, and the server keeps a 32nd of that ahead, and what the writer needs.
    while occupied(&store) > (40 << 20) {
        assert!(begun.elapsed() < PATIENCE, "{} bytes are left", occupied(&store));
        client.write(0, &[1; 4096]).unwrap();
        std::thread::sleep(Duration::from_millis(300));
    }
    drop(client);
    assert_eq!(server.stop("TERM"), Some(0));
    store.is_clean();
}

#[test]
fn the_least_rate_delays_neither_an_empty_disk_nor_an_interrupt() {
    let store = Store::new();
    let mut server = store.serve("");
    store.run("disk create empty 64G").ok();
    for command in [
        "disk optimize empty",
        "disk migrate empty -d sesparse",
        "disk consolidate empty",
        "snapshot delete empty@s",
        "scrub start",
        "scrub --every 7d",
        "backup create empty /nowhere",
    ] {
        store.run(&format!("{command} --rate 1")).fails(2, "the least is 64 KiB per second, and 0 is no limit");
    }
    let begun = Instant::now();
    store.run("disk optimize empty --dedup disk --rate 64K").ok();
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    store.run("disk create full 16M").ok();
    let mut client = Client::connect(&store.socket(), "full").unwrap();
    client.write(0, &Random::new(3).bytes(8 * MIB)).unwrap();
    client.flush().unwrap();
    let mut command = store.command("disk optimize full --rate 64K");
    let running = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let is_job = || {
        let list = store.run("job list --json").json();
        list["jobs"].as_array().unwrap().iter().any(|job| job["object"] == "full" && job["state"] == "running")
    };
    process::until("it is a job", is_job);
    process::send(running.id(), "INT");
    let begun = Instant::now();
    let done: process::Done = running.wait_with_output().unwrap().into();
    done.fails(130, "stopped");
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    drop(client);
    assert_eq!(server.stop("TERM"), Some(0));
    store.is_clean();
}
