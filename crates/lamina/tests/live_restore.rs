//! Disks that can be used while they are restored from a backup, with the command line: the first read, writes
//! meanwhile, kills, a full file system, damaged, missing and moved repositories, and the protection of the backup.

#![allow(clippy::unwrap_used)]

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::time::Instant;
use testkit::mounted::{leave, make_room, on_tmpfs};
use testkit::nbd::Client;
use testkit::process::{PATIENCE, Store, files, run, until};
use testkit::{Random, pattern};

const BLOCK: u64 = 4096;
const PIECE: u64 = 1 << 20;
const SIZE: u64 = 120 << 20;

fn path(folder: &tempfile::TempDir, name: &str) -> PathBuf {
    folder.path().join(name)
}

fn show(store: &Store, disk: &str) -> Value {
    store.run(&format!("--json disk show {disk}")).json()
}

fn is_native(store: &Store, disk: &str) -> bool {
    show(store, disk)["format"] == "native"
}

/// The jobs that copy content, the oldest first.
fn copies(store: &Store) -> Vec<Value> {
    let jobs = store.run("--json job list").json();
    let jobs = jobs["jobs"].as_array().unwrap().iter();
    jobs.filter(|job| job["kind"] == "backup restore --live").cloned().collect()
}

fn readers(repository: &Path) -> usize {
    files(repository).iter().filter(|name| name.starts_with("reader-")).count()
}

/// A disk `web` with two increments in a repository; returns the content of the last backup.
fn backed_up(here: &Store, repository: &Path, options: &str) -> Vec<u8> {
    let repository = repository.display();
    let _server = here.serve("");
    here.run(&format!("disk create web {SIZE}")).ok();
    here.fill("web", 1, (0..60).map(|piece| piece * 2));
    let mut random = Random::new(1);
    for round in 0..3 {
        here.run(&format!("snapshot create web@s{round}")).ok();
        here.run(&format!("backup create web@s{round} {repository} {options}")).ok();
        if round < 2 {
            let mut client = Client::connect(&here.socket(), "web").unwrap();
            for _ in 0..100 {
                let block = random.below(SIZE / BLOCK);
                client.write(block * BLOCK, &random.bytes(BLOCK as usize)).unwrap();
            }
            client.trim(40 * PIECE, 3 * PIECE as u32).unwrap();
            client.flush().unwrap();
        }
    }
    here.content("web@s2")
}

#[test]
fn a_disk_of_64_gib_serves_its_first_block_while_its_content_arrives() {
    let (here, there, beside) = (Store::new(), Store::new(), tempfile::tempdir().unwrap());
    let repository = path(&beside, "backups");
    let at = repository.display();
    let far = [0, 20 << 30, (64 << 30) - PIECE];
    {
        let _server = here.serve("");
        here.run("disk create big 64G").ok();
        here.fill("big", 1, far.iter().map(|offset| offset / PIECE));
        here.fill("big", 1, 1000..1016);
        here.run("snapshot create big@s").ok();
        here.run(&format!("backup create big@s {at}")).ok();
    }
    let _server = there.serve("");
    // The rate makes the copy take minutes, so what is read comes from the backup.
    let begun = Instant::now();
    let made = there.run(&format!("--json backup restore {at} big --live --rate 64K")).json();
    let mut client = Client::connect(&there.socket(), "big").unwrap();
    assert!(client.read(0, PIECE as u32).unwrap() == pattern::bytes(1, PIECE as usize));
    let first = begun.elapsed();
    // The bar for a release build is 1 s; a busy machine and a debug build get some more.
    assert!(first < PATIENCE, "the first read took {first:?}");
    assert_eq!((&made["served"], &made["known"], &made["unprotected"]), (&true.into(), &false.into(), &Value::Null));
    for offset in far {
        assert!(client.read(offset, PIECE as u32).unwrap() == pattern::bytes(1 + offset / PIECE, PIECE as usize));
    }
    assert!(client.read(40 << 30, PIECE as u32).unwrap().iter().all(|byte| *byte == 0));
    // The state is shown, and the backup is protected.
    until("the job runs", || copies(&there).iter().any(|job| job["object"] == "big" && job["state"] == "running"));
    let live = show(&there, "big")["image"]["live"].clone();
    assert!(live["source"].as_str().unwrap().contains("of 'big@s' in"), "{live}");
    assert!(live["running"] == true && live["error"].is_null(), "{live}");
    assert!(there.run("disk show big").ok().contains("live restore"));
    run(&format!("backup delete {at} big@s")).fails(4, "disk 'big' of the datastore");
    let planned = run(&format!("--json backup prune {at} --keep last=1")).json();
    assert_eq!(planned["deleted"], 0);
    there.run("snapshot create big@x").fails(4, "big");
    // The repeated command changes nothing, and a second disk is possible at the same time.
    let again = there.run(&format!("--json backup restore {at} big --live")).json();
    assert_eq!(again["known"], true);
    there.run(&format!("backup restore {at} other --backup big --live --rate 64K")).ok();
    assert_eq!(readers(&repository), 2);
    drop(client);
    there.run("disk delete other").ok();
    there.run("disk delete big").ok();
    assert_eq!(readers(&repository), 0);
    run(&format!("backup delete {at} big@s")).ok();
    there.is_clean();
}

