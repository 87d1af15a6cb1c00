//! Tenants: clients that may open some of the exports, depending on their certificates, and cannot find out anything
//! about the others.

use crate::memory_disk::{Changing, MemoryDisk, Random, Shelf};
use crate::tls::{Certificates, upgrade};
use crate::{Folder, Running};
use connections::Listen;
use export::access::{Rules, UserAccess};
use export::exports::Exports;
use export::nbd::ServerConfig;
use rustix::fs::{CWD, FileType, mknodat};
use std::collections::BTreeSet;
use std::net::TcpStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use testkit::protocol::*;

const CAPACITY: u64 = 1 << 20;
const READ_ONLY: u16 = 1 << 1;
/// Number of attempts of a tenant to reach an export of another tenant.
const ATTEMPTS: u64 = 1000;

struct Tenants {
    certificates: Certificates,
    running: Running,
}

impl Tenants {
    fn new(rules: &str) -> Self {
        let certificates = Certificates::new();
        let config = ServerConfig {
            listen: vec![Listen::Tcp("127.0.0.1:0".parse().unwrap())],
            tls: Some(certificates.server(true, true)),
            rules: Some(Rules::parse(rules).unwrap()),
            ..ServerConfig::default()
        };
        let disks: Vec<_> =
            ["a-1", "a-2", "b-1", "b-1@monday", "b-2"].iter().map(|name| MemoryDisk::new(name, CAPACITY, 2)).collect();
        Self { certificates, running: Running::with(config, Shelf::of(&disks.iter().collect::<Vec<_>>())) }
    }

    fn client(&self, name: &str) -> Client {
        upgrade(TcpStream::connect(self.running.tcp_address()).unwrap(), self.certificates.client_named(name))
    }

    fn listed(&self, client: &mut Client) -> Vec<String> {
        let replies = client.option(OPT_LIST, &[]);
        let names = replies.iter().filter(|(kind, _)| *kind == REP_SERVER).map(|(_, data)| {
            let length = u32::from_be_bytes(data[..4].try_into().unwrap()) as usize;
            String::from_utf8(data[4..4 + length].to_vec()).unwrap()
        });
        names.collect()
    }
}

/// Replaces the rules, which ends `ended` connections.
fn replace(tenants: &Tenants, rules: &str, ended: usize) {
    assert_eq!(tenants.running.server.replace_rules(Rules::parse(rules).unwrap()), Some(ended));
}

/// The reply to a request for an export, with the name replaced, so that replies for several names can be compared.
fn reply(client: &mut Client, code: u32, name: &str) -> (u32, String) {
    let data = match code {
        OPT_LIST_META | OPT_SET_META => Client::meta_data(name, &["base:allocation"]),
        _ => Client::info_data(name, &[]),
    };
    let (kind, data) = client.option(code, &data).pop().unwrap();
    (kind, String::from_utf8_lossy(&data).replace(name, "NAME"))
}

#[test]
fn a_tenant_sees_its_own_exports_and_writes_where_it_may() {
    let tenants = Tenants::new("a.example a-* write\nb.example b-*,a-1 read\nb.example b-2 write\n");
    let mut a = tenants.client("a.example");
    assert_eq!(tenants.listed(&mut a), ["a-1", "a-2"]);
    a.choose(Mode::Structured);
    assert_eq!(a.go("a-1"), REP_ACK);
    assert_eq!(a.flags & READ_ONLY, 0);
    a.write(0, b"of tenant a");
    a.leave();
    let mut b = tenants.client("b.example");
    assert_eq!(tenants.listed(&mut b), ["a-1", "b-1", "b-1@monday", "b-2"]);
    b.choose(Mode::Structured);
    assert_eq!(b.go("a-1"), REP_ACK);
    assert_ne!(b.flags & READ_ONLY, 0);
    assert_eq!(b.read(0, 11), b"of tenant a");
    assert_ne!(b.ask_with(CMD_WRITE, 0, 0, 4, b"mine").error, 0);
    b.leave();
    let mut b = tenants.client("b.example");
    b.choose(Mode::Extended);
    assert_eq!(b.go("b-2"), REP_ACK);
    b.write(0, b"of tenant b");
    b.leave();
    // A client without a rule sees no exports, and has no default export.
    let mut c = tenants.client("c.example");
    assert!(tenants.listed(&mut c).is_empty());
    assert_eq!(c.go(""), ERR_UNKNOWN);
    // The rules do not apply to the unix socket.
    let mut local = Client::unix(&tenants.running.socket);
    local.greet(3);
    assert_eq!(tenants.listed(&mut local).len(), 5);
    // The only export that a client may open is its default.
    let tenants = Tenants::new("a.example a-1 write\n");
    let mut a = tenants.client("a.example");
    assert_eq!(a.go(""), REP_ACK);
}

