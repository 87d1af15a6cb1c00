//! Commands and their flags, with every style of headers.

use crate::Running;
use crate::in_process::encode;
use crate::memory_disk::{MemoryDisk, Planning, Random, Shelf};
use error::ErrorKind;
use export::exports::ResizePolicy;
use export::nbd::ServerConfig;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use testkit::process::{PATIENCE, until};
use testkit::protocol::*;

const MODES: [Mode; 3] = [Mode::Simple, Mode::Structured, Mode::Extended];
const CAPACITY: u64 = (40 << 20) + 1536;

fn start() -> (Running, Arc<MemoryDisk>) {
    let disk = MemoryDisk::new("vm", CAPACITY, 7);
    (Running::start(Shelf::of(&[&disk])), disk)
}

#[test]
fn reads_return_written_bytes_at_any_alignment_and_size() {
    for mode in MODES {
        let (running, _disk) = start();
        let mut client = Client::open(&running.socket, "vm", mode);
        let mut random = Random(3);
        for (offset, length) in
            [(0, 1), (511, 2), (4095, 4098), (1, 65535), (123, 65536), (777, 300_000), (0, 32 << 20), (CAPACITY - 5, 5)]
        {
            let data = random.bytes(length);
            client.write(offset, &data);
            assert!(client.read(offset, length as u64) == data, "{mode:?} {offset} {length}");
        }
        client.leave();
    }
}

#[test]
fn ranges_beyond_the_limits_fail_and_the_session_continues() {
    for mode in MODES {
        let (running, _disk) = start();
        let mut client = Client::open(&running.socket, "vm", mode);
        let too_long = if mode == Mode::Simple { EINVAL } else { EOVERFLOW };
        assert_eq!(client.ask(CMD_READ, 0, 0, (32 << 20) + 1).error, too_long);
        for command in [CMD_READ, CMD_TRIM, CMD_CACHE] {
            assert_eq!(client.ask(command, 0, CAPACITY - 10, 11).error, EINVAL);
            assert_eq!(client.ask(command, 0, u64::MAX, 2).error, EINVAL);
            assert_eq!(client.ask(command, 0, 0, 0).error, EINVAL);
        }
        assert_eq!(client.ask(CMD_ZEROES, 0, CAPACITY - 10, 11).error, ENOSPC);
        assert_eq!(client.ask_with(CMD_WRITE, 0, CAPACITY - 10, 11, &[1; 11]).error, ENOSPC);
        assert_eq!(client.ask_with(CMD_WRITE, 0, u64::MAX - 3, 100_000, &vec![1; 100_000]).error, ENOSPC);
        assert_eq!(client.ask(CMD_FLUSH, 0, 4096, 0).error, EINVAL);
        assert_eq!(client.ask(77, 0, 0, 512).error, EINVAL);
        assert_eq!(client.ask(CMD_READ, 1 << 9, 0, 512).error, EINVAL);
        assert_eq!(client.ask(CMD_TRIM, NO_HOLE, 0, 512).error, EINVAL);
        assert_eq!(client.ask_with(CMD_WRITE, REQ_ONE, 0, 512, &[1; 512]).error, EINVAL);
        assert_eq!(client.ask(CMD_STATUS, 0, 0, 512).error, EINVAL, "no metadata context was negotiated");
        assert_eq!(client.read(0, 512), vec![0; 512]);
    }
}

#[test]
fn reads_that_miss_metadata_wait_for_it_together() {
    const READS: u64 = 8;
    let (running, disk) = start();
    disk.metadata_misses_of_8.store(8, Ordering::Relaxed);
    let mut client = Client::open(&running.socket, "vm", Mode::Simple);
    client.write(0, &[7; READS as usize * 4096]);
    *disk.planning.lock() = Some(Vec::new());
    let mut requests = Vec::new();
    // The reads are in descending order, because an ascending sequence would be read ahead.
    for number in (0..READS).rev() {
        requests.extend(client.encode(CMD_READ, 0, number * 4096, 4096, &[]).1);
    }
    client.stream.write_all(&requests).unwrap();
    for _ in 0..READS {
        assert!(client.receive().1.data == [7; 4096]);
    }
    let planning = disk.planning.lock().take().unwrap();
    let each = |step: fn(u64) -> Planning| (0..READS).rev().map(|number| step(number * 4096)).collect::<Vec<_>>();
    // The metadata of all reads is requested before the first read waits for its metadata.
    let together: Vec<Planning> = [each(Planning::Try), each(Planning::Load), each(Planning::Try)].concat();
    assert_eq!(planning[..together.len()], together);
    // If metadata is still missing after the attempts, each plan waits for it.
    assert_eq!(planning[planning.len() - READS as usize..], each(Planning::Plan));
}

