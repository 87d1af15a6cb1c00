//! `lamina convert` and the commands about images: results, output and errors, without a datastore, on an unserved one,
//! and on a served one.

#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::process::Stdio;
use testkit::Random;
use testkit::process::{Done, Store, files, lamina, send, tool, until, wait, wait_until_interruptible};
use testkit::{mounted, process};

const MIB: usize = 1 << 20;

/// Runs `lamina` in a folder.
fn run_in(folder: &Path, arguments: &str) -> Done {
    process::output(lamina().current_dir(folder).args(arguments.split_whitespace())).into()
}

/// A disk with data, a hole, and unaligned ends.
fn make_raw(path: &Path, megabytes: usize) -> Vec<u8> {
    let mut bytes = vec![0; megabytes * MIB + 512];
    for (at, byte) in bytes.iter_mut().enumerate() {
        if at / MIB % 3 == 1 {
            *byte = (at as u32).wrapping_mul(2_654_435_761).rotate_left(9) as u8;
        }
    }
    bytes[megabytes * MIB + 511] = 9;
    std::fs::write(path, &bytes).unwrap();
    bytes
}

#[test]
fn images_are_made_shown_and_checked() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let run = |arguments: &str| run_in(path, arguments);
    let made = run("image create vm.vmdk 1.5G").ok();
    assert!(made.contains("1.50 GiB, thin"), "{made}");
    assert_eq!(files(path), ["vm-flat.vmdk", "vm.vmdk"]);
    let made = run("image create vm-000001.vmdk --parent vm.vmdk --format sesparse").ok();
    assert!(made.contains("1.50 GiB, sesparse, above vm.vmdk"), "{made}");
    let text = run("image show vm-000001.vmdk").ok();
    for words in ["create type:", "seSparse", "parent:", "vm.vmdk", "blocks allocated:", "1.50 GiB (1610612736 bytes)"]
    {
        assert!(text.contains(words), "'{words}' is not in: {text}");
    }
    let shown = run("image show vm-000001.vmdk --json").json();
    let levels = shown["levels"].as_array().unwrap();
    assert_eq!(levels.len(), 2);
    assert_eq!((&levels[0]["format"], &levels[1]["format"]), (&"sesparse".into(), &"thin".into()));
    assert_eq!(levels[0]["parent_content_id"], levels[1]["content_id"]);
    assert_eq!((&levels[1]["blocks_allocated"], &levels[1]["blocks_to_be_zeroed"]), (&0.into(), &0.into()));
    assert_eq!(run("image check vm-000001.vmdk").ok(), "clean\n");
    assert_eq!(run("image check vm-000001.vmdk --json").json()["problems"], 0);

    run("image create vm.vmdk 1G").fails(1, "vm.vmdk");
    run("image create flat.vmdk 2G --parent vm.vmdk").fails(2, "parent");
    run("image create small.vmdk 1G --parent vm.vmdk --format vmfssparse").fails(2, "cannot have a parent");
    run("image create x.vmdk 3T --format vmfssparse").fails(2, "SEsparse");
    run("image create x.vmdk 3T -d vmfssparse").fails(2, "SEsparse");
    run("image create x.vmdk --format sesparse").fails(2, "SIZE");
    run("image create x 1G").fails(2, "NAME.vmdk");
    run("image create x.vmdk 1G --format qcow2").fails(2, "qcow2");
    run("image show none.vmdk").fails(3, "none.vmdk");
    run("image show vm-000001-sesparse.vmdk").fails(2, "open the descriptor");
    assert_eq!(files(path), ["vm-000001-sesparse.vmdk", "vm-000001.vmdk", "vm-flat.vmdk", "vm.vmdk"]);

    // The parent is missing: the image is shown, and the missing parent reported.
    std::fs::rename(path.join("vm.vmdk"), path.join("moved")).unwrap();
    let done = run("image show vm-000001.vmdk");
    assert!(done.code == 6 && done.stdout.contains("problem: the parent of"), "{done:?}");
    let done = run("image check vm-000001.vmdk");
    assert!(done.code == 6 && done.stdout.contains("1 problem"), "{done:?}");
    std::fs::rename(path.join("moved"), path.join("vm.vmdk")).unwrap();

    // An extent is truncated.
    run("image create cut.vmdk 64M --format monolithicflat").ok();
    std::fs::File::options().write(true).open(path.join("cut-flat.vmdk")).unwrap().set_len(1 << 20).unwrap();
    run("image check cut.vmdk").fails(6, "truncated");
}

