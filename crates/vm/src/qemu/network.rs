//! What QEMU connects network cards to, and what the host needs for it.
//!
//! A card on a user network is connected to QEMU's own network, or to passt ([`super::passt`]): then QEMU listens on a
//! socket in the run folder.
//!
//! 1. The options are the same for a process that starts and for a running process.
//! 2. If the host lacks something that a card needs, the user gets an error with the remedy before QEMU is started or
//!    receives a command.

use super::command::{self, RunFolder, hub, network_node};
use super::passt::Passt;
use crate::definition::{Definition, Link, Network};
use error::{Error, ErrorKind, IoContext, Result};
use serde_json::{Map, Value, json};
use std::fs;
use std::path::Path;

/// Interfaces of the host's network in which this process is.
const INTERFACES: &str = "/proc/self/net/dev";
/// Which bridges QEMU's helper program may use.
const HELPER_RULES: &str = "/etc/qemu/bridge.conf";
/// Where distributions have QEMU's helper program.
const HELPERS: [&str; 3] =
    ["/usr/lib/qemu/qemu-bridge-helper", "/usr/libexec/qemu-bridge-helper", "/usr/local/libexec/qemu-bridge-helper"];

/// Kind and options of the backend of a card. An option `a.b` is the member `b` of the JSON object `a`.
fn options(network: &Network, passt: Option<(&Passt, &RunFolder)>) -> (&'static str, Vec<(&'static str, String)>) {
    if let Some((_, run)) = passt.filter(|(passt, _)| passt.serves(network)) {
        let path = run.network(network.slot).display().to_string();
        return ("stream", vec![("server", "on".into()), ("addr.type", "unix".into()), ("addr.path", path)]);
    }
    match &network.link {
        Link::User => ("user", Vec::new()),
        Link::Forward(ports) => ("user", ports.iter().map(|port| ("hostfwd", port.rule())).collect()),
        Link::Bridge(bridge) => ("bridge", vec![("br", bridge.clone())]),
        Link::Tap(tap) => {
            // The device exists and is configured, so QEMU calls no scripts.
            let plain = ["script", "downscript"].map(|script| (script, "no".to_owned()));
            ("tap", [("ifname", tap.clone())].into_iter().chain(plain).collect())
        }
        Link::None => ("hubport", vec![("hubid", hub(network).to_string())]),
    }
}

/// The backend of a card in a command line.
pub fn argument(network: &Network, passt: Option<(&Passt, &RunFolder)>) -> String {
    let (kind, options) = options(network, passt);
    let mut text = format!("{kind},id={}", network_node(network));
    for (key, value) in options {
        text.push_str(&format!(",{key}={}", command::value(value)));
    }
    text
}

/// The backend of a card for a running process.
pub fn backend(network: &Network, passt: Option<(&Passt, &RunFolder)>) -> Value {
    let (kind, options) = options(network, passt);
    let mut all = Map::new();
    all.insert("type".into(), json!(kind));
    all.insert("id".into(), json!(network_node(network)));
    for (key, value) in options {
        match (key, all.get_mut(key)) {
            ("hostfwd", Some(Value::Array(ports))) => ports.push(json!({ "str": value })),
            ("hostfwd", _) => drop(all.insert(key.into(), json!([{ "str": value }]))),
            ("hubid", _) => drop(all.insert(key.into(), json!(hub(network)))),
            ("server", _) => drop(all.insert(key.into(), json!(value == "on"))),
            ("addr.type", _) => drop(all.insert("addr".into(), json!({ "type": value }))),
            ("addr.path", _) => all["addr"]["path"] = json!(value),
            _ => drop(all.insert(key.into(), json!(value))),
        }
    }
    Value::Object(all)
}

/// Checks that the host has what the cards of a machine need.
///
/// # Errors
/// `NotFound`, with what is missing and a command that creates it.
pub fn check(definition: &Definition) -> Result<()> {
    definition.networks.iter().try_for_each(check_one)
}

