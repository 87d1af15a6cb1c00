//! Checks that the format pages match the code: each field of each record, each kind of page, batch and message, and
//! each magic number must be described on its page. The test reads the sources, so that it fails after a member was
//! added to a type that is listed here, until the page describes the member. (Tests of the encoders check the
//! operations of the journal and the bytes of the examples.)

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};

/// A type in the code, and the section of the page that describes the type. An empty section stands for the whole page.
struct Item {
    source: &'static str,
    name: &'static str,
    page: &'static str,
    section: &'static str,
    /// Names of fields or variants on the page, if they differ from the names in the code.
    called: &'static [(&'static str, &'static str)],
}

const fn item(
    source: &'static str,
    name: &'static str,
    (page, section): (&'static str, &'static str),
    called: &'static [(&'static str, &'static str)],
) -> Item {
    Item { source, name, page, section, called }
}

const NATIVE: &str = "docs/format/native.md";
const SUPERBLOCK: (&str, &str) = (NATIVE, "Superblock");
const CATALOG: (&str, &str) = (NATIVE, "Catalog");
const MESSAGES: (&str, &str) = ("docs/protocol/replication.md", "Messages");
const FRAMES: (&str, &str) = ("docs/protocol/replication.md", "Frames");
const LINES: (&str, &str) = ("docs/protocol/control.md", "Lines");
const REQUESTS: (&str, &str) = ("docs/protocol/control.md", "Requests");
const REPLIES: (&str, &str) = ("docs/protocol/control.md", "Replies");
const JOBS: (&str, &str) = ("docs/protocol/control.md", "Jobs");
const EVENTS: (&str, &str) = ("docs/protocol/control.md", "Events");
const INTENT: (&str, &str) = ("docs/format/migration-intent.md", "");
const RECEPTION: (&str, &str) = ("docs/format/reception.md", "");
const BACKUP: (&str, &str) = ("docs/format/backup.md", "Records");
const MACHINE_BACKUP: (&str, &str) = ("docs/format/backup.md", "Backup of a machine");
const PACK: (&str, &str) = ("docs/format/backup.md", "Pack");
const GROUP: (&str, &str) = ("docs/format/snapshot-group.md", "");
const CLIENTS: (&str, &str) = ("docs/format/clients.md", "");
const GROWTH: (&str, &str) = ("docs/format/growth.md", "");
const SETTINGS: (&str, &str) = ("docs/format/settings.md", "");
const SCRUB: (&str, &str) = ("docs/format/scrub.md", "");
const SCRUB_RECORD: &str = "crates/disk/src/scrub/record.rs";
const LAYERS: (&str, &str) = ("docs/format/vmdk-disk.md", "The layers above the head");
const DISK: (&str, &str) = ("docs/format/vmdk-disk.md", "");
const MACHINE: (&str, &str) = ("docs/format/machines.md", "machine.toml");
const MACHINE_INTENT: (&str, &str) = ("docs/format/machines.md", "intent.toml");
const MACHINE_SNAPSHOT: (&str, &str) = ("docs/format/machines.md", "snapshot.toml");
const MACHINE_IMAGE: (&str, &str) = ("docs/format/machines.md", "image.toml");
const VMDK_RECORD: &str = "crates/vmdk/src/record.rs";
const DEFINITION: &str = "crates/vm/src/definition.rs";

