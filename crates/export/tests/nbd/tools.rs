//! The server with common clients: libnbd's tools, QEMU's tools and fio. These programs must be installed.

use crate::Running;
use crate::memory_disk::{MemoryDisk, Random, Shelf};
use crate::tls::Certificates;
use connections::Listen;
use export::nbd::ServerConfig;
use std::process::Command;
use std::sync::Arc;

const CAPACITY: u64 = (64 << 20) + 512 * 3;

fn start() -> (Running, Arc<MemoryDisk>) {
    let disk = MemoryDisk::new("vm", CAPACITY, 11);
    (Running::start(Shelf::of(&[&disk, &MemoryDisk::read_only("vm@monday", CAPACITY)])), disk)
}

/// Runs a tool, which must succeed; returns its output.
fn run(tool: &str, arguments: &[&str]) -> String {
    let output = Command::new("timeout").arg("120").arg(tool).args(arguments).output();
    let output = output.unwrap_or_else(|error| panic!("{tool} could not be started: {error}"));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{tool} {arguments:?}: {}\n{text}{complaint}", output.status);
    text
}

fn uri(running: &Running, export: &str) -> String {
    format!("nbd+unix:///{export}?socket={}", running.socket.display())
}

/// An image file with data and holes, as long as the disk.
fn make_image(running: &Running) -> String {
    use std::os::unix::fs::FileExt;
    let path = running.folder.0.join("image.raw");
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(CAPACITY).unwrap();
    let mut random = Random(21);
    for _ in 0..40 {
        let length = 1 + random.below(600_000);
        file.write_all_at(&random.bytes(length as usize), random.below(CAPACITY - length)).unwrap();
    }
    path.to_str().unwrap().to_owned()
}

#[test]
fn nbdinfo_shows_exports_and_features() {
    let (running, _disk) = start();
    let text = run("nbdinfo", &[&uri(&running, "vm")]);
    for line in [
        "export-size: 67110400",
        "is_read_only: false",
        "can_multi_conn: true",
        "can_fast_zero: true",
        "can_fua: true",
        "can_cache: true",
        "can_trim: true",
        "can_df: true",
        "block_size_preferred: 4096",
        "block_size_maximum: 33554432",
        "base:allocation",
        "lamina:dirty:monday",
        "qemu:dirty-bitmap:tuesday",
        "using structured packets",
    ] {
        assert!(text.contains(line), "{line} is not in\n{text}");
    }
    let text = run("nbdinfo", &["--list", &uri(&running, "")]);
    assert!(text.contains("export=\"vm\"") && text.contains("export=\"vm@monday\""), "{text}");
    assert!(run("nbdinfo", &[&uri(&running, "")]).contains("export=\"vm\""), "the default export, by its own name");
    assert!(run("nbdinfo", &[&uri(&running, "vm@monday")]).contains("is_read_only: true"));
    assert_eq!(run("nbdinfo", &["--size", &uri(&running, "vm")]).trim(), CAPACITY.to_string());
}

#[test]
fn nbdcopy_copies_in_and_out() {
    let (running, _disk) = start();
    let image = make_image(&running);
    let back = running.folder.0.join("back.raw");
    for options in [&["--connections=1"][..], &["--connections=4", "--requests=64"], &["--synchronous"]] {
        let to = uri(&running, "vm");
        run("nbdcopy", &[options, &["--flush", &image, &to]].concat());
        run("nbdcopy", &[options, &[&to, back.to_str().unwrap()]].concat());
        run("cmp", &[&image, back.to_str().unwrap()]);
    }
    let map = run("nbdinfo", &["--map", &uri(&running, "vm")]);
    assert!(map.contains("hole,zero") && map.contains("data"), "{map}");
}

#[test]
fn qemu_img_converts_compares_and_maps() {
    let (running, _disk) = start();
    let image = make_image(&running);
    let target = uri(&running, "vm");
    run("qemu-img", &["convert", "-n", "-f", "raw", "-O", "raw", &image, &target]);
    assert!(run("qemu-img", &["compare", "-f", "raw", "-F", "raw", &image, &target]).contains("identical"));
    let qcow2 = running.folder.0.join("copy.qcow2");
    run("qemu-img", &["convert", "-f", "raw", "-O", "qcow2", &target, qcow2.to_str().unwrap()]);
    run("qemu-img", &["compare", "-f", "qcow2", "-F", "raw", qcow2.to_str().unwrap(), &target]);
    let map = run("qemu-img", &["map", "--output=json", "-f", "raw", &target]);
    assert!(map.contains("\"zero\": true") && map.contains("\"zero\": false"), "{map}");
    let options = format!("driver=nbd,server.type=unix,server.path={},export=vm", running.socket.display());
    assert!(run("qemu-img", &["info", "--image-opts", &options]).contains("67110400 bytes"));
    // The context for changed blocks has the name that backup tools use.
    let options = format!("driver=raw,file.{}", options.replace(",s", ",file.s").replace(",export", ",file.export"));
    let options = format!("{options},file.x-dirty-bitmap=qemu:dirty-bitmap:monday");
    let map = run("qemu-img", &["map", "--output=json", "--image-opts", &options]);
    assert!(map.contains("\"data\": false"), "a changed range is not reported as data: {map}");
}

