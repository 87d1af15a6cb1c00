//! Storage that fails on request, for file systems that a test mounts: a loop device on a file of nbdfuse, whose NBD
//! server is in this module. The server runs in the outer process of the test, and continues if the inner process
//! fails, so that the mounts can be removed. The inner process controls the server over a socket.
//!
//! nbdkit's error filter is not used, because it can fail neither flushes nor the nth request. A request that fails has
//! no effect. Acknowledged data is kept until the power is cut: then each unit of 4 KiB written since the last flush is
//! randomly kept or lost, and the content does not change until the power is restored. Units are not torn, because ext4
//! and XFS cannot be mounted if their superblock or a directory block is torn.

#![allow(dead_code, reason = "each test file uses only a part")]
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use testkit::Random;
use testkit::mounted;
use testkit::nbd::{EIO, OPT_GO, OPTION, OPTION_REPLY, REP_ACK, REP_INFO, SIMPLE_REPLY};
use testkit::process::{tool, until};

/// Environment variable with the path of the control socket, for the inner process.
const INSIDE: &str = "LAMINA_TEST_MEDIUM";
/// Unit that a power cut does not tear.
const UNIT: usize = 4096;
const UNSUPPORTED: u32 = 0x8000_0001;
/// Transmission flags of the server: flags present, flush, FUA, trim, write zeroes.
const FLAGS: u16 = 0b110_1101;

/// Kinds of requests to the storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    Read,
    Write,
    Flush,
    /// Discards and zeroing.
    Punch,
}

impl Request {
    fn of(command: u16) -> Option<Self> {
        match command {
            0 => Some(Self::Read),
            1 => Some(Self::Write),
            3 => Some(Self::Flush),
            4 | 6 => Some(Self::Punch),
            _ => None,
        }
    }
}

/// State of a power cut that is scheduled or has happened.
struct Power {
    /// Number of changes and flushes until the cut.
    left: u64,
    done: u64,
    off: bool,
    /// Content at the last flush, and the units written since.
    durable: Vec<u8>,
    unflushed: BTreeSet<usize>,
    random: Random,
}

struct Inside {
    content: Vec<u8>,
    power: Option<Power>,
    fails: Option<Request>,
    /// Number of requests of this kind that still succeed, and the number of requests after them that fail.
    passes: u64,
    left: u64,
    failed: u64,
    /// Ranges of which reads fail.
    unreadable: Vec<std::ops::Range<usize>>,
}

impl Inside {
    fn is_unreadable(&self, request: Request, range: &std::ops::Range<usize>) -> bool {
        let touches = |bad: &std::ops::Range<usize>| bad.start < range.end && range.start < bad.end;
        request == Request::Read && self.unreadable.iter().any(touches)
    }

    /// Carries out a request that changes the content.
    fn change(&mut self, request: Request, range: std::ops::Range<usize>, payload: &[u8]) {
        if let Some(power) = &mut self.power {
            if power.off {
                return;
            }
            if power.left == 0 {
                power.off = true;
                for unit in std::mem::take(&mut power.unflushed) {
                    let bytes = unit * UNIT..(unit + 1) * UNIT;
                    if power.random.once_in(2) {
                        self.content[bytes.clone()].copy_from_slice(&power.durable[bytes]);
                    }
                }
                return;
            }
            power.left -= 1;
            power.done += 1;
            match request {
                Request::Flush => {
                    for unit in std::mem::take(&mut power.unflushed) {
                        let bytes = unit * UNIT..(unit + 1) * UNIT;
                        power.durable[bytes.clone()].copy_from_slice(&self.content[bytes]);
                    }
                }
                _ => power.unflushed.extend(range.start / UNIT..range.end.div_ceil(UNIT)),
            }
        }
        match request {
            Request::Write => self.content[range].copy_from_slice(payload),
            Request::Punch => self.content[range].fill(0),
            Request::Read | Request::Flush => {}
        }
    }

    fn refuses(&mut self, request: Request) -> bool {
        if self.fails != Some(request) || self.left == 0 {
            return false;
        }
        if self.passes > 0 {
            self.passes -= 1;
            return false;
        }
        self.left -= 1;
        self.failed += 1;
        true
    }
}

