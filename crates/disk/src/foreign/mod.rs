//! Disks in other makers' formats: chains of layers.

mod device;

pub use device::ChainedDevice;
