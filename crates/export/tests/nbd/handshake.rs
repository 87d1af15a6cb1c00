//! Negotiation of options, with one property in each test.

use crate::Running;
use crate::memory_disk::{Changing, MemoryDisk, Shelf};
use export::clients::Clients;
use export::exports::ResizePolicy;
use export::nbd::ServerConfig;
use std::sync::Arc;
use std::time::Duration;
use testkit::protocol::*;

const MIB: u64 = 1 << 20;

fn one_disk() -> Running {
    Running::start(Shelf::of(&[&MemoryDisk::new("vm", MIB, 1), &MemoryDisk::read_only("vm@monday", MIB)]))
}

fn greeted(running: &Running) -> Client {
    let mut client = Client::unix(&running.socket);
    client.greet(3);
    client
}

#[test]
fn the_reply_to_export_name_is_padded_unless_no_zeroes_is_set() {
    let running = one_disk();
    for (flags, length) in [(1, 10 + 124), (3, 10), (0, 10 + 124)] {
        let mut client = Client::unix(&running.socket);
        client.greet(flags);
        client.send_option(OPT_EXPORT_NAME, b"vm");
        let answer = client.take(length);
        assert_eq!(&answer[..8], &MIB.to_be_bytes());
        assert!(answer[10..].iter().all(|byte| *byte == 0));
        // Transmission begins directly after the reply to the option.
        assert_eq!(client.read(0, 512), vec![0; 512]);
        client.leave();
    }
}

#[test]
fn export_name_of_a_missing_export_closes_the_connection() {
    let running = one_disk();
    for name in [&b"nothing"[..], b"\xff\xfe", b"a\0b", &[b'x'; 5000]] {
        let mut client = greeted(&running);
        client.send_option(OPT_EXPORT_NAME, name);
        assert!(client.at_end());
    }
}

#[test]
fn list_returns_all_exports_with_descriptions() {
    let running = one_disk();
    let mut client = greeted(&running);
    let replies = client.option(OPT_LIST, &[]);
    let text: Vec<_> = replies.iter().map(|(kind, data)| (*kind, String::from_utf8_lossy(data).into_owned())).collect();
    assert_eq!(text[0], (REP_SERVER, "\0\0\0\u{2}vm1048576 bytes in memory".to_owned()));
    assert_eq!(text[1], (REP_SERVER, "\0\0\0\u{9}vm@monday1048576 bytes in memory".to_owned()));
    assert_eq!(text[2], (REP_ACK, String::new()));
    assert_eq!(client.verdict(OPT_LIST, b"x"), ERR_INVALID);
}

#[test]
fn info_replies_with_the_requested_information() {
    let running = one_disk();
    let mut client = greeted(&running);
    let replies = client.option(OPT_INFO, &Client::info_data("vm", &[0, 1, 2, 3, 77]));
    let kinds: Vec<_> = replies.iter().map(|(kind, data)| (*kind, data.get(..2).map(<[u8]>::to_vec))).collect();
    let fact = |kind: u8| (REP_INFO, Some(vec![0, kind]));
    assert_eq!(kinds, [fact(0), fact(1), fact(2), fact(3), (REP_ACK, None)]);
    assert_eq!(&replies[1].1[2..], b"vm");
    assert_eq!(&replies[2].1[2..], b"1048576 bytes in memory");
    assert_eq!(&replies[3].1[2..], [0, 0, 0, 1, 0, 0, 0x10, 0, 2, 0, 0, 0]);
    // INFO without information types returns the mandatory types, and does not end the handshake.
    assert_eq!(client.option(OPT_INFO, &Client::info_data("vm", &[])).len(), 2);
    assert_eq!(client.go("vm"), REP_ACK);
    assert_eq!(client.size, MIB);
}

