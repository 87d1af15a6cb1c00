//! Disks as text.

use crate::output::human::{count, size, time};
use crate::output::table::{Align, Table, print_facts};
use control::{DiskRequest, MachineNotice, Request, Resized, SnapshotRequest};
use disk::{
    Compression, CompressionState, CompressionStatus, Deduplication, DeduplicationState, DeduplicationStatus,
    DetectZeroes, DiskDefaults, DiskInfo, DiskSettings, DiskStatistics, DiskUser, ImageDetails, LiveProgress, OnFull,
    Provisioning, Reclaimed, ReduceAt, WaitingWrites,
};
use std::io::{self, Write};

/// Size of a block in bytes, for block counts.
const BLOCK: u64 = backend::BLOCK_SIZE as u64;

fn provisioning(kind: Provisioning) -> &'static str {
    match kind {
        Provisioning::Thin => "thin",
        Provisioning::ZeroedThick => "zeroedthick",
        Provisioning::EagerZeroedThick => "eagerzeroedthick",
    }
}

/// Prints a disk: after a change on one line, for `show` completely.
pub fn print(out: &mut dyn Write, request: &Request, disk: &DiskInfo) -> io::Result<()> {
    let DiskInfo { name, .. } = disk;
    match request {
        Request::Disk(DiskRequest::Create { .. }) => {
            write!(out, "created disk {name}: {}, ", size(disk.capacity))?;
            match disk.format.as_str() {
                "native" => writeln!(out, "{}", provisioning(disk.provisioning)),
                "vmdk" => writeln!(out, "vmdk, {}", provisioning(disk.provisioning)),
                format => writeln!(out, "{format}"),
            }
        }
        Request::Disk(DiskRequest::Edit { .. }) => {
            print_facts(out, &[vec![("name", name.clone())], settings_facts(disk)].concat())
        }
        Request::Disk(DiskRequest::Reopen { .. }) => writeln!(out, "disk {name} takes writes"),
        Request::Disk(DiskRequest::Inflate { .. }) => writeln!(out, "disk {name} has all its space allocated"),
        Request::Disk(DiskRequest::Consolidate { .. }) => {
            let levels = disk.image.as_ref().map_or(1, |image| image.levels);
            writeln!(out, "disk {name} has {} now", count(levels, "level"))
        }
        Request::Disk(DiskRequest::Rename { name: old, .. }) => writeln!(out, "disk {old} is {name} now"),
        Request::Disk(DiskRequest::Detach { .. }) => writeln!(out, "disk {name} is independent now"),
        Request::Snapshot(SnapshotRequest::Revert { name: snapshot, .. }) => {
            writeln!(out, "disk {name} is as it was at {snapshot}")
        }
        _ => print_facts(out, &disk_facts(disk)),
    }
}

/// Prints the new capacity, and the clients that still see the old one.
pub fn print_resized(out: &mut dyn Write, resized: &Resized) -> io::Result<()> {
    let Resized { disk, reconnected, unaware, machine, .. } = resized;
    writeln!(out, "disk {} has {} now", disk.name, size(disk.capacity))?;
    if *reconnected > 0 {
        let ended = count(*reconnected, "connection");
        writeln!(out, "ended {ended}: clients that reconnect see the new size")?;
    }
    if !unaware.is_empty() {
        writeln!(
            out,
            "{} connected before the resize and use the old size until they reconnect: {}; --reconnect-clients ends \
             their connections, and clients that do not reconnect by themselves then get I/O errors",
            count(unaware.len() as u64, "client"),
            unaware.join(", ")
        )?;
    }
    match machine {
        None => Ok(()),
        Some(MachineNotice { name, seen: true }) => writeln!(out, "machine {name} sees the new size"),
        Some(MachineNotice { name, seen: false }) => writeln!(
            out,
            "machine {name} runs and the datastore is not served: serve the datastore and repeat the command, so that \
             the machine sees the new size"
        ),
    }
}