#[test]
fn an_export_of_another_tenant_cannot_be_told_from_one_that_does_not_exist() {
    let tenants = Tenants::new("a.example a-* write\n");
    let mut random = Random(14);
    let mut a = tenants.client("a.example");
    a.choose(Mode::Structured);
    let codes = [OPT_INFO, OPT_GO, OPT_LIST_META, OPT_SET_META];
    // The replies are also the same when the client has an export of its own open, and for a name with the prefix of
    // the client's own names.
    assert_eq!(reply(&mut a, OPT_INFO, "a-2").0, REP_ACK);
    let absent: Vec<(u32, String)> = codes.iter().map(|code| reply(&mut a, *code, "b-9")).collect();
    assert!(absent.iter().all(|(kind, text)| *kind == ERR_UNKNOWN && text.contains("NAME")), "{absent:?}");
    assert_eq!(reply(&mut a, OPT_INFO, "a-9"), absent[0]);
    let others = ["b-1", "b-2", "b-1@monday", "b-1@a-1", "B-1", "b-1 ", "../a-1", "b-1@"];
    for attempt in 0..ATTEMPTS {
        let at = random.below(codes.len() as u64) as usize;
        let name = others[random.below(others.len() as u64) as usize];
        // The server accepts a limited number of options on a connection.
        if attempt % 20 == 0 {
            a = tenants.client("a.example");
            a.choose(Mode::Structured);
        }
        assert_eq!(reply(&mut a, codes[at], name), absent[at], "{name}");
    }
    // The option EXPORT_NAME, which has no error reply, ends the connection for an export of another tenant and for an
    // absent export.
    for name in ["b-1", "b-9"] {
        let mut a = tenants.client("a.example");
        a.send_option(OPT_EXPORT_NAME, name.as_bytes());
        assert!(catch_unwind(AssertUnwindSafe(|| a.take(1))).is_err(), "{name}");
    }
}

#[test]
fn new_rules_hold_for_sessions_that_began_before() {
    let tenants = Tenants::new("a.example a-* write\nb.example a-* write\nb.example b-* read\n");
    let open = |name: &str, export: &str| {
        let mut client = tenants.client(name);
        client.choose(Mode::Structured);
        assert_eq!(client.go(export), REP_ACK);
        client
    };
    let (mut a, mut b) = (open("a.example", "a-1"), open("b.example", "a-1"));
    // A client in the handshake that has queried an export and is about to choose it.
    let mut undecided = tenants.client("a.example");
    assert_eq!(reply(&mut undecided, OPT_INFO, "a-2").0, REP_ACK);
    let mut reader = open("b.example", "b-1@monday");
    // The new rules grant all permissions that are in use, and more.
    replace(&tenants, "* * write\n", 0);
    a.write(0, b"1");
    replace(&tenants, "b.example *-1 write\n", 1);
    assert!(a.at_end());
    b.write(0, b"2");
    assert_eq!(undecided.go("a-2"), ERR_UNKNOWN);
    assert!(tenants.listed(&mut undecided).is_empty());
    // A session that only reads keeps its permission.
    replace(&tenants, "b.example * read\n", 1);
    assert!(b.at_end());
    assert_eq!(reader.read(0, 1).len(), 1);
    let mut b = open("b.example", "a-1");
    assert_ne!(b.flags & READ_ONLY, 0);
    assert_eq!(b.read(0, 1), b"2");
    // Without any rule every session over TCP ends, and those over the unix socket continue.
    let mut local = Client::open(&tenants.running.socket, "a-1", Mode::Structured);
    replace(&tenants, "", 2);
    assert!(b.at_end() && reader.at_end());
    local.write(0, b"3");
    local.leave();
    // In a server that was started without rules, rules cannot be set.
    let without = Running::start(Shelf::of(&[&MemoryDisk::new("vm", CAPACITY, 2)]));
    assert_eq!(without.server.replace_rules(Rules::default()), None);
}

#[test]
fn a_client_without_its_right_is_not_waited_for_and_one_that_may_read_is() {
    let certificates = Certificates::new();
    let clients = Arc::new(export::clients::Clients::in_memory(Duration::from_secs(60)));
    let config = ServerConfig {
        listen: vec![Listen::Tcp("127.0.0.1:0".parse().unwrap())],
        tls: Some(certificates.server(true, true)),
        rules: Some(Rules::parse("* * write\n").unwrap()),
        clients: Arc::clone(&clients),
        ..ServerConfig::default()
    };
    let disks = ["a-1", "b-1"].map(|name| MemoryDisk::new(name, CAPACITY, 2));
    let tenants = Tenants { certificates, running: Running::with(config, Shelf::of(&disks.each_ref())) };
    let _sessions = ["a-1", "b-1"].map(|export| {
        let mut client = tenants.client("a.example");
        assert_eq!(client.go(export), REP_ACK);
        // The session is registered once it answers requests.
        client.read(0, 512);
        client
    });
    replace(&tenants, "a.example b-1 read\n", 2);
    let waiting: Vec<_> = clients.all().into_iter().map(|client| client.export).collect();
    assert_eq!(waiting, ["b-1"]);
}

