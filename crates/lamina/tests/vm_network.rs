//! Network cards of a real guest: forwarded ports, tap devices and bridges. The machine with the tap device is started
//! in a network namespace of the test. This needs root.

#![allow(clippy::unwrap_used)]

use serde_json::json;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::process::{Command, Stdio};
use testkit::machines::Room;
use testkit::process::{Done, output, tool};

/// A port of the host that no process uses.
fn free_port() -> u16 {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port()
}

/// Waits until a guest has its address, and then until it answers on two forwarded ports.
fn until_answered(room: &Room, first: u16, second: u16) {
    room.until("the guest has its address", || room.shell("web", "ip addr show eth0").contains("10.0.2.15/24"));
    for (port, words) in [(8080, "one"), (8081, "two")] {
        room.shell("web", &format!("(echo {words} | nc -l -p {port}) >/dev/null 2>&1 &"));
    }
    for (port, words) in [(first, "one\n"), (second, "two\n")] {
        let mut said = String::new();
        room.until("the guest answers", || {
            let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port));
            said.clear();
            stream.is_ok_and(|mut stream| stream.read_to_string(&mut said).is_ok()) && !said.is_empty()
        });
        assert_eq!(said, words);
    }
}

#[test]
fn a_forwarded_port_leads_into_the_guest() {
    let room = Room::new();
    let [first, second] = [free_port(), free_port()];
    room.run("vm import nothing.vmx --network tap=tap7").fails(2, "for one card");
    room.run(&format!("vm create wrong --network user,forward={first}")).fails(2, "no forwarded port");
    let networks = format!("--memory 192M --network user,forward={first}:8080,forward=127.0.0.1:{second}:8081");
    room.boot_from("vm-initrd", "web", &networks, "");
    assert_eq!(room.show("web")["networks"][0]["link"], format!("user,forward={first}:8080,forward={second}:8081"));
    until_answered(&room, first, second);
    room.run("vm snapshot create web@live --memory").fails(1, "cannot have its tap device or forwarded ports");
    room.run("vm clone web twin").ok();
    assert_eq!(room.show("twin")["networks"][0]["link"], "user");
    room.close();
}

/// The passt process that serves a card of a running machine, by the peer of QEMU's socket.
fn passt_of(room: &Room, name: &str, slot: u8) -> u32 {
    let list = tool("ss", &["-xpH"]);
    // State, queues, local path and inode, peer path and inode, processes.
    let fields: Vec<Vec<&str>> = list.lines().map(|line| line.split_whitespace().collect()).collect();
    let pid = room.show(name)["pid"].to_string();
    let socket = format!("net{slot}.sock");
    let own = fields
        .iter()
        .find(|it| it[4].ends_with(&socket) && it[1] == "ESTAB" && it.last().unwrap().contains(&format!("pid={pid},")));
    let peer = own.unwrap_or_else(|| panic!("{pid}: {list}"))[7];
    let other = fields.iter().find(|it| it[5] == peer && it.last().unwrap().contains("passt")).unwrap();
    let process = other.last().unwrap().split("pid=").nth(1).unwrap();
    process.split(',').next().unwrap().parse().unwrap()
}

