//! A Linux guest in QEMU on one disk. `scripts/guest` builds the guest. A phase of `crates/lamina/tests/guest/init` is
//! the guest's part of a test.

use crate::machines::{KERNEL_LINE, PATIENCE};
use crate::process::{until, wait_within};
use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A running guest, which is killed when this value is dropped.
pub struct Guest {
    child: Child,
    console: Arc<Mutex<String>>,
}

impl Guest {
    /// Boots a guest for one phase. `qemu` starts QEMU, with arguments that the test needs; `blockdev` and `device` are
    /// its arguments for the disk.
    pub fn boot(mut qemu: Command, blockdev: &str, device: &str, phase: &str) -> Self {
        let folder = crate::machines::guest();
        // KVM is not used: it is often missing where these tests run, and the guest's speed does not matter.
        qemu.args(["-accel", "tcg", "-machine", "pc", "-m", "256", "-display", "none", "-monitor", "none"]);
        qemu.args(["-no-reboot", "-nodefaults", "-serial", "stdio", "-blockdev", blockdev, "-device", device]);
        qemu.arg("-kernel").arg(folder.join("vmlinuz")).arg("-initrd").arg(folder.join("initrd"));
        qemu.args(["-append", &format!("{KERNEL_LINE} phase={phase}")]);
        let mut child = qemu.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn().unwrap();
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

    pub fn console(&self) -> String {
        self.console.lock().unwrap().clone()
    }

    /// The number of rounds that the guest has completed.
    pub fn round(&self) -> usize {
        self.console().matches("guest: round ").count()
    }

    /// Waits until the guest has reached a round; returns its current round.
    pub fn reach(&mut self, round: usize, line: &str) -> usize {
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
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Writes a line to the guest's console.
    pub fn tell(&mut self, line: &str) {
        self.child.stdin.as_mut().unwrap().write_all(format!("{line}\n").as_bytes()).unwrap();
    }

    /// Waits until the guest has completed its phase without errors of its disk; returns its console output.
    pub fn end(mut self, line: &str) -> String {
        let code = wait_within(&mut self.child, PATIENCE);
        assert_eq!(code, Some(0), "{line}: {}", self.console());
        until("all of the console is read", || Arc::strong_count(&self.console) == 1);
        let console = self.console();
        assert!(console.contains("guest: done"), "{line}: {console}");
        for complaint in ["I/O error", "EXT4-fs error", "EXT4-fs warning"] {
            assert!(!console.contains(complaint), "{line}: {complaint}: {console}");
        }
        console
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