/// How many blocks were read from the read cache, of those that it may hold.
pub fn hit_rate(hits: u64, misses: u64) -> String {
    let lookups = hits.saturating_add(misses);
    let percent = u128::from(hits) * 100 / u128::from(lookups.max(1));
    format!("{percent} % of {} read from it", count(lookups, "block"))
}

fn disk_facts(disk: &DiskInfo) -> Vec<(&'static str, String)> {
    let blocks = |blocks: u64| format!("{blocks} ({})", size(blocks.saturating_mul(BLOCK)));
    let mut facts = vec![
        ("name", disk.name.clone()),
        ("uuid", disk.uuid.clone()),
        ("capacity", format!("{} ({} bytes)", size(disk.capacity), disk.capacity)),
        ("provisioning", provisioning(disk.provisioning).into()),
        ("format", disk.format.clone()),
    ];
    facts.extend(disk.blocks_allocated.map(|n| ("blocks allocated", blocks(n))));
    facts.extend(disk.blocks_to_be_zeroed.map(|n| ("blocks to be zeroed", blocks(n))));
    facts.extend(disk.exclusive.map(|n| ("exclusive", size(n))));
    if disk.cache_hits + disk.cache_misses > 0 {
        facts.push(("read cache", hit_rate(disk.cache_hits, disk.cache_misses)));
    }
    facts.push(("snapshots", disk.snapshots.to_string()));
    facts.extend(disk.parent_snapshot.clone().map(|s| ("stands on", s)));
    facts.extend(disk.origin.clone().map(|s| ("linked clone of", s)));
    facts.extend(disk.stopped.as_ref().map(|why| ("stopped", stopped(disk, why))));
    facts.extend(settings_facts(disk));
    facts.extend(disk.waiting.as_ref().map(|waiting| ("waiting", waiting_writes(waiting))));
    facts.push(("clients", disk.clients.to_string()));
    facts.extend(disk.users.iter().map(|user| ("", client(disk, user))));
    facts.extend(disk.machine.clone().map(|machine| ("machine", machine)));
    facts.push(("created", time(disk.created)));
    facts.extend(disk.image.iter().flat_map(|image| image_facts(image)));
    facts
}

fn settings_facts(disk: &DiskInfo) -> Vec<(&'static str, String)> {
    let when_full = match disk.settings.on_full {
        OnFull::Error => "error: writes that need space fail at once".to_owned(),
        OnFull::Wait(None) => "wait: writes that need space wait for it".to_owned(),
        limited => format!("{limited}: writes that need space wait for it, then fail"),
    };
    let mut facts = vec![("when full", when_full)];
    facts.extend(match disk.settings.detect_zeroes {
        DetectZeroes::Off => None,
        DetectZeroes::On => Some(("writes of zeros", "on: stored without data, the range keeps its space".into())),
        DetectZeroes::Unmap => Some(("writes of zeros", "unmap: the range is unmapped".into())),
    });
    facts.extend(compression(disk).map(|text| ("compression", text)));
    facts.extend(deduplication(disk).map(|text| ("deduplication", text)));
    facts.extend(disk.settings.labels.iter().map(|(key, value)| ("label", format!("{key}={value}"))));
    facts.extend(disk.settings.limits.quota.map(|bytes| ("quota", size(bytes))));
    facts.extend(disk.settings.limits.reservation.map(|bytes| ("reservation", size(bytes))));
    facts
}

/// The setting of compression, and what was done because of it.
fn compression(disk: &DiskInfo) -> Option<String> {
    let DiskSettings { compression, compress_at, dedup, dedup_at, .. } = &disk.settings;
    if compression.is_off() {
        return None;
    }
    let state = || disk.compression.as_ref().map(progress);
    Some(format!("{}, {}", method(*compression, *compress_at, (dedup, *dedup_at)), effect(disk, state)))
}