#[test]
fn malformed_info_and_contexts_are_refused_and_the_handshake_continues() {
    let running = one_disk();
    let mut client = greeted(&running);
    client.choose(Mode::Structured);
    let mut long = Client::info_data("vm", &[]);
    long.push(0);
    let mut lying = Client::info_data("vm", &[3]);
    lying.truncate(lying.len() - 1);
    let huge = [0xff; 64];
    for data in [&b""[..], b"\0\0", &long, &lying, &huge] {
        for code in [OPT_INFO, OPT_GO, OPT_LIST_META, OPT_SET_META] {
            assert_eq!(client.verdict(code, data), ERR_INVALID, "{code} {data:?}");
        }
    }
    assert_eq!(client.verdict(OPT_INFO, &Client::info_data("nothing", &[])), ERR_UNKNOWN);
    assert_eq!(client.verdict(OPT_LIST_META, &Client::meta_data("nothing", &[])), ERR_UNKNOWN);
    assert_eq!(client.verdict(99, b"anything"), ERR_UNSUP);
    assert_eq!(client.verdict(4, b""), ERR_UNSUP);
    assert_eq!(client.verdict(OPT_INFO, &vec![0; 65 << 10]), ERR_TOO_BIG);
    assert_eq!(client.verdict(OPT_STARTTLS, b""), ERR_POLICY);
    assert_eq!(client.go("vm"), REP_ACK);
    client.leave();
}

#[test]
fn default_export_is_the_only_disk() {
    let running = one_disk();
    let mut client = greeted(&running);
    let replies = client.option(OPT_GO, &Client::info_data("", &[]));
    assert!(
        replies.iter().any(|(kind, data)| *kind == REP_INFO && data[..] == *b"\0\x01vm"),
        "the canonical name is sent"
    );
    drop(running);
    let running = Running::start(Shelf::of(&[&MemoryDisk::new("a", MIB, 1), &MemoryDisk::new("b", MIB, 1)]));
    let mut client = greeted(&running);
    let replies = client.option(OPT_GO, &Client::info_data("", &[]));
    assert_eq!(replies[0].0, ERR_UNKNOWN);
    assert!(String::from_utf8_lossy(&replies[0].1).contains("several disks"));
}

#[test]
fn transmission_flags_follow_the_negotiated_style() {
    const WRITABLE: u16 = 1 << 5 | 1 << 6 | 1 << 11;
    const ALWAYS: u16 = 1 | 1 << 2 | 1 << 3 | 1 << 8 | 1 << 10;
    let disks = || Shelf::of(&[&MemoryDisk::new("vm", MIB, 1), &MemoryDisk::read_only("vm@monday", MIB)]);
    let running = Running::start(disks());
    let flags = |running: &Running, export: &str, mode, contexts: bool| {
        let mut client = greeted(running);
        client.choose(mode);
        if contexts {
            client.set_meta(export, &["base:allocation"]);
        }
        assert_eq!(client.go(export), REP_ACK);
        client.flags
    };
    assert_eq!(flags(&running, "vm", Mode::Simple, false), ALWAYS | WRITABLE | 1 << 9);
    assert_eq!(flags(&running, "vm", Mode::Structured, true), ALWAYS | WRITABLE | 1 << 9 | 1 << 7);
    assert_eq!(flags(&running, "vm", Mode::Extended, false), ALWAYS | WRITABLE | 1 << 9 | 1 << 7);
    assert_eq!(flags(&running, "vm", Mode::Extended, true), ALWAYS | WRITABLE | 1 << 9 | 1 << 7 | 1 << 12);
    assert_eq!(flags(&running, "vm@monday", Mode::Simple, false), ALWAYS | 2);
    let config = ServerConfig { read_only: true, ..ServerConfig::default() };
    assert_eq!(flags(&Running::with(config, disks()), "vm", Mode::Simple, false), ALWAYS | 2);
    let config = ServerConfig { resize: ResizePolicy::Never, ..ServerConfig::default() };
    assert_eq!(flags(&Running::with(config, disks()), "vm", Mode::Simple, false), ALWAYS | WRITABLE);
}

#[test]
fn extended_headers_take_precedence_over_structured_replies() {
    let running = one_disk();
    let mut client = greeted(&running);
    assert_eq!(client.verdict(OPT_STRUCTURED_REPLY, b"x"), ERR_INVALID);
    assert_eq!(client.verdict(OPT_EXTENDED, b"x"), ERR_INVALID);
    client.choose(Mode::Structured);
    client.choose(Mode::Extended);
    assert_eq!(client.verdict(OPT_STRUCTURED_REPLY, b""), ERR_EXT_REQD);
    client.send_option(OPT_EXPORT_NAME, b"vm");
    assert!(client.at_end(), "EXPORT_NAME must not be used with extended headers");
}

