//! The geometry for firmware: adapter, cylinders, heads and sectors, as VMware computes them.

/// The adapter a disk was made for (`ddb.adapterType`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Adapter {
    /// IDE.
    Ide,
    /// BusLogic SCSI.
    BusLogic,
    /// LSI Logic SCSI; disks on newer adapters have this value too.
    #[default]
    LsiLogic,
}

impl Adapter {
    /// The adapter with this name.
    pub fn named(name: &str) -> Option<Self> {
        let known = [Self::Ide, Self::BusLogic, Self::LsiLogic];
        known.into_iter().find(|adapter| adapter.name().eq_ignore_ascii_case(name))
    }

    /// The name of the adapter in a descriptor.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ide => "ide",
            Self::BusLogic => "buslogic",
            Self::LsiLogic => "lsilogic",
        }
    }
}

/// Cylinders, heads and sectors per track.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Cylinders, up to the adapter's maximum.
    pub cylinders: u64,
    /// Heads.
    pub heads: u64,
    /// Sectors per track.
    pub sectors: u64,
}

/// Sectors in 1 GiB.
const GIB: u64 = 1 << 21;
/// The most cylinders of an IDE disk, and of any other.
const CYLINDERS_MAX: (u64, u64) = (16_383, 65_535);

impl Geometry {
    /// The geometry of a disk of this many sectors.
    pub fn of(adapter: Adapter, sectors: u64) -> Self {
        let (heads, per_track) = match adapter {
            Adapter::Ide => (16, 63),
            _ if sectors < GIB => (64, 32),
            Adapter::BusLogic if sectors < 2 * GIB => (128, 32),
            _ => (255, 63),
        };
        let most = if adapter == Adapter::Ide { CYLINDERS_MAX.0 } else { CYLINDERS_MAX.1 };
        Self { cylinders: (sectors / (heads * per_track)).min(most), heads, sectors: per_track }
    }
}
