//! TLS with certificates made on the spot.