/// How and when data is compressed. Before that, it is compared with other data.
fn method(compression: Compression, at: ReduceAt, (dedup, dedup_at): (&Deduplication, ReduceAt)) -> String {
    match (compression, at) {
        (Compression::Off, _) => compression.to_string(),
        (_, ReduceAt::WriteBack) if dedup.is_off() || !dedup_at.is_idle() => format!("{compression} at write-back"),
        (_, ReduceAt::Inline) if dedup.is_off() || !dedup_at.is_idle() => format!("{compression} inline"),
        _ if !dedup.is_off() => format!("{compression} after deduplication"),
        _ => format!("{compression} when idle"),
    }
}

/// What a setting of compression or deduplication does for a disk. `state` says what a server has done because of it.
fn effect(disk: &DiskInfo, state: impl Fn() -> Option<String>) -> String {
    match (disk.format.as_str(), disk.provisioning) {
        ("native", Provisioning::Thin) => state().unwrap_or_else(|| "while the datastore is served".to_owned()),
        ("native", _) => "without effect on a thick disk".to_owned(),
        _ => "without effect on images".to_owned(),
    }
}

/// The setting of deduplication, and what was done because of it.
fn deduplication(disk: &DiskInfo) -> Option<String> {
    let domain = &disk.settings.dedup;
    let state = || match domain {
        Deduplication::Label(key) if !disk.settings.labels.contains_key(key) => {
            Some(format!("without effect, because the disk has no label '{key}'"))
        }
        _ => disk.deduplication.as_ref().map(removed),
    };
    (!domain.is_off()).then(|| format!("{}, {}", domain_at(domain, disk.settings.dedup_at), effect(disk, state)))
}

/// Among which disks and when equal data is found.
fn domain_at(domain: &Deduplication, at: ReduceAt) -> String {
    match at {
        _ if domain.is_off() => domain.to_string(),
        ReduceAt::WriteBack => format!("{domain} at write-back"),
        ReduceAt::Inline => format!("{domain} inline"),
        ReduceAt::Idle => format!("{domain} when idle"),
    }
}

fn removed(state: &DeduplicationState) -> String {
    let mut parts = vec![format!("{} to be examined", size(state.pending))];
    parts.extend(state.ended.map(|ended| format!("last pass {}", time(ended))));
    if state.shared > 0 {
        parts.push(format!("{} of equal data removed", size(state.shared)));
    }
    parts.join(", ")
}

fn progress(state: &CompressionState) -> String {
    let mut parts = vec![format!("{} to be examined", size(state.pending))];
    parts.extend(state.ended.map(|ended| format!("last pass {}", time(ended))));
    if state.compressed > 0 {
        let after = state.compressed.saturating_sub(state.saved);
        parts.push(format!("{} compressed to {}", size(state.compressed), size(after)));
    }
    parts.join(", ")
}

/// Compression by settings, for the status of a datastore; `None` if no disk has the setting.
pub fn compression_status(status: &CompressionStatus) -> Option<String> {
    if status.disks == 0 && status.new_disks.is_off() {
        return None;
    }
    let mut parts = vec![count(status.disks, "disk"), format!("{} for new ones", status.new_disks)];
    let state =
        CompressionState { pending: status.pending, compressed: status.compressed, saved: status.saved, ended: None };
    parts.push(progress(&state));
    parts.extend(status.running.as_ref().map(|disk| format!("running on {disk}")));
    Some(parts.join(", "))
}

/// Deduplication by settings, for the status of a datastore; `None` if no disk has the setting.
pub fn deduplication_status(status: &DeduplicationStatus) -> Option<String> {
    if status.disks == 0 && status.new_disks.is_off() {
        return None;
    }
    let mut parts = vec![count(status.disks, "disk"), format!("{} for new ones", status.new_disks)];
    parts.push(removed(&DeduplicationState { pending: status.pending, shared: status.shared, ended: None }));
    parts.extend(status.running.as_ref().map(|domain| format!("running on {domain}")));
    Some(parts.join(", "))
}

/// Prints the settings that new disks get.
pub fn print_defaults(out: &mut dyn Write, defaults: &DiskDefaults) -> io::Result<()> {
    let DiskDefaults { compression, compress_at, dedup, dedup_at } = defaults;
    let compression = method(*compression, *compress_at, (dedup, *dedup_at));
    print_facts(out, &[("compression", compression), ("deduplication", domain_at(dedup, *dedup_at))])
}

