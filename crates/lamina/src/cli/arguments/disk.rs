//! Arguments of the commands about disks.

use super::image::source_format;
use crate::cli::address::{location, parse_disk};
use crate::cli::format::{parse_delta, parse_format};
use crate::cli::size::{memory, parse_rate, parse_size};
use clap::{Args, Subcommand, ValueEnum};
use control::{DiskRequest, Reconnect, Request};
use disk::convert::SourceFormat;
use disk::migrate::{ImportMode, ImportOptions, MigrateOptions};
use disk::{
    Compression, DEDUP_MEMORY_MIN, Deduplication, DefaultsChange, Deletion, DeltaFormat, DetectZeroes, DiskFormat,
    LimitsChange, Location, NewDisk, OnFull, Provisioning, ReduceAt, SettingsChange, Tuning,
};
use std::path::PathBuf;

/// Provisioning type of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ProvisioningArgument {
    /// Space is allocated on first write.
    Thin,
    /// Space is reserved at creation, and zeroed on first write.
    #[value(name = "zeroedthick")]
    ZeroedThick,
    /// Space is reserved and zeroed at creation.
    #[value(name = "eagerzeroedthick")]
    EagerZeroedThick,
}

impl From<ProvisioningArgument> for Provisioning {
    fn from(argument: ProvisioningArgument) -> Self {
        match argument {
            ProvisioningArgument::Thin => Self::Thin,
            ProvisioningArgument::ZeroedThick => Self::ZeroedThick,
            ProvisioningArgument::EagerZeroedThick => Self::EagerZeroedThick,
        }
    }
}

/// `lamina disk create`.
#[derive(Debug, Args)]
pub struct DiskCreate {
    /// Name of the new disk.
    #[arg(value_parser = parse_disk)]
    pub name: String,
    /// Capacity, such as 10G; 512 bytes to 64T.
    #[arg(value_name = "SIZE", value_parser = parse_size, required_unless_present = "size_option")]
    pub size: Option<u64>,
    /// Capacity, as an option instead of after the name.
    #[arg(id = "size_option", long = "size", value_name = "SIZE", value_parser = parse_size, conflicts_with = "size")]
    pub size_option: Option<u64>,
    /// Provisioning type, for formats with several. Default: thin.
    #[arg(long, value_enum, value_name = "TYPE")]
    pub provisioning: Option<ProvisioningArgument>,
    /// Format of the disk: native, vmdk (VMware's flat disk), or an image format such as sesparse.
    #[arg(long, value_name = "FORMAT", default_value = "native", value_parser = parse_format)]
    pub format: DiskFormat,
    /// Format of the disk's snapshots: vmfssparse, sesparse or vsansparse. Default as in vSphere: vmfssparse, above 2
    /// TiB sesparse.
    #[arg(long, value_name = "FORMAT", value_parser = parse_delta)]
    pub delta: Option<DeltaFormat>,
    /// Settings of the disk.
    #[command(flatten)]
    pub settings: SettingsArguments,
}

/// Settings of a disk.
#[derive(Debug, Args)]
pub struct SettingsArguments {
    /// What happens to a write that needs space while there is none: error (it fails at once), wait (it waits until
    /// there is space), or wait=TIME such as wait=10m (it fails if there is no space after this time). A new disk has
    /// error.
    #[arg(long, value_name = "error|wait[=TIME]", value_parser = parse_on_full)]
    pub on_full: Option<OnFull>,
    /// What happens to writes of zeros: off (they are stored like other data), on (the range is zeroed without data and
    /// keeps or gets its space), or unmap (the range is unmapped). A new disk has off.
    #[arg(long, value_name = "off|on|unmap", value_parser = parse_zeroes)]
    pub detect_zeroes: Option<DetectZeroes>,
    /// A label of the disk, such as tenant=a; may be repeated. If the disk has a label with the same key, its value is
    /// replaced.
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = parse_label)]
    pub labels: Vec<(String, String)>,
    /// Most space that the disk may map; 0 for no quota.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub quota: Option<u64>,
    /// Space that the disk can map whatever other disks write; 0 for no reservation.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub reservation: Option<u64>,
    /// How data of the disk and its snapshots is compressed: off, lz4, or zstd with a level from 1 to 19, such as
    /// zstd:9. Only for thin native disks. A new disk has what 'disk defaults' shows.
    #[arg(long, value_name = "METHOD")]
    pub compression: Option<Compression>,
    /// When new data is compressed: at write-back (what compression that is switched on has), also if clients have to
    /// wait for it (inline), or only by servers once it was not written for a while (idle), which they do with all
    /// data.
    #[arg(long, value_name = "inline|write-back|idle")]
    pub compress_at: Option<ReduceAt>,
    /// Among which disks data of the disk and its snapshots that is stored again is found, to store it once: off, disk
    /// (only within the disk), label:KEY such as label:tenant (the disks with this setting and the same value of the
    /// label), or datastore (all disks with this setting). Only for thin native disks. A new disk has what 'disk
    /// defaults' shows.
    #[arg(long, value_name = "off|disk|label:KEY|datastore")]
    pub dedup: Option<Deduplication>,
    /// When new data is compared with stored data: at write-back (what deduplication that is switched on has), also if
    /// clients have to wait for it (inline), or only by servers once it was not written for a while (idle), which they
    /// do with all data.
    #[arg(long, value_name = "inline|write-back|idle")]
    pub dedup_at: Option<ReduceAt>,
}