const ITEMS: &[Item] = &[
    item(
        "crates/store/src/engine/log/superblock.rs",
        "Superblock",
        SUPERBLOCK,
        &[("journal_size", "size of the journal"), ("created", "creation time"), ("clean", "closed cleanly")],
    ),
    item(
        "crates/store/src/engine/log/record.rs",
        "CheckpointRecord",
        SUPERBLOCK,
        &[
            ("data_regions", "regions of the data"),
            ("map_regions", "regions of the map"),
            ("map_length", "length of the map"),
            ("catalog_slots", "slots of the catalog"),
            ("next_id", "next object id"),
        ],
    ),
    item(
        "crates/store/src/engine/log/superblock.rs",
        "NamedImages",
        SUPERBLOCK,
        &[("count", "images of that checkpoint"), ("checksum", "CRC32C of the head")],
    ),
    item(
        "crates/store/src/engine/log/images.rs",
        "Head",
        (NATIVE, "Images of a checkpoint"),
        &[("count", "number of images"), ("keys_checksum", "CRC32C of the blocks of keys")],
    ),
    item("crates/store/src/journal/mod.rs", "Head", (NATIVE, "Journal"), &[]),
    item("crates/store/src/journal/mod.rs", "BatchKind", (NATIVE, "Journal"), &[("Pages", "page images")]),
    item(
        "crates/store/src/pages/layout.rs",
        "PageFile",
        (NATIVE, "Files"),
        &[
            ("MapTable", "map.table"),
            ("MapSummary", "map.summary"),
            ("DataTable", "data.table"),
            ("DataSummary", "data.summary"),
        ],
    ),
    item(
        "crates/store/src/catalog/mod.rs",
        "Object",
        CATALOG,
        &[
            ("incomplete", "being made"),
            ("parent", "the snapshot before it"),
            ("origin", "the snapshot it started from"),
            ("created", "creation time"),
            ("reserved", "blocks reserved"),
        ],
    ),
    item(
        "crates/store/src/catalog/mod.rs",
        "ObjectState",
        CATALOG,
        &[("Unsealed", "snapshot waiting for its last writes")],
    ),
    item("crates/store/src/catalog/mod.rs", "Provisioning", CATALOG, &[]),
    item("crates/replication/src/message.rs", "Message", MESSAGES, &[]),
    item("crates/replication/src/message.rs", "Offer", MESSAGES, &[]),
    item("crates/replication/src/message.rs", "Known", MESSAGES, &[]),
    item("crates/replication/src/frame.rs", "Kind", FRAMES, &[]),
    item("crates/replication/src/frame.rs", "Head", FRAMES, &[("checksum", "CRC32C")]),
    item("crates/control/src/message/line.rs", "FromClient", LINES, &[]),
    item("crates/control/src/message/line.rs", "FromServer", LINES, &[]),
    item("crates/control/src/message/line.rs", "Part", LINES, &[]),
    item("crates/control/src/message/line.rs", "ProgressReport", LINES, &[]),
    item("crates/control/src/message/line.rs", "Failure", LINES, &[]),
    item("crates/control/src/message/line.rs", "Versioned", LINES, &[]),
    item("crates/control/src/message/line.rs", "Line", LINES, &[]),
    item("crates/control/src/message/mod.rs", "Request", REQUESTS, &[]),
    item("crates/control/src/message/disk.rs", "DiskRequest", REQUESTS, &[]),
    item("crates/control/src/message/disk.rs", "Reconnect", REQUESTS, &[]),
    item("crates/control/src/message/scrub.rs", "ScrubRequest", REQUESTS, &[]),
    item("crates/control/src/message/snapshot.rs", "SnapshotRequest", REQUESTS, &[]),
    item("crates/control/src/message/image.rs", "ImageRequest", REQUESTS, &[]),
    item("crates/control/src/message/send.rs", "SendRequest", REQUESTS, &[]),
    item("crates/control/src/message/send.rs", "SendHow", REQUESTS, &[]),
    item("crates/control/src/message/send.rs", "SendPoint", REQUESTS, &[]),
    item("crates/control/src/message/send.rs", "SendTls", REQUESTS, &[]),
    item("crates/control/src/message/send.rs", "SentDisk", REQUESTS, &[]),
    item("crates/control/src/message/send.rs", "ReceiveRequest", REQUESTS, &[]),
    item("crates/control/src/message/backup.rs", "BackupRequest", REQUESTS, &[]),
    item("crates/control/src/message/backup.rs", "BackupPlace", REQUESTS, &[]),
    item("crates/backup/src/bucket/address.rs", "BucketAddress", REQUESTS, &[]),
    item("crates/backup/src/bucket/address.rs", "Credentials", REQUESTS, &[]),
    item("crates/control/src/message/backup.rs", "BackupCreate", REQUESTS, &[]),
    item("crates/control/src/message/backup.rs", "BackupRestore", REQUESTS, &[]),
    item("crates/control/src/message/backup.rs", "BackupMachine", REQUESTS, &[]),
    item("crates/backup/src/machine.rs", "MachinePoint", REQUESTS, &[]),
    item("crates/backup/src/machine.rs", "MachineContent", REQUESTS, &[]),
    item("crates/control/src/message/job.rs", "JobRequest", REQUESTS, &[]),
    item("crates/control/src/message/job.rs", "JobState", JOBS, &[]),
    item("crates/control/src/message/job.rs", "JobInfo", JOBS, &[]),
    item("crates/control/src/message/job.rs", "JobEnd", JOBS, &[]),
    item("crates/control/src/message/event.rs", "Event", EVENTS, &[]),
    item("crates/control/src/message/event.rs", "Change", EVENTS, &[]),
    item("crates/control/src/message/reply.rs", "Reply", REPLIES, &[]),
    item("crates/control/src/message/reply.rs", "MachineNotice", REPLIES, &[]),
    item("crates/control/src/message/reply.rs", "Resized", REPLIES, &[]),
    item("crates/control/src/message/reply.rs", "Reclaimable", REPLIES, &[]),
    item("crates/backup/src/machine.rs", "MachineCreated", REPLIES, &[]),
    item("crates/backup/src/machine.rs", "MachineBackupInfo", REPLIES, &[]),
    item("crates/control/src/message/reply.rs", "Serving", REPLIES, &[]),
    item("crates/control/src/message/reply.rs", "ExportInfo", REPLIES, &[]),
    item("crates/disk/src/migrate/intent.rs", "Intent", INTENT, &[]),
    item("crates/disk/src/migrate/intent.rs", "Stage", INTENT, &[]),
    item("crates/disk/src/migrate/intent.rs", "Copy", INTENT, &[]),
    item("crates/disk/src/transfer/record.rs", "Record", RECEPTION, &[]),
    item("crates/disk/src/transfer/record.rs", "Arriving", RECEPTION, &[]),
    item("crates/disk/src/transfer/record.rs", "SnapshotIdentity", RECEPTION, &[]),
    item("crates/backup/src/manifest.rs", "RepositoryRecord", BACKUP, &[]),
    item("crates/backup/src/manifest.rs", "Parent", BACKUP, &[]),
    item("crates/backup/src/manifest.rs", "Description", BACKUP, &[]),
    item("crates/backup/src/manifest.rs", "PackRecord", BACKUP, &[]),
    item("crates/backup/src/manifest.rs", "Manifest", BACKUP, &[]),
    item("crates/backup/src/readers.rs", "ReaderRecord", BACKUP, &[]),
    item("crates/backup/src/machine.rs", "MachineDescription", MACHINE_BACKUP, &[]),
    item("crates/backup/src/machine.rs", "MachineFile", MACHINE_BACKUP, &[]),
    item("crates/backup/src/machine.rs", "MachineDisk", MACHINE_BACKUP, &[]),
    item("crates/backup/src/bucket/lease.rs", "LockRecord", BACKUP, &[]),
    item("crates/disk/src/migrate/live_source.rs", "LiveSourceRecord", LAYERS, &[]),
    item(
        "crates/backup/src/pack.rs",
        "Head",
        PACK,
        &[("body_sum", "CRC32C of the body as it is stored"), ("index_sum", "CRC32C of the index")],
    ),
    item("crates/backup/src/pack.rs", "Zeros", PACK, &[("first", "first block of the disk")]),
    item("crates/disk/src/snapshot_group.rs", "Group", GROUP, &[]),
    item("crates/disk/src/snapshot_group.rs", "ImageSnapshot", GROUP, &[]),
    item("crates/export/src/clients/record.rs", "Record", CLIENTS, &[]),
    item("crates/export/src/clients/record.rs", "Gone", CLIENTS, &[]),
    item("crates/disk/src/growth.rs", "GrowthRecord", GROWTH, &[]),
    item("crates/disk/src/growth.rs", "Growth", REPLIES, &[]),
    item("crates/disk/src/growth.rs", "GrowthRate", REPLIES, &[]),
    item("crates/disk/src/settings/record.rs", "SettingsRecord", SETTINGS, &[]),
    item("crates/disk/src/settings/record.rs", "DiskSettings", SETTINGS, &[]),
    item("crates/disk/src/settings/record.rs", "DiskDefaults", SETTINGS, &[]),
    item("crates/disk/src/settings/record.rs", "SettingsChange", REQUESTS, &[]),
    item("crates/disk/src/settings/record.rs", "DefaultsChange", REQUESTS, &[]),
    item("crates/disk/src/settings/record.rs", "LimitsChange", REQUESTS, &[]),
    item(SCRUB_RECORD, "ScrubRecord", SCRUB, &[]),
    item(SCRUB_RECORD, "ScrubSchedule", SCRUB, &[]),
    item(SCRUB_RECORD, "ScrubRun", SCRUB, &[]),
    item(SCRUB_RECORD, "ScrubResult", SCRUB, &[]),
    item(SCRUB_RECORD, "DamageRecord", SCRUB, &[]),
    item(SCRUB_RECORD, "ReferenceRecord", SCRUB, &[]),
    item(VMDK_RECORD, "DeltaFormat", DISK, &[]),
    item(VMDK_RECORD, "ImageOwnership", DISK, &[]),
    item(VMDK_RECORD, "Node", DISK, &[]),
    item(VMDK_RECORD, "SnapshotRecord", DISK, &[]),
    item(VMDK_RECORD, "Tunables", DISK, &[]),
    item(VMDK_RECORD, "OriginRecord", DISK, &[]),
    item(VMDK_RECORD, "CloneRecord", DISK, &[]),
    item(VMDK_RECORD, "FileRecord", DISK, &[]),
    item(VMDK_RECORD, "ParentNow", DISK, &[]),
    item(VMDK_RECORD, "Settlement", DISK, &[]),
    item(VMDK_RECORD, "MergeSide", DISK, &[]),
    item(VMDK_RECORD, "Merging", DISK, &[]),
    item(VMDK_RECORD, "Fate", DISK, &[]),
    item(VMDK_RECORD, "Pending", DISK, &[]),
    item(VMDK_RECORD, "Record", DISK, &[]),
    item(
        "crates/layer/src/hosted/header.rs",
        "Header",
        ("docs/format/hosted.md", "Header"),
        &[
            ("descriptor_offset", "first sector of the descriptor"),
            ("descriptor_size", "sectors of the descriptor"),
            ("table_entries", "entries of a grain table"),
            ("redundant_offset", "first sector of the redundant directory"),
            ("directory_offset", "first sector of the directory"),
        ],
    ),
    item(
        "crates/layer/src/qcow2/header.rs",
        "Header",
        ("docs/format/qcow2.md", "Header"),
        &[
            ("cluster_bits", "logarithm of a cluster's size"),
            ("l1_entries", "entries of the L1 table"),
            ("l1_offset", "offset of the L1 table"),
        ],
    ),
    item("crates/layer/src/sesparse/header.rs", "Layout", ("docs/format/sesparse.md", "Constant header"), &[]),
    item(
        "crates/layer/src/sesparse/header.rs",
        "Volatile",
        ("docs/format/sesparse.md", "Volatile header"),
        &[
            ("free_table", "grain tables allocated"),
            ("next_sequence", "sequence number of the journal's next transaction"),
            ("replay", "has to be replayed"),
        ],
    ),
    item(
        "crates/layer/src/sesparse/entry.rs",
        "Entry",
        ("docs/format/sesparse.md", "Directory and tables"),
        &[
            ("Absent", "the parent, zeros without one"),
            ("Unmapped", "given back by SCSI UNMAP"),
            ("Zero", "zeros that hide the parent"),
            ("Data", "a grain"),
        ],
    ),
    item(
        "crates/layer/src/vsansparse/header.rs",
        "Header",
        ("docs/format/vsansparse.md", "Header"),
        &[("id", "number of the object"), ("tail_number", "tail: its number"), ("clean", "closed properly")],
    ),
    item(
        "crates/layer/src/vsansparse/page.rs",
        "Kind",
        ("docs/format/vsansparse.md", "Root"),
        &[("Page", "map page"), ("Root", "root block")],
    ),
    item(
        "crates/layer/src/vsansparse/log.rs",
        "Record",
        ("docs/format/vsansparse.md", "Log"),
        &[("grain", "first grain"), ("count", "number of grains"), ("place", "block of the first grain")],
    ),
    item("crates/layer/src/stream/marker.rs", "Kind", ("docs/format/stream.md", "What is written"), &[]),
    item(DEFINITION, "Definition", MACHINE, &[]),
    item(DEFINITION, "Boot", MACHINE, &[]),
    item(DEFINITION, "CloneKind", MACHINE, &[]),
    item(DEFINITION, "NewIdentity", MACHINE, &[]),
    item(DEFINITION, "Origin", MACHINE, &[]),
    item(DEFINITION, "Disk", MACHINE, &[]),
    item("crates/vm/src/definition/cdroms.rs", "Cdrom", MACHINE, &[]),
    item("crates/vm/src/definition/cdroms.rs", "BootDevice", MACHINE, &[]),
    item("crates/vm/src/definition/seed.rs", "Seed", MACHINE, &[]),
    item(DEFINITION, "Link", MACHINE, &[]),
    item(DEFINITION, "Network", MACHINE, &[]),
    item("crates/vm/src/machines/intent.rs", "Intent", MACHINE_INTENT, &[]),
    item("crates/vm/src/machines/intent.rs", "Intended", MACHINE_INTENT, &[]),
    item("crates/vm/src/machines/intent.rs", "OwnDisk", MACHINE_INTENT, &[]),
    item("crates/vm/src/machines/intent.rs", "Snapshot", MACHINE_INTENT, &[]),
    item("crates/vm/src/snapshots.rs", "Record", MACHINE_SNAPSHOT, &[]),
    item("crates/vm/src/snapshots.rs", "Intent", MACHINE_SNAPSHOT, &[]),
    item("crates/vm/src/instant/image.rs", "Record", MACHINE_IMAGE, &[]),
    item("crates/vm/src/instant/image.rs", "Snapshot", MACHINE_IMAGE, &[]),
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// Fields or variants of a type, with the names that serde gives them; `None` if the source has no such type.
fn members(source: &str, name: &str) -> Option<Vec<String>> {
    let starts = ["struct", "enum"].map(|kind| [format!("{kind} {name} {{\n"), format!("{kind} {name}<M> {{\n")]);
    let body = starts.as_flattened().iter().find_map(|start| source.split_once(start.as_str()))?.1.split_once("\n}")?.0;
    let (mut out, mut depth, mut renamed, mut skipped) = (Vec::new(), 0, None, false);
    for line in body.lines().map(str::trim).filter(|line| !line.starts_with("//")) {
        if depth == 0 && line.starts_with("#[") {
            renamed = line.split_once("rename = \"").map(|(_, rest)| rest.split('"').next().unwrap().to_owned());
            skipped = line == "#[serde(skip)]";
            continue;
        }
        if depth == 0 {
            let line = line.split_once(") ").filter(|_| line.starts_with("pub(")).map_or(line, |(_, rest)| rest);
            let line = line.strip_prefix("pub ").unwrap_or(line);
            let word: String = line.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            if !word.is_empty() && !std::mem::take(&mut skipped) {
                out.push(renamed.take().unwrap_or(word));
            }
        }
        depth += line.matches(['{', '(']).count();
        depth -= line.matches(['}', ')']).count();
    }
    Some(out)
}

/// A section of a page, up to the next heading of the same or a higher level.
fn section<'a>(page: &'a str, heading: &str) -> &'a str {
    if heading.is_empty() {
        return page;
    }
    let start = format!("\n## {heading}\n");
    let (_, rest) = page.split_once(&start).unwrap_or_else(|| panic!("no section {heading}"));
    rest.split("\n## ").next().unwrap()
}

