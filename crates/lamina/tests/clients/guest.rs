//! A Linux guest in each QEMU generation on a lamina disk whose server is restarted while the guest writes. The guest
//! sees a disk that is slow for a while, but no error. `scripts/guest` builds the guest; the phase `restarts` of
//! `tests/guest/init` is its part of the test.
//!
//! A server that ends on SIGTERM writes everything back. A killed server loses writes that were not flushed, as a disk
//! does on a power failure, but a guest that continues to run does not repeat them. The option `write-cache=off`, with
//! which QEMU requests FUA for every write, protects the guest.

use crate::libnbd::service;
use crate::program::Generation;
use crate::served::{Served, Target};
use testkit::guest::Guest;
use testkit::process::{PATIENCE, tool};

/// How often the server is restarted under one guest.
const RESTARTS: usize = 4;

/// Rounds of the guest's writes between two restarts.
const ROUNDS: usize = 3;

/// Rounds after which every file was written; `tests/guest/init` has 16 files.
const ROUNDS_MIN: usize = 16;

fn boot(generation: Generation, target: &Target, write_cache: &str) -> Guest {
    // The delay is longer than any restart in this test.
    let reconnect = format!("reconnect-delay={}", PATIENCE.as_secs());
    let blockdev = format!("{},node-name=disk0,discard=unmap,{reconnect}", target.image());
    let device = format!("virtio-blk-pci,drive=disk0,write-cache={write_cache}");
    let mut qemu = service(generation, "qemu-system-x86_64");
    qemu.args(target.objects());
    Guest::boot(qemu, &blockdev, &device, "restarts")
}

fn outlives(generation: Generation, signal: &str, tls: bool) {
    let mut served = Served::start();
    served.store.run("disk create vm1 128M").ok();
    let write_cache = if signal == "KILL" { "off" } else { "on" };
    let version = generation.version("qemu-system-x86_64");
    let line = format!("QEMU {version}, guest, TLS {tls}, write-cache={write_cache}, SIG{signal}");
    let target = Target { served: &served, export: "vm1".into(), tls };
    let mut guest = boot(generation, &target, write_cache);
    let mut round = guest.reach(ROUNDS, &line);
    for _ in 0..RESTARTS {
        served.restart(signal);
        round = guest.reach(round + ROUNDS, &line);
    }
    guest.reach(ROUNDS_MIN, &line);
    guest.tell("enough");
    guest.end(&line);
    // The guest connected in the expected style, and e2fsck on the host finds the guest's file system clean.
    let style = format!("style={:?}", generation.qemu_style());
    assert!(served.server.log().contains(&style), "{line}: not in {style}: {}", served.server.log());
    let image = served.scratch().join("image");
    tool("nbdcopy", &[&served.store.uri("vm1"), image.to_str().unwrap()]);
    tool("e2fsck", &["-fn", image.to_str().unwrap()]);
    assert_eq!(served.server.stop("TERM"), Some(0));
    served.store.is_clean();
}

#[test]
fn a_guest_outlives_restarts_of_the_server() {
    outlives(Generation::Installed, "TERM", false);
    outlives(Generation::Installed, "KILL", true);
}

#[test]
fn a_guest_of_the_newest_qemu_outlives_restarts_of_the_server() {
    outlives(Generation::Newest, "TERM", false);
    outlives(Generation::Newest, "KILL", true);
}