fn number<const N: usize>(stream: &mut UnixStream) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn shake_hands(stream: &mut UnixStream, size: u64) -> io::Result<()> {
    stream.write_all(b"NBDMAGICIHAVEOPT\x00\x03")?;
    let _flags: [u8; 4] = number(stream)?;
    loop {
        let magic = u64::from_be_bytes(number(stream)?);
        assert_eq!(magic, OPTION, "no NBD client");
        let option = u32::from_be_bytes(number(stream)?);
        let length = u32::from_be_bytes(number(stream)?);
        stream.read_exact(&mut vec![0; length as usize])?;
        let mut reply = |kind: u32, data: &[u8]| {
            let mut message = OPTION_REPLY.to_be_bytes().to_vec();
            [option, kind, data.len() as u32].iter().for_each(|word| message.extend(word.to_be_bytes()));
            message.extend(data);
            stream.write_all(&message)
        };
        if option != OPT_GO {
            reply(UNSUPPORTED, &[])?;
            continue;
        }
        let mut export = vec![0, 0];
        export.extend(size.to_be_bytes());
        export.extend(FLAGS.to_be_bytes());
        reply(REP_INFO, &export)?;
        return reply(REP_ACK, &[]);
    }
}

/// Serves one client until it disconnects.
fn serve(mut stream: UnixStream, inside: &Mutex<Inside>) -> io::Result<()> {
    let size = inside.lock().unwrap().content.len() as u64;
    shake_hands(&mut stream, size)?;
    loop {
        let _magic_and_flags: [u8; 6] = number(&mut stream)?;
        let command = u16::from_be_bytes(number(&mut stream)?);
        let cookie: [u8; 8] = number(&mut stream)?;
        let offset = u64::from_be_bytes(number(&mut stream)?) as usize;
        let length = u32::from_be_bytes(number(&mut stream)?) as usize;
        let Some(request) = Request::of(command) else { return Ok(()) };
        let mut payload = vec![0; if request == Request::Write { length } else { 0 }];
        stream.read_exact(&mut payload)?;
        let (mut error, mut answer) = (0, Vec::<u8>::new());
        {
            let mut inside = inside.lock().unwrap();
            let range = offset..offset + length;
            match request {
                request if inside.refuses(request) || inside.is_unreadable(request, &range) => error = EIO,
                Request::Read => answer.extend(&inside.content[range]),
                _ => inside.change(request, range, &payload),
            }
        }
        let mut message = SIMPLE_REPLY.to_be_bytes().to_vec();
        message.extend(error.to_be_bytes());
        message.extend(cookie);
        message.extend(answer);
        stream.write_all(&message)?;
    }
}

/// Command: schedule a power cut after a number of changes, with a seed. The reply is 0.
const POWER: u64 = 100;
/// Command: query the power. The reply is 1 if it is off, otherwise 0.
const POWER_IS_OFF: u64 = 101;
/// Command: restore the power. The reply is the number of changes since the cut was scheduled.
const POWER_STAYS: u64 = 102;
/// Command: reads of a range, offset and length, fail from now on. The reply is 0.
const UNREADABLE: u64 = 103;

impl Inside {
    fn obey(&mut self, words: &[u64]) -> u64 {
        match words[0] {
            POWER => {
                let (durable, unflushed, random) = (self.content.clone(), BTreeSet::new(), Random(words[2]));
                self.power = Some(Power { left: words[1], done: 0, off: false, durable, unflushed, random });
                0
            }
            POWER_IS_OFF => u64::from(self.power.as_ref().is_some_and(|power| power.off)),
            POWER_STAYS => self.power.take().map_or(0, |power| power.done),
            UNREADABLE => {
                self.unreadable.push(words[1] as usize..(words[1] + words[2]) as usize);
                0
            }
            command => {
                self.fails = Request::of(command as u16);
                (self.passes, self.left) = (words[1], words[2]);
                std::mem::take(&mut self.failed)
            }
        }
    }
}

/// Carries out commands of the inner process. A command either sets failures or switches the power. To set failures,
/// the command names a kind of request, the number of requests that succeed first, and the number of requests that fail
/// after them; the reply is the number of failures since the last command.
fn obey(stream: UnixStream, inside: &Mutex<Inside>) -> io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?);
    let mut answers = stream;
    let mut line = String::new();
    while lines.read_line(&mut line)? > 0 {
        let words: Vec<u64> = line.split_whitespace().map(|word| word.parse().unwrap()).collect();
        let answer = inside.lock().unwrap().obey(&words);
        writeln!(answers, "{answer}")?;
        line.clear();
    }
    Ok(())
}

fn listen(path: PathBuf, inside: &Arc<Mutex<Inside>>, answer: fn(UnixStream, &Mutex<Inside>) -> io::Result<()>) {
    let listener = UnixListener::bind(path).unwrap();
    let inside = Arc::clone(inside);
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let inside = Arc::clone(&inside);
            // Each client has a thread, so that a client that disconnects ends only its own connection.
            std::thread::spawn(move || drop(answer(stream, &inside)));
        }
    });
}

/// The storage as controlled by the inner process.
pub struct Medium {
    pub device: String,
    pub mounted: PathBuf,
    told: BufReader<UnixStream>,
}

