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
use std::io::{Read, Write};
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Instant;
use testkit::process::{PATIENCE, tool};

/// How often the server is restarted under one guest.
const RESTARTS: usize = 4;

/// Rounds of the guest's writes between two restarts.
const ROUNDS: usize = 3;

/// Rounds after which every file was written; `tests/guest/init` has 16 files.
const ROUNDS_MIN: usize = 16;

/// A running guest, which is killed when this value is dropped.
struct Guest {
    child: Child,
    console: Arc<Mutex<String>>,
}

impl Guest {
    fn boot(generation: Generation, target: &Target, write_cache: &str) -> Self {
        let folder = testkit::machines::guest();
        // Longer than any restart in this test.
        let reconnect = format!("reconnect-delay={}", PATIENCE.as_secs());
        let blockdev = format!("{},node-name=disk0,discard=unmap,{reconnect}", target.image());
        let device = format!("virtio-blk-pci,drive=disk0,write-cache={write_cache}");
        let mut command = service(generation, "qemu-system-x86_64");
        // KVM is not used: it is often missing where these tests run, and the guest's speed does not matter.
        command.args(["-accel", "tcg", "-machine", "pc", "-m", "256", "-display", "none", "-monitor", "none"]);
        command.args(["-no-reboot", "-nodefaults", "-serial", "stdio"]);
        command.args(target.objects()).args(["-blockdev", &blockdev, "-device", &device]);
        command.arg("-kernel").arg(folder.join("vmlinuz")).arg("-initrd").arg(folder.join("initrd"));
        command.args(["-append", "console=ttyS0 quiet panic=-1 phase=restarts"]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn().unwrap();
        let console = Arc::new(Mutex::new(String::new()));
        let (mut output, copy) = (child.stdout.take().unwrap(), console.clone());
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = output.read(&mut bytes) {
                copy.lock().unwrap().push_str(&String::from_utf8_lossy(&bytes[..count]));
            }
        });
        Self { child, console }
    }

    fn console(&self) -> String {
        self.console.lock().unwrap().clone()
    }

    fn round(&self) -> usize {
        self.console().matches("guest: round ").count()
    }

    /// Waits until the guest has reached a round; returns its current round.
    fn reach(&mut self, round: usize, line: &str) -> usize {
        let begin = Instant::now();
        loop {
            let reached = self.round();
            if reached >= round {
                return reached;
            }
            let ended = self.child.try_wait().unwrap();
            let console = self.console();
            assert!(ended.is_none() && !console.contains("guest: failed"), "{line}: the guest failed: {console}");
            assert!(begin.elapsed() < PATIENCE, "{line}: the guest does not continue: {console}");
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }

    /// Tells the guest to end and waits; returns its console output.
    fn end(mut self, line: &str) -> String {
        self.child.stdin.take().unwrap().write_all(b"enough\n").unwrap();
        let code = testkit::process::wait(&mut self.child);
        assert_eq!(code, Some(0), "{line}: {}", self.console());
        testkit::process::until("all of the console is read", || Arc::strong_count(&self.console) == 1);
        self.console()
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn outlives(generation: Generation, signal: &str, tls: bool) {
    let mut served = Served::start();
    served.store.run("disk create vm1 128M").ok();
    let write_cache = if signal == "KILL" { "off" } else { "on" };
    let version = generation.version("qemu-system-x86_64");
    let line = format!("QEMU {version}, guest, TLS {tls}, write-cache={write_cache}, SIG{signal}");
    let target = Target { served: &served, export: "vm1".into(), tls };
    let mut guest = Guest::boot(generation, &target, write_cache);
    let mut round = guest.reach(ROUNDS, &line);
    for _ in 0..RESTARTS {
        served.restart(signal);
        round = guest.reach(round + ROUNDS, &line);
    }
    guest.reach(ROUNDS_MIN, &line);
    let console = guest.end(&line);
    assert!(console.contains("guest: done"), "{line}: {console}");
    for complaint in ["I/O error", "EXT4-fs error", "EXT4-fs warning"] {
        assert!(!console.contains(complaint), "{line}: {complaint}: {console}");
    }
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