/// Whether a text contains these words as whole words.
fn has_words(text: &str, words: &str) -> bool {
    let border = |c: Option<char>| c.is_none_or(|c| !c.is_alphanumeric() && c != '_');
    let (text, words) = (text.to_lowercase(), words.to_lowercase());
    text.match_indices(&words)
        .any(|(at, _)| border(text[..at].chars().next_back()) && border(text[at + words.len()..].chars().next()))
}

/// The words of a name in code.
fn words(name: &str) -> String {
    let mut out = String::new();
    for c in name.chars() {
        match c {
            '_' => out.push(' '),
            c if c.is_uppercase() => out.extend([' ', c.to_ascii_lowercase()]),
            c => out.push(c),
        }
    }
    out.trim().into()
}

/// Whether a section describes a member: in a table, in an example, or by its name in code font.
fn says(section: &str, member: &str, called: Option<&str>) -> bool {
    let mut code = false;
    let mut laid_out = String::new();
    for line in section.lines() {
        if line.starts_with("```") {
            code = !code;
        } else if code || line.starts_with('|') {
            laid_out += line;
            laid_out.push('\n');
        }
    }
    match called {
        Some(called) => has_words(&laid_out, called),
        None => {
            let lower = member.to_lowercase();
            let named =
                [format!("`{member}`"), format!("`{lower}`"), format!("`[{member}]`"), format!("`[[{member}]]`")];
            named.iter().any(|name| section.contains(name.as_str()))
                || [" ", "-", "_"].iter().any(|gap| has_words(&laid_out, &words(member).replace(' ', gap)))
                || has_words(&laid_out, member)
        }
    }
}