#[test]
fn qemu_io_reads_writes_zeroes_and_discards() {
    let (running, disk) = start();
    let target = uri(&running, "vm");
    let commands = [
        "write -P 0x5a 1000000 2000000",
        "read -P 0x5a 1000000 2000000",
        "write -P 0x11 -f 512 512",
        "write -z 1048576 65536",
        "read -P 0 1048576 65536",
        "write -z -u 1200000 100000",
        "read -P 0 1200000 100000",
        "discard 2097152 524288",
        "flush",
        "aio_write -P 7 40000000 1048576",
        "aio_read -P 7 40000000 1048576",
        "aio_flush",
        "read -P 0x11 512 512",
        "read 0 32M",
    ];
    let mut arguments = vec!["-f", "raw"];
    // `aio_read` may overtake `aio_write`, so the flush in the list of commands separates them.
    for command in commands.iter().filter(|command| !command.starts_with("aio_read")) {
        arguments.extend(["-c", command]);
    }
    arguments.extend(["-c", "aio_read -P 7 40000000 1048576", "-c", "aio_flush", &target]);
    let text = run("qemu-io", &arguments);
    assert!(!text.contains("failed") && !text.contains("error"), "{text}");
    assert!(disk.flushes.load(std::sync::atomic::Ordering::SeqCst) > 0);
    let denied = Command::new("qemu-io").args(["-f", "raw", "-c", "write 0 512", &uri(&running, "vm@monday")]).output();
    assert!(!denied.unwrap().status.success(), "a write to a snapshot");
}

#[test]
fn fio_verifies_what_it_wrote() {
    let (running, _disk) = start();
    let uri_option = format!("--uri={}", uri(&running, "vm"));
    for (blocks, depth) in [("4k", "1"), ("4k", "32"), ("512-64k", "16"), ("1m", "4")] {
        let blocks = if blocks.contains('-') { format!("--bsrange={blocks}") } else { format!("--bs={blocks}") };
        let depth = format!("--iodepth={depth}");
        let arguments = ["--name=verify", "--ioengine=nbd", &uri_option, "--rw=randrw", "--size=48m", "--io_size=48m"];
        let verify = ["--verify=crc32c", "--verify_fatal=1", "--do_verify=1", "--fsync=64", "--verify_state_save=0"];
        run("fio", &[&arguments[..], &verify, &[&blocks, &depth]].concat());
    }
}

#[test]
fn gnutls_clients_connect_with_certificates() {
    let certificates = Certificates::new();
    let config = ServerConfig {
        listen: vec![Listen::Tcp("127.0.0.1:0".parse().unwrap())],
        tls: Some(certificates.server(true, true)),
        ..ServerConfig::default()
    };
    let running = Running::with(config, Shelf::of(&[&MemoryDisk::new("vm", 8 << 20, 3)]));
    let folder = certificates.folder.0.display();
    let port = running.tcp_address().port();
    let secure = format!("nbds://localhost:{port}/vm?tls-certificates={folder}");
    assert!(run("nbdinfo", &[&secure]).contains("with TLS"));
    let image = running.folder.0.join("tls.raw");
    std::fs::write(&image, Random(5).bytes(8 << 20)).unwrap();
    run("nbdcopy", &[image.to_str().unwrap(), &secure]);
    let object = format!("tls-creds-x509,id=tls0,endpoint=client,dir={folder}");
    let options = format!("driver=nbd,host=localhost,port={port},export=vm,tls-creds=tls0");
    let plain = format!("driver=raw,file.driver=file,file.filename={}", image.display());
    run("qemu-img", &["compare", "--object", &object, "--image-opts", &options, &plain]);
    let plainly = Command::new("nbdinfo").arg(format!("nbd://localhost:{port}/vm")).output().unwrap();
    assert!(!plainly.status.success(), "a client without TLS could connect");
}
