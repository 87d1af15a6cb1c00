//! The disks: copies of the Debian that `scripts/debian` makes. On each copy, some of the applications that
//! `scripts/desktops` has fetched are installed in a random order, and logs are written between the installations.
//!
//! The packages are installed as on a machine, by dpkg with the scripts of the packages: they make caches, lists and
//! translated modules, and the file system of each disk places the files differently.

use super::super::say;
use crate::error::{Doing, Error, Result};
use crate::process;
use crate::random::Random;
use crate::scratch::Scratch;
use crate::volume::Volume;
use std::collections::HashSet;
use std::fs::{self, File, Permissions};
use std::io::{BufWriter, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Applications on each disk.
const APPLICATIONS: usize = 3;
/// Bytes of logs that are written before the first installation and after each one.
const LOG: u64 = 2 << 20;
/// Time limit of an installation: its scripts may wait for a busy medium at every flush.
const INSTALL_TIME_MAX: Duration = Duration::from_secs(1800);
/// discard: the blocks of removed files are returned, as on a machine, because this Debian's fstab has the same option.
/// nobarrier: flushes need not reach the medium, because the image is used only after the file system was unmounted.
const MOUNT_OPTIONS: &str = "discard,nobarrier";

/// Services, and their messages in logs, in which `#` becomes a number.
const MESSAGES: [(&str, &str); 8] = [
    ("kernel", "[#.#] usb 1-#: new high-speed USB device number # using xhci_hcd"),
    ("systemd[1]", "Started session-#.scope - Session # of User user#."),
    ("sshd[#]", "Accepted publickey for user# from 10.#.#.# port # ssh2: ED25519 SHA256:#:#"),
    ("NetworkManager[#]", "<info>  [#.#] dhcp4 (eth#): state changed new lease, address=10.#.#.#"),
    ("dbus-daemon[#]", "[session uid=# pid=#] Successfully activated service 'org.freedesktop.portal.Desktop'"),
    ("CRON[#]", "(root) CMD (command -v debian-sa1 > /dev/null && debian-sa1 # #)"),
    ("rtkit-daemon[#]", "Supervising # threads of # processes of # users."),
    ("gnome-shell[#]", "Window manager warning: last_user_time (#) is greater than comparison timestamp (#)."),
];

/// An application, and the files of its packages.
struct Application {
    name: String,
    packages: Vec<String>,
}

/// Makes the disks. `guest` is the folder of `scripts/debian` and `scripts/desktops`.
pub(super) fn make(scratch: &Scratch, guest: &Path, count: u32, seed: u64) -> Result<Vec<PathBuf>> {
    let (debian, folder) = (guest.join("debian/debian.img"), guest.join("desktops"));
    let Ok(list) = fs::read_to_string(folder.join("applications")) else {
        let folder = folder.display();
        return Err(Error::Usage(format!("no packages in {folder}: fetch them with scripts/setup desktops")));
    };
    let applications: Vec<Application> = list.lines().filter_map(parsed).collect();
    let mut random = Random::new(seed);
    let mut images = Vec::new();
    for number in 0..count {
        let order = random.order(applications.len() as u32);
        let chosen: Vec<_> = order.into_iter().take(APPLICATIONS).map(|index| &applications[index as usize]).collect();
        let shown: Vec<_> = chosen.iter().map(|application| application.name.as_str()).collect();
        say(&format!("disk {} of {count}: {}", number + 1, shown.join(", ")));
        let image = scratch.path(&format!("desktop{number}.raw"));
        process::run(Command::new("cp").arg("--sparse=always").arg(&debian).arg(&image))?;
        let volume = Volume::open(scratch, "root", &image, MOUNT_OPTIONS)?;
        let host = format!("desktop{number}");
        prepare(volume.path(), &host, &mut random)?;
        log(volume.path(), &host, &mut random)?;
        let mut installed = HashSet::new();
        for application in chosen {
            let new = application.packages.iter().filter(|package| installed.insert(package.as_str()));
            install(volume.path(), new.map(|package| folder.join("packages").join(package)))?;
            log(volume.path(), &host, &mut random)?;
        }
        drop(volume);
        images.push(image);
    }
    scratch.settle()?;
    Ok(images)
}

/// A line of the list: a name, then files.
fn parsed(line: &str) -> Option<Application> {
    let mut words = line.split_whitespace().map(str::to_owned);
    Some(Application { name: words.next()?, packages: words.collect() })
}

/// Gives a disk an identity, and prevents the scripts of packages from starting services.
fn prepare(root: &Path, host: &str, random: &mut Random) -> Result<()> {
    let put = |name: &str, text: String, mode: u32| {
        let path = root.join(name);
        let written = fs::write(&path, text).and_then(|()| fs::set_permissions(&path, Permissions::from_mode(mode)));
        written.doing(|| format!("writing {}", path.display()))
    };
    put("etc/hostname", format!("{host}\n"), 0o644)?;
    put("etc/machine-id", format!("{:016x}{:016x}\n", random.word(), random.word()), 0o444)?;
    put("usr/sbin/policy-rc.d", "#!/bin/sh\nexit 101\n".into(), 0o755)
}

fn install(root: &Path, packages: impl Iterator<Item = PathBuf>) -> Result<()> {
    let mut command = Command::new("dpkg");
    command.arg("--root").arg(root).env("DEBIAN_FRONTEND", "noninteractive").env("LC_ALL", "C");
    // Without flushes of every file. The order of the files is not that of their dependencies, so packages are unpacked
    // before all that they need is there; at the end everything is.
    command.args(["--force-unsafe-io", "--force-depends", "--install"]).args(packages);
    process::run_within(&mut command, INSTALL_TIME_MAX).map(drop)
}

/// Appends messages of random services to the log of a disk.
fn log(root: &Path, host: &str, random: &mut Random) -> Result<()> {
    let path = root.join("var/log/syslog");
    let doing = || format!("writing {}", path.display());
    let mut file = BufWriter::new(File::options().create(true).append(true).open(&path).doing(doing)?);
    let (mut written, mut second) = (0, random.below(1 << 24));
    while written < LOG {
        second += random.below(60);
        let (day, hour, minute) = (1 + second / 86_400 % 28, second / 3600 % 24, second / 60 % 60);
        let (service, message) = MESSAGES[random.below(MESSAGES.len() as u64) as usize];
        let time = format!("2026-11-{day:02}T{hour:02}:{minute:02}:{:02}.{:06}", second % 60, random.below(1_000_000));
        let line = format!("{time}+00:00 {host} {}: {}\n", numbered(service, random), numbered(message, random));
        file.write_all(line.as_bytes()).doing(doing)?;
        written += line.len() as u64;
    }
    file.flush().doing(doing)
}

/// A text with a random number at each `#`, small ones as often as large ones.
fn numbered(text: &str, random: &mut Random) -> String {
    let mut parts = text.split('#');
    let mut out = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let digits = random.below(5);
        out += &random.below(10 << (3 * digits)).to_string();
        out += part;
    }
    out
}