#[test]
fn writes_and_kills_during_the_restore_leave_an_equal_disk() {
    let (here, there, beside) = (Store::new(), Store::new(), tempfile::tempdir().unwrap());
    let (repository, key) = (path(&beside, "backups"), path(&beside, "key"));
    let (at, key) = (repository.display(), key.display());
    run(&format!("backup key {key}")).ok();
    let mut model = backed_up(&here, &repository, &format!("--key-file {key}"));
    let mut server = there.serve("");
    there.run(&format!("backup restore {at} web --live")).fails(2, "--key-file");
    assert_eq!(readers(&repository), 0);
    there.run(&format!("backup restore {at} web --live --rate 20M --key-file {key}")).ok();
    let mut random = Random::new(7);
    for round in 0..3 {
        let mut client = Client::connect(&there.socket(), "web").unwrap();
        for _ in 0..200 {
            let length = 1 + random.below(20_000);
            let offset = random.below(SIZE - length);
            let bytes = random.bytes(length as usize);
            client.write(offset, &bytes).unwrap();
            model[offset as usize..(offset + length) as usize].copy_from_slice(&bytes);
            let offset = random.below(SIZE - length);
            let read = client.read(offset, length as u32).unwrap();
            assert!(read == model[offset as usize..(offset + length) as usize], "{length} bytes at {offset}");
        }
        client.flush().unwrap();
        if round < 2 {
            server.kill();
            server = there.serve("");
        }
    }
    // The next server continues, although the command was not repeated.
    until("all content has arrived", || is_native(&there, "web"));
    std::fs::remove_dir_all(&repository).unwrap();
    assert!(there.content("web") == model);
    // On a slow host, a server that was killed may have made the last step.
    assert!(copies(&there).last().is_none_or(|copy| copy["state"] == "done"));
    there.run("snapshot create web@x").ok();
    server.kill();
    there.is_clean();
    let _server = there.serve("");
    assert!(there.content("web") == model);
}

/// How far the copy has come, in percent; `None` if the disk is native.
fn arrived(store: &Store, disk: &str) -> Option<u64> {
    let live = show(store, disk)["image"]["live"].clone();
    let number = |member: &str| live[member].as_u64();
    Some(number("done")? * 100 / number("total")?.max(1))
}

/// Nothing slows the copy here, so the last kills meet its end, where the disk becomes a native one.
#[test]
fn a_server_that_is_killed_anywhere_in_an_arrival_leaves_a_disk_that_becomes_complete() {
    let (here, there, beside) = (Store::new(), Store::new(), tempfile::tempdir().unwrap());
    let repository = path(&beside, "backups");
    let expected = backed_up(&here, &repository, "");
    let at = repository.display();
    let mut server = there.serve("");
    let mut within = 0;
    for (round, (percent, rate)) in [(1, "--rate 10M"), (50, "--rate 10M"), (99, ""), (100, "")].into_iter().enumerate()
    {
        let disk = format!("vm{round}");
        there.run(&format!("backup restore {at} {disk} --backup web --live {rate}")).ok();
        // What a client has flushed must survive, wherever the copy is.
        let mut client = Client::connect(&there.socket(), &disk).unwrap();
        let (offset, bytes) = (17 * PIECE + 100, vec![round as u8; 9000]);
        client.write(offset, &bytes).unwrap();
        client.flush().unwrap();
        drop(client);
        until("the copy has come far enough", || arrived(&there, &disk).is_none_or(|done| done >= percent));
        server.kill();
        server = there.serve("");
        within += u64::from(!is_native(&there, &disk));
        until("all content has arrived", || is_native(&there, &disk));
        let mut model = expected.clone();
        model[offset as usize..][..bytes.len()].copy_from_slice(&bytes);
        assert!(there.content(&disk) == model, "killed at {percent} %");
        until("the backup is not protected any more", || readers(&repository) == 0);
        there.run(&format!("disk delete {disk}")).ok();
    }
    assert!(within > 0, "no kill was before the end of a copy");
    assert_eq!(server.stop("TERM"), Some(0));
    there.is_clean();
}

