#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| ksf_fuzz::ninep_requests(input));