impl SettingsArguments {
    fn change(&self) -> SettingsChange {
        SettingsChange {
            on_full: self.on_full,
            detect_zeroes: self.detect_zeroes,
            labels: self.labels.iter().cloned().collect(),
            remove_labels: Vec::new(),
            limits: LimitsChange { quota: self.quota, reservation: self.reservation },
            compression: self.compression,
            compress_at: self.compress_at,
            dedup: self.dedup.clone(),
            dedup_at: self.dedup_at,
        }
    }
}

fn parse_zeroes(text: &str) -> Result<DetectZeroes, String> {
    text.parse().map_err(|error: error::Error| error.to_string())
}

fn parse_label(text: &str) -> Result<(String, String), String> {
    disk::parse_label(text).map_err(|error| error.to_string())
}

fn parse_on_full(text: &str) -> Result<OnFull, String> {
    text.parse().map_err(|error: error::Error| error.to_string())
}

/// `lamina disk edit`.
#[derive(Debug, Args)]
pub struct DiskEdit {
    /// The disk.
    #[arg(value_parser = parse_disk)]
    pub name: String,
    /// Settings of the disk.
    #[command(flatten)]
    pub settings: SettingsArguments,
    /// Remove the label with this key; may be repeated.
    #[arg(long = "remove-label", value_name = "KEY")]
    pub remove_labels: Vec<String>,
}

impl DiskEdit {
    fn request(&self) -> Result<DiskRequest, String> {
        let settings = SettingsChange { remove_labels: self.remove_labels.clone(), ..self.settings.change() };
        if settings == SettingsChange::default() {
            return Err("nothing to change is given: see 'lamina disk edit --help'".into());
        }
        Ok(DiskRequest::Edit { name: self.name.clone(), settings })
    }
}

impl DiskCreate {
    /// The parameters of the new disk; an error if the arguments contradict each other.
    fn new_disk(&self) -> Result<NewDisk, String> {
        if let (DiskFormat::Image(kind), Some(_)) = (self.format, self.provisioning) {
            return Err(format!(
                "--format {} determines how space is allocated; --provisioning is for native and vmdk",
                kind.name()
            ));
        }
        Ok(NewDisk {
            capacity: self.size.or(self.size_option).unwrap_or_default(),
            provisioning: self.provisioning.map_or(Provisioning::Thin, Into::into),
            format: self.format,
            delta: self.delta,
        })
    }
}

/// `lamina disk tune`.
#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("tunables").required(true).multiple(true))]
pub struct DiskTune {
    /// The disk.
    #[arg(value_parser = parse_disk)]
    pub name: String,
    /// Limit of the metadata cache, in extents.
    #[arg(long, value_name = "N", group = "tunables")]
    pub metadata_entries: Option<u64>,
    /// Bytes around a cache miss that are looked up together with the miss.
    #[arg(long, value_name = "SIZE", value_parser = parse_size, group = "tunables")]
    pub prefetch: Option<u64>,
    /// Limit of the extents that one prefetch adds to the metadata cache.
    #[arg(long, value_name = "N", group = "tunables")]
    pub prefetch_extents: Option<u64>,
    /// Memory for the read cache; 0 for none.
    #[arg(long, value_name = "SIZE", value_parser = parse_size, group = "tunables")]
    pub read_cache: Option<u64>,
    /// Limit of the number of levels (images) in the disk's chain.
    #[arg(long, value_name = "N", group = "tunables")]
    pub levels_max: Option<u64>,
}

