//! The arguments of each command, and their translation to requests; a file for each group of commands.

mod backup;
mod check;
mod clone;
mod disk;
mod image;
mod job;
mod label;
mod machine;
mod machine_backup;
mod machine_create;
mod machine_devices;
mod machine_edit;
mod machine_import;
mod machine_seed;
mod salvage;
mod scrub;
mod send;
mod serve;
mod snapshot;

pub use backup::BackupCommand;
pub use check::CheckArguments;
pub use clone::CloneArguments;
pub use disk::DiskCommand;
pub use image::{ConvertArguments, ImageCommand};
pub use job::JobCommand;
pub use label::LabelCommand;
pub use machine::{VmArguments, VmCommand};
pub use salvage::SalvageArguments;
pub use scrub::ScrubArguments;
pub use send::ReceiveCommand;
pub use serve::{ExportCommand, ServeArguments};
pub use snapshot::SnapshotCommand;
