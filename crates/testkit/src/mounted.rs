//! A small file system for a test, which can become full: a tmpfs, or, for root, another file system on a loop device.
//! The test runs itself again with `unshare` in a mount namespace (without root, if user namespaces are allowed). The
//! mounts end with the namespace.

use crate::process::tool;
use std::io::{Read, Seek};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Environment variable by which the inner process receives the path of the file system.
const INSIDE: &str = "LAMINA_TEST_FULL";

/// Runs a script in a mount namespace. The script has the test program as `$0`, the test's name as `$TEST`, and a
/// folder as `$FOLDER`; `inside` is the environment variable for the inner process and its value.
pub fn in_a_namespace(test: &str, unshare: &[&str], script: &str, folder: &Path, inside: (&str, &Path)) {
    // A file, because a program that the script leaves behind would keep a pipe open.
    let mut output = tempfile::tempfile().unwrap();
    let status = Command::new("unshare")
        .args(unshare)
        .args(["sh", "-c", script])
        .arg(std::env::current_exe().unwrap())
        .env("TEST", test)
        .env("FOLDER", folder)
        .env(inside.0, inside.1)
        .stdout(output.try_clone().unwrap())
        .stderr(output.try_clone().unwrap())
        .status()
        .unwrap_or_else(|e| panic!("unshare: {e}; the tests need it"));
    if !status.success() {
        let mut text = Vec::new();
        output.rewind().and_then(|()| output.read_to_end(&mut text)).unwrap();
        // The lines are indented, because the summary of the inner process must not be counted with the others.
        String::from_utf8_lossy(&text).lines().for_each(|line| println!("    {line}"));
        panic!("the run on a file system of its own failed");
    }
}

/// Runs one test again in an inner process, after `script` has mounted a file system on `$FOLDER/mounted`.
fn mounted_by(test: &str, unshare: &[&str], script: &str) {
    let folder = tempfile::tempdir().unwrap();
    let script = format!("set -e; {script}; exec \"$0\" --exact \"$TEST\" --include-ignored --nocapture");
    in_a_namespace(test, unshare, &script, folder.path(), (INSIDE, &folder.path().join("mounted")));
}

/// Runs a test again, by name, on a tmpfs of this many MiB.
pub fn on_tmpfs(test: &str, megabytes: u64, fill_up: fn(&Path)) {
    match std::env::var_os(INSIDE) {
        Some(folder) => fill_up(&PathBuf::from(folder)),
        None => mounted_by(
            test,
            &["--user", "--map-root-user", "--mount"],
            &format!("mkdir $FOLDER/mounted; mount -t tmpfs -o size={megabytes}M none $FOLDER/mounted"),
        ),
    }
}

/// Runs a test on a file system of this many MiB in a file, created by `mkfs`.
fn on_loop(test: &str, megabytes: u64, mkfs: &str, options: &str, fill_up: fn(&Path)) {
    match std::env::var_os(INSIDE) {
        Some(folder) => fill_up(&PathBuf::from(folder)),
        // Only root may mount a loop device; without root only the tmpfs variant runs.
        None if tool("id", &["-u"]).trim() != "0" => println!("not root: only the run on tmpfs is made"),
        None => mounted_by(
            test,
            &["--mount"],
            &format!(
                "mkdir $FOLDER/mounted; truncate -s {megabytes}M $FOLDER/image; {mkfs} $FOLDER/image >/dev/null; \
                 mount -o loop{options} $FOLDER/image $FOLDER/mounted"
            ),
        ),
    }
}

/// Runs a test on ext4 with blocks of 1 KiB, the default of `mke2fs` for small file systems. With this block size, a
/// block of a disk may be allocated only in part.
pub fn on_ext4(test: &str, fill_up: fn(&Path)) {
    on_loop(test, 96, "mke2fs -q -t ext4 -b 1024 -m 0", "", fill_up);
}

/// Runs a test on XFS of the smallest size that XFS's tools allow.
pub fn on_xfs(test: &str, fill_up: fn(&Path)) {
    on_loop(test, 300, "mkfs.xfs -q", "", fill_up);
}

/// Runs a test on btrfs.
pub fn on_btrfs(test: &str, fill_up: fn(&Path)) {
    on_loop(test, 256, "mkfs.btrfs -q", "", fill_up);
}

/// Runs a test on btrfs with nodes of 4 KiB and with metadata among the data.
pub fn on_mixed_btrfs(test: &str, fill_up: fn(&Path)) {
    on_loop(test, 256, "mkfs.btrfs -q --mixed", "", fill_up);
}

/// Runs a test on a btrfs with free space, in a subvolume whose quota is exhausted. A kernel for tests may lack quotas
/// of ext4 and XFS, and those of ext4 do not apply to root.
pub fn on_btrfs_quota(test: &str, fill_up: fn(&Path)) {
    match std::env::var_os(INSIDE) {
        Some(folder) => fill_up(&PathBuf::from(folder).join("limited")),
        None if tool("id", &["-u"]).trim() != "0" => println!("not root: only the run on tmpfs is made"),
        None => mounted_by(
            test,
            &["--mount"],
            "mkdir $FOLDER/mounted; truncate -s 512M $FOLDER/image; mkfs.btrfs -q $FOLDER/image >/dev/null; \
             mount -o loop $FOLDER/image $FOLDER/mounted; cd $FOLDER/mounted; btrfs -q quota enable .; \
             btrfs -q subvolume create limited; btrfs -q qgroup limit 160M limited; cd /",
        ),
    }
}