/// `lamina disk migrate`.
#[derive(Debug, Args)]
pub struct DiskMigrate {
    /// The disk.
    #[arg(value_parser = parse_disk)]
    pub name: String,
    /// Target format: native, thin, zeroedthick, eagerzeroedthick, sesparse, ...
    #[arg(short = 'd', long, value_name = "FORMAT", value_parser = parse_format)]
    pub format: DiskFormat,
    /// Provisioning type, for formats with several.
    #[arg(long, value_enum, value_name = "TYPE", default_value = "thin")]
    pub provisioning: ProvisioningArgument,
    /// Format of the disk's snapshots, if they are images. Default: as in vSphere.
    #[arg(long, value_name = "FORMAT", value_parser = parse_delta)]
    pub delta: Option<DeltaFormat>,
    /// Folder of another datastore to migrate the disk to.
    #[arg(long, value_name = "DATASTORE", value_parser = location())]
    pub to: Option<Location>,
    /// Migrate the disk to another datastore even if a machine uses it. The machine does not start without the disk.
    #[arg(long, requires = "to")]
    pub force: bool,
    /// Limit of copied bytes per second, such as 100M. 0 is no limit.
    #[arg(long, value_name = "SIZE", value_parser = parse_rate, default_value = "0")]
    pub rate: u64,
}

/// `lamina disk import`.
#[derive(Debug, Args)]
pub struct DiskImport {
    /// The image: the descriptor of the newest image of the chain.
    pub path: PathBuf,
    /// Format of the image, instead of detecting it from the first bytes, or from the name for a raw disk. Give raw for
    /// raw disks, because the guest writes their first bytes.
    #[arg(short = 'f', long = "from", value_name = "FORMAT", value_parser = source_format())]
    pub from: Option<SourceFormat>,
    /// Name of the new disk.
    #[arg(value_parser = parse_disk)]
    pub name: String,
    /// Use the images where they are; writes go to a delta in the datastore.
    #[arg(long, conflicts_with_all = ["live", "format"])]
    pub in_place: bool,
    /// Make the disk usable at once, and copy the images while it is in use.
    #[arg(long)]
    pub live: bool,
    /// Format of the new disk.
    #[arg(short = 'd', long, value_name = "FORMAT", value_parser = parse_format, default_value = "native")]
    pub format: DiskFormat,
    /// Provisioning type, for formats with several.
    #[arg(long, value_enum, value_name = "TYPE", default_value = "thin")]
    pub provisioning: ProvisioningArgument,
    /// Format of the disk's snapshots, if they are images. Default: as in vSphere.
    #[arg(long, value_name = "FORMAT", value_parser = parse_delta)]
    pub delta: Option<DeltaFormat>,
    /// Another folder in which parents and extents of the image may be.
    #[arg(long, value_name = "DIR")]
    pub allow_folder: Vec<PathBuf>,
    /// Accept a parent that was changed since its child was made. With --in-place and --live the present content is
    /// accepted permanently, but no later change.
    #[arg(long)]
    pub force_parent: bool,
    /// Replay the journal of a SEsparse image that was not closed cleanly, as far as its records are provably complete.
    /// With --in-place and --live this is done whenever the image is opened.
    #[arg(long)]
    pub replay_journal: bool,
    /// Limit of copied bytes per second, such as 100M. 0 is no limit.
    #[arg(long, value_name = "SIZE", value_parser = parse_rate, default_value = "0")]
    pub rate: u64,
}

