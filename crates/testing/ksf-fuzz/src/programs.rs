//! Framing programs: no object and no instructions do more than fail, and the pieces a stream lies in do not matter.

use ksf_bpf_framing::{FramingLoadError, FramingOptions, FramingProgram};

use crate::input::{Choices, Cuts};

/// Any bytes as an object file. What loads is run.
pub fn framing_object(input: &[u8]) {
    let mut options = FramingOptions::default();
    match FramingProgram::from_object(input, &options) {
        Ok(program) => run_on_streams(&program),
        Err(FramingLoadError::SeveralPrograms { found }) => {
            for name in found {
                options.program = Some(name);
                if let Ok(program) = FramingProgram::from_object(input, &options) {
                    run_on_streams(&program);
                }
            }
        }
        Err(_) => {}
    }
}

/// Any bytes as instructions, behind a seed for the cuts and 15 bytes of stream.
pub fn framing_program(input: &[u8]) {
    let mut choices = Choices::new(input);
    let seed = choices.byte();
    let stream: [u8; 15] = std::array::from_fn(|_| choices.byte());
    let instructions = choices.rest();
    let whole = instructions.len() - instructions.len() % 8;
    if let Ok(program) = FramingProgram::from_instructions(&instructions[..whole], &FramingOptions::default()) {
        run(&program, &stream, seed);
    }
}

fn run_on_streams(program: &FramingProgram) {
    for stream in [&[][..], &[0, 0, 0, 10, 1], &[b'\n'; 70]] {
        run(program, stream, 1);
    }
}

fn run(program: &FramingProgram, stream: &[u8], seed: u8) {
    let whole = program.message_len(&[stream]);
    assert_eq!(program.message_len(&[stream]), whole, "the second run is another");
    for seed in [0, seed] {
        let pieces: Vec<&[u8]> = Cuts::new(seed).cut(stream).collect();
        assert_eq!(program.message_len(&pieces), whole, "{} pieces", pieces.len());
    }
}