/// The writes of a disk that wait for space.
pub fn waiting_writes(waiting: &WaitingWrites) -> String {
    let writes = count(waiting.writes, "write");
    format!("{writes} ({}) for space, since {}: {}", size(waiting.bytes), time(waiting.since), waiting.reason)
}

fn stopped(disk: &DiskInfo, why: &str) -> String {
    match disk.format.as_str() {
        "native" => format!("takes no writes ({why}); stop the server and start it again"),
        _ => format!("takes no writes ({why}); 'lamina disk reopen {}' opens it again", disk.name),
    }
}

fn client(disk: &DiskInfo, user: &DiskUser) -> String {
    let of = if user.export == disk.name { String::new() } else { format!(" of {}", user.export) };
    match user.grace {
        None => format!("{}{of}", user.client),
        Some(left) => format!("{}{of}: lost the connection, in grace for another {left} s", user.client),
    }
}

/// Number of connected clients, and of clients that may reconnect.
fn clients(disk: &DiskInfo) -> String {
    match disk.users.iter().filter(|user| user.grace.is_some() && user.export == disk.name).count() {
        0 => disk.clients.to_string(),
        lost => format!("{} (+{lost} lost)", disk.clients),
    }
}

/// How far the content of a disk has come.
fn arrived(live: &LiveProgress) -> String {
    let passed = match live.total {
        0 => "not begun since the server started".to_owned(),
        total => format!("the first {} of {}", size(live.done), size(total)),
    };
    match (&live.error, live.running) {
        (None, true) => passed,
        (None, false) => format!("{passed}; no server copies it now"),
        (Some(error), true) => format!("{passed}; failed, and is tried again: {error}"),
        (Some(error), false) => format!("{passed}; ended, and begins again when the command is repeated: {error}"),
    }
}

fn image_facts(image: &ImageDetails) -> Vec<(&'static str, String)> {
    let mut facts = vec![
        ("base", image.kind.clone()),
        ("levels", format!("{} of {} ({})", image.levels, image.levels_max, image.formats.join(", "))),
        ("format of snapshots", image.delta.clone()),
    ];
    if let Some(counters) = image.counters {
        facts.push(("nb", format!("{} of {} (1 MiB blocks with space)", counters.nb, counters.blocks)));
        facts.push(("tbz", format!("{} (of these, to be zeroed)", counters.tbz)));
    }
    facts.extend(image.fragments.map(|n| ("fragments", n.to_string())));
    facts.push(("allocated", size(image.allocated)));
    facts.push(("mapped", size(image.mapped)));
    facts.push(("dead", size(image.dead)));
    if image.importing {
        let until = "until the copy is complete, the disk takes no snapshots and keeps its size";
        let source = image.live.as_ref().and_then(|live| live.source.as_ref());
        facts.push(match source {
            Some(source) => ("live restore", format!("the server copies the content of {source}; {until}")),
            None => ("live import", format!("the server copies the images into the datastore; {until}")),
        });
        facts.extend(image.live.iter().map(|live| ("arrived", arrived(live))));
    }
    if image.consolidation_needed {
        facts.push(("consolidation", "needed: the chain has levels that no snapshot needs".into()));
    }
    for (index, file) in image.files.iter().enumerate() {
        let note = if file.standing == "made" { String::new() } else { format!(" ({})", file.standing) };
        facts.push((if index == 0 { "files" } else { "" }, format!("{}{note}", file.path)));
    }
    facts
}

