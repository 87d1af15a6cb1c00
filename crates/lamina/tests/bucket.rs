//! Backups in a bucket with the command line: with and without a server of the datastore, with kills, failures of the
//! network and wrong input. The S3 server is a program of its own.

#![allow(clippy::unwrap_used)]

use serde_json::Value;
use std::time::Duration;
use testkit::nbd::Client;
use testkit::process::{Done, Serving, Store, files, lamina, output, send, until, wait};
use testkit::s3::{BUCKET, Fault, KEY_ID, S3, SECRET};

const BLOCK: u64 = 4096;
const PIECE: u64 = 1 << 20;
const SIZE: u64 = 100 << 20;
const PLACE: &str = "s3://lab/vms/web";

/// Runs a command on a datastore, with the variables of the bucket.
fn on(store: &Store, server: &S3, arguments: &str) -> Done {
    output(store.command(arguments).envs(server.environment())).into()
}

/// Runs a command without a datastore, with the variables of the bucket.
fn with(server: &S3, arguments: &str) -> Done {
    output(lamina().args(arguments.split_whitespace()).envs(server.environment())).into()
}

/// Serves a datastore, with the variables of the bucket.
fn serve(store: &Store, server: &S3) -> Serving {
    let mut command = store.command("serve");
    command.envs(server.environment());
    Serving::start(command)
}

fn number(value: &Value, member: &str) -> u64 {
    value[member].as_u64().unwrap_or_else(|| panic!("{member} of {value}"))
}

fn is_native(store: &Store, disk: &str) -> bool {
    store.run(&format!("--json disk show {disk}")).json()["format"] == "native"
}

/// Names of the objects that begin with a prefix.
fn objects(server: &S3, prefix: &str) -> Vec<String> {
    let names = files(&server.objects("vms/web"));
    names.into_iter().filter(|name| name.starts_with(prefix)).collect()
}

/// A disk `web` with a snapshot and content.
fn disk(store: &Store) {
    let _server = store.serve("");
    store.run(&format!("disk create web {SIZE}")).ok();
    store.fill("web", 1, (0..50).map(|piece| piece * 2));
    store.run("snapshot create web@a").ok();
}

#[test]
fn a_bucket_has_increments_and_restores_each_of_them_equal() {
    let (here, there, server) = (Store::new(), Store::new(), S3::start());
    disk(&here);
    let expected = {
        // The server of the datastore has no credentials: the command sends its own.
        let mut command = here.command("serve");
        command.env("RUST_LOG", "debug");
        let serving = Serving::start(command);
        let full = on(&here, &server, &format!("--json backup create web@a {PLACE}")).json();
        assert_eq!((number(&full, "data"), full["based_on"].is_null()), (50 * PIECE, true));
        let mut client = Client::connect(&here.socket(), "web").unwrap();
        client.write(3 * BLOCK, &[7; 8192]).unwrap();
        client.flush().unwrap();
        let job = on(&here, &server, &format!("--json --background backup create web {PLACE}")).json();
        here.run(&format!("job wait {}", job["id"].as_str().unwrap())).ok();
        let again = on(&here, &server, &format!("--json backup create web {PLACE}")).json();
        assert_eq!(number(&again, "data"), 0);
        let log = serving.log();
        assert!(log.contains(KEY_ID) && !log.contains(SECRET), "{log}");
        [here.content("web@a"), here.content("web")]
    };
    let backups = with(&server, &format!("backup list {PLACE} --json")).json()["backups"].as_array().unwrap().clone();
    assert_eq!(backups.len(), 3);
    assert_eq!(number(&backups[1], "data"), 2 * BLOCK);
    assert!(with(&server, &format!("backup verify {PLACE}")).ok().ends_with("clean\n"));
    // The server is named by an option, and the datastore is not served.
    let command = format!("backup restore {PLACE} old --backup web@a --s3-endpoint {}", server.endpoint());
    let mut command = there.command(&command);
    let done: Done = output(command.envs([("AWS_ACCESS_KEY_ID", KEY_ID), ("AWS_SECRET_ACCESS_KEY", SECRET)])).into();
    done.ok();
    on(&there, &server, &format!("backup restore {PLACE} web")).ok();
    let serving = there.serve("");
    assert!(there.content("old") == expected[0] && there.content("web") == expected[1]);
    drop(serving);
    there.is_clean();
    let ids: Vec<&str> = backups.iter().map(|backup| backup["id"].as_str().unwrap()).collect();
    with(&server, &format!("backup delete {PLACE} {}", ids[0])).fails(4, "is based on it");
    with(&server, &format!("backup delete {PLACE} {}", ids.join(" "))).ok();
    assert_eq!(files(&server.objects("vms/web")), ["lock", "repository"]);
}