impl Medium {
    fn tell(&mut self, command: u64, passes: u64, fails: u64) -> u64 {
        writeln!(self.told.get_mut(), "{command} {passes} {fails}").unwrap();
        let mut answer = String::new();
        self.told.read_line(&mut answer).unwrap();
        answer.trim().parse().unwrap()
    }

    /// Lets `passes` requests of a kind succeed, and the following `fails` ones fail.
    pub fn fail(&mut self, request: Request, passes: u64, fails: u64) {
        let command = [(Request::Read, 0), (Request::Write, 1), (Request::Flush, 3), (Request::Punch, 4)];
        let (_, command) = command.into_iter().find(|(of, _)| *of == request).unwrap();
        self.tell(command, passes, fails);
    }

    /// Makes a range of the device unreadable.
    pub fn spoil(&mut self, offset: u64, length: u64) {
        self.tell(UNREADABLE, offset, length);
    }

    /// Ends all failures, except of unreadable ranges; returns their number.
    pub fn heal(&mut self) -> u64 {
        self.tell(2, 0, 0)
    }

    /// Schedules a power cut after this many changes and flushes; the seed decides which unflushed data is kept.
    pub fn cut_power_after(&mut self, changes: u64, seed: u64) {
        self.tell(POWER, changes, seed);
    }

    /// Whether the power was cut, so that later acknowledged writes may be lost.
    pub fn is_off(&mut self) -> bool {
        self.tell(POWER_IS_OFF, 0, 0) == 1
    }

    /// Restores the power; returns the number of changes since the cut was scheduled.
    pub fn restore_power(&mut self) -> u64 {
        self.tell(POWER_STAYS, 0, 0)
    }

    pub fn mount(&self, options: &str) {
        tool("mount", &["-o", options, &self.device, self.mounted.to_str().unwrap()]);
    }

    pub fn unmount(&self) {
        unmount(&self.mounted);
    }

    pub fn make_file_system(&self, xfs: bool) {
        match xfs {
            true => tool("mkfs.xfs", &["-q", "-f", &self.device]),
            false => tool("mke2fs", &["-q", "-F", "-t", "ext4", "-m", "0", &self.device]),
        };
    }
}

/// Runs a test of this file again in an inner process, with storage of this many MiB.
pub fn on_medium(test: &str, megabytes: usize, body: fn(&mut Medium)) {
    if let Some(folder) = std::env::var_os(INSIDE) {
        let folder = PathBuf::from(folder);
        let device = std::fs::read_to_string(folder.join("device")).unwrap().trim().to_owned();
        let told = BufReader::new(UnixStream::connect(folder.join("control")).unwrap());
        return body(&mut Medium { device, mounted: folder.join("mounted"), told });
    }
    if tool("id", &["-u"]).trim() != "0" {
        return println!("not root: other tests simulate this");
    }
    let folder = tempfile::tempdir().unwrap();
    let (content, unreadable) = (vec![0; megabytes << 20], Vec::new());
    let inside = Inside { content, power: None, fails: None, passes: 0, left: 0, failed: 0, unreadable };
    let inside = Arc::new(Mutex::new(inside));
    listen(folder.path().join("nbd"), &inside, serve);
    listen(folder.path().join("control"), &inside, obey);
    // The loop device accesses the file with direct I/O, so that failures are visible to the file system.
    let script = "set -e; mkdir $FOLDER/medium $FOLDER/mounted; touch $FOLDER/medium/disk; \
        nbdfuse $FOLDER/medium/disk nbd+unix:///?socket=$FOLDER/nbd 2>$FOLDER/nbdfuse & medium=$!; \
        for i in $(seq 600); do [ $(stat -c %s $FOLDER/medium/disk) -gt 0 ] && break; sleep 0.05; done; \
        device=$(losetup --find --show --direct-io=on $FOLDER/medium/disk); echo $device >$FOLDER/device; \
        set +e; \"$0\" --exact \"$TEST\" --include-ignored --nocapture; status=$?; \
        umount $FOLDER/mounted 2>/dev/null || umount -l $FOLDER/mounted 2>/dev/null; losetup -d $device; \
        for i in $(seq 100); do fusermount3 -u $FOLDER/medium/disk 2>/dev/null && break; sleep 0.05; done; \
        kill $medium 2>/dev/null; wait $medium; exit $status";
    mounted::in_a_namespace(test, &["--mount"], script, folder.path(), (INSIDE, folder.path()));
}

/// Unmounts a file system. After a kill, the kernel frees the rings of the process a little later, and each of them has
/// a file open.
pub fn unmount(mounted: &Path) {
    until("the file system is unmounted", || {
        Command::new("umount").arg(mounted).output().is_ok_and(|output| output.status.success())
    });
}