#[test]
fn read_only_exports_refuse_changes() {
    let disk = MemoryDisk::new("vm", CAPACITY, 7);
    let config = ServerConfig { read_only: true, ..ServerConfig::default() };
    let running = Running::with(config, Shelf::of(&[&disk]));
    for mode in MODES {
        let mut client = Client::open(&running.socket, "vm", mode);
        for command in [CMD_TRIM, CMD_ZEROES, CMD_RESIZE] {
            assert_eq!(client.ask(command, 0, 0, 512).error, EPERM);
        }
        assert_eq!(client.ask_with(CMD_WRITE, 0, 0, 512, &[1; 512]).error, EPERM);
        assert_eq!(client.ask_with(CMD_WRITE, 0, 0, 1 << 20, &vec![1; 1 << 20]).error, EPERM);
        assert_eq!(client.ask(CMD_FLUSH, 0, 0, 0).error, 0);
        assert_eq!(client.read(0, 512), vec![0; 512]);
    }
}

#[test]
fn fua_is_accepted_on_every_command_and_reaches_the_device() {
    let (running, disk) = start();
    let mut client = Client::open(&running.socket, "vm", Mode::Structured);
    set_fua(&mut client, &disk, CMD_WRITE, &[9; 4096]);
    set_fua(&mut client, &disk, CMD_ZEROES, &[]);
    set_fua(&mut client, &disk, CMD_TRIM, &[]);
    for command in [CMD_READ, CMD_CACHE] {
        assert_eq!(client.ask(command, FUA, 0, 4096).error, 0);
    }
    assert_eq!(client.ask(CMD_FLUSH, FUA, 0, 0).error, 0);
}

fn set_fua(client: &mut Client, disk: &MemoryDisk, command: u16, payload: &[u8]) {
    let before = disk.fua_writes.load(Ordering::SeqCst);
    assert_eq!(client.ask_with(command, 0, 0, 4096, payload).error, 0);
    assert_eq!(disk.fua_writes.load(Ordering::SeqCst), before);
    assert_eq!(client.ask_with(command, FUA, 0, 4096, payload).error, 0);
    assert_eq!(disk.fua_writes.load(Ordering::SeqCst), before + 1);
}

#[test]
fn a_write_of_a_killed_client_is_not_carried_out_after_those_of_the_next_client() {
    let (running, disk) = start();
    let mut killed = Client::open(&running.socket, "vm", Mode::Structured);
    disk.hold_next_write();
    killed.send(CMD_WRITE, 0, 0, 4096, &[1; 4096]);
    disk.await_held_write();
    drop(killed);
    std::thread::scope(|scope| {
        let (flushed, after) = std::sync::mpsc::channel();
        let socket = &running.socket;
        scope.spawn(move || {
            let mut next = Client::open(socket, "vm", Mode::Structured);
            next.write(0, &[2; 4096]);
            assert_eq!(next.ask(CMD_FLUSH, 0, 0, 0).error, 0);
            flushed.send(()).unwrap();
            next.leave();
        });
        let early = after.recv_timeout(Duration::from_millis(300));
        disk.release_write();
        if early.is_err() {
            after.recv_timeout(PATIENCE).unwrap();
        }
    });
    until("the sessions end", || running.server.connections() == 0);
    assert!(disk.contents()[..4096] == [2; 4096], "an acknowledged and flushed write is lost");
}

#[test]
fn flushes_that_arrive_together_share_one() {
    let (running, disk) = start();
    let mut client = Client::open(&running.socket, "vm", Mode::Structured);
    let mut batch = Vec::new();
    for n in 0..20u64 {
        batch.extend(client.encode(CMD_WRITE, 0, n * 512, 512, &[n as u8; 512]).1);
        batch.extend(client.encode(CMD_FLUSH, 0, 0, 0, &[]).1);
    }
    client.stream.write_all(&batch).unwrap();
    for _ in 0..40 {
        assert_eq!(client.receive().1.error, 0);
    }
    let flushes = disk.flushes.load(Ordering::SeqCst);
    assert!((1..=4).contains(&flushes), "{flushes} device flushes for 20 requests sent at once");
}

