//! A client with two connections closes one of them because the server does not answer in time, and repeats its
//! requests on the other one.

use crate::Running;
use crate::memory_disk::{MemoryDisk, Shelf};
use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;
use testkit::process::{PATIENCE, until};
use testkit::protocol::*;

const BLOCK: usize = 4096;
/// The time after which the client does not wait for a reply any more.
const TIMEOUT: Duration = Duration::from_millis(100);

fn start() -> (Running, Arc<MemoryDisk>) {
    let disk = MemoryDisk::new("vm", 1 << 20, 7);
    (Running::start(Shelf::of(&[&disk])), disk)
}

/// A client, and its socket.
fn open(running: &Running) -> (Client, UnixStream) {
    let socket = UnixStream::connect(&running.socket).unwrap();
    let mut client = Client::new(Box::new(socket.try_clone().unwrap()));
    client.greet(3);
    client.choose(Mode::Structured);
    assert_eq!(client.go("vm"), REP_ACK);
    (client, socket)
}

/// The value of a block of which all bytes are the same.
fn value(disk: &MemoryDisk, block: usize) -> Option<u8> {
    let all = disk.contents();
    let block = &all[block * BLOCK..(block + 1) * BLOCK];
    block.iter().all(|byte| *byte == block[0]).then_some(block[0])
}

#[test]
fn a_repeated_write_waits_for_the_original_and_later_originals_are_refused() {
    let (running, disk) = start();
    let mut abandoned = Client::open(&running.socket, "vm", Mode::Structured);
    let mut other = Client::open(&running.socket, "vm", Mode::Structured);
    disk.hold_next_write();
    abandoned.send(CMD_WRITE, 0, 0, BLOCK as u64, &[1; BLOCK]);
    disk.await_held_write();
    // This write stays in the socket.
    abandoned.send(CMD_WRITE, 0, 2 * BLOCK as u64, BLOCK as u64, &[1; BLOCK]);
    // A connection that is only slow delays no other one.
    std::thread::sleep(TIMEOUT);
    other.write(BLOCK as u64, &[3; BLOCK]);
    drop(abandoned);
    std::thread::scope(|scope| {
        let (flushed, after) = std::sync::mpsc::channel();
        scope.spawn(move || {
            for value in [1, 2] {
                other.write(0, &[value; BLOCK]);
            }
            assert_eq!(other.ask(CMD_FLUSH, 0, 0, 0).error, 0);
            flushed.send(()).unwrap();
            other.leave();
        });
        let early = after.recv_timeout(Duration::from_millis(300));
        disk.release_write();
        assert!(early.is_err(), "a repeated write was answered before the original was carried out");
        after.recv_timeout(PATIENCE).unwrap();
    });
    until("the sessions end", || running.server.connections() == 0);
    assert_eq!((value(&disk, 0), value(&disk, 1)), (Some(2), Some(3)));
    assert_ne!(value(&disk, 2), Some(1), "a write of a closed connection was begun");
}

#[test]
fn requests_of_a_slow_connection_are_carried_out_while_its_client_waits() {
    let (running, disk) = start();
    let mut slow = Client::open(&running.socket, "vm", Mode::Structured);
    let other = Client::open(&running.socket, "vm", Mode::Structured);
    disk.hold_next_write();
    slow.send(CMD_WRITE, 0, 0, BLOCK as u64, &[1; BLOCK]);
    disk.await_held_write();
    slow.send(CMD_WRITE, 0, BLOCK as u64, BLOCK as u64, &[2; BLOCK]);
    std::thread::sleep(TIMEOUT);
    disk.release_write();
    (0..2).for_each(|_| assert_eq!(slow.receive().1.error, 0));
    assert_eq!((value(&disk, 0), value(&disk, 1)), (Some(1), Some(2)));
    slow.leave();
    other.leave();
}

#[test]
fn a_client_with_one_connection_may_close_it_behind_its_requests() {
    let (running, disk) = start();
    let mut client = Client::open(&running.socket, "vm", Mode::Structured);
    std::thread::sleep(TIMEOUT);
    client.send(CMD_WRITE, 0, 0, BLOCK as u64, &[1; BLOCK]);
    client.send(CMD_DISC, 0, 0, 0, &[]);
    drop(client);
    until("the session ends", || running.server.connections() == 0);
    assert_eq!(value(&disk, 0), Some(1));
}

#[test]
fn a_client_that_only_stops_sending_gets_its_replies() {
    let (running, disk) = start();
    let other = Client::open(&running.socket, "vm", Mode::Structured);
    let (mut client, socket) = open(&running);
    disk.hold_next_write();
    for block in 0..2 {
        client.send(CMD_WRITE, 0, block * BLOCK as u64, BLOCK as u64, &[1; BLOCK]);
        if block == 0 {
            disk.await_held_write();
        }
    }
    socket.shutdown(Shutdown::Write).unwrap();
    disk.release_write();
    (0..2).for_each(|_| assert_eq!(client.receive().1.error, 0));
    assert_eq!((value(&disk, 0), value(&disk, 1)), (Some(1), Some(1)));
    drop(client);
    other.leave();
}

#[test]
fn a_request_that_is_cut_off_delays_no_other_connection() {
    let (running, _disk) = start();
    let (mut cut, mut socket) = open(&running);
    let mut other = Client::open(&running.socket, "vm", Mode::Structured);
    let (_, request) = cut.encode(CMD_WRITE, 0, 0, 1 << 20, &vec![1; 1 << 20]);
    socket.write_all(&request[..request.len() / 2]).unwrap();
    other.write(0, &[2; BLOCK]);
    drop((cut, socket));
    other.write(0, &[3; BLOCK]);
    other.leave();
}
