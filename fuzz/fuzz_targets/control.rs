//! A line of the control protocol in either direction: it is decoded or refused; a decoded message is the same after
//! encoding and decoding.

#![no_main]

use control::message::{FromClient, FromServer, REPLY_LINE_MAX, REQUEST_LINE_MAX, decode, encode};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    if let Ok(message) = decode::<FromClient>(data) {
        let line = encode(&message, REQUEST_LINE_MAX).expect("it came in a line of that length");
        assert_eq!(decode::<FromClient>(&line).expect("an encoded message can be decoded and encoded again"), message);
        if let FromClient::Request(request) = message {
            let _ = request.takes_long();
        }
    }
    if let Ok(message) = decode::<FromServer>(data)
        && let Ok(line) = encode(&message, REPLY_LINE_MAX)
    {
        let again = decode::<FromServer>(&line).expect("an encoded message can be decoded and encoded again");
        // Numbers with a fraction may be encoded differently at first; encoding them again gives the same text.
        assert_eq!(encode(&again, REPLY_LINE_MAX).expect("an encoded message can be decoded and encoded again"), line);
    }
});