#[test]
fn requests_that_arrive_during_a_flush_are_answered() {
    let (running, disk) = start();
    for command in [CMD_FLUSH, CMD_READ, CMD_TRIM] {
        let stream = UnixStream::connect(&running.socket).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut client = Client::new(Box::new(stream));
        client.greet(3);
        client.choose(Mode::Structured);
        assert_eq!(client.go("vm"), REP_ACK);
        disk.hold_flushes(true);
        let before = disk.flushes.load(Ordering::SeqCst);
        let first = client.encode(CMD_FLUSH, 0, 0, 0, &[]).1;
        client.stream.write_all(&first).unwrap();
        until("the flush has begun", || disk.flushes.load(Ordering::SeqCst) > before);
        let length = if command == CMD_FLUSH { 0 } else { 512 };
        let second = client.encode(command, 0, 0, length, &[]).1;
        client.stream.write_all(&second).unwrap();
        disk.hold_flushes(false);
        for _ in 0..2 {
            assert_eq!(client.receive().1.error, 0);
        }
    }
}

#[test]
fn long_runs_of_zeros_are_sent_as_holes() {
    let (running, disk) = start();
    for mode in [Mode::Structured, Mode::Extended] {
        let mut client = Client::open(&running.socket, "vm", mode);
        client.write(8192, &[5; 4096]);
        client.write(20000, &[6; 100]);
        disk.settle();
        let reply = client.ask(CMD_READ, 0, 0, 32768);
        // The layout of the range: zeros | data | zeros | data | zeros.
        assert_eq!(reply.chunks, (2, 3));
        let reply = client.ask(CMD_READ, DF, 0, 32768);
        assert_eq!(reply.chunks, (1, 0), "DF: one chunk");
        assert_eq!((reply.data[8191], reply.data[8192], reply.data[20050], reply.data[20100]), (0, 5, 6, 0));
        // A run of zeros shorter than a block is not sent as a separate chunk.
        assert_eq!(client.ask(CMD_READ, 0, 8000, 4400).chunks, (1, 0));
        assert_eq!(client.ask(CMD_READ, 0, 1 << 20, 1 << 20).chunks, (0, 1));
        assert_eq!(client.ask(CMD_READ, DF, 1 << 20, 1 << 20).chunks, (1, 0));
    }
    let mut client = Client::open(&running.socket, "vm", Mode::Simple);
    assert_eq!(client.ask(CMD_READ, DF, 0, 512).error, EINVAL, "DF needs structured replies");
}

#[test]
fn zeroing_keeps_or_frees_space_as_requested() {
    let (running, _disk) = start();
    let mut client = Client::unix(&running.socket);
    client.greet(3);
    client.choose(Mode::Structured);
    let id = client.set_meta("vm", &["base:allocation"])["base:allocation"];
    assert_eq!(client.go("vm"), REP_ACK);
    client.write(0, &vec![1; 5 * 4096]);
    assert_eq!(client.ask(CMD_ZEROES, 0, 4096, 4096).error, 0);
    assert_eq!(client.ask(CMD_ZEROES, NO_HOLE, 2 * 4096, 4096).error, 0);
    assert_eq!(client.ask(CMD_ZEROES, FAST_ZERO, 3 * 4096, 4096).error, 0);
    let extents = &client.ask(CMD_STATUS, 0, 0, 5 * 4096).status[&id];
    let flags: Vec<_> = extents.iter().map(|extent| (extent.length / 4096, extent.flags)).collect();
    assert_eq!(flags, [(1, 0), (1, 3), (1, 2), (1, 3), (1, 0)]);
    assert_eq!(client.read(4096, 3 * 4096), vec![0; 3 * 4096]);
    // FAST_ZERO is refused, without effect, if zeroing may cost as much as writing.
    assert_eq!(client.ask(CMD_ZEROES, FAST_ZERO | NO_HOLE, 0, 4096).error, ENOTSUP);
    assert_eq!(client.ask(CMD_ZEROES, FAST_ZERO, 100, 4096).error, ENOTSUP);
    assert_eq!(client.read(0, 4096), vec![1; 4096]);
    assert_eq!(client.ask(CMD_ZEROES, FAST_ZERO, 0, CAPACITY).error, 0, "the odd end of the disk counts as aligned");
    assert_eq!(client.ask(CMD_STATUS, 0, 0, CAPACITY).status[&id], [Extent { length: CAPACITY, flags: 3 }]);
}