#[test]
fn every_member_of_a_record_is_on_its_page() {
    let mut complaints = Vec::new();
    for item in ITEMS {
        let Some(members) = members(&read(item.source), item.name) else {
            complaints.push(format!("{} has no type {}", item.source, item.name));
            continue;
        };
        assert!(!members.is_empty(), "{} {}", item.source, item.name);
        let page = read(item.page);
        let section = section(&page, item.section);
        for member in &members {
            let called = item.called.iter().find(|(name, _)| name == member).map(|(_, called)| *called);
            if !says(section, member, called) {
                let words = called.unwrap_or(member);
                let place = if item.section.is_empty() { String::new() } else { format!(", section {}", item.section) };
                complaints
                    .push(format!("{} does not say what {}::{member} is ('{words}'){place}", item.page, item.name));
            }
        }
        for (name, _) in item.called.iter().filter(|(name, _)| !members.iter().any(|member| member == name)) {
            complaints.push(format!("{}: {} has no {name}", item.source, item.name));
        }
    }
    assert!(complaints.is_empty(), "\n{}", complaints.join("\n"));
}

/// If a source file contains a listed record, every other stored record in this file must be listed too.
#[test]
fn every_stored_record_in_a_listed_file_is_listed() {
    let mut complaints = Vec::new();
    let sources: std::collections::BTreeSet<&str> = ITEMS.iter().map(|item| item.source).collect();
    for path in sources {
        let source = read(path);
        let product = source.split("#[cfg(test)]").next().unwrap();
        for after in product.split("#[derive(").skip(1) {
            let (derived, rest) = after.split_once(")]").unwrap();
            if !derived.contains("Deserialize") {
                continue;
            }
            let line = rest.lines().find(|line| line.contains("struct ") || line.contains("enum ")).unwrap();
            let name = line.split_whitespace().skip_while(|w| *w != "struct" && *w != "enum").nth(1).unwrap();
            let name = name.split('<').next().unwrap();
            // A struct of one unnamed member has no names to describe.
            if name.contains('(') {
                continue;
            }
            if !ITEMS.iter().any(|item| item.source == path && item.name == name) {
                complaints.push(format!("{path}: {name} is stored or sent, and no page is named for it"));
            }
        }
    }
    assert!(complaints.is_empty(), "\n{}", complaints.join("\n"));
}

