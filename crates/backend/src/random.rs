//! Random bytes of the kernel, for identities and tokens: no metadata depends on them.

use error::{Error, Result};
use rustix::rand::{GetRandomFlags, getrandom};

/// `N` bytes of the kernel's random generator (getrandom(2)).
pub fn bytes<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    let mut filled = 0;
    while filled < N {
        filled += getrandom(&mut bytes[filled..], GetRandomFlags::empty())
            .map_err(|e| Error::io("getting random bytes from the kernel", e.into()))?;
    }
    Ok(bytes)
}