#[test]
fn block_status_of_several_contexts() {
    for mode in [Mode::Structured, Mode::Extended] {
        let (running, disk) = start();
        let mut client = Client::unix(&running.socket);
        client.greet(3);
        client.choose(mode);
        let names = ["base:allocation", "lamina:dirty:monday", "qemu:dirty-bitmap:monday"];
        let ids = client.set_meta("vm", &names);
        let [base, ours, qemu] = names.map(|name| ids[name]);
        assert_eq!(client.go("vm"), REP_ACK);
        client.write(0, &[1; 8192]);
        disk.take_snapshot();
        client.write(4096, &[2; 4096]);
        let status = client.ask(CMD_STATUS, 0, 0, 16384).status;
        let extent = |length, flags| Extent { length, flags };
        assert_eq!(status[&base], [extent(8192, 0), extent(8192, 3)]);
        assert_eq!(status[&ours], [extent(4096, 0), extent(4096, 1), extent(8192, 0)]);
        assert_eq!(status[&qemu], status[&ours]);
        // The reply is one extent, not longer than requested.
        let one = client.ask(CMD_STATUS, REQ_ONE, 100, 1000).status;
        assert_eq!((one[&base].clone(), one[&ours].clone()), (vec![extent(1000, 0)], vec![extent(1000, 0)]));
        assert_eq!(client.ask(CMD_STATUS, 0, CAPACITY - 1, 2).error, EINVAL);
        if mode == Mode::Structured {
            assert_eq!(client.ask(CMD_STATUS, PAYLOAD, 0, 12).error, EINVAL);
            continue;
        }
        // A payload selects contexts.
        let form = |length: u64, ids: &[u32]| {
            let mut payload = length.to_be_bytes().to_vec();
            ids.iter().for_each(|id| payload.extend(id.to_be_bytes()));
            payload
        };
        let mut ask = |payload: &[u8]| client.ask_with(CMD_STATUS, PAYLOAD, 0, payload.len() as u64, payload);
        let reply = ask(&form(4096, &[qemu]));
        assert_eq!(reply.status.len(), 1);
        assert_eq!(reply.status[&qemu], [extent(4096, 0)]);
        for bad in [form(4096, &[]), form(4096, &[77]), form(4096, &[qemu, qemu]), vec![0; 5], vec![0; 100_000]] {
            assert_eq!(ask(&bad).error, EINVAL);
        }
        assert_eq!(ask(&form(CAPACITY + 1, &[base])).error, EINVAL);
        assert_eq!(client.read(0, 1), [1]);
    }
}

#[test]
fn with_extended_headers_payload_follows_its_flag() {
    let (running, _disk) = start();
    let mut client = Client::open(&running.socket, "vm", Mode::Extended);
    // If a command without payload has one, the payload is read and discarded.
    assert_eq!(client.ask_with(CMD_READ, PAYLOAD, 0, 100_000, &vec![7; 100_000]).error, EINVAL);
    assert_eq!(client.ask_with(CMD_FLUSH, PAYLOAD, 0, 9, &[7; 9]).error, EINVAL);
    assert_eq!(client.ask(CMD_TRIM, 0, 0, 1 << 40).error, EINVAL);
    assert_eq!(client.ask(CMD_TRIM, 0, 0, CAPACITY).error, 0);
    // QEMU sends its writes without the payload flag.
    for (flags, byte) in [(0, 3), (PAYLOAD, 4), (FUA, 5), (FUA | PAYLOAD, 6)] {
        for length in [512, 100_000] {
            let cookie = 9000 + length as u64 + u64::from(flags);
            client.expect(CMD_WRITE, cookie, 512, length as u64);
            let payload = vec![byte; length];
            let bytes = encode(Mode::Extended, CMD_WRITE, flags, cookie, 512, length as u64, &payload);
            client.stream.write_all(&bytes).unwrap();
            let (answered, reply) = client.receive();
            assert_eq!((answered, reply.error), (cookie, 0), "{}", reply.message);
            assert_eq!(client.read(512, length as u64), payload);
        }
    }
}