/// In the code, the header fields of VMFSsparse have no names, so their offsets are checked.
#[test]
fn every_offset_of_the_vmfssparse_header_has_a_row() {
    let source = read("crates/layer/src/vmfssparse/header.rs");
    let page = read("docs/format/vmfssparse.md");
    let product = source.split("#[cfg(test)]").next().unwrap();
    let calls = ["header.get(", "header.set(", "self.get(", "self.set("];
    let literals = calls.iter().flat_map(|call| product.split(call).skip(1));
    let named = product.split("const OFFSET_").skip(1).map(|rest| rest.split("= ").nth(1).unwrap());
    let numbers = literals
        .chain(named)
        .filter_map(|rest| rest.chars().take_while(char::is_ascii_digit).collect::<String>().parse::<usize>().ok());
    let offsets: std::collections::BTreeSet<usize> = numbers.collect();
    assert!(offsets.len() > 5, "{offsets:?}");
    let missing: Vec<&usize> = offsets.iter().filter(|at| !page.contains(&format!("\n| {at} | "))).collect();
    assert!(missing.is_empty(), "docs/format/vmfssparse.md has no row for the offsets {missing:?}");
}

/// The magic numbers of structures on storage or on the wire, in crates whose formats have pages.
#[test]
fn every_magic_number_is_on_a_page() {
    let mut pages = String::new();
    for folder in ["docs/format", "docs/protocol"] {
        for entry in std::fs::read_dir(root().join(folder)).unwrap() {
            pages += &std::fs::read_to_string(entry.unwrap().path()).unwrap();
        }
    }
    let (mut found, mut complaints) = (0, Vec::new());
    for source in ["store", "layer", "vmdk", "disk", "replication", "backup"] {
        let mut folders = vec![root().join("crates").join(source).join("src")];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    folders.push(path);
                    continue;
                }
                let text = std::fs::read_to_string(&path).unwrap();
                let begins = |line: &&str| line.contains("const ") && line.contains("MAGIC");
                for line in text.lines().filter(begins) {
                    let value = line.split_once(" = ").map_or("", |(_, value)| value).trim_end_matches(';');
                    found += 1;
                    let text = value.split('"').nth(1).map(|text| text.split('\\').next().unwrap().to_owned());
                    let number = value.replace('_', "").trim_start_matches("0x").trim_start_matches('0').to_lowercase();
                    let shown = match &text {
                        Some(text) => pages.contains(text.as_str()),
                        None => pages.to_lowercase().replace('_', "").contains(&number),
                    };
                    if !shown {
                        complaints.push(format!("{}: {value} is on no page", path.display()));
                    }
                }
            }
        }
    }
    assert!(found > 15 && complaints.is_empty(), "{found} magic numbers\n{}", complaints.join("\n"));
}