/// Checks that the host has what a card needs.
pub fn check_one(network: &Network) -> Result<()> {
    let (Link::Bridge(name) | Link::Tap(name)) = &network.link else { return Ok(()) };
    let interfaces = fs::read_to_string(INTERFACES).during(|| format!("reading '{INTERFACES}'"))?;
    let there = interfaces.lines().any(|line| line.trim_start().split(':').next() == Some(name));
    let missing = |what: String| {
        let text = format!("network card {}: {what}", network.mac);
        Err(Error::new(ErrorKind::NotFound, text))
    };
    match (&network.link, there) {
        (Link::Tap(_), false) => missing(format!(
            "the host has no tap device '{name}'; as root, 'ip tuntap add dev {name} mode tap user USER' makes one for \
             the user who starts the machine, and 'ip link set {name} up' activates it"
        )),
        (Link::Bridge(_), false) => missing(format!(
            "the host has no bridge '{name}'; as root, 'ip link add {name} type bridge' makes one, and 'ip link set {name} \
             up' activates it"
        )),
        (Link::Bridge(_), true) if !HELPERS.iter().any(|helper| Path::new(helper).exists()) => missing(format!(
            "QEMU needs its program qemu-bridge-helper for a bridge, which is not at {}; Debian's package is \
             qemu-system-common",
            HELPERS.join(" or ")
        )),
        (Link::Bridge(_), true) if !allows(&fs::read_to_string(HELPER_RULES).unwrap_or_default(), name) => {
            missing(format!(
                "qemu-bridge-helper is not allowed to use the bridge '{name}'; as root, add the line 'allow {name}' to \
                 {HELPER_RULES}"
            ))
        }
        _ => Ok(()),
    }
}

/// Whether the rules of the helper program allow a bridge. Rules in included files are left to the helper.
fn allows(rules: &str, bridge: &str) -> bool {
    let mut words = rules.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    words.any(|words| {
        matches!(words[..], ["allow", name] if name == bridge || name == "all") || words.first() == Some(&"include")
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::definition::Card;

    fn card(link: Link) -> Network {
        Network { mac: "52:54:00:12:34:56".parse().unwrap(), link, slot: 16, model: Card::Virtio }
    }

    #[test]
    fn options_are_the_same_for_a_command_line_and_for_a_running_process() {
        let forward = Link::Forward(vec!["2222:22".parse().unwrap(), "5353:53/udp".parse().unwrap()]);
        for (link, text, value) in [
            (Link::User, "user,id=net16", json!({ "type": "user", "id": "net16" })),
            (
                forward,
                "user,id=net16,hostfwd=tcp:127.0.0.1:2222-:22,hostfwd=udp:127.0.0.1:5353-:53",
                json!({ "type": "user", "id": "net16",
                        "hostfwd": [{ "str": "tcp:127.0.0.1:2222-:22" }, { "str": "udp:127.0.0.1:5353-:53" }] }),
            ),
            (
                Link::Bridge("br,0".into()),
                "bridge,id=net16,br=br,,0",
                json!({ "type": "bridge", "id": "net16", "br": "br,0" }),
            ),
            (
                Link::Tap("tap0".into()),
                "tap,id=net16,ifname=tap0,script=no,downscript=no",
                json!({ "type": "tap", "id": "net16", "ifname": "tap0", "script": "no", "downscript": "no" }),
            ),
            (Link::None, "hubport,id=net16,hubid=1016", json!({ "type": "hubport", "id": "net16", "hubid": 1016 })),
        ] {
            let card = card(link);
            assert_eq!((argument(&card, None).as_str(), backend(&card, None)), (text, value));
        }
        let run = RunFolder("/run/a,b".into());
        let installed = Passt { program: "passt".into(), forwards: true };
        let passt = Some((&installed, &run));
        let value = json!({ "type": "stream", "id": "net16", "server": true,
                            "addr": { "type": "unix", "path": "/run/a,b/net16.sock" } });
        let text = "stream,id=net16,server=on,addr.type=unix,addr.path=/run/a,,b/net16.sock";
        for link in [Link::User, Link::Forward(vec!["2222:22".parse().unwrap()])] {
            let card = card(link);
            assert_eq!((argument(&card, passt).as_str(), backend(&card, passt)), (text, value.clone()));
        }
        let unplugged = card(Link::None);
        assert_eq!(argument(&unplugged, passt), argument(&unplugged, None));
    }

    #[test]
    fn a_missing_interface_is_reported_with_the_command_that_makes_it() {
        check_one(&card(Link::User)).unwrap();
        for (link, command) in [
            (Link::Tap("lamina-none".into()), "ip tuntap add dev lamina-none mode tap"),
            (Link::Bridge("lamina-none".into()), "ip link add lamina-none type bridge"),
        ] {
            let error = check_one(&card(link)).unwrap_err();
            assert!(error.kind() == ErrorKind::NotFound && error.to_string().contains(command), "{error}");
        }
        // The loopback interface is in every network.
        check_one(&card(Link::Tap("lo".into()))).unwrap();
    }

    #[test]
    fn rules_of_the_helper_program() {
        assert!(allows("# bridges\nallow br0\n", "br0") && allows("allow all", "br0") && allows("include /x", "br0"));
        assert!(!allows("", "br0") && !allows("allow br1\ndeny br0\n#allow br0", "br0"));
    }
}