#[test]
fn an_arrival_on_a_full_file_system_fails_clearly_and_goes_on_with_room() {
    on_tmpfs("an_arrival_on_a_full_file_system_fails_clearly_and_goes_on_with_room", 160, on_full);
}

fn on_full(folder: &Path) {
    let (here, there, beside) = (Store::new(), Store::at(folder, "4M"), tempfile::tempdir().unwrap());
    let repository = path(&beside, "backups");
    let mut expected = backed_up(&here, &repository, "");
    let at = repository.display();
    let mut server = there.serve("");
    leave(folder, "rest", 30 << 20);
    there.run(&format!("backup restore {at} web --live")).ok();
    let failed = |there: &Store| copies(there).iter().any(|job| job["state"] == "failed");
    until("the file system is full", || failed(&there));
    let error = copies(&there)[0]["error"].to_string();
    assert!(error.contains("no space left"), "{error}");
    // The job ends before the disk shows its error.
    let shown = || show(&there, "web")["image"]["live"]["error"].to_string();
    until("the disk shows the error", || shown().contains("no space left"));
    assert!(there.run("disk show web").ok().contains("failed, and is tried again"));
    // Clients read all content, and overwrite what has arrived.
    assert!(there.content("web") == expected);
    let mut client = Client::connect(&there.socket(), "web").unwrap();
    client.write(BLOCK, &vec![0x5a; BLOCK as usize]).unwrap();
    client.flush().unwrap();
    expected[BLOCK as usize..2 * BLOCK as usize].fill(0x5a);
    drop(client);
    // Also the next server begins on the full file system.
    server.kill();
    server = there.serve("");
    until("the file system is full", || failed(&there));
    assert!(there.content("web") == expected);
    make_room(folder, "rest");
    there.run(&format!("backup restore {at} web --live")).ok();
    until("all content has arrived", || is_native(&there, "web"));
    until("the backup is not protected any more", || readers(&repository) == 0);
    assert!(there.content("web") == expected);
    assert_eq!(server.stop("TERM"), Some(0));
    there.is_clean();
}

#[test]
fn without_a_server_the_disk_is_made_and_the_next_server_copies_its_content() {
    let (here, there, beside) = (Store::new(), Store::new(), tempfile::tempdir().unwrap());
    let repository = path(&beside, "backups");
    let expected = backed_up(&here, &repository, "");
    let at = repository.display();
    let told = there.run(&format!("backup restore {at} copy --backup web@s2 --live")).ok();
    assert!(told.contains("copy can be used, with the content of web@s2: a server"), "{told}");
    assert_eq!(show(&there, "copy")["image"]["live"]["running"], false);
    let _server = there.serve("");
    until("all content has arrived", || is_native(&there, "copy"));
    until("the repository knows it", || readers(&repository) == 0);
    assert!(there.content("copy") == expected);
}

#[test]
fn damage_and_a_missing_repository_fail_only_what_has_not_arrived() {
    let (here, there, beside) = (Store::new(), Store::new(), tempfile::tempdir().unwrap());
    let repository = path(&beside, "backups");
    let expected = backed_up(&here, &repository, "");
    let at = repository.display();
    // A byte in the middle of the largest pack: a chunk of one MiB.
    let pack = files(&repository).into_iter().filter(|name| name.starts_with("pack-"));
    let pack = pack.max_by_key(|name| std::fs::metadata(repository.join(name)).unwrap().len()).unwrap();
    let good = std::fs::read(repository.join(&pack)).unwrap();
    let mut bad = good.clone();
    let middle = bad.len() / 2;
    bad[middle] ^= 1;
    std::fs::write(repository.join(&pack), &bad).unwrap();
    let mut server = there.serve("");
    there.run(&format!("backup restore {at} web --live")).ok();
    until("the copy has failed", || copies(&there).iter().any(|job| job["state"] == "failed"));
    let error = copies(&there)[0]["error"].to_string();
    assert!(error.contains("1 MiB of disk 'web' cannot be read from its source"), "{error}");
    assert!(there.run("disk show web").ok().contains("failed, and is tried again"));
    let failing = |there: &Store| -> Vec<u64> {
        let mut client = Client::connect(&there.socket(), "web").unwrap();
        let mut failing = Vec::new();
        for piece in 0..SIZE / PIECE {
            match client.read(piece * PIECE, PIECE as u32) {
                Ok(bytes) => assert!(bytes == expected[(piece * PIECE) as usize..][..PIECE as usize], "{piece}"),
                Err(_) => failing.push(piece),
            }
        }
        failing
    };
    let damaged = failing(&there);
    assert_eq!(damaged.len(), 1, "{damaged:?}");
    // Without the repository, ranges that have arrived can be read, also by the next server.
    server.kill();
    let away = path(&beside, "away");
    std::fs::rename(&repository, &away).unwrap();
    server = there.serve("");
    until("the copy has failed", || copies(&there).iter().any(|job| job["state"] == "failed"));
    let error = copies(&there)[0]["error"].to_string();
    assert!(error.contains("no repository of backups"), "{error}");
    let missing = failing(&there);
    assert!(missing.contains(&damaged[0]), "{missing:?}");
    // Pieces that the backup has in whole have arrived.
    assert!(
        missing.iter().all(|piece| piece % 2 == 1 || *piece == damaged[0] || (40..43).contains(piece)),
        "{missing:?}"
    );
    // The repository comes back without the damage, and the repeated command continues at once.
    std::fs::rename(&away, &repository).unwrap();
    std::fs::write(repository.join(&pack), &good).unwrap();
    there.run(&format!("backup restore {at} web --live")).ok();
    until("all content has arrived", || is_native(&there, "web"));
    assert!(failing(&there).is_empty());
    server.kill();
    there.is_clean();
}

