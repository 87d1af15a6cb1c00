//! Arguments of `lamina image` and `lamina convert`.

use crate::cli::address::{EndAddress, absolute};
use crate::cli::size::{parse_rate, parse_size};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Subcommand};
use control::{ImageRequest, Request};
use disk::convert::{Address, Conversion, ImageOptions, SourceFormat, TargetFormat};
use disk::images::{ImageKind, NewImage};
use std::path::PathBuf;

/// Parser of target formats.
pub(super) fn target_format() -> impl TypedValueParser<Value = TargetFormat> {
    PossibleValuesParser::new(TargetFormat::all().map(TargetFormat::name)).try_map(|name| name.parse())
}

/// Parser of formats of new empty images.
fn image_kind() -> impl TypedValueParser<Value = ImageKind> {
    PossibleValuesParser::new(ImageKind::ALL.map(ImageKind::name)).try_map(|name| name.parse())
}

/// Parser of source formats.
pub(super) fn source_format() -> impl TypedValueParser<Value = SourceFormat> {
    PossibleValuesParser::new(SourceFormat::ALL.map(SourceFormat::name)).try_map(|name| name.parse())
}

/// Options for opening images.
#[derive(Debug, Args)]
pub struct OpeningArguments {
    /// Format of the image, instead of detecting it from the first bytes, or from the name for a raw disk. Give raw for
    /// raw disks, because the guest writes their first bytes.
    #[arg(short = 'f', long = "from", value_name = "FORMAT", value_parser = source_format())]
    pub from: Option<SourceFormat>,
    /// Accept a parent that was changed since its child was made, and a stream that was cut. The data may be wrong.
    #[arg(long)]
    pub force_parent: bool,
    /// Replay the journal of a SEsparse image that was not closed cleanly, as far as its records are provably complete.
    #[arg(long)]
    pub replay_journal: bool,
    /// Allow the image to refer to files in this folder too.
    #[arg(long = "allow-folder", value_name = "FOLDER")]
    pub allow_folder: Vec<PathBuf>,
    /// The disk to read from an archive, by the name of its file in the archive.
    #[arg(long, value_name = "FILE")]
    pub member: Option<String>,
}

impl OpeningArguments {
    pub(super) fn options(&self) -> ImageOptions {
        ImageOptions {
            format: self.from,
            force_parent: self.force_parent,
            replay_journal: self.replay_journal,
            permitted: self.allow_folder.clone(),
            member: self.member.clone(),
            resolved: false,
        }
    }
}

/// `lamina convert`.
#[derive(Debug, Args)]
pub struct ConvertArguments {
    /// Source: an image or archive, or disk:NAME or disk:NAME@SNAPSHOT of the datastore.
    #[arg(value_name = "SOURCE")]
    pub source: EndAddress,
    /// Target: a file that does not exist yet, or disk:NAME of the datastore.
    #[arg(value_name = "TARGET")]
    pub target: EndAddress,
    /// Format of the target.
    #[arg(short = 'd', long, value_name = "FORMAT", value_parser = target_format())]
    pub format: TargetFormat,
    /// How the source is opened.
    #[command(flatten)]
    pub opening: OpeningArguments,
    /// Limit of copied bytes per second.
    #[arg(long, value_name = "SIZE", value_parser = parse_rate)]
    pub rate: Option<u64>,
    /// Write zeros for ranges of the source that are damaged, unreadable or missing, list these ranges, and end with
    /// exit code 6. Without this option, the first such range ends the conversion.
    #[arg(long)]
    pub skip_damaged: bool,
}

impl ConvertArguments {
    /// The request.
    pub fn request(&self) -> Result<Request, String> {
        let mut conversion = Conversion {
            from: self.source.0.clone(),
            to: self.target.0.clone(),
            format: self.format,
            options: self.opening.options(),
            rate: self.rate.unwrap_or(0),
            skip_damaged: self.skip_damaged,
        };
        if conversion.needs_datastore() {
            // The server of the datastore may have another working directory, so the paths are made absolute.
            for end in [&mut conversion.from, &mut conversion.to] {
                if let Address::Path(path) = end {
                    *path = absolute(path)?;
                }
            }
            for folder in &mut conversion.options.permitted {
                *folder = absolute(folder)?;
            }
        }
        Ok(Request::Convert(Box::new(conversion)))
    }
}

/// Subcommands of `lamina image`.
#[derive(Debug, Subcommand)]
pub enum ImageCommand {
    /// Show an image and all its parents.
    Show {
        /// The image: a descriptor, or the file if the format has only one.
        path: PathBuf,
        /// How the image is opened.
        #[command(flatten)]
        opening: OpeningArguments,
    },
    /// Check the tables of an image and of its parents.
    Check {
        /// The image.
        path: PathBuf,
        /// Recover the image itself after a crash; its parents are never changed.
        #[arg(long)]
        repair: bool,
        /// How the image is opened.
        #[command(flatten)]
        opening: OpeningArguments,
    },
    /// Create an empty image.
    Create {
        /// The file to create; a descriptor must be named NAME.vmdk.
        path: PathBuf,
        /// Capacity, such as 10G; default with --parent: the parent's.
        #[arg(value_name = "SIZE", value_parser = parse_size, required_unless_present = "parent")]
        size: Option<u64>,
        /// Format of the image.
        #[arg(short = 'd', long, value_name = "FORMAT", value_parser = image_kind(), default_value = "thin")]
        format: ImageKind,
        /// The parent image, for formats that support one.
        #[arg(long, value_name = "IMAGE")]
        parent: Option<PathBuf>,
        /// The disk adapter that the geometry in the descriptor is computed for.
        #[arg(long, value_name = "ADAPTER", default_value = "lsilogic", value_parser = ["lsilogic", "buslogic", "ide"])]
        adapter: String,
        /// How the parent is opened.
        #[command(flatten)]
        opening: OpeningArguments,
    },
}

impl ImageCommand {
    /// The request.
    pub fn request(&self) -> Request {
        Request::Image(match self {
            Self::Show { path, opening } => ImageRequest::Show { path: path.clone(), options: opening.options() },
            Self::Check { path, repair, opening } => {
                ImageRequest::Check { path: path.clone(), repair: *repair, options: opening.options() }
            }
            Self::Create { path, size, format, parent, adapter, opening } => ImageRequest::Create {
                new: NewImage {
                    path: path.clone(),
                    capacity: *size,
                    format: format.name().to_owned(),
                    parent: parent.clone(),
                    adapter: Some(adapter.clone()),
                },
                options: opening.options(),
            },
        })
    }
}