#[test]
fn a_killed_backup_continues_and_its_lock_is_taken_over() {
    let (here, server) = (Store::new(), S3::start());
    disk(&here);
    let mut command = here.command(&format!("backup create web@a {PLACE} --rate 4M"));
    let mut child = command.envs(server.environment()).spawn().unwrap();
    until("a pack is stored", || server.objects("vms/web").exists() && !objects(&server, "pack-").is_empty());
    // Meanwhile another command is refused.
    with(&server, &format!("backup prune {PLACE} --keep last=1")).fails(4, "another command changes the repository");
    send(child.id(), "KILL");
    assert_eq!(wait(&mut child), None);
    assert!(objects(&server, "lock") == ["lock"] && objects(&server, "backup-").is_empty());
    // The upload of the next attempt is cut again and again, and succeeds in the end.
    let mut cuts = 0;
    server.rule(move |head| {
        cuts += usize::from(head.starts_with("put ") && head.contains("/pack-"));
        match (head.starts_with("put ") && head.contains("/pack-"), cuts % 2) {
            (true, 1) => Fault::CutRequest(100_000),
            _ => Fault::None,
        }
    });
    let made = on(&here, &server, &format!("--json backup create web@a {PLACE}")).json();
    assert!(number(&made, "resumed") > 0, "{made}");
    server.rule(|_| Fault::None);
    assert!(objects(&server, "unfinished-").is_empty());
    with(&server, &format!("backup verify {PLACE}")).ok();
    // A backup that cannot continue leaves packs that no backup refers to: a deletion removes them.
    std::fs::remove_file(server.objects("vms/web").join(&objects(&server, "backup-")[0])).unwrap();
    assert!(!objects(&server, "pack-").is_empty());
    let pruned = with(&server, &format!("--json backup prune {PLACE} --keep last=1")).json();
    assert!(number(&pruned, "swept") > 0);
    assert!(objects(&server, "pack-").is_empty());
}

#[test]
fn a_snapshot_is_kept_while_it_is_unknown_whether_its_backup_has_begun() {
    let (here, server) = (Store::new(), S3::start());
    disk(&here);
    let snapshots = || here.run("--json snapshot list web").json()["snapshots"].as_array().unwrap().len();
    let create = format!("--json backup create web {PLACE}");
    on(&here, &server, &create).ok();
    assert_eq!(snapshots(), 2);
    // From the second pack on, the server refuses everything, also to say which backups have begun.
    let mut packs = 0;
    server.rule(move |head| {
        packs += usize::from(head.starts_with("put ") && head.contains("/pack-"));
        if packs > 1 { Fault::status(403) } else { Fault::None }
    });
    // A warning says that the lock is not released.
    let refused = on(&here, &server, &create.replace("create", "create --full"));
    assert!(refused.code == 1 && refused.stderr.contains("access is denied"), "{refused:?}");
    server.rule(|_| Fault::None);
    assert_eq!(snapshots(), 3);
    let made = on(&here, &server, &create.replace("create", "create --full")).json();
    assert!(number(&made, "resumed") > 0, "{made}");
    assert_eq!(snapshots(), 2);
    // The backup has not begun: nothing is left of it.
    server.faults("/unfinished-", std::iter::repeat_n(Fault::status(403), 100));
    on(&here, &server, &create).fails(1, "access is denied");
    assert_eq!(snapshots(), 2);
}

