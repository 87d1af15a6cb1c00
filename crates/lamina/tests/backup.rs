//! Backups with the command line: to a folder, a file and a pipe, with and without a server, with cuts, damage and
//! wrong input. A restored disk is equal to the snapshot to the byte.

#![allow(clippy::unwrap_used)]

use serde_json::Value;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use testkit::nbd::Client;
use testkit::process::{Done, Store, files, lamina, output, run, send, until, wait, wait_until_interruptible};
use testkit::{Random, pattern};

const BLOCK: u64 = 4096;
const PIECE: u64 = 1 << 20;
const SIZE: u64 = 200 << 20;

/// A folder beside the datastores.
struct Beside(tempfile::TempDir);

impl Beside {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }
}

fn number(value: &Value, member: &str) -> u64 {
    value[member].as_u64().unwrap_or_else(|| panic!("{member} of {value}"))
}

fn list(repository: &str) -> Vec<Value> {
    run(&format!("backup list {repository} --json")).json()["backups"].as_array().unwrap().clone()
}

/// Deletes the receptions of failed restores. A further restore would continue a reception, and not read the bytes
/// again that the reception has.
fn forget_receptions(store: &Store) {
    for reception in store.run("--json receive list").json()["receptions"].as_array().unwrap() {
        store.run(&format!("receive delete {}", reception["id"].as_str().unwrap())).ok();
    }
}

#[test]
fn a_repository_has_increments_and_restores_each_of_them_equal() {
    let (here, there, beside) = (Store::new(), Store::new(), Beside::new());
    let repository = beside.text("backups");
    let mut random = Random::new(1);
    let mut contents = Vec::new();
    {
        let _server = here.serve("");
        here.run(&format!("disk create web {SIZE}")).ok();
        here.fill("web", 1, (0..40).map(|piece| piece * 3));
        here.run("snapshot create web@s0").ok();
        contents.push(here.content("web@s0"));
        let full = here.run(&format!("--json backup create web@s0 {repository}")).json();
        assert_eq!((number(&full, "data"), &full["based_on"]), (40 * PIECE, &Value::Null), "{full}");
        for round in 1..4u64 {
            let mut client = Client::connect(&here.socket(), "web").unwrap();
            let changed = 300;
            for place in 0..changed {
                client.write((place * 150 + round) * BLOCK, &random.bytes(BLOCK as usize)).unwrap();
            }
            client.flush().unwrap();
            here.run(&format!("snapshot create web@s{round}")).ok();
            contents.push(here.content(&format!("web@s{round}")));
            let made = here.run(&format!("--json backup create web@s{round} {repository}")).json();
            assert_eq!(number(&made, "data"), changed * BLOCK, "{made}");
            assert!(number(&made, "stored") <= changed * BLOCK * 102 / 100, "{made}");
            assert_eq!(made["based_on"], format!("s{}", round - 1));
        }
        let again = here.run(&format!("backup create web@s3 {repository}")).ok();
        assert!(again.starts_with("web@s3 was backed up before, as "), "{again}");
        let full = here.run(&format!("--json backup create web@s3 {repository} --full")).json();
        assert_eq!(full["based_on"], Value::Null);
    }
    let backups = list(&repository);
    assert_eq!(backups.len(), 5);
    assert!(backups.iter().all(|backup| backup["problem"].is_null() && backup["finished"].is_u64()), "{backups:?}");
    let verified = run(&format!("backup verify {repository}")).ok();
    assert!(verified.starts_with("5 backups verified") && verified.ends_with("clean\n"), "{verified}");
    // The backups are restored without a server, and compared through a server. Each id belongs to the incremental
    // backup, not to the full backup.
    for (round, backup) in backups.iter().take(4).enumerate() {
        let id = &backup["id"].as_str().unwrap()[..8];
        let restored = there.run(&format!("--json backup restore {repository} r{round} --backup {id}")).json();
        assert_eq!(restored["snapshot"], format!("s{round}"));
    }
    // The name of a disk stands for its newest backup.
    there.run(&format!("backup restore {repository} web")).ok();
    {
        let _server = there.serve("");
        for (round, expected) in contents.iter().enumerate() {
            assert!(there.content(&format!("r{round}")) == *expected, "r{round}");
            assert!(there.content(&format!("r{round}@s{round}")) == *expected, "r{round}@s{round}");
        }
        assert!(there.content("web") == contents[3]);
    }
    there.is_clean();
    let ids: Vec<&str> = backups.iter().map(|backup| backup["id"].as_str().unwrap()).collect();
    run(&format!("backup delete {repository} {}", ids[1])).fails(4, "is based on it");
    run(&format!("backup delete {repository} {} {} {} {}", ids[0], ids[1], ids[2], ids[3])).ok();
    assert_eq!(list(&repository).len(), 1);
    assert!(files(Path::new(&repository)).iter().all(|name| ids[..4].iter().all(|id| !name.contains(id))));
}