/// The arrows of the state diagram name functions of the store, or types that do the step.
#[test]
fn the_functions_that_the_state_diagram_names_exist() {
    let page = read("docs/format/native.md");
    let diagram = page.split("```mermaid\n").nth(1).unwrap().split("```").next().unwrap();
    let mut code = String::new();
    let mut folders = vec![root().join("crates/store/src")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true if path.ends_with("tests") => {}
                true => folders.push(path),
                false => code += &std::fs::read_to_string(&path).unwrap(),
            }
        }
    }
    let mut missing = Vec::new();
    let mut arrows = 0;
    for line in diagram.lines().filter(|line| line.contains("-->")) {
        let (_, label) = line.split_once(": ").unwrap_or_else(|| panic!("an arrow without a label: {line}"));
        arrows += 1;
        for step in label.split(" (").next().unwrap().split(", ").filter(|step| *step != "crash") {
            let name = step.strip_prefix("then ").unwrap_or(step).rsplit("::").next().unwrap();
            let forms = [format!("fn {name}("), format!("fn {name}<"), format!("struct {name} ")];
            if !forms.iter().any(|form| code.contains(form.as_str())) {
                missing.push(name.to_owned());
            }
        }
    }
    assert!(arrows > 20 && missing.is_empty(), "{arrows} arrows; the store has no {missing:?}");
}

#[test]
fn a_member_that_is_not_on_the_page_is_reported() {
    let source = "pub struct A {\n    /// x\n    #[serde(default, rename = \"disk\")]\n    pub disks: Vec<u8>,\n    pub(super) \
                  tail_at: B<C, D>,\n}\nenum E {\n    One,\n    Two { a: u8 },\n    #[serde(skip)]\n    Three,\n}\n";
    assert_eq!(members(source, "A").unwrap(), ["disk", "tail_at"]);
    assert_eq!(members(source, "E").unwrap(), ["One", "Two"]);
    assert_eq!(members(source, "B"), None);
    let page = "# T\n\n## S\n\n| 0 | tail at |\n`disk` in words, other in words\n\n## U\n\n| 8 | other |\n";
    let s = section(page, "S");
    assert!(says(s, "disk", None) && says(s, "tail_at", None) && says(s, "x", Some("tail at")));
    assert!(!says(s, "other", None) && !says(s, "tail", Some("other")) && !says(s, "il", None));
}