#[test]
fn a_passt_process_serves_a_card_as_long_as_the_machine_runs() {
    let room = Room::new();
    room.boot("web", "192M", "");
    if room.show("web")["why_not_passt"].as_str().is_some_and(|why| why.contains("before 2025")) {
        // The version of Debian 12 is not used.
        assert!(room.run("vm show web").ok().contains("not passt: connections hang"));
        return room.close();
    }
    assert_eq!((&room.show("web")["passt"], &room.show("web")["why_not_passt"]), (&json!(true), &json!(null)));
    assert!(room.run("vm show web").ok().contains("passt"));
    room.until("the guest has its address", || room.shell("web", "ip addr show eth0").contains("10.0.2.15/24"));
    // The guest reaches a server of the host.
    let server = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = server.local_addr().unwrap().port();
    let answered = std::thread::spawn(move || server.accept().unwrap().0.write_all(b"hello\n").unwrap());
    assert_eq!(room.shell("web", &format!("nc 10.0.2.2 {port} </dev/null")), "hello");
    answered.join().unwrap();
    // A card that is added while the machine runs, and removed again.
    let gone = |process: u32| !std::path::Path::new(&format!("/proc/{process}/exe")).exists();
    let first = passt_of(&room, "web", 16);
    room.run("vm edit web --add-network user").ok();
    let second = passt_of(&room, "web", 32);
    assert!(first != second && room.show("web")["passt"] == json!(true));
    room.until("the guest has the card", || room.shell("web", "ls /sys/class/net").contains("eth1"));
    let mac = room.show("web")["networks"][1]["mac"].as_str().unwrap().to_owned();
    room.run(&format!("vm edit web --remove-network {mac}")).ok();
    room.until("its process has ended", || gone(second));

    // States that are saved with passt continue with passt, and instant clones continue without passt.
    room.run("vm snapshot create web@live --memory").ok();
    assert_eq!(room.show("web")["passt"], json!(true));
    room.run("vm clone web twin --instant --identity required").ok();
    assert_eq!(room.show("twin")["passt"], json!(false));
    room.until("the clone has its address", || room.shell("twin", "ip addr show eth0").contains("10.0.2.15/24"));
    room.run("vm snapshot create twin@live --memory").ok();
    room.run("vm revert twin@live").ok();
    assert_eq!(room.show("twin")["passt"], json!(false), "a state of QEMU's own network needs that network");
    room.run("vm freeze web").ok();
    room.run("vm start web").ok();
    assert_eq!(room.show("web")["passt"], json!(true));
    room.run("vm revert web@live").ok();
    assert_eq!(room.show("web")["passt"], json!(true));
    room.until_answers("web");

    // The passt process ends with QEMU. If passt is not installed, the guest has QEMU's own network.
    let last = passt_of(&room, "web", 16);
    room.run("vm stop web --force").ok();
    room.until("its process has ended", || gone(last));
    let path = std::env::var_os("PATH").unwrap();
    let others = std::env::split_paths(&path).filter(|it| !it.join("passt").exists());
    let folder = tempfile::tempdir().unwrap();
    let qemu = tool("sh", &["-c", "command -v qemu-system-x86_64"]);
    std::os::unix::fs::symlink(qemu.trim(), folder.path().join("qemu-system-x86_64")).unwrap();
    let path = std::env::join_paths(others.chain([folder.path().to_owned()])).unwrap();
    let done: Done = output(room.store.command("vm start web").env("PATH", &path)).into();
    done.ok();
    assert_eq!(room.show("web")["passt"], json!(false));
    let told: Done = output(room.store.command("vm show web").env("PATH", &path)).into();
    assert!(told.ok().contains("QEMU's own, not passt: passt is not installed"));
    room.close();
}

/// The network of the test: a tap device and a bridge, each with an address of the host.
const NETWORK: &str = "
set -e
mkdir -p /etc/qemu
mount -t tmpfs none /etc/qemu
echo allow br7 >/etc/qemu/bridge.conf
ip link set lo up
ip tuntap add dev tap7 mode tap
ip addr add 10.77.0.1/24 dev tap7
ip link set tap7 up
ip link add br7 type bridge
ip addr add 10.78.0.1/24 dev br7
ip link set br7 up
exec \"$@\"";

#[test]
fn a_guest_is_reached_over_a_tap_device_and_over_a_bridge() {
    let room = Room::new();
    room.boot("web", "192M", "");
    let sandboxed = || {
        let status = std::fs::read_to_string(format!("/proc/{}/status", room.show("web")["pid"])).unwrap();
        status.contains("\nSeccomp:\t2\n")
    };
    assert!(sandboxed());
    room.run("vm edit web --add-network tap=tap7").fails(3, "ip tuntap add dev tap7 mode tap");
    room.run("vm edit web --add-network bridge=br7").fails(7, "stop it first");
    room.run("vm edit web --add-network tap=longer-than-allowed").fails(2, "no name of an interface");
    room.run("vm stop web --force").ok();
    room.run("vm edit web --add-network tap=tap7 --add-network bridge=br7").ok();
    room.run("vm start web").fails(3, "ip tuntap add dev tap7 mode tap");
    let mut start = Command::new("unshare");
    start.args(["--net", "--mount", "sh", "-c", NETWORK, "sh"]);
    let lamina = room.store.command("vm start web");
    let done: Done = output(start.arg(lamina.get_program()).args(lamina.get_args()).stdin(Stdio::null())).into();
    done.ok();
    room.until_answers("web");
    assert!(!sandboxed(), "QEMU starts the bridge helper, which its sandbox does not permit");
    let links: Vec<_> =
        room.show("web")["networks"].as_array().unwrap().iter().map(|card| card["link"].clone()).collect();
    assert_eq!(links, [json!("user"), json!("tap=tap7"), json!("bridge=br7")]);
    let namespace = format!("--net=/proc/{}/ns/net", room.show("web")["pid"]);
    for (card, address) in [("eth1", "10.77.0.2"), ("eth2", "10.78.0.2")] {
        room.shell("web", &format!("ip addr add {address}/24 dev {card}; ip link set {card} up"));
        room.shell("web", &format!("(echo {card} | nc -l -p 9000) >/dev/null 2>&1 &"));
        let ask = ["timeout", "60", "sh", "-c", "until busybox nc $1 9000 </dev/null; do sleep 1; done", "sh", address];
        assert_eq!(tool("nsenter", &[&[namespace.as_str()], &ask[..]].concat()), format!("{card}\n"));
    }
    room.run("vm stop web --force").ok();
    room.close();
}