#[test]
fn a_refused_payload_is_discarded_up_to_the_maximum() {
    let disk = MemoryDisk::new("vm", CAPACITY, 7);
    let config = ServerConfig { read_only: true, ..ServerConfig::default() };
    let running = Running::with(config, Shelf::of(&[&disk]));
    let refused = |mode, command, flags, length: usize, errno| {
        let mut client = Client::open(&running.socket, "vm", mode);
        client.expect(command, 5, 0, length as u64);
        let request = encode(mode, command, flags, 5, 0, length as u64, &vec![1; length]);
        client.stream.write_all(&request).unwrap();
        assert_eq!(client.receive().1.error, errno, "{mode:?} command {command} of {length} bytes");
        assert_eq!(client.read(0, 512), [0; 512], "{mode:?} command {command} of {length} bytes");
    };
    for length in [1, 65_535, 65_536, 300_000, 32 << 20] {
        for mode in MODES {
            refused(mode, CMD_WRITE, 0, length, EPERM);
        }
        refused(Mode::Extended, CMD_WRITE, PAYLOAD, length, EPERM);
        for command in [CMD_READ, CMD_FLUSH, CMD_TRIM, CMD_CACHE, CMD_ZEROES, CMD_STATUS, CMD_RESIZE, 77] {
            refused(Mode::Extended, command, PAYLOAD, length, EINVAL);
        }
    }
}

#[test]
fn a_disconnect_with_any_fields_ends_the_session() {
    for mode in MODES {
        for flags in [0, FUA, PAYLOAD, u16::MAX] {
            let (running, _disk) = start();
            let mut client = Client::open(&running.socket, "vm", mode);
            client.write(0, &[4; 65_536]);
            let mut batch = Vec::new();
            for n in 0..10 {
                batch.extend(client.encode(CMD_WRITE, 0, n * 4096, 4096, &[5; 4096]).1);
                batch.extend(client.encode(CMD_READ, 0, (1 << 20) + n * 4096, 4096, &[]).1);
                batch.extend(client.encode(CMD_FLUSH, 0, 0, 0, &[]).1);
            }
            batch.extend(encode(mode, CMD_DISC, flags, 1, 0, 4096, &[]));
            // Bytes after the disconnect request are ignored.
            batch.extend(client.encode(CMD_READ, 0, 0, 4096, &[]).1);
            client.stream.write_all(&batch).unwrap();
            for _ in 0..30 {
                assert_eq!(client.receive().1.error, 0);
            }
            assert!(client.at_end(), "{mode:?} {flags:#x}");
        }
    }
}

#[test]
fn resize_follows_the_policy_for_growing_and_shrinking() {
    let shelf = |disk: &Arc<MemoryDisk>| Shelf::of(&[disk]);
    let disk = MemoryDisk::new("vm", 8192, 1);
    let running = Running::start(shelf(&disk));
    let mut client = Client::open(&running.socket, "vm", Mode::Structured);
    assert_eq!(client.ask(CMD_RESIZE, 0, 1 << 20, 0).error, 0);
    client.write(1 << 19, &[3; 512]);
    let reply = client.ask(CMD_RESIZE, 0, 4096, 0);
    assert_eq!(reply.error, EPERM);
    assert!(reply.message.contains("shrink"));
    assert_eq!(client.read(1 << 19, 512), [3; 512]);
    let config = ServerConfig { resize: ResizePolicy::Any, ..ServerConfig::default() };
    let running = Running::with(config, shelf(&disk));
    let mut client = Client::open(&running.socket, "vm", Mode::Structured);
    assert_eq!(client.ask(CMD_RESIZE, 0, 4096, 0).error, 0);
    assert_eq!(client.ask(CMD_READ, 0, 4096, 1).error, EINVAL);
    let config = ServerConfig { resize: ResizePolicy::Never, ..ServerConfig::default() };
    let running = Running::with(config, shelf(&disk));
    let mut client = Client::open(&running.socket, "vm", Mode::Structured);
    assert_eq!(client.ask(CMD_RESIZE, 0, 8192, 0).error, EPERM);
}

