//! Figures, for people.

use super::*;

#[test]
#[ignore = "prints figures"]
fn beside_a_plain_file() {
    crate::speed::compare("vsansparse", &|file, capacity| {
        create(Arc::clone(&file), "image", &CreateOptions { capacity, id: ID }).unwrap();
        Box::new(VsanSparse::open(file, &OpenOptions::writing("image")).unwrap())
    });
}