/// Lets every user open one disk.
#[derive(Debug)]
struct OneDisk;

impl UserAccess for OneDisk {
    fn only(&self, _user: u32) -> Option<BTreeSet<String>> {
        Some(BTreeSet::from(["a-1".to_owned()]))
    }
}

#[test]
fn a_user_learns_of_no_snapshot_of_its_own_disk() {
    let served = |user_access: Option<Arc<dyn UserAccess>>| {
        let disks = ["a-1", "a-1@monday"].map(|name| MemoryDisk::new(name, CAPACITY, 2));
        let config = ServerConfig { user_access, ..ServerConfig::default() };
        Running::with(config, Shelf::of(&disks.iter().collect::<Vec<_>>()))
    };
    let listed = |client: &mut Client| {
        let replies = client.option(OPT_LIST_META, &Client::meta_data("a-1", &[]));
        let names = replies.iter().filter(|(kind, _)| *kind == REP_META);
        names.map(|(_, data)| String::from_utf8(data[4..].to_vec()).unwrap()).collect::<Vec<_>>()
    };
    // Both disks in memory report the snapshots 'monday' and 'tuesday'.
    let queries = ["base:allocation", "lamina:dirty:monday", "qemu:dirty-bitmap:monday", "lamina:dirty:sunday"];
    let unrestricted = served(None);
    let mut owner = Client::unix(&unrestricted.socket);
    owner.greet(3);
    owner.choose(Mode::Structured);
    assert_eq!(listed(&mut owner).len(), 5);
    assert_eq!(owner.set_meta("a-1", &queries).len(), 3);

    let restricted = served(Some(Arc::new(OneDisk)));
    let mut user = Client::unix(&restricted.socket);
    user.greet(3);
    user.choose(Mode::Structured);
    assert_eq!(listed(&mut user), ["base:allocation"]);
    let chosen = user.set_meta("a-1", &queries);
    assert_eq!(chosen.keys().collect::<Vec<_>>(), ["base:allocation"]);
    // The user has the permissions of `write` in the rules for TCP: it writes the disk, and grows but never shrinks it.
    assert_eq!(user.go("a-1"), REP_ACK);
    user.write(0, b"of the user");
    assert_eq!(user.ask(CMD_RESIZE, 0, 2 * CAPACITY, 0).error, 0);
    assert_eq!(user.ask(CMD_RESIZE, 0, CAPACITY, 0).error, EPERM);
}

#[test]
fn a_resize_by_a_client_is_reported_with_the_present_name_of_the_disk() {
    let clients = Arc::new(export::clients::Clients::in_memory(Duration::from_secs(60)));
    let user_access: Option<Arc<dyn UserAccess>> = Some(Arc::new(OneDisk));
    let config = ServerConfig { user_access, clients: Arc::clone(&clients), ..ServerConfig::default() };
    let shelf = Shelf::of(&[&MemoryDisk::new("a-1", CAPACITY, 2)]);
    let running = Running::with(config, Arc::clone(&shelf) as Arc<dyn Exports>);
    let mut user = Client::open(&running.socket, "a-1", Mode::Structured);
    assert_eq!(user.ask(CMD_RESIZE, 0, 2 * CAPACITY, 0).error, 0);
    clients.rename("a-1", "a-9", || Ok(())).unwrap();
    assert_eq!(user.ask(CMD_RESIZE, 0, 3 * CAPACITY, 0).error, 0);
    // Neither a refused request nor a failed one has resized the disk.
    assert_eq!(user.ask(CMD_RESIZE, 0, CAPACITY, 0).error, EPERM);
    assert_eq!(user.ask(CMD_RESIZE, 0, 2 << 30, 0).error, ENOSPC);
    assert_eq!(*shelf.resized.lock(), [("a-1".to_owned(), 2 * CAPACITY), ("a-9".to_owned(), 3 * CAPACITY)]);
}