#[test]
fn contexts_are_listed_and_chosen_by_name() {
    let running = one_disk();
    let mut client = greeted(&running);
    let set = Client::meta_data("vm", &["base:allocation"]);
    assert_eq!(client.verdict(OPT_SET_META, &set), ERR_INVALID, "needs structured replies");
    client.choose(Mode::Structured);
    let mut list = |queries: &[&str]| -> Vec<String> {
        let replies = client.option(OPT_LIST_META, &Client::meta_data("vm", queries));
        assert_eq!(replies.last().unwrap().0, REP_ACK);
        let names = replies.iter().filter(|(kind, _)| *kind == REP_META);
        names.map(|(_, data)| String::from_utf8(data[4..].to_vec()).unwrap()).collect()
    };
    let ours = ["lamina:dirty:monday", "lamina:dirty:tuesday"];
    let others = ["qemu:dirty-bitmap:monday", "qemu:dirty-bitmap:tuesday"];
    assert_eq!(list(&[]), [&["base:allocation"], &ours[..], &others].concat());
    assert_eq!(list(&["base:"]), ["base:allocation"]);
    assert_eq!(list(&["base:allocation", "base:"]), ["base:allocation"]);
    assert_eq!(list(&["lamina:"]), ours);
    assert_eq!(list(&["lamina:dirty:"]), ours);
    assert_eq!(list(&["qemu:"]), others);
    assert_eq!(list(&["qemu:dirty-bitmap:tuesday"]), [others[1]]);
    assert!(list(&["other:thing", "base:nothing", "lamina:dirty:sunday", "no colon", ""]).is_empty());

    assert!(client.set_meta("vm", &[]).is_empty());
    assert!(client.set_meta("vm", &["base:", "lamina:", "lamina:dirty:sunday", "x-y:z"]).is_empty());
    let chosen = client.set_meta("vm", &[others[0], "base:allocation", ours[0], others[0]]);
    assert_eq!(chosen.len(), 3);
    let mut ids: Vec<_> = chosen.values().collect();
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 3, "every context has its own number");
}

#[test]
fn contexts_negotiated_for_another_export_do_not_apply() {
    let running = Running::start(Shelf::of(&[&MemoryDisk::new("a", MIB, 1), &MemoryDisk::new("b", MIB, 1)]));
    let mut client = greeted(&running);
    client.choose(Mode::Structured);
    client.set_meta("a", &["base:allocation"]);
    assert_eq!(client.go("b"), REP_ACK);
    assert_eq!(client.ask(CMD_STATUS, 0, 0, 4096).error, EINVAL);
    // A failed request also discards the contexts chosen before.
    let mut client = greeted(&running);
    client.choose(Mode::Structured);
    client.set_meta("a", &["base:allocation"]);
    assert_eq!(client.verdict(OPT_SET_META, b"junk"), ERR_INVALID);
    assert_eq!(client.go("a"), REP_ACK);
    assert_eq!(client.ask(CMD_STATUS, 0, 0, 4096).error, EINVAL);
}

#[test]
fn the_abort_option_is_acknowledged() {
    let running = one_disk();
    let mut client = greeted(&running);
    assert_eq!(client.verdict(OPT_ABORT, b"whatever"), REP_ACK);
    assert!(client.at_end());
}

#[test]
fn protocol_violations_in_the_handshake_close_the_connection() {
    let running = one_disk();
    let mut client = Client::unix(&running.socket);
    client.greet(1 << 5 | 3);
    assert!(client.at_end(), "unknown handshake flags");
    let mut client = Client::unix(&running.socket);
    client.greet(0);
    client.send_option(OPT_LIST, &[]);
    assert!(client.at_end(), "options without fixed newstyle");
    let mut client = greeted(&running);
    client.stream.write_all(b"IHAVEOPS\0\0\0\x03\0\0\0\0").unwrap();
    assert!(client.at_end(), "wrong magic");
    let mut client = greeted(&running);
    client.stream.write_all(b"IHAVEOPT\0\0\0\x03\xff\xff\xff\xff").unwrap();
    assert!(client.at_end(), "an option of 4 GiB");
}

