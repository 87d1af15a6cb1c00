//! Figures, for people.

use super::*;

#[test]
#[ignore = "prints figures"]
fn beside_a_plain_file() {
    crate::speed::compare("vmfssparse", &|file, capacity| {
        create(Arc::clone(&file), "image", &CreateOptions::new(capacity)).unwrap();
        Box::new(VmfsSparse::open(file, &OpenOptions::writing("image")).unwrap())
    });
}