#[test]
fn device_errors_become_error_numbers_with_messages() {
    let (running, disk) = start();
    let mut client = Client::open(&running.socket, "vm", Mode::Structured);
    let table = [
        (ErrorKind::NoSpace, ENOSPC),
        (ErrorKind::ReadOnly, EPERM),
        (ErrorKind::Invalid, EINVAL),
        (ErrorKind::Corrupt, EIO),
        (ErrorKind::Stopped, EIO),
        (ErrorKind::Unsupported, EINVAL),
    ];
    for (kind, errno) in table {
        *disk.fail_writes.lock() = Some(kind);
        let reply = client.ask_with(CMD_WRITE, 0, 0, 512, &[1; 512]);
        assert_eq!((reply.error, reply.message.as_str()), (errno, "write to disk vm refused by the test"));
    }
    *disk.fail_writes.lock() = None;
    client.write(0, &[1; 16384]);
    disk.settle();
    disk.slow(std::time::Duration::ZERO);
    disk.break_medium(4096..4097);
    let reply = client.ask(CMD_READ, 0, 0, 16384);
    assert_eq!(reply.error, EIO);
    assert!(reply.message.contains("reading 16384 bytes at 0 of vm"), "{}", reply.message);
    assert_eq!(client.read(8192, 4096), [1; 4096], "only the broken range fails");
}

#[test]
fn a_read_whose_blocks_change_is_planned_again() {
    let (running, disk) = start();
    let mut client = Client::open(&running.socket, "vm", Mode::Structured);
    client.write(0, &[1; 65536]);
    disk.again_every.store(2, Ordering::SeqCst);
    for _ in 0..50 {
        assert_eq!(client.read(0, 65536), [1; 65536]);
    }
    disk.again_every.store(1, Ordering::SeqCst);
    assert_eq!(client.ask(CMD_READ, 0, 0, 4096).error, EIO, "the read fails if every attempt has to be repeated");
}

#[test]
fn cache_requests_prefetch_into_the_page_cache() {
    let (running, disk) = start();
    let mut client = Client::open(&running.socket, "vm", Mode::Simple);
    assert_eq!(client.ask(CMD_CACHE, 0, 4096, 8192).error, 0);
    assert_eq!(*disk.prefetched.lock(), vec![4096..12288]);
    assert_eq!(client.ask(CMD_CACHE, NO_HOLE, 4096, 8192).error, EINVAL);
}

#[test]
fn a_cache_request_for_a_large_disk_loads_a_limited_part() {
    let disk = MemoryDisk::new("vm", 70 << 20, 7);
    let running = Running::start(Shelf::of(&[&disk]));
    let mut client = Client::open(&running.socket, "vm", Mode::Extended);
    assert_eq!(client.ask(CMD_CACHE, 0, 4096, 69 << 20).error, 0);
    assert_eq!(*disk.prefetched.lock(), vec![4096..4096 + (64 << 20)]);
}

#[test]
fn a_disconnect_completes_requests_under_way() {
    let (running, disk) = start();
    let mut client = Client::open(&running.socket, "vm", Mode::Structured);
    client.write(0, &vec![4; 1 << 20]);
    disk.settle();
    disk.slow(std::time::Duration::from_millis(30));
    let mut batch = Vec::new();
    for n in 0..10 {
        batch.extend(client.encode(CMD_READ, 0, n * 4096, 4096, &[]).1);
    }
    batch.extend(client.encode(CMD_DISC, 0, 0, 0, &[]).1);
    client.stream.write_all(&batch).unwrap();
    for _ in 0..10 {
        assert_eq!(client.receive().1.data, [4; 4096]);
    }
    assert!(client.at_end());
}

#[test]
fn slow_reads_do_not_delay_other_requests() {
    let (running, disk) = start();
    let mut client = Client::open(&running.socket, "vm", Mode::Structured);
    client.write(0, &vec![4; 1 << 20]);
    disk.settle();
    disk.slow(std::time::Duration::from_millis(300));
    let mut slow = vec![client.send(CMD_READ, 0, 0, 4096, &[])];
    // Gives the server time to begin waiting in its queue.
    std::thread::sleep(std::time::Duration::from_millis(50));
    slow.push(client.send(CMD_READ, 0, 4096, 4096, &[]));
    slow.push(client.send(CMD_READ, 0, 8192, 4096, &[]));
    let quick = client.send(CMD_READ, 0, 8 << 20, 4096, &[]);
    let order: Vec<u64> = (0..4).map(|_| client.receive().0).collect();
    let position = |cookie| order.iter().position(|done| *done == cookie);
    assert!(position(quick) < position(slow[2]), "a read of zeros need not wait for the medium: {order:?}");
}
