//! Network cards of a real guest: forwarded ports, tap devices and bridges. The machine with the tap device is started
//! in a network namespace of the test, which needs root.

#![allow(clippy::unwrap_used)]

use serde_json::json;
use std::io::Read;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::process::{Command, Stdio};
use testkit::machines::Room;
use testkit::process::{Done, output, tool};

/// A port of the host that no process uses.
fn free_port() -> u16 {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port()
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
    room.until("the guest has its address", || room.shell("web", "ip addr show eth0").contains("10.0.2."));
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
    room.run("vm snapshot create web@live --memory").fails(1, "two processes cannot have");
    room.run("vm clone web twin").ok();
    assert_eq!(room.show("twin")["networks"][0]["link"], "user");
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
