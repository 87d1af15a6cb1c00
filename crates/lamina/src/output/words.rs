//! Words that text and JSON output share.

use control::{MachineReply, MachineVerb};
use vm::definition::{Bus, Clock, Disk, Display, Link, Platform};

/// The participle for an operation on several machines, such as `started`.
pub fn done(verb: &MachineVerb) -> &'static str {
    match verb {
        MachineVerb::Start { .. } => "started",
        MachineVerb::Stop { .. } => "stopped",
        MachineVerb::Pause { .. } => "paused",
        MachineVerb::Resume { .. } => "resumed",
        MachineVerb::Delete { .. } => "deleted",
        _ => "done",
    }
}

/// Consistency of a snapshot, or how long the guest was paused for it.
pub fn how_taken(reply: &MachineReply) -> String {
    match reply {
        MachineReply::SnapshotTaken { quiet: Some(quiet), .. } => quiet.clone(),
        MachineReply::SnapshotTaken { stun_ms, .. } => {
            format!("with memory; the guest was paused for {:.1} ms", stun_ms.unwrap_or(0.0))
        }
        _ => String::new(),
    }
}

/// The network of a card, as it is written on the command line.
pub fn link(link: &Link) -> String {
    match link {
        Link::User => "user".into(),
        Link::None => "unplugged".into(),
        Link::Bridge(bridge) => format!("bridge={bridge}"),
        Link::Tap(tap) => format!("tap={tap}"),
        Link::Forward(ports) => ports.iter().fold("user".into(), |text, port| format!("{text},forward={port}")),
    }
}

/// Describes firmware, chipset and other hardware that differs from the defaults.
pub fn platform(platform: &Platform) -> String {
    let mut all = vec![platform.firmware.name().to_owned(), platform.chipset.name().to_owned()];
    if platform.secure_boot {
        all.push("secure boot".into());
    }
    if let Some(cores) = platform.cores.filter(|cores| *cores > 1) {
        all.push(format!("{cores} cores in a socket"));
    }
    if platform.clock == Clock::Local {
        all.push("clock in local time".into());
    }
    if platform.display == Display::Vga {
        all.push("vga".into());
    }
    all.join(", ")
}

/// The place where a disk is attached; empty for virtio.
pub fn place(disk: &Disk) -> String {
    match disk.bus {
        Bus::Virtio => String::new(),
        bus => format!(", {} unit {}", bus.name(), disk.unit),
    }
}