#[test]
fn a_disk_is_used_while_its_content_arrives_from_a_bucket() {
    let (here, there, server) = (Store::new(), Store::new(), S3::start());
    disk(&here);
    on(&here, &server, &format!("backup create web@a {PLACE}")).ok();
    let restore = format!("backup restore {PLACE} web --live --rate 6M");
    {
        // The server would have no credentials after the command.
        let _serving = there.serve("");
        on(&there, &server, &restore).fails(1, "there are no credentials");
        assert!(objects(&server, "reader-").is_empty());
    }
    let mut serving = serve(&there, &server);
    server.seen();
    on(&there, &server, &restore).ok();
    let mut client = Client::connect(&there.socket(), "web").unwrap();
    let last = 98 * PIECE;
    let expected = testkit::pattern::bytes(1 + 98, PIECE as usize);
    assert!(client.read(last, PIECE as u32).unwrap() == expected);
    let ranged = |head: &String| head.starts_with("get ") && head.contains("/pack-") && head.contains("range: bytes=");
    assert!(server.seen().iter().any(ranged));
    client.write(last, &[9; 4096]).unwrap();
    client.flush().unwrap();
    let shown = there.run("--json disk show web").json()["image"]["live"].to_string();
    assert!(shown.contains("'web@a' in 's3://lab/vms/web'") && !shown.contains(SECRET), "{shown}");
    with(&server, &format!("backup delete {PLACE} web@a")).fails(4, "is being restored from it");
    serving.kill();
    // The next server continues, although the bucket fails now and then.
    let mut count = 0;
    server.rule(move |head| {
        count += 1;
        match head.starts_with("get ") && count % 7 == 0 {
            true => Fault::CutAnswer(200),
            false => Fault::None,
        }
    });
    let mut serving = serve(&there, &server);
    on(&there, &server, &format!("backup restore {PLACE} web --live")).ok();
    until("all content has arrived", || is_native(&there, "web"));
    until("the repository knows it", || objects(&server, "reader-").is_empty());
    let content = there.content("web");
    assert!(content[last as usize..last as usize + 4096] == [9; 4096]);
    assert!(content[last as usize + 4096..(last + PIECE) as usize] == expected[4096..]);
    for piece in (0..98).step_by(2) {
        let bytes = testkit::pattern::bytes(1 + piece, PIECE as usize);
        assert!(content[(piece * PIECE) as usize..][..PIECE as usize] == bytes, "{piece}");
    }
    serving.kill();
    there.is_clean();
}

#[test]
fn wrong_input_and_failures_are_reported_with_the_bucket() {
    let (here, server) = (Store::new(), S3::start());
    disk(&here);
    with(&server, &format!("backup list {PLACE}")).fails(3, "no repository of backups at 's3://lab/vms/web'");
    on(&here, &server, "backup create web@a s3://elsewhere/x").fails(3, "there is no such bucket");
    with(&server, "backup list s3://l").fails(2, "is not the name of a bucket");
    let done = with(&server, &format!("backup list {PLACE} --s3-endpoint http://ID:{SECRET}@x"));
    assert!(!done.stderr.contains(SECRET));
    done.fails(2, "'***@x' is not the URL of a server");
    let mut socks = lamina();
    socks.args(["backup", "list", PLACE, "--s3-endpoint", "http://store.example"]).envs(server.environment());
    socks.env_remove("NO_PROXY").env_remove("no_proxy").env("ALL_PROXY", "socks5://p");
    Done::from(output(&mut socks)).fails(2, "the proxy of ALL_PROXY cannot be used");
    with(&server, "backup list /srv --s3-endpoint http://x").fails(2, "--s3-endpoint is the server of a bucket");
    with(&server, &format!("backup list {PLACE} --s3-endpoint x")).fails(2, "is not the URL of a server");
    on(&here, &server, &format!("backup create web@none {PLACE}")).fails(3, "none");
    assert!(!server.objects("vms/web").exists());
    on(&here, &server, &format!("backup create web@a {PLACE} --from a")).fails(2, "--from");
    here.run(&format!("backup create web@a {PLACE} --s3-endpoint {}", server.endpoint())).fails(1, "no credentials");
    std::fs::create_dir_all(server.objects("taken")).unwrap();
    std::fs::write(server.objects("taken/letter"), "mine").unwrap();
    on(&here, &server, &format!("backup create web@a s3://{BUCKET}/taken")).fails(2, "not empty");
    let mut wrong = here.command(&format!("backup create web@a {PLACE}"));
    wrong.envs(server.environment()).env("AWS_SECRET_ACCESS_KEY", "wrong");
    Done::from(output(&mut wrong)).fails(1, "access is denied: check the credentials");
    let mut nowhere = here.command(&format!("backup create web@a {PLACE} --s3-endpoint http://127.0.0.1:1"));
    nowhere.envs(server.environment());
    Done::from(output(&mut nowhere)).fails(1, "Connection refused");
    // A slow server is not an error.
    server.faults("/backup-", [Fault::Wait(Duration::from_secs(2))]);
    on(&here, &server, &format!("backup create web@a {PLACE}")).ok();
}