impl DiskImport {
    /// The request, with absolute paths, because the server has another working directory.
    fn request(&self) -> Result<DiskRequest, String> {
        let absolute = |path: &PathBuf| {
            std::path::absolute(path).map_err(|error| format!("'{}' is no path: {error}", path.display()))
        };
        let way = match (self.in_place, self.live) {
            (true, _) => ImportMode::InPlace,
            (false, true) => ImportMode::Live,
            (false, false) => ImportMode::Copy,
        };
        Ok(DiskRequest::Import {
            name: self.name.clone(),
            import: ImportOptions {
                path: absolute(&self.path)?,
                format: self.from,
                way,
                target: MigrateOptions {
                    format: self.format,
                    provisioning: self.provisioning.into(),
                    delta: self.delta,
                },
                permitted: self.allow_folder.iter().map(absolute).collect::<Result<_, _>>()?,
                force_parent: self.force_parent,
                replay_journal: self.replay_journal,
                rate: self.rate,
                resolved: false,
            },
        })
    }
}

/// Subcommands of `lamina disk`.
#[derive(Debug, Subcommand)]
pub enum DiskCommand {
    /// Create a disk.
    Create(DiskCreate),
    /// List all disks.
    List {
        /// Show the space of each disk and snapshot instead: mapped, stored, shared, exclusive.
        #[arg(long)]
        space: bool,
        /// Only disks with this label: KEY=VALUE, or a key with any value.
        #[arg(long, value_name = "LABEL", conflicts_with = "space")]
        label: Option<String>,
    },
    /// Show one disk, with its block counts.
    Show {
        /// The disk.
        #[arg(value_parser = parse_disk)]
        name: String,
        /// Show the space of the disk and of each snapshot instead: mapped, stored, shared, exclusive.
        #[arg(long)]
        space: bool,
    },
    /// Grow a disk, or shrink it with --shrink. A running virtual machine that uses the disk sees the new size at once.
    Resize {
        /// The disk.
        #[arg(value_parser = parse_disk)]
        name: String,
        /// The new capacity.
        #[arg(value_parser = parse_size)]
        size: u64,
        /// Allow a smaller capacity; data beyond the new capacity is lost.
        #[arg(long)]
        shrink: bool,
        /// End the connections of all clients of the disk after finishing their requests, so that they reconnect and
        /// see the new size. Clients that do not reconnect get I/O errors.
        #[arg(long)]
        reconnect_clients: bool,
    },
    /// Rename a disk.
    Rename {
        /// The disk.
        #[arg(value_parser = parse_disk)]
        name: String,
        /// New name of the disk.
        #[arg(value_name = "NEW_NAME", value_parser = parse_disk)]
        to: String,
        /// Rename the disk even if clients have it open or may reconnect, or a machine uses it. Clients that reconnect
        /// request the old name.
        #[arg(long)]
        force: bool,
    },
    /// Delete a disk with its snapshots. Refused if linked clones are based on the snapshots.
    Delete {
        /// The disk. With --dry-run, one or more disks.
        #[arg(value_name = "NAME", value_parser = parse_disk, required = true)]
        names: Vec<String>,
        /// Show what deleting the disks together would free, and delete nothing.
        #[arg(long)]
        dry_run: bool,
        /// Hand over to linked clones the snapshots on which these clones are based, then delete.
        #[arg(long)]
        promote: bool,
        /// Delete the disk even if a client that lost its connection may reconnect, or a machine uses it.
        #[arg(long)]
        force: bool,
    },
    /// Make a linked clone independent of its parent, while the clone is in use.
    Detach {
        /// The clone.
        #[arg(value_parser = parse_disk)]
        name: String,
    },
    /// Show statistics of a disk's chain: caches, lookups, levels.
    Stats {
        /// The disk.
        #[arg(value_parser = parse_disk)]
        name: String,
    },
    /// Change the settings of a disk, at once and permanently, also while the disk is in use.
    Edit(DiskEdit),
    /// Show the settings that new disks get if no others are given, or change them. Existing disks keep their settings.
    Defaults {
        /// How data of new thin native disks is compressed: off, lz4, or zstd with a level from 1 to 19.
        #[arg(long, value_name = "METHOD")]
        compression: Option<Compression>,
        /// When new data of these disks is compressed: at write-back, also if clients have to wait for it (inline), or
        /// only once it was not written for a while (idle).
        #[arg(long, value_name = "inline|write-back|idle")]
        compress_at: Option<ReduceAt>,
        /// Among which disks servers find equal data of new thin native disks.
        #[arg(long, value_name = "off|disk|label:KEY|datastore")]
        dedup: Option<Deduplication>,
        /// When new data of these disks is compared with stored data: at write-back, also if clients have to wait for
        /// it (inline), or only once it was not written for a while (idle).
        #[arg(long, value_name = "inline|write-back|idle")]
        dedup_at: Option<ReduceAt>,
    },
    /// Change the tunables of a disk's chain, at once and permanently.
    Tune(DiskTune),
    /// Reopen a disk in VMware's formats that stopped after an I/O error; clients stay connected.
    Reopen {
        /// The disk.
        #[arg(value_parser = parse_disk)]
        name: String,
    },
    /// Allocate and zero all space of a thin or zeroed thick flat disk, while the disk is in use.
    Inflate {
        /// The disk.
        #[arg(value_parser = parse_disk)]
        name: String,
    },
    /// Make a flat disk thin: return blocks that contain only zeros to the file system, while the disk is in use.
    #[command(name = "punchzero")]
    PunchZero {
        /// The disk.
        #[arg(value_parser = parse_disk)]
        name: String,
    },
    /// Find grains of a disk's deltas that nothing references and free them for new data, while the disk is in use.
    Wipe {
        /// The disk.
        #[arg(value_parser = parse_disk)]
        name: String,
    },
    /// Return free grains of a disk's deltas to the file system, while the disk is in use.
    Shrink {
        /// The disk.
        #[arg(value_parser = parse_disk)]
        name: String,
    },
    /// Give back the blocks that the guest's file systems do not use, while no client has the disk open. The free maps
    /// of ext2, ext3, ext4, XFS and NTFS are read; elsewhere, blocks of zeros are given back.
    Reclaim {
        /// The disk.
        #[arg(value_parser = parse_disk, required_unless_present = "all")]
        name: Option<String>,
        /// Show what each disk would give back; with --dry-run only.
        #[arg(long, requires = "dry_run", conflicts_with = "name")]
        all: bool,
        /// Show what would be given back, and change nothing.
        #[arg(long)]
        dry_run: bool,
    },
    /// Compress a native disk and its snapshots, and store equal blocks once, while they are in use. Blocks that are
    /// overwritten later are stored on their own and without compression until the command is repeated, or the server
    /// reduces them by the settings of the disk.
    Optimize {
        /// The disk.
        #[arg(value_parser = parse_disk)]
        name: String,
        /// lz4, zstd with a level from 1 to 19, such as zstd:9, or off.
        #[arg(long, value_name = "METHOD", default_value = "lz4")]
        compression: Compression,
        /// Store equal blocks once, before the compression: those of the disk and its snapshots (disk), of all thin
        /// native disks with the same value of a label, such as label:tenant, and their snapshots, or of all thin
        /// native disks and snapshots (datastore).
        #[arg(long, value_name = "off|disk|label:KEY|datastore", default_value = "off")]
        dedup: Deduplication,
        /// Memory for the comparison with --dedup, 144K at the least. With less memory it takes more rounds, each of
        /// which reads the maps of the data, and finds the same. One round needs 36 bytes for each 4 KiB of data: 9G
        /// for 1 TiB. By default that of the server, or 144M without one.
        #[arg(long, value_name = "SIZE", value_parser = memory(DEDUP_MEMORY_MIN))]
        dedup_memory: Option<usize>,
        /// Limit of bytes read and written per second, such as 100M. 0 is no limit.
        #[arg(long, value_name = "SIZE", value_parser = parse_rate, default_value = "0")]
        rate: u64,
    },
    /// Merge a disk's chain into its base, while the disk is in use. The snapshots of the merged images are deleted.
    Consolidate {
        /// The disk.
        #[arg(value_parser = parse_disk)]
        name: String,
        /// Limit of copied bytes per second, such as 100M. 0 is no limit.
        #[arg(long, value_name = "SIZE", value_parser = parse_rate, default_value = "0")]
        rate: u64,
    },
    /// Migrate a disk with its snapshots to another format, provisioning type or datastore, while the disk is in use.
    Migrate(DiskMigrate),
    /// Send a disk to another server, over TLS. After an interruption the same command resumes.
    Send(super::send::DiskSend),
    /// Create a disk from existing images, with their snapshots.
    Import(DiskImport),
}