#[test]
fn a_repository_and_a_key_that_were_moved_are_followed_also_by_the_next_server() {
    let (here, there, beside) = (Store::new(), Store::new(), tempfile::tempdir().unwrap());
    let (repository, key) = (path(&beside, "backups"), path(&beside, "key"));
    run(&format!("backup key {}", key.display())).ok();
    let expected = backed_up(&here, &repository, &format!("--key-file {}", key.display()));
    let restore = |repository: &Path, key: &Path| {
        let (at, key) = (repository.display(), key.display());
        there.run(&format!("--json backup restore {at} web --live --rate 64K --key-file {key}")).json()
    };
    let mut server = there.serve("");
    assert_eq!(restore(&repository, &key)["known"], false);
    let (moved, moved_key) = (path(&beside, "moved"), path(&beside, "moved-key"));
    std::fs::rename(&repository, &moved).unwrap();
    std::fs::rename(&key, &moved_key).unwrap();
    assert_eq!(restore(&moved, &moved_key)["known"], true);
    let source = show(&there, "web")["image"]["live"]["source"].to_string();
    assert!(source.contains(moved.to_str().unwrap()), "{source}");
    assert!(there.content("web") == expected);
    server.kill();
    let _server = there.serve("");
    assert!(there.content("web") == expected);
    assert!(!is_native(&there, "web"), "what was read came from the backup");
    assert_eq!(readers(&moved), 1);
    there.run("disk delete web").ok();
    assert_eq!(readers(&moved), 0);
}

#[test]
fn wrong_input_is_refused_and_a_forced_deletion_ends_the_protection() {
    let (here, there, beside) = (Store::new(), Store::new(), tempfile::tempdir().unwrap());
    let repository = path(&beside, "backups");
    let expected = backed_up(&here, &repository, "");
    let at = repository.display();
    let _server = there.serve("");
    there.run(&format!("backup restore file:{at} web --live")).fails(2, "--live needs the folder");
    there.run("backup restore - web --live").fails(2, "--live needs the folder");
    there.run(&format!("backup restore {at} web --live --update")).fails(2, "--update");
    there.run(&format!("backup restore {at} none --live")).fails(3, "no backup 'none'");
    there.run("disk create taken 1M").ok();
    there.run(&format!("backup restore {at} taken --backup web --live")).fails(1, "taken");
    assert_eq!(readers(&repository), 0);
    there.run(&format!("backup restore {at} web --live --rate 4M")).ok();
    // A job that is cancelled only stops, and the repeated command continues.
    until("the job runs", || !copies(&there).is_empty());
    let id = copies(&there)[0]["id"].as_str().unwrap().to_owned();
    there.run(&format!("job cancel {id}")).ok();
    until("the job has ended", || copies(&there)[0]["state"] == "cancelled");
    let mut client = Client::connect(&there.socket(), "web").unwrap();
    assert!(client.read(SIZE - PIECE, PIECE as u32).unwrap() == expected[(SIZE - PIECE) as usize..]);
    drop(client);
    let deleted = format!("backup delete {at} web@s2 web@s1 web@s0");
    run(&deleted).fails(4, "is being restored from it");
    run(&format!("{deleted} --force")).ok();
    assert_eq!(readers(&repository), 0);
    let mut client = Client::connect(&there.socket(), "web").unwrap();
    assert!((0..SIZE / PIECE).any(|piece| client.read(piece * PIECE, PIECE as u32).is_err()));
    drop(client);
    there.run("disk delete web").ok();
    there.is_clean();
}