#[test]
fn the_current_state_is_backed_up_by_a_snapshot_that_the_next_backup_replaces() {
    let (here, beside) = (Store::new(), Beside::new());
    let repository = beside.text("backups");
    let _server = here.serve("");
    here.run(&format!("disk create web {SIZE}")).ok();
    let snapshots = || here.run("--json snapshot list web").json()["snapshots"].as_array().unwrap().len();
    for round in 0..3u64 {
        here.fill("web", round * 100, [round]);
        let made = here.run(&format!("--json backup create web {repository}")).json();
        assert_eq!(number(&made, "data"), PIECE);
        assert_eq!(made["based_on"].is_null(), round == 0, "{made}");
        assert_eq!(snapshots(), 1);
    }
    // The snapshot of another repository stays.
    here.run(&format!("backup create web {}", beside.text("others"))).ok();
    assert_eq!(snapshots(), 2);
    here.run(&format!("backup restore {repository} copy --backup web")).ok();
    assert!(here.content("copy") == here.content("web"));
    // The server makes the backup as a job.
    let job = here.run(&format!("--json --background backup create web {repository}")).json();
    let done = here.run(&format!("job wait {}", job["id"].as_str().unwrap())).ok();
    assert!(done.starts_with("backed up web@backup-"), "{done}");
    assert_eq!(list(&repository).len(), 4);
}

#[test]
fn a_killed_or_interrupted_backup_or_restore_continues() {
    let (here, there, beside) = (Store::new(), Store::new(), Beside::new());
    let repository = beside.text("backups");
    let mut server = here.serve("");
    here.run(&format!("disk create web {SIZE}")).ok();
    here.fill("web", 7, 0..80);
    here.run("snapshot create web@s").ok();
    let expected = here.content("web@s");
    // The rate makes the backup take seconds.
    let slow = |store: &Store, arguments: &str| {
        store.command(arguments).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    };
    let packs = |count: usize| {
        let found = std::fs::read_dir(&repository).map(|entries| {
            entries.filter(|entry| entry.as_ref().unwrap().file_name().to_string_lossy().starts_with("pack-")).count()
        });
        found.unwrap_or(0) >= count
    };
    let mut command = slow(&here, &format!("backup create web@s {repository} --rate 30M"));
    wait_until_interruptible(command.id());
    until("a pack was stored", || packs(1));
    send(command.id(), "INT");
    assert_eq!(wait(&mut command), Some(130));
    assert_eq!(list(&repository)[0]["finished"], Value::Null);
    let mut command = slow(&here, &format!("backup create web@s {repository} --rate 30M"));
    until("another pack was stored", || packs(2));
    server.kill();
    wait(&mut command);
    // The next backup is made without a server.
    let made = here.run(&format!("--json backup create web@s {repository}")).json();
    assert!(number(&made, "resumed") > 16 << 20, "{made}");
    assert_eq!(number(&made, "data"), 80 * PIECE);
    run(&format!("backup verify {repository}")).ok();
    let mut command = slow(&there, &format!("backup restore {repository} web --rate 8M"));
    wait_until_interruptible(command.id());
    std::thread::sleep(std::time::Duration::from_millis(2500));
    send(command.id(), "INT");
    assert_eq!(wait(&mut command), Some(130));
    let kept = there.run("--json receive list").json();
    assert!(number(&kept["receptions"][0], "bytes") > 0, "{kept}");
    let restored = there.run(&format!("--json backup restore {repository} web")).json();
    assert!(number(&restored, "resumed") > 0, "{restored}");
    let _server = there.serve("");
    assert!(there.content("web") == expected);
}