#[test]
fn unknown_options_of_any_size_are_refused_and_the_handshake_continues() {
    let running = one_disk();
    let mut client = greeted(&running);
    for code in [0, 4, 12, 13, 255, 0x1234_5678, u32::MAX] {
        for length in [0, 1, 4096, 64 << 10] {
            assert_eq!(client.verdict(code, &vec![0xa5; length]), ERR_UNSUP, "option {code} of {length} bytes");
        }
    }
    for length in [(64 << 10) + 1, 1 << 20] {
        for code in [OPT_LIST, OPT_GO, OPT_SET_META, 77] {
            assert_eq!(client.verdict(code, &vec![0xa5; length]), ERR_TOO_BIG, "option {code} of {length} bytes");
        }
    }
    client.choose(Mode::Structured);
    assert_eq!(client.verdict(77, b"between"), ERR_UNSUP);
    assert_eq!(client.go("vm"), REP_ACK);
    assert_eq!(client.read(0, 512), [0; 512]);
    client.leave();
    let mut client = greeted(&running);
    client.stream.write_all(b"IHAVEOPT\0\0\0\x4d\0\x10\0\x01").unwrap();
    assert!(client.at_end(), "an option of 1 MiB and a byte");
}

#[test]
fn unknown_information_requests_are_ignored() {
    let running = one_disk();
    let mut client = greeted(&running);
    let strange: Vec<u16> = (4..250).collect();
    for wanted in [&strange[..], &[u16::MAX], &[0x8000, 4, 4, 4], &[0, 0, 0]] {
        for code in [OPT_INFO, OPT_GO] {
            let replies = client.option(code, &Client::info_data("vm", wanted));
            let kinds: Vec<_> = replies.iter().map(|(kind, _)| *kind).collect();
            assert_eq!(kinds, [REP_INFO, REP_ACK], "{wanted:?}");
            assert_eq!(replies[0].1[..2], [0, 0]);
            if code == OPT_GO {
                assert_eq!(client.read(0, 512), [0; 512]);
                client = greeted(&running);
            }
        }
    }
    // Each kind of information is sent once, even if it is requested repeatedly, and unknown kinds are ignored.
    let replies = client.option(OPT_INFO, &Client::info_data("vm", &[3, 9, 3, 1, 1000, 1]));
    let facts: Vec<u8> = replies.iter().filter(|(kind, _)| *kind == REP_INFO).map(|(_, data)| data[1]).collect();
    assert_eq!(facts, [0, 1, 3]);
}

#[test]
fn extensions_may_be_negotiated_twice() {
    let running = one_disk();
    let mut client = greeted(&running);
    for code in [OPT_STRUCTURED_REPLY, OPT_STRUCTURED_REPLY, OPT_EXTENDED, OPT_EXTENDED] {
        assert_eq!(client.verdict(code, &[]), REP_ACK);
    }
    client.mode = Mode::Extended;
    for _ in 0..3 {
        assert_eq!(client.set_meta("vm", &["base:allocation"]).len(), 1);
        assert_eq!(client.verdict(OPT_INFO, &Client::info_data("vm", &[])), REP_ACK);
    }
    assert_eq!(client.go("vm"), REP_ACK);
    assert_eq!(client.ask(CMD_STATUS, 0, 0, 4096).error, 0);
    client.leave();
}

