//! Clients connect, disconnect, lose their connections and reconnect; the record survives the process.
#![allow(clippy::unwrap_used)]

use super::limits::CLIENTS_GONE_MAX;
use super::*;
use backend::simulated::{SimulatedDisk, SimulatedOptions};

const LONG: Duration = Duration::from_secs(3600);
const ONE: Peer = Peer::Process { pid: 1, user: 0 };
const TWO: Peer = Peer::Process { pid: 2, user: 0 };

fn directory() -> Arc<dyn Directory> {
    SimulatedDisk::new(1, SimulatedOptions::default()).directory()
}

fn serve(directory: &Arc<dyn Directory>) -> Clients {
    let clients = Clients::of_server(Arc::clone(directory), LONG);
    clients.keep_record().unwrap();
    clients
}

fn connect(clients: &Clients, peer: Peer, export: &str) -> Visit {
    let visit = clients.arrive(peer);
    visit.chooses(export, LONG).unwrap();
    visit.agreed(export);
    visit
}

/// The listed clients: export, client, and whether it is connected.
fn listed(clients: &Clients) -> Vec<(String, Peer, bool)> {
    clients.all().into_iter().map(|client| (client.export, client.peer, client.grace.is_none())).collect()
}

fn until(mut condition: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(begin.elapsed() < Duration::from_secs(60), "waited too long");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_client_that_disconnects_is_removed_and_a_lost_client_is_in_grace() {
    let clients = Clients::in_memory(LONG);
    let (mut one, two) = (connect(&clients, ONE, "a"), connect(&clients, TWO, "a"));
    // A session that ends before its handshake is complete is not listed.
    drop(clients.arrive(Peer::Unknown));
    one.says_farewell();
    drop(one);
    assert_eq!(listed(&clients), [("a".into(), TWO, true)]);
    drop(two);
    assert_eq!(listed(&clients), [("a".into(), TWO, false)]);
    // A client that loses its connection twice is listed once per export.
    drop(connect(&clients, TWO, "a"));
    drop(connect(&clients, TWO, "b"));
    assert_eq!(listed(&clients), [("a".into(), TWO, false), ("b".into(), TWO, false)]);
    let mut back = connect(&clients, TWO, "a");
    assert_eq!(listed(&clients), [("a".into(), TWO, true), ("b".into(), TWO, false)]);
    back.says_farewell();
    drop(back);
    clients.forget(|export| export == "b");
    assert_eq!(listed(&clients), []);
}

#[test]
fn connections_from_one_host_on_different_ports_are_one_client() {
    let peer = |text: &str| Peer::Address(text.parse().unwrap());
    assert!(peer("192.0.2.1:1000").may_be(&peer("192.0.2.1:2000")));
    assert!(peer("[::ffff:192.0.2.1]:1").may_be(&peer("192.0.2.1:2000")));
    assert!(!peer("192.0.2.1:1000").may_be(&peer("192.0.2.2:1000")));
    assert!(!ONE.may_be(&TWO) && !ONE.may_be(&peer("192.0.2.1:1000")));
}

#[test]
fn the_grace_of_a_client_ends() {
    let clients = Clients::in_memory(Duration::from_millis(50));
    drop(connect(&clients, ONE, "a"));
    until(|| listed(&clients).is_empty());
    let none = Clients::in_memory(Duration::ZERO);
    drop(connect(&none, ONE, "a"));
    assert_eq!(listed(&none), []);
}

#[test]
fn the_number_of_clients_in_grace_is_limited() {
    let clients = Clients::in_memory(LONG);
    for pid in 0..CLIENTS_GONE_MAX as i32 + 10 {
        drop(connect(&clients, Peer::Process { pid, user: 0 }, "a"));
    }
    assert_eq!(clients.all().len(), CLIENTS_GONE_MAX);
    assert!(listed(&clients).iter().all(|(_, peer, _)| *peer != ONE), "the oldest client is removed first");
}

#[test]
fn a_new_session_waits_for_sessions_that_are_told_to_end() {
    let clients = Arc::new(Clients::in_memory(LONG));
    let (old, other) = (connect(&clients, ONE, "a"), connect(&clients, TWO, "a"));
    assert!(clients.retire("b", ClientSelection::All).is_empty());
    assert_eq!(clients.retire("a", ClientSelection::Process(1)), [old.number()]);
    assert!(old.stop().load(Ordering::SeqCst) && !other.stop().load(Ordering::SeqCst));
    let new = clients.arrive(ONE);
    assert_eq!(new.chooses("a", Duration::from_millis(20)).unwrap_err().kind(), ErrorKind::Busy);
    new.chooses("b", LONG).unwrap();
    let waiting = std::thread::spawn(move || {
        new.chooses("a", LONG).unwrap();
        new.agreed("a");
        new
    });
    assert_eq!(clients.wait_ended(&[old.number()], Duration::from_millis(20)), [old.number()]);
    let number = old.number();
    drop(old);
    assert!(clients.wait_ended(&[number], LONG).is_empty());
    let new = waiting.join().unwrap();
    assert_eq!(
        listed(&clients),
        [("a".into(), TWO, true), ("a".into(), ONE, true)],
        "the client has reconnected, so its grace has ended"
    );
    drop((new, other));
}

/// Content of the record: export, client, whether the connection ended, and whether it ended because the server
/// stopped.
fn recorded(directory: &Arc<dyn Directory>) -> Vec<(String, Peer, bool, bool)> {
    let record = record::read(&**directory);
    let clients = record.map(|record| record.clients).unwrap_or_default();
    clients.into_iter().map(|one| (one.export, one.peer, one.ended.is_some(), one.with_server)).collect()
}

#[test]
fn the_record_follows_the_clients_and_is_removed_with_the_last() {
    let directory = directory();
    let clients = serve(&directory);
    let (mut one, two) = (connect(&clients, ONE, "a"), connect(&clients, TWO, "a@s"));
    until(|| recorded(&directory).len() == 2);
    drop(two);
    until(|| recorded(&directory) == [("a@s".into(), TWO, true, false), ("a".into(), ONE, false, false)]);
    one.says_farewell();
    drop(one);
    clients.forget(|export| export == "a@s");
    until(|| recorded(&directory).is_empty());
    clients.close();
    assert!(!directory.list().unwrap().contains(&record::FILE.to_owned()));
}

#[test]
fn clients_of_an_ended_server_are_in_grace() {
    let directory = directory();
    let clients = serve(&directory);
    let (mut one, two) = (connect(&clients, ONE, "a"), connect(&clients, TWO, "b"));
    until(|| recorded(&directory).len() == 2);
    let killed = directory.open(record::FILE, backend::IoMode::Buffered).unwrap();
    let mut bytes = vec![0; killed.len().unwrap() as usize];
    killed.read_at(&mut bytes, 0).unwrap();
    one.ends_with_server();
    drop((one, two));
    clients.close();
    let ended = [("a".to_owned(), ONE, true, true), ("b".to_owned(), TWO, true, false)];
    assert_eq!(recorded(&directory), ended);

    // The record of a killed server, to which both clients were connected.
    sealed_put(&directory, &bytes);
    let looked = Clients::of_record(Arc::clone(&directory));
    assert_eq!(listed(&looked), [("a".into(), ONE, false), ("b".into(), TWO, false)]);
    assert!(recorded(&directory).iter().all(|(.., ended, with_server)| *ended && *with_server), "the grace has begun");
    drop(looked);
    let next = serve(&directory);
    assert_eq!(listed(&next).len(), 2);
    drop(connect(&next, ONE, "a"));
    drop(next);
    assert_eq!(listed(&Clients::of_record(Arc::clone(&directory))).len(), 2);
    let looked = Clients::of_record(Arc::clone(&directory));
    looked.forget(|_| true);
    assert!(recorded(&directory).is_empty());
}

fn sealed_put(directory: &Arc<dyn Directory>, bytes: &[u8]) {
    disk::sealed::put(&**directory, record::FILE, bytes).unwrap();
}

#[test]
fn a_grace_that_expired_without_a_server_begins_again_with_the_next_server() {
    let directory = directory();
    let gone = |export: &str, with_server| Gone {
        export: export.into(),
        asked: None,
        peer: ONE,
        connected: 1,
        ended: Some(2),
        with_server,
    };
    let record = Record { grace: 60, clients: vec![gone("lost", false), gone("a", true)] };
    record::write(&*directory, &record).unwrap();
    let looked = Clients::of_record(Arc::clone(&directory));
    assert_eq!(listed(&looked), []);
    looked.forget(|export| export == "other");
    drop(looked);
    assert_eq!(recorded(&directory), [("a".into(), ONE, true, true)]);
    let served = serve(&directory);
    assert_eq!(listed(&served), [("a".into(), ONE, false)]);
}

#[test]
fn invalid_bytes_decode_to_no_record() {
    let record = Record { grace: 60, clients: Vec::new() };
    let good = record::encode(&record).unwrap();
    assert_eq!(record::decode(&good).unwrap(), record);
    let text = String::from_utf8(good.clone()).unwrap();
    for bad in [String::new(), "lamina".into(), text.replace(" 1 ", " 2 "), text.replace("60", "61")] {
        assert!(record::decode(bad.as_bytes()).is_err(), "{bad}");
        let directory = directory();
        sealed_put(&directory, bad.as_bytes());
        assert_eq!(listed(&Clients::of_record(Arc::clone(&directory))), []);
        assert_eq!(listed(&serve(&directory)), []);
    }
}

#[test]
fn the_format_page_shows_the_record_of_clients() {
    let record = Record {
        grace: 120,
        clients: vec![
            Gone {
                export: "größe".into(),
                asked: None,
                peer: ONE,
                connected: 1_795_000_000,
                ended: None,
                with_server: false,
            },
            Gone {
                export: "vm1@monday".into(),
                asked: Some("web@monday".into()),
                peer: Peer::Address("192.0.2.7:50112".parse().unwrap()),
                connected: 1_795_000_000,
                ended: Some(1_795_000_300),
                with_server: true,
            },
        ],
    };
    let written = String::from_utf8(record::encode(&record).unwrap()).unwrap();
    let page = include_str!("../../../../docs/format/clients.md");
    assert!(page.contains(&written), "docs/format/clients.md should show:\n{written}");
}

#[test]
fn a_renamed_disk_keeps_its_clients_and_its_old_name_opens_no_other_disk() {
    let directory = directory();
    let clients = serve(&directory);
    let (one, two) = (connect(&clients, ONE, "g"), connect(&clients, TWO, "g@s"));
    drop(connect(&clients, Peer::Unknown, "g"));
    connect(&clients, ONE, "gg").says_farewell();
    assert!(clients.rename("g", "x", || Err::<(), _>(Error::new(ErrorKind::Io, "no"))).is_err());
    assert!(listed(&clients).iter().all(|(export, ..)| export.starts_with('g')));
    clients
        .rename("g", "g2", || {
            // A session that opens the disk during the rename finds neither the old disk nor a disk with the new name.
            assert_eq!(clients.arrive(TWO).chooses("g", LONG).unwrap_err().kind(), ErrorKind::Busy);
            assert_eq!(one.opened("g").unwrap_err().kind(), ErrorKind::Busy);
            Ok(())
        })
        .unwrap();
    let now = [("g2".into(), ONE, true), ("g2".into(), Peer::Unknown, false), ("g2@s".into(), TWO, true)];
    assert_eq!(listed(&clients), now);
    one.opened("g").unwrap_err();
    // The disk that now has the name has no clients: clients of the renamed disk are not counted for it.
    assert!(clients.retire("g", ClientSelection::All).is_empty());
    assert_eq!(clients.retire("g2", ClientSelection::Process(1)), [one.number()]);
    drop(one);
    let back = clients.arrive(ONE);
    for (name, to) in [("g", "'g2'"), ("g@s", "'g2@s'")] {
        let refused = back.chooses(name, LONG).unwrap_err();
        assert!(refused.kind() == ErrorKind::Busy && refused.to_string().contains(to), "{refused}");
    }
    // A client that uses the new name counts as a different client.
    connect(&clients, ONE, "g2").says_farewell();
    assert_eq!(listed(&clients).len(), 3);
    // The record also has the requested name, so the next server does not count the client twice.
    drop((two, back));
    clients.close();
    let clients = Clients::of_record(Arc::clone(&directory));
    clients.rename("g2", "g3", || Ok(())).unwrap();
    drop(clients);
    let clients = serve(&directory);
    assert_eq!(listed(&clients).iter().filter(|(export, ..)| export == "g3").count(), 2);
    assert!(clients.arrive(TWO).chooses("g", LONG).unwrap_err().to_string().contains("'g3'"));
    clients.arrive(TWO).chooses("g2", LONG).unwrap();
    clients.rename("g3", "g", || Ok(())).unwrap();
    drop(connect(&clients, ONE, "g"));
    assert_eq!(listed(&clients).len(), 3, "the client uses the present name again");
}

#[test]
fn a_client_that_agrees_after_a_rename_is_listed_under_the_new_name() {
    let clients = Clients::in_memory(LONG);
    let visit = clients.arrive(ONE);
    visit.chooses("g", LONG).unwrap();
    visit.opened("g").unwrap();
    clients.rename("g", "g2", || Ok(())).unwrap();
    visit.agreed("g");
    assert_eq!(listed(&clients), [("g2".into(), ONE, true)]);
}

#[test]
fn two_clients_without_identity_are_never_taken_for_one() {
    let clients = Clients::in_memory(LONG);
    let lost: Vec<_> = (0..2).map(|_| connect(&clients, Peer::Unknown, "a")).collect();
    drop(lost);
    let (waits, here) = (("a".to_owned(), Peer::Unknown, false), ("a".to_owned(), Peer::Unknown, true));
    assert_eq!(listed(&clients), [waits.clone(), waits.clone()]);
    let mut back = connect(&clients, Peer::Unknown, "a");
    assert_eq!(listed(&clients), [here.clone(), waits.clone()]);
    // The new client may be either of the two clients in grace, or neither.
    back.says_farewell();
    drop(back);
    assert_eq!(listed(&clients), [waits.clone(), waits.clone()]);
    // An unknown client that repeatedly reconnects and disconnects has only one entry.
    for _ in 0..3 {
        drop(connect(&clients, Peer::Unknown, "a"));
    }
    assert_eq!(listed(&clients), [waits.clone(), waits]);
}

#[test]
fn lost_clients_of_one_disk_do_not_end_the_grace_of_another() {
    let clients = Clients::in_memory(LONG);
    drop(connect(&clients, ONE, "b"));
    for pid in 0..CLIENTS_GONE_MAX as i32 + 10 {
        drop(connect(&clients, Peer::Process { pid, user: 0 }, "a"));
    }
    assert_eq!(clients.all().len(), CLIENTS_GONE_MAX);
    assert!(listed(&clients).contains(&("b".into(), ONE, false)));
}

#[test]
fn recorded_times_beyond_the_limits_are_clamped() {
    let directory = directory();
    let gone = |export: &str, ended| Gone {
        export: export.into(),
        asked: None,
        peer: ONE,
        connected: u64::MAX,
        ended,
        with_server: false,
    };
    let clients = vec![gone("a", Some(u64::MAX)), gone("b", None), gone("c", Some(1))];
    let record = Record { grace: u64::MAX, clients };
    record::write(&*directory, &record).unwrap();
    let bytes = record::encode(&record).unwrap();
    let bounded = |clients: &Clients| {
        let all = clients.all();
        assert_eq!(all.len(), 2, "{all:?}");
        assert!(all.iter().all(|client| client.grace.is_some_and(|left| left <= CLIENT_GRACE_MAX)), "{all:?}");
    };
    bounded(&Clients::of_record(Arc::clone(&directory)));
    let read = record::read(&*directory).unwrap();
    assert!(
        read.grace <= 86_400 && read.clients.iter().all(|one| one.ended.unwrap() < u64::MAX),
        "the grace has begun"
    );
    sealed_put(&directory, &bytes);
    bounded(&Clients::of_server(Arc::clone(&directory), Duration::MAX));
    let clients = Clients::in_memory(Duration::MAX);
    drop((connect(&clients, ONE, "a"), connect(&clients, TWO, "a")));
    bounded(&clients);
}

#[test]
fn a_server_that_does_not_start_leaves_the_record() {
    let directory = directory();
    let gone = Gone { export: "a".into(), asked: None, peer: ONE, connected: 1, ended: None, with_server: false };
    let record = Record { grace: 60, clients: vec![gone] };
    record::write(&*directory, &record).unwrap();
    drop(Clients::of_server(Arc::clone(&directory), LONG));
    assert_eq!(record::read(&*directory).unwrap(), record);
}

#[test]
fn sessions_in_their_handshake_delay_no_other_session() {
    let clients = Clients::in_memory(LONG);
    let (one, two) = (clients.arrive(ONE), clients.arrive(TWO));
    one.chooses("a", LONG).unwrap();
    two.chooses("a", LONG).unwrap();
    assert_eq!(clients.retire("a", ClientSelection::All).len(), 2);
    one.chooses("a", LONG).unwrap();
    two.chooses("a", LONG).unwrap();
    one.agreed("a");
    // The waiting session has to end too, so it stops waiting for the other session.
    assert_eq!(two.chooses("a", LONG).unwrap_err().kind(), ErrorKind::Busy);
    let new = clients.arrive(ONE);
    let stop = new.stop();
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| new.chooses("a", LONG));
        stop.store(true, Ordering::SeqCst);
        assert_eq!(waits.join().unwrap().unwrap_err().kind(), ErrorKind::Busy);
    });
}