/// Prints the statistics of a chain.
pub fn print_statistics(out: &mut dyn Write, of: &DiskStatistics) -> io::Result<()> {
    let (metadata, data, tunables) = (&of.metadata, &of.data, &of.tunables);
    let share = |part: u64, rest: u64| match part.saturating_add(rest) {
        0 => "-".to_owned(),
        all => format!("{:.1} %", part as f64 * 100.0 / all as f64),
    };
    let mean = if metadata.walks == 0 { 0.0 } else { metadata.walk_levels as f64 / metadata.walks as f64 };
    let unused = metadata.prefetched.saturating_sub(metadata.prefetched_used);
    let number = |value: Option<u64>| value.map_or_else(|| "-".into(), |value| value.to_string());
    let levels: Vec<&str> = of.levels.iter().map(|level| level.format.as_str()).collect();
    let facts = [
        ("name", of.name.clone()),
        ("levels", format!("{} of {} ({})", levels.len(), number(tunables.levels_max), levels.join(", "))),
        ("metadata hits", format!("{} ({})", metadata.hits, share(metadata.hits, metadata.misses))),
        ("metadata misses", metadata.misses.to_string()),
        ("evictions", metadata.evictions.to_string()),
        ("walks", format!("{} ({mean:.1} levels each, {} in the longest)", metadata.walks, metadata.walk_levels_max)),
        ("prefetched extents", metadata.prefetched.to_string()),
        ("  of these used", format!("{} ({})", metadata.prefetched_used, share(metadata.prefetched_used, unused))),
        ("entries", format!("{} of {}", metadata.entries, number(tunables.metadata_entries))),
        ("memory", size(metadata.memory)),
        (
            "prefetch",
            format!("{}, {} extents", size(tunables.prefetch.unwrap_or(0)), number(tunables.prefetch_extents)),
        ),
        ("read cache", format!("{} of {}", size(data.memory), size(data.memory_max))),
        ("  hits", format!("{} ({})", data.hits, share(data.hits, data.misses))),
        ("  evictions", data.evictions.to_string()),
        ("grains filled up", of.fills.to_string()),
    ];
    print_facts(out, &facts)
}

/// Prints the space that was reclaimed.
pub fn print_reclaimed(out: &mut dyn Write, request: &Request, name: &str, of: &Reclaimed) -> io::Result<()> {
    match request {
        Request::Disk(DiskRequest::Wipe { .. }) => {
            writeln!(out, "disk {name}: {} freed for new data; 'lamina disk shrink' gives them back", size(of.freed))
        }
        Request::Disk(DiskRequest::Optimize { compression, dedup, .. }) => {
            if of.lost > 0 {
                let lost = size(of.lost);
                writeln!(out, "disk {name}: {lost} stay as they are: pages of metadata are lost, see 'lamina check'")?;
            }
            if *dedup != Deduplication::Off {
                writeln!(out, "disk {name}: {} of equal data removed", size(of.shared))?;
            }
            if *compression == Compression::Off {
                return Ok(());
            }
            let (before, after) = (of.moved, of.moved.saturating_sub(of.freed));
            writeln!(out, "disk {name}: {} compressed to {}", size(before), size(after))
        }
        _ => writeln!(out, "disk {name}: {} given back", size(of.returned)),
    }
}

pub fn print_all(out: &mut dyn Write, disks: &[DiskInfo]) -> io::Result<()> {
    let mut columns = vec![
        ("NAME", Align::Left),
        ("CAPACITY", Align::Right),
        ("FORMAT", Align::Left),
        ("PROVISIONING", Align::Left),
        ("SNAPSHOTS", Align::Right),
        ("CLIENTS", Align::Right),
        ("ORIGIN", Align::Left),
    ];
    let state = |disk: &DiskInfo| match (&disk.stopped, &disk.waiting) {
        (Some(_), _) => Some("stopped"),
        (None, Some(_)) => Some("waits for space"),
        (None, None) => None,
    };
    let any_state = disks.iter().any(|disk| state(disk).is_some());
    if any_state {
        columns.push(("STATE", Align::Left));
    }
    let mut table = Table::new(&columns);
    for disk in disks {
        let mut row = vec![
            disk.name.clone(),
            size(disk.capacity),
            disk.format.clone(),
            provisioning(disk.provisioning).into(),
            disk.snapshots.to_string(),
            clients(disk),
            disk.origin.clone().unwrap_or_else(|| "-".into()),
        ];
        if any_state {
            row.push(state(disk).unwrap_or("-").into());
        }
        table.row(row);
    }
    table.print(out)
}