#[test]
fn export_names_of_every_form() {
    const STRANGE: &str = "Ünïcode/with space, 雪";
    let names = ["vm", "vm@monday", STRANGE];
    let [vm, monday, strange] = names.map(|name| match name {
        "vm@monday" => MemoryDisk::read_only(name, 2 * MIB),
        name => MemoryDisk::new(name, if name == "vm" { MIB } else { 3 * MIB }, 1),
    });
    let running = Running::start(Shelf::of(&[&vm, &monday, &strange]));
    for (name, size) in [("vm", MIB), ("vm@monday", 2 * MIB), (STRANGE, 3 * MIB)] {
        let mut client = greeted(&running);
        assert_eq!(client.verdict(OPT_INFO, &Client::info_data(name, &[1])), REP_ACK, "{name}");
        assert_eq!(client.go(name), REP_ACK, "{name}");
        assert_eq!(client.size, size);
        client.leave();
        let mut client = greeted(&running);
        client.send_option(OPT_EXPORT_NAME, name.as_bytes());
        assert_eq!(client.take(10)[..8], size.to_be_bytes(), "{name}");
        client.leave();
    }
    // A wrong name gets an error reply and does not end the session.
    let mut client = greeted(&running);
    let longest = "x".repeat(4096);
    for name in ["", "VM", "vm ", " vm", "/vm", "vm/", "vm@", "@monday", "vm@tuesday", "..", &longest] {
        assert_eq!(client.verdict(OPT_INFO, &Client::info_data(name, &[])), ERR_UNKNOWN, "{name:?}");
        assert_eq!(client.go(name), ERR_UNKNOWN, "{name:?}");
    }
    for name in [&b"a\0b"[..], b"\xff\xfe", &[b'x'; 4097]] {
        let mut data = (name.len() as u32).to_be_bytes().to_vec();
        data.extend(name);
        data.extend([0, 0]);
        assert_eq!(client.verdict(OPT_GO, &data), ERR_INVALID, "{name:?}");
    }
    assert_eq!(client.go("vm"), REP_ACK);
    client.leave();
}

#[test]
fn the_empty_name_is_the_default_export_in_every_option() {
    let running = one_disk();
    let mut client = greeted(&running);
    client.send_option(OPT_EXPORT_NAME, b"");
    assert_eq!(client.take(10)[..8], MIB.to_be_bytes());
    client.leave();
    // The default export has two names. Contexts that are chosen under one name are valid under the other.
    for (chosen, opened) in [("", "vm"), ("vm", ""), ("", "")] {
        let mut client = greeted(&running);
        client.choose(Mode::Extended);
        client.set_meta(chosen, &["base:allocation"]);
        assert_eq!(client.go(opened), REP_ACK);
        assert_eq!(client.ask(CMD_STATUS, 0, 0, 4096).error, 0, "{chosen:?} {opened:?}");
        client.leave();
    }
}

/// The disk that the client has queried is renamed, and another disk gets its name, before the client chooses the name.
#[test]
fn the_chosen_export_is_the_disk_that_has_its_name_then() {
    const DESCRIPTION: u16 = 2;
    for style in [OPT_SET_META, OPT_GO] {
        let clients = Arc::new(Clients::in_memory(Duration::from_secs(60)));
        let (old, new) = (MemoryDisk::new("a", MIB, 1), MemoryDisk::new("a", 2 * MIB, 1));
        let after = Shelf::of(&[&new]);
        let renamed = Arc::clone(&clients);
        let change = move || renamed.rename("a", "b", || Ok(after)).unwrap();
        let exports = Changing::new(Shelf::of(&[&old]), change);
        let config = ServerConfig { clients: Arc::clone(&clients), ..ServerConfig::default() };
        let running = Running::with(config, exports);
        let mut client = greeted(&running);
        client.choose(Mode::Structured);
        let replies = client.option(OPT_INFO, &Client::info_data("a", &[DESCRIPTION]));
        assert_eq!(replies[0].1[2..10], MIB.to_be_bytes());
        if style == OPT_SET_META {
            assert_eq!(client.set_meta("a", &["base:allocation"]).len(), 1);
        }
        assert_eq!(client.go("a"), REP_ACK);
        assert_eq!(client.size, 2 * MIB, "the size of the disk that has the name now");
        client.write(0, &[1; 512]);
        assert!(old.contents()[..512] == [0; 512] && new.contents()[..512] == [1; 512]);
        let listed: Vec<String> = clients.all().into_iter().map(|client| client.export).collect();
        assert_eq!(listed, ["a"]);
    }
}