#[test]
fn an_image_after_a_crash_is_repaired_on_request() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    make_raw(&path.join("a.raw"), 8);
    run_in(path, "convert -f raw a.raw vm.vmdk -d vmfssparse").ok();
    // Sets the mark in the header that says that the image is open, as a crash leaves it.
    let extent = path.join("vm-delta.vmdk");
    let mut bytes = std::fs::read(&extent).unwrap();
    bytes[1648] = 1;
    std::fs::write(&extent, &bytes).unwrap();
    let text = run_in(path, "image check vm.vmdk").ok();
    assert!(text.contains("not closed properly") && text.ends_with("clean\n"), "{text}");
    assert_eq!(std::fs::read(&extent).unwrap(), bytes, "checking changes nothing");
    // A repaired image may still have unreferenced space.
    let text = run_in(path, "image check --repair vm.vmdk").ok();
    assert!(text.ends_with("clean\n") && !text.contains("not closed properly"), "{text}");
    assert_eq!(std::fs::read(&extent).unwrap()[1648], 0);
    assert!(
        tool(
            "qemu-img",
            &[
                "compare",
                "-f",
                "raw",
                "-F",
                "vmdk",
                &format!("{}/a.raw", path.display()),
                &format!("{}/vm.vmdk", path.display())
            ]
        )
        .contains("identical")
    );
}

#[test]
fn disks_are_converted_to_and_from_images() {
    let store = Store::new();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let bytes = make_raw(&path.join("a.raw"), 16);
    let on = |arguments: &str| {
        let mut command = store.command(arguments);
        Done::from(process::output(command.current_dir(path)))
    };
    let round = |label: &str| {
        let text = on(&format!("convert -f raw a.raw disk:{label} -d native")).ok();
        assert!(text.contains(&format!("made {label}: native, 16.0 MiB")), "{text}");
        on(&format!("snapshot create {label}@a")).ok();
        for (from, to) in [(label.to_owned(), "head"), (format!("{label}@a"), "snapshot")] {
            let made = on(&format!("convert disk:{from} {label}-{to}.vmdk -d sesparse --json")).json();
            assert_eq!(made["capacity"], bytes.len());
            let (image, back) = (format!("{label}-{to}.vmdk"), format!("{label}-{to}.raw"));
            run_in(path, &format!("convert {image} {back} -d raw")).ok();
            assert!(std::fs::read(path.join(back)).unwrap() == bytes, "{from}");
        }
        on(&format!("convert -f raw a.raw disk:{label} -d native")).fails(1, label);
        on(&format!("convert -f raw a.raw disk:{label}@b -d native")).fails(2, "snapshot");
        on("convert disk:none x.vmdk -d thin").fails(3, "none");
        on(&format!("convert disk:{label}@z x.vmdk -d thin")).fails(3, "z");
        on("convert -f raw a.raw x.vmdk -d native").fails(2, "disk:NAME");
        assert_eq!(on("snapshot list --json").json()["snapshots"].as_array().unwrap().len(), 1);
        on(&format!("disk delete {label}")).ok();
    };
    round("alone");
    let mut serving = store.serve("");
    round("served");
    assert_eq!(serving.stop("TERM"), Some(0));
    store.is_clean();
    run_in(path, "convert -f raw a.raw disk:vm -d native").fails(2, "LAMINA_DATASTORE");
    assert!(!path.join("x.vmdk").exists());
}

/// Starts a slow conversion and waits until its target exists under a temporary name.
fn slow(path: &Path, target: &str, format: &str) -> std::process::Child {
    let arguments = format!("convert -f raw a.raw {target} -d {format} --rate 4M");
    let mut command = lamina();
    command.current_dir(path).args(arguments.split_whitespace()).stdout(Stdio::null()).stderr(Stdio::null());
    let child = command.spawn().unwrap();
    wait_until_interruptible(child.id());
    until("the target is begun", || files(path).iter().any(|name| name.ends_with(".lamina-new")));
    child
}

#[test]
fn an_interrupted_conversion_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    make_raw(&path.join("a.raw"), 64);
    for format in ["thin", "eagerzeroedthick", "sesparse", "2gbsparse", "monolithicsparse", "streamoptimized"] {
        let mut child = slow(path, "vm.vmdk", format);
        // A second conversion to the same name is refused meanwhile.
        let other = run_in(path, &format!("convert -f raw a.raw vm.vmdk -d {format}"));
        other.fails(4, "being made");
        send(child.id(), "INT");
        assert_eq!(wait(&mut child), Some(130), "{format}");
        assert_eq!(files(path), ["a.raw"], "{format}");
        // The next conversion removes the temporary files of a killed one.
        let mut child = slow(path, "vm.vmdk", format);
        send(child.id(), "KILL");
        assert_eq!(wait(&mut child), None);
        assert!(!path.join("vm.vmdk").exists() && files(path).len() > 1);
        let done = run_in(path, &format!("convert -f raw a.raw vm.vmdk -d {format}"));
        assert_eq!(done.code, 0, "{done:?}");
        assert!(!files(path).iter().any(|name| name.ends_with(".lamina-new")));
        for name in files(path).iter().filter(|name| name.starts_with("vm")) {
            std::fs::remove_file(path.join(name)).unwrap();
        }
    }
}