/// A renamed disk whose former name a client may still request: no other client learns of it.
#[test]
fn a_rename_is_not_revealed_to_other_tenants_and_users() {
    let certificates = Certificates::new();
    let clients = Arc::new(export::clients::Clients::in_memory(Duration::from_secs(60)));
    let config = ServerConfig {
        listen: vec![Listen::Tcp("127.0.0.1:0".parse().unwrap())],
        tls: Some(certificates.server(true, true)),
        rules: Some(Rules::parse("a.example a-* write\n").unwrap()),
        user_access: Some(Arc::new(OneDisk)),
        clients: Arc::clone(&clients),
        ..ServerConfig::default()
    };
    let disks = ["a-1", "b-1"].map(|name| MemoryDisk::new(name, CAPACITY, 2));
    let tenants = Tenants { certificates, running: Running::with(config, Shelf::of(&disks.each_ref())) };
    let _sessions = ["a-1", "b-1"].map(|export| {
        let visit = clients.arrive(connections::Peer::Unknown);
        visit.chooses(export, Duration::from_secs(60)).unwrap();
        visit.agreed(export);
        clients.rename(export, &format!("secret-{export}"), || Ok(())).unwrap();
        visit
    });
    let mut tenant = tenants.client("a.example");
    let mut user = Client::unix(&tenants.running.socket);
    user.greet(3);
    for client in [&mut tenant, &mut user] {
        let absent = reply(client, OPT_INFO, "b-9");
        assert_eq!(reply(client, OPT_INFO, "b-1"), absent);
        let (kind, text) = reply(client, OPT_INFO, "a-1");
        assert!(kind == ERR_UNKNOWN && text.contains("try again") && !text.contains("secret"), "{text}");
    }
}

/// The rules permit the name under which the client has opened the disk, and not the one that the disk has since.
#[test]
fn a_disk_that_is_renamed_during_the_handshake_is_served_by_the_rules_for_its_new_name() {
    const DESCRIPTION: u16 = 2;
    for (to, served) in [("a-2", true), ("b-1", false)] {
        let certificates = Certificates::new();
        let clients = Arc::new(export::clients::Clients::in_memory(Duration::from_secs(60)));
        let config = ServerConfig {
            listen: vec![Listen::Tcp("127.0.0.1:0".parse().unwrap())],
            tls: Some(certificates.server(true, true)),
            rules: Some(Rules::parse("a.example a-* write\n* b-1 read\n").unwrap()),
            clients: Arc::clone(&clients),
            ..ServerConfig::default()
        };
        let shelf = Shelf::of(&[&MemoryDisk::new("a-1", CAPACITY, 2)]);
        let (renamed, after) = (Arc::clone(&clients), Arc::clone(&shelf));
        let exports = Changing::new(shelf, move || renamed.rename("a-1", to, || Ok(after)).unwrap());
        let tenants = Tenants { certificates, running: Running::with(config, exports) };
        let mut client = tenants.client("a.example");
        // The server queries the description, at which the disk is renamed, after it has opened the export.
        let replies = client.option(OPT_GO, &Client::info_data("a-1", &[DESCRIPTION]));
        assert_eq!(replies.last().unwrap().0, REP_ACK);
        let read = client.encode(CMD_READ, 0, 0, 512, &[]).1;
        // The server may have closed the connection already.
        let _ = client.stream.write_all(&read);
        assert_eq!(!client.at_end(), served, "{to}");
    }
}

/// The export offers CAN_MULTI_CONN: a flush on one connection covers the writes of all.
#[test]
fn a_flush_of_a_tenant_that_may_only_read_covers_the_writes_of_others() {
    let certificates = Certificates::new();
    let config = ServerConfig {
        listen: vec![Listen::Tcp("127.0.0.1:0".parse().unwrap())],
        tls: Some(certificates.server(true, true)),
        rules: Some(Rules::parse("a.example shared write\nb.example shared read\n").unwrap()),
        ..ServerConfig::default()
    };
    let disk = MemoryDisk::new("shared", CAPACITY, 2);
    let tenants = Tenants { certificates, running: Running::with(config, Shelf::of(&[&disk])) };
    let [mut a, mut b] = ["a.example", "b.example"].map(|name| tenants.client(name));
    assert_eq!((a.go("shared"), b.go("shared")), (REP_ACK, REP_ACK));
    a.write(0, b"of tenant a");
    for flushes in 1..3 {
        assert_eq!(b.ask(CMD_FLUSH, 0, 0, 0).error, 0);
        assert_eq!(disk.flushes.load(Ordering::SeqCst), flushes);
    }
}

#[test]
fn rules_in_a_pipe_or_device_are_refused_at_once() {
    let folder = Folder::new();
    let pipe = folder.0.join("rules");
    mknodat(CWD, &pipe, FileType::Fifo, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR, 0).unwrap();
    for path in [&*pipe, &*folder.0, Path::new("/dev/zero")] {
        let text = Rules::load(path).unwrap_err().to_string();
        assert!(text.ends_with("is a folder, a pipe or a device: that is no list of access rules"), "{text}");
    }
}
