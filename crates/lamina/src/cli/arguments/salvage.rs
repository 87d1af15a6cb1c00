//! `lamina salvage`.

use crate::cli::address::{location, parse_disk};
use crate::cli::arguments::image::{OpeningArguments, target_format};
use crate::cli::size::parse_rate;
use clap::Args;
use control::Request;
use disk::Location;
use disk::convert::TargetFormat;
use disk::salvage::{Extract, SalvageRequest};

/// Arguments of `lamina salvage`.
#[derive(Debug, Args)]
pub struct SalvageArguments {
    /// Folder of the damaged datastore, or a damaged image, which is read with its parents. The salvage writes nothing
    /// to the datastore or the image.
    #[arg(value_name = "DATASTORE|IMAGE", value_parser = location())]
    pub location: Location,
    /// List the disks and snapshots that can be extracted, and how much of each is lost.
    #[arg(long, conflicts_with_all = ["disk", "snapshot", "to"])]
    pub list: bool,
    /// The disk of the datastore to extract.
    #[arg(long, value_name = "NAME", requires = "to")]
    pub disk: Option<String>,
    /// Extract this snapshot of the disk instead of its current state.
    #[arg(long, value_name = "NAME", requires = "disk", value_parser = parse_disk)]
    pub snapshot: Option<String>,
    /// Target: a file that does not exist yet, or the folder of another datastore.
    #[arg(long, value_name = "FILE|DATASTORE", value_parser = location())]
    pub to: Option<Location>,
    /// Format of the target. Default: by its name .raw, .vmdk (monolithicsparse) or .ova; native in a datastore.
    #[arg(long, value_name = "FORMAT", value_parser = target_format())]
    pub format: Option<TargetFormat>,
    /// Name of the new disk, if the target is a datastore.
    #[arg(long, value_name = "NAME", value_parser = parse_disk)]
    pub name: Option<String>,
    /// Limit of copied bytes per second.
    #[arg(long, value_name = "SIZE", value_parser = parse_rate)]
    pub rate: Option<u64>,
    /// How images are opened.
    #[command(flatten)]
    pub opening: OpeningArguments,
}

impl SalvageArguments {
    /// The request.
    pub fn request(&self) -> Result<Request, String> {
        let image = self.location.local_path().is_some_and(|path| path.is_file());
        if !self.list && (self.to.is_none() || self.disk.is_none() && !image) {
            let what = "list what can be extracted with --list, or extract a disk with --disk NAME --to FILE|DATASTORE; \
                        for an image, --to alone is sufficient";
            return Err(format!("{what} (see 'lamina salvage --help')"));
        }
        let extract = self.to.clone().map(|to| Extract {
            disk: self.disk.clone(),
            snapshot: self.snapshot.clone(),
            to,
            format: self.format,
            name: self.name.clone(),
            rate: self.rate.unwrap_or(0),
        });
        let (datastore, options) = (self.location.clone(), self.opening.options());
        Ok(Request::Salvage(Box::new(SalvageRequest { datastore, options, extract })))
    }
}