#[test]
fn failed_conversions_on_a_full_file_system_leave_no_files() {
    mounted::on_tmpfs("failed_conversions_on_a_full_file_system_leave_no_files", 24, fill_by_converting);
}

fn fill_by_converting(target: &Path) {
    let folder = tempfile::tempdir().unwrap();
    let raw = folder.path().join("a.raw");
    // Random data, which no format can compress.
    std::fs::write(&raw, Random(1).bytes(40 * MIB)).unwrap();
    for format in [
        "thin",
        "zeroedthick",
        "eagerzeroedthick",
        "vmfssparse",
        "sesparse",
        "vsansparse",
        "monolithicsparse",
        "monolithicflat",
        "2gbsparse",
        "2gbflat",
        "raw",
        "streamoptimized",
    ] {
        run_in(target, &format!("convert -f raw {} vm.vmdk -d {format}", raw.display())).fails(5, "");
        assert!(files(target).is_empty(), "{format}: {:?}", files(target));
    }
    run_in(target, &format!("convert -f raw {} vm.ova -d ova", raw.display())).fails(5, "");
    assert!(files(target).is_empty());
}

#[test]
fn junk_has_one_exit_code_whatever_format_is_given_and_its_file_is_named_once() {
    let folder = tempfile::tempdir().unwrap();
    let run = |arguments: &str| run_in(folder.path(), arguments);
    for name in ["junk.vmdk", "junk.qcow2", "junk.ova"] {
        std::fs::write(folder.path().join(name), Random(3).bytes(100_000)).unwrap();
        for format in ["vmdk", "qcow2", "vmfssparse", "ova"] {
            let done = run(&format!("image show {name} -f {format}"));
            assert_eq!(done.code, 6, "{name} as {format}: {done:?}");
            assert_eq!(done.stderr.matches(name).count(), 1, "{name} as {format}: {done:?}");
            assert!(done.stderr.is_ascii() && done.stderr.len() < 300, "{name} as {format}: {done:?}");
        }
        if name != "junk.qcow2" {
            run(&format!("image show {name}")).fails(6, "is called like");
        }
    }
    std::fs::create_dir(folder.path().join("dir.vmdk")).unwrap();
    let done = run("image show dir.vmdk");
    assert_eq!((done.code, done.stderr.matches("dir.vmdk").count()), (1, 1), "{done:?}");
    run("image create base.vmdk 10M -d monolithicsparse").ok();
    run("convert base.vmdk base.ova -d ova").ok();
    run("image create child.vmdk -d vmfssparse --parent base.ova").fails(2, "needed here: 'lamina convert'");
    let store = Store::new();
    let import = format!("--datastore {} vm import junk.vmdk", store.path().display());
    let done = run(&import);
    assert_eq!((done.code, done.stderr.matches("junk.vmdk").count()), (6, 1), "{done:?}");
    run("image create x.ova 10M").fails(2, "or 'lamina convert'");
    run("image create child.vmdk 65T").fails(2, "up to 64 TiB, not 65 TiB");
}

#[test]
fn snapshots_inside_a_qcow2_image_are_reported_because_they_are_not_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("web.qcow2").display().to_string();
    let store = Store::new();
    tool("qemu-img", &["create", "-f", "qcow2", &path, "1M"]);
    for count in 0..2 {
        let told = |done: Done| {
            assert_eq!(done.code, 0, "{done:?}");
            let text = format!("{}{}", done.stdout, done.stderr);
            assert_eq!(text.contains("has internal snapshots (1), which are not read"), count == 1, "{text}");
        };
        told(store.run(&format!("disk import {path} copy-{count}")));
        told(run_in(folder.path(), &format!("convert web.qcow2 raw-{count}.img -d raw")));
        told(run_in(folder.path(), &format!("convert --skip-damaged web.qcow2 whole-{count}.img -d raw")));
        assert_eq!(
            run_in(folder.path(), "image show web.qcow2 --json").json()["levels"][0]["internal_snapshots"],
            count
        );
        tool("qemu-img", &["snapshot", "-c", "before", &path]);
    }
}