#[test]
fn a_file_and_a_pipe_carry_backups_and_increments() {
    let (here, there, beside) = (Store::new(), Store::new(), Beside::new());
    let (_here, _there) = (here.serve(""), there.serve(""));
    here.run(&format!("disk create web {SIZE}")).ok();
    here.fill("web", 3, [0, 5, 199]);
    here.run("snapshot create web@a").ok();
    here.fill("web", 4, [5, 6]);
    here.run("snapshot create web@b").ok();
    let (first, second) = (here.content("web@a"), here.content("web@b"));
    let file = beside.text("web");
    let made = here.run(&format!("--json backup create web@a file:{file}")).json();
    assert_eq!(number(&made, "data"), 3 * PIECE);
    assert!(number(&made, "stored") < std::fs::metadata(&file).unwrap().len(), "{made}");
    // A backup continues in a file that was cut anywhere, and a damaged file is detected.
    let whole = std::fs::read(&file).unwrap();
    let mut random = Random::new(5);
    for _ in 0..8 {
        std::fs::write(&file, &whole[..random.index(whole.len())]).unwrap();
        let verified = run(&format!("backup verify file:{file}"));
        assert_eq!(verified.code, 6, "{verified:?}");
        here.run(&format!("backup create web@a file:{file}")).ok();
        run(&format!("backup verify file:{file}")).ok();
    }
    for _ in 0..8 {
        let mut bad = whole.clone();
        let at = random.index(bad.len());
        bad[at] ^= 0x10;
        let damaged = beside.text("damaged");
        std::fs::write(&damaged, &bad).unwrap();
        let verified = run(&format!("--json backup verify file:{damaged}"));
        assert_eq!(verified.code, 6, "byte {at}: {verified:?}");
        let code = there.run(&format!("backup restore file:{damaged} bad")).code;
        assert!(code == 6, "byte {at} of {}: exit code {code}", bad.len());
        forget_receptions(&there);
    }
    let listed = run(&format!("--json backup list file:{file}")).json();
    assert_eq!(listed["backups"][0]["snapshot"], "a");
    there.run(&format!("backup restore file:{file} web")).ok();
    assert!(there.content("web") == first);
    // A pipe: the increment updates the restored disk.
    let mut sender = here.command("backup create web@b - --from a").stdout(Stdio::piped()).spawn().unwrap();
    let mut receiver = there.command("--json backup restore - web --update");
    let received: Done = output(receiver.stdin(Stdio::from(sender.stdout.take().unwrap()))).into();
    assert_eq!(number(&received.json(), "data"), 2 * PIECE);
    assert_eq!(wait(&mut sender), Some(0));
    assert!(there.content("web") == second && there.content("web@a") == first);
    // A stream to standard output that is redirected to a file is a backup in a file.
    let piped = File::create(beside.path("piped")).unwrap();
    assert!(here.command("backup create web@a -").stdout(piped).status().unwrap().success());
    run(&format!("backup verify file:{}", beside.text("piped"))).ok();
    // A reader that ends the pipe ends the command, and a pipe that ends early leaves no disk.
    let mut sender =
        here.command("backup create web@a -").stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    drop(sender.stdout.take());
    assert_ne!(wait(&mut sender), Some(0));
    std::fs::write(beside.path("cut"), &whole[..whole.len() / 2]).unwrap();
    let cut = File::open(beside.path("cut")).unwrap();
    let received: Done = output(there.command("backup restore - early").stdin(cut)).into();
    received.fails(1, "it was cut, or is not complete yet");
    there.run("disk show early").fails(3, "early");
    assert!(files(&here.path()).iter().chain(&files(&there.path())).all(|name| !name.starts_with("backup-")));
}

