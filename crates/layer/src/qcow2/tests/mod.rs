//! qcow2 images written by QEMU, undamaged and damaged.

mod damage;
mod qemu;

use super::{Header, Qcow2};
use crate::proving::{Folder, Random, memory_file, pattern, read, read_all};
use crate::{ErrorKind, Layer, SECTOR};