/// Bytes that are available for new data: in the file system, or in the quota of the folder.
pub fn free(folder: &Path) -> u64 {
    let path = folder.to_str().unwrap();
    if is_btrfs(folder) && folder.ends_with("limited") {
        tool("sync", &["-f", path]);
        let groups = tool("btrfs", &["qgroup", "show", "-r", "--raw", "-f", path]);
        // The columns: number, referenced, exclusive, limit of referenced, path.
        let group: Vec<&str> = groups.lines().last().unwrap().split_whitespace().collect();
        let [referenced, most] = [group[1], group[3]].map(|number| number.parse::<u64>().unwrap());
        return most.saturating_sub(referenced);
    }
    let free = tool("stat", &["-f", "-c", "%a %S", path]);
    free.split_whitespace().map(|number| number.parse::<u64>().unwrap()).product()
}

/// Runs a test on ext4 without a journal, whose storage fails writes with EIO while the file `trigger` next to the
/// mount exists: a loop device on a file of nbdfuse, served by nbdkit.
pub fn on_failing_writes(test: &str, body: fn(&Path, &Path)) {
    if let Some(folder) = std::env::var_os(INSIDE) {
        let folder = PathBuf::from(folder);
        return body(&folder, &folder.with_file_name("trigger"));
    }
    if tool("id", &["-u"]).trim() != "0" {
        return println!("not root: other tests simulate this");
    }
    let folder = tempfile::tempdir().unwrap();
    let script = "set -e; mkdir $FOLDER/medium $FOLDER/mounted; touch $FOLDER/medium/disk; \
        nbdfuse $FOLDER/medium/disk [ nbdkit --exit-with-parent --filter=error memory 128M \
            error-pwrite=EIO error-pwrite-rate=100% error-pwrite-file=$FOLDER/trigger ] & \
        medium=$!; \
        for i in $(seq 1200); do [ $(stat -c %s $FOLDER/medium/disk) -gt 0 ] && break; sleep 0.05; done; \
        mke2fs -q -t ext4 -O ^has_journal $FOLDER/medium/disk; \
        mount -o loop $FOLDER/medium/disk $FOLDER/mounted; \
        set +e; \"$0\" --exact \"$TEST\" --nocapture; status=$?; \
        umount $FOLDER/mounted; sleep 0.2; fusermount3 -u $FOLDER/medium/disk || umount -l $FOLDER/medium/disk; \
        kill $medium 2>/dev/null; wait $medium; exit $status";
    in_a_namespace(test, &["--mount"], script, folder.path(), (INSIDE, &folder.path().join("mounted")));
}

/// Fills a file system except for this many bytes, according to the file system's free space, which does not include
/// the limit of a quota.
pub fn leave(folder: &Path, name: &str, bytes: u64) {
    let reserve = |path: &Path, offset: u64, length: u64| {
        let [offset, length] = [offset, length].map(|number| number.to_string());
        let mut taken = Command::new("fallocate");
        taken.args(["-o", &offset, "-l", &length]).arg(path).stderr(std::process::Stdio::null());
        taken.status().unwrap_or_else(|e| panic!("fallocate: {e}; the tests need it")).success()
    };
    // When a quota is exhausted, truncating a file may be refused, but removing it is not.
    let left = folder.join(format!("{name}-left"));
    reserve(&left, 0, bytes);
    let path = folder.join(name);
    if let Ok(file) = std::fs::File::create(&path) {
        let (mut end, mut piece) = (0, 64 << 20);
        while piece >= 64 << 10 {
            match reserve(&path, end, piece) {
                true => end += piece,
                false => piece /= 2,
            }
        }
        // A refused reservation may have allocated space, which is freed.
        let _ = file.set_len(end);
        file.sync_all().unwrap();
    }
    let _ = std::fs::remove_file(left);
    std::fs::File::open(folder).unwrap().sync_all().unwrap();
}

/// Fills a file system to the last byte, most of it in one step.
pub fn take_the_rest(folder: &Path, name: &str) {
    leave(folder, name, 16 << 10);
    fill_rest(folder, &format!("{name}-end"));
}

/// Fills the last block, and the space for further file names.
pub fn fill_with_names(folder: &Path, name: &str) {
    fill_rest(folder, name);
    let names = folder.join(format!("{name}-names"));
    if std::fs::create_dir(&names).is_ok() {
        // The names are long, because fewer long names fill the space.
        (0..1 << 16).find(|i| std::fs::File::create(names.join(format!("{i:0>250}"))).is_err());
    }
}

pub fn is_btrfs(folder: &Path) -> bool {
    tool("stat", &["-f", "-c", "%T", folder.to_str().unwrap()]).trim() == "btrfs"
}

/// Deletes the files that the functions of this module have created, by the prefix of their names.
pub fn make_room(folder: &Path, names: &str) {
    for entry in std::fs::read_dir(folder).unwrap().flatten() {
        if entry.file_name().to_string_lossy().starts_with(names) {
            let path = entry.path();
            let removed = if path.is_dir() { std::fs::remove_dir_all(path) } else { std::fs::remove_file(path) };
            removed.unwrap();
        }
    }
}

/// Fills a file system to the last block.
pub fn fill_rest(folder: &Path, name: &str) {
    // If not even a name can be created, the file system is full.
    let Ok(mut rest) = std::fs::File::create(folder.join(name)) else { return };
    // Most bytes are written in large steps. A block in which a single byte was written counts as full.
    for (length, most) in [(1 << 20, u32::MAX), (4096, u32::MAX), (1, 64)] {
        let mut left = most;
        while left > 0 && std::io::Write::write_all(&mut rest, &vec![1; length]).is_ok() && rest.sync_all().is_ok() {
            left -= 1;
        }
    }
}
