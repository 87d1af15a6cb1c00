//! A machine whose disk has no space: QEMU pauses its guest, and the guest loses nothing when it is resumed.

#![allow(clippy::unwrap_used)]

use std::path::Path;
use testkit::machines::Room;
use testkit::mounted::{make_room, on_tmpfs, take_the_rest};

#[test]
fn a_machine_without_space_is_paused_and_resumed() {
    // The guest is built before the test runs in a namespace.
    testkit::machines::guest();
    on_tmpfs("a_machine_without_space_is_paused_and_resumed", 192, paused);
}

fn paused(folder: &Path) {
    let room = Room::at(folder);
    room.boot_from("vm-initrd", "web", "--memory 256M --write-errors stop", "");
    assert_eq!(room.show("web")["write_errors"], "stop");
    assert!(room.run("vm show web").ok().contains("write errors:"));
    let sum =
        room.shell("web", "dd if=/dev/urandom of=/tmp/content bs=64k count=256 2>/dev/null; sha256sum </tmp/content");
    take_the_rest(folder, "filler");
    room.shell(
        "web",
        "(dd if=/tmp/content of=/content bs=64k conv=fsync && echo written >/tmp/written) >/dev/null 2>&1 &",
    );
    room.until("QEMU has paused the guest", || room.state("web") == "paused");
    room.run("vm edit web --write-errors report").fails(7, "stop it first");
    make_room(folder, "filler");
    room.run("vm resume web").ok();
    room.until("the guest has written", || room.shell("web", "cat /tmp/written 2>/dev/null || true") == "written");
    assert_eq!(room.shell("web", "echo 3 >/proc/sys/vm/drop_caches; sha256sum </content"), sum);
    assert!(!room.console("web").contains("I/O error"), "{}", room.console("web"));
    room.close();
}