/// The first SIGINT ends the command, although nothing reads or writes the other end of its pipe.
#[test]
fn an_interrupted_command_does_not_wait_for_its_pipe() {
    let here = Store::new();
    let mut server = here.serve("");
    here.run(&format!("disk create web {SIZE}")).ok();
    here.fill("web", 9, 0..40);
    here.run("snapshot create web@s").ok();
    let running = || {
        let jobs = here.run("--json job list").json();
        jobs["jobs"].as_array().unwrap().iter().any(|job| job["state"] == "running")
    };
    for arguments in ["backup create web@s -", "backup restore - copy"] {
        let mut command = here.command(arguments);
        let mut command = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        until("the job runs", running);
        send(command.id(), "INT");
        assert_eq!(wait(&mut command), Some(130), "{arguments}");
        until("the job has ended", || !running());
    }
    // The server stops, too, although the command is still there.
    let mut command = here.command("backup restore - copy");
    let mut command = command.stdin(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    until("the job runs", running);
    assert_eq!(server.stop("TERM"), Some(0));
    assert_eq!(wait(&mut command), Some(130));
}

#[test]
fn rules_delete_old_backups_and_keep_what_others_are_based_on() {
    let (here, beside) = (Store::new(), Beside::new());
    let repository = beside.text("backups");
    let _server = here.serve("");
    here.run("disk create web 64M").ok();
    for (round, full) in [(0, ""), (1, ""), (2, "--full"), (3, "")] {
        here.fill("web", round, [round]);
        here.run(&format!("snapshot create web@s{round}")).ok();
        here.run(&format!("backup create web@s{round} {repository} {full}")).ok();
    }
    let prune = |arguments: &str| run(&format!("--json backup prune {repository} {arguments}"));
    let reasons = |pruned: &Value| -> Vec<String> {
        let backups = pruned["backups"].as_array().unwrap().iter();
        backups
            .map(|backup| backup["reasons"].as_array().unwrap().iter().map(|it| it.as_str().unwrap()).collect())
            .collect()
    };
    let planned = prune("--keep last=1 --dry-run").json();
    assert_eq!(reasons(&planned), ["", "", "base", "last"]);
    assert_eq!((number(&planned, "deleted"), list(&repository).len()), (2, 4));
    prune("").fails(2, "--keep");
    prune("--keep weeks=1").fails(2, "daily=7,weekly=4");
    assert_eq!(number(&prune("--keep daily=1,yearly=3").json(), "deleted"), 2);
    assert_eq!(list(&repository).len(), 2);
    run(&format!("backup verify {repository}")).ok();
    here.run(&format!("backup restore {repository} copy --backup web@s3")).ok();
    assert!(here.content("copy") == here.content("web@s3"));
}

#[test]
fn encrypted_backups_are_restored_with_their_key_only() {
    let (here, there, beside) = (Store::new(), Store::new(), Beside::new());
    let (repository, key, other) = (beside.text("backups"), beside.text("key"), beside.text("other"));
    let made = run(&format!("--json backup key {key}")).json();
    assert_eq!(made["id"].as_str().unwrap().len(), 16);
    run(&format!("backup key {key}")).fails(1, "key");
    run(&format!("backup key {other}")).ok();
    let (_here, _there) = (here.serve(""), there.serve(""));
    here.run(&format!("disk create web {SIZE}")).ok();
    here.fill("web", 3, [0, 40]);
    here.run("snapshot create web@a").ok();
    here.run(&format!("backup create web@a {repository} --key-file {key}")).ok();
    here.fill("web", 4, [1]);
    here.run("snapshot create web@b").ok();
    here.run(&format!("backup create web@b {repository}")).fails(2, "--key-file");
    let increment = here.run(&format!("--json backup create web@b {repository} --key-file {key}")).json();
    assert_eq!((number(&increment, "data"), &increment["based_on"]), (PIECE, &Value::from("a")));
    assert_eq!(list(&repository).len(), 2);
    run(&format!("backup verify {repository}")).fails(2, "--key-file");
    run(&format!("backup verify {repository} --key-file {key}")).ok();
    for (option, words) in [(String::new(), "--key-file"), (format!("--key-file {other}"), "encrypted with the key")] {
        there.run(&format!("backup restore {repository} web {option}")).fails(2, words);
    }
    there.run(&format!("backup restore {repository} web --key-file {repository}/repository")).fails(2, "not a key");
    there.run(&format!("backup restore {repository} web --key-file {key}")).ok();
    assert!(there.content("web") == here.content("web@b"));
    // The backup is sent through a pipe, with the key in the environment.
    let mut sender =
        here.command("backup create web@a -").env("LAMINA_BACKUP_KEY", &key).stdout(Stdio::piped()).spawn();
    let pipe = sender.as_mut().unwrap().stdout.take().unwrap();
    let mut receiver = there.command("backup restore - piped");
    let received: Done = output(receiver.env("LAMINA_BACKUP_KEY", &key).stdin(Stdio::from(pipe))).into();
    received.ok();
    assert_eq!(wait(sender.as_mut().unwrap()), Some(0));
    assert!(there.content("piped") == here.content("web@a"));
    let pack = files(Path::new(&repository)).into_iter().find(|name| name.starts_with("pack-")).unwrap();
    let stored = std::fs::read(Path::new(&repository).join(pack)).unwrap();
    let plain = pattern::bytes(3, 64);
    assert!(!stored.windows(64).any(|part| part == plain), "the data is stored as it is");
}

#[test]
fn damage_in_a_repository_is_found_and_no_disk_is_made_of_it() {
    let (here, beside) = (Store::new(), Beside::new());
    let repository = beside.text("backups");
    {
        let _server = here.serve("");
        here.run(&format!("disk create web {SIZE}")).ok();
        here.fill("web", 3, [0, 20, 40]);
    }
    here.run("snapshot create web@a").ok();
    here.run(&format!("backup create web@a {repository}")).ok();
    let pack = files(Path::new(&repository)).into_iter().find(|name| name.starts_with("pack-")).unwrap();
    let path = Path::new(&repository).join(&pack);
    let good = std::fs::read(&path).unwrap();
    let mut random = Random::new(9);
    for _ in 0..6 {
        let mut bad = good.clone();
        let at = random.index(bad.len());
        bad[at] ^= 1;
        std::fs::write(&path, &bad).unwrap();
        let verified = run(&format!("--json backup verify {repository}"));
        assert_eq!(verified.code, 6, "byte {at}: {verified:?}");
        let problems: Value = serde_json::from_str(&verified.stdout).unwrap();
        assert!(problems["problems"][0].as_str().unwrap().contains(&pack), "{problems}");
        assert_eq!(here.run(&format!("backup restore {repository} copy --backup web")).code, 6, "byte {at}");
        forget_receptions(&here);
    }
    std::fs::remove_file(&path).unwrap();
    assert_eq!(run(&format!("backup verify {repository}")).code, 6);
    std::fs::write(&path, &good).unwrap();
    here.run(&format!("backup restore {repository} copy --backup web")).ok();
    let manifest = files(Path::new(&repository)).into_iter().find(|name| name.starts_with("backup-")).unwrap();
    std::fs::write(Path::new(&repository).join(&manifest), "lamina backup 1 crc32c=00000000\n{}\n").unwrap();
    let listed = run(&format!("backup list {repository}"));
    assert_eq!(listed.code, 6, "{listed:?}");
    run(&format!("backup delete {repository} {}", manifest.trim_start_matches("backup-"))).ok();
    assert_eq!(files(Path::new(&repository)).iter().filter(|name| *name != "lock").collect::<Vec<_>>(), ["repository"]);
}

#[test]
fn wrong_input_is_refused_and_changes_nothing() {
    let (here, beside) = (Store::new(), Beside::new());
    here.run("disk create web 1M").ok();
    here.run("snapshot create web@a").ok();
    let repository = beside.text("backups");
    here.run(&format!("backup create none@a {repository}")).fails(3, "none");
    here.run(&format!("backup create web@none {repository}")).fails(3, "none");
    assert!(!Path::new(&repository).exists());
    here.run(&format!("backup create web@a {repository} --from a")).fails(2, "--from");
    here.run(&format!("backup create web file:{}", beside.text("x"))).fails(2, "snapshot create web@NAME");
    here.run("backup create web@a s3:bucket").fails(2, "'s3:' is not known");
    here.run(&format!("backup create web@a {repository} --level 40")).fails(2, "--level");
    here.run("--background backup create web@a -").fails(2, "background");
    run(&format!("backup list {repository}")).fails(3, "no repository");
    run(&format!("backup verify {repository}")).fails(3, "no repository");
    run("backup verify -").fails(2, "file:PATH");
    let occupied = beside.text("occupied");
    std::fs::create_dir(&occupied).unwrap();
    std::fs::write(Path::new(&occupied).join("letter"), "mine").unwrap();
    here.run(&format!("backup create web@a {occupied}")).fails(2, "not empty");
    std::fs::write(beside.path("text"), "not a backup, although it has more bytes than the head of one").unwrap();
    run(&format!("backup list file:{}", beside.text("text"))).fails(6, "not a backup");
    here.run(&format!("backup create web@a file:{}", beside.text("text"))).fails(1, "is not a backup of 'web@a'");
    here.run(&format!("backup restore file:{} x", beside.text("text"))).fails(6, "not a backup");
    here.run(&format!("backup create web@a {}", beside.text("text"))).fails(2, "file:");
    here.run(&format!("backup create web@a {repository}")).ok();
    here.run(&format!("backup restore {repository} web")).fails(1, "'web'");
    here.run(&format!("backup restore {repository} x --backup other")).fails(3, "backup list");
    here.run(&format!("backup restore {repository} x --update")).fails(2, "--update");
    let done: Done = output(lamina().arg("--datastore").arg(here.path()).args(["backup", "restore", "-", "x"])).into();
    done.fails(1, "it was cut");
    assert_eq!(here.run("--json disk list").json()["disks"].as_array().unwrap().len(), 1);
    assert_eq!(here.run("--json receive list").json()["receptions"].as_array().unwrap().len(), 0);
}