/// The only name in a list; an error if there are more.
pub fn only_one<T>(names: &[T]) -> Result<&T, String> {
    match names {
        [name] => Ok(name),
        _ => Err("several names are allowed with --dry-run only: delete them one after another, or see --help".into()),
    }
}

impl DiskCommand {
    /// The request; an error if the arguments contradict each other.
    pub fn request(&self) -> Result<Request, String> {
        Ok(Request::Disk(match self {
            Self::Create(create) => DiskRequest::Create {
                name: create.name.clone(),
                new: create.new_disk()?,
                settings: create.settings.change(),
            },
            Self::List { space: true, .. } => DiskRequest::Space { name: None },
            Self::List { label: Some(label), .. } => DiskRequest::Labelled { label: label.clone() },
            Self::List { .. } => DiskRequest::List,
            Self::Show { name, space: true } => DiskRequest::Space { name: Some(name.clone()) },
            Self::Show { name, space: false } => DiskRequest::Show { name: name.clone() },
            Self::Resize { name, size, shrink, reconnect_clients } => DiskRequest::Resize {
                name: name.clone(),
                capacity: *size,
                shrink: *shrink,
                reconnect: if *reconnect_clients { Reconnect::All } else { Reconnect::NoClient },
                tell_machine: !*shrink,
            },
            Self::Rename { name, to, force } => {
                DiskRequest::Rename { name: name.clone(), to: to.clone(), force: *force }
            }
            Self::Delete { names, dry_run: true, promote, force } => DiskRequest::WouldFree {
                deletion: Deletion { disks: names.clone(), promote: *promote, ..Deletion::default() },
                force: *force,
            },
            Self::Delete { names, dry_run: false, promote, force } => {
                DiskRequest::Delete { name: only_one(names)?.clone(), promote: *promote, force: *force }
            }
            Self::Detach { name } => DiskRequest::Detach { name: name.clone() },
            Self::Stats { name } => DiskRequest::Stats { name: name.clone() },
            Self::Edit(edit) => edit.request()?,
            Self::Defaults { compression, compress_at, dedup, dedup_at } => DiskRequest::Defaults {
                change: DefaultsChange {
                    compression: *compression,
                    compress_at: *compress_at,
                    dedup: dedup.clone(),
                    dedup_at: *dedup_at,
                },
            },
            Self::Tune(tune) => DiskRequest::Tune {
                name: tune.name.clone(),
                tuning: Tuning {
                    metadata_entries: tune.metadata_entries,
                    prefetch: tune.prefetch,
                    prefetch_extents: tune.prefetch_extents,
                    read_cache: tune.read_cache,
                    levels_max: tune.levels_max,
                },
            },
            Self::Reopen { name } => DiskRequest::Reopen { name: name.clone() },
            Self::Inflate { name } => DiskRequest::Inflate { name: name.clone() },
            Self::PunchZero { name } => DiskRequest::PunchZero { name: name.clone() },
            Self::Wipe { name } => DiskRequest::Wipe { name: name.clone() },
            Self::Reclaim { name: Some(name), dry_run, .. } => {
                DiskRequest::Reclaim { name: name.clone(), dry_run: *dry_run }
            }
            Self::Reclaim { name: None, .. } => DiskRequest::Reclaimable,
            Self::Shrink { name } => DiskRequest::Shrink { name: name.clone() },
            Self::Optimize { name, compression, dedup, dedup_memory, rate } => DiskRequest::Optimize {
                name: name.clone(),
                compression: *compression,
                dedup: dedup.clone(),
                dedup_memory: dedup_memory.map(|bytes| bytes as u64),
                rate: *rate,
            },
            Self::Migrate(migrate) => DiskRequest::Migrate {
                name: migrate.name.clone(),
                target: MigrateOptions {
                    format: migrate.format,
                    provisioning: migrate.provisioning.into(),
                    delta: migrate.delta,
                },
                to: migrate.to.as_ref().map(Location::absolute).transpose().map_err(|error| error.to_string())?,
                force: migrate.force,
                rate: migrate.rate,
            },
            Self::Import(import) => import.request()?,
            Self::Send(send) => return send.request(),
            Self::Consolidate { name, rate } => DiskRequest::Consolidate { name: name.clone(), rate: *rate },
        }))
    }
}
