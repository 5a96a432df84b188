use super::*;
use crate::buffers::Buffers;
use crate::files::File;
use crate::service::Pieces;

fn bytes(batch: &SendBatch) -> Vec<u8> {
    let mut slices = [&[][..]; 16];
    let filled = batch.slices(&mut slices);
    slices[..filled].concat()
}

#[test]
fn short_pieces_of_a_long_list_keep_no_buffer_each() {
    let (mut output, mut spares) = (Output::default(), Spares::default());
    let mut pieces = Pieces::stream(&mut output, &mut spares, false);
    for _ in 0..1000 {
        pieces.bytes(b"four");
        pieces.chunk(Chunk::from_vec(vec![7; 3000]));
        pieces.bytes(b"more");
        pieces.owned(vec![8; 3000]);
    }
    let memory = |piece: &Piece| match piece {
        Piece::Bytes(bytes) => bytes.capacity(),
        piece => piece.len(),
    };
    let held: usize = output.pieces().map(memory).sum::<usize>() + output.tail.capacity();
    assert_eq!(output.len(), 1000 * (4 + 3000 + 4 + 3000));
    let slack = held - output.len();
    assert!(slack <= (BUFFERS_OF_REPLY_MAX + 1) * Spares::BYTES_MIN, "{slack}");
}

#[test]
fn short_ranges_of_a_long_list_keep_no_buffer_each() {
    const RANGES: usize = 1000;
    let (mut output, mut spares, buffers) = (Output::default(), Spares::default(), Buffers::default());
    let file = File::from(std::fs::File::open("/dev/null").unwrap());
    let mut pieces = Pieces::stream(&mut output, &mut spares, true);
    for number in 0..RANGES as u64 {
        pieces.file(FileRange { file: file.clone(), offset: 10 * number, bytes: 10 }).unwrap();
    }
    assert_eq!(output.memory_bytes(), RANGES * FILE_RANGE_BYTES);
    let mut expected = Vec::new();
    while let Some(range) = output.file_to_read(0) {
        // In two parts, which are of one reply all the same.
        let part = range.bytes.min(7);
        let bytes: Vec<u8> = (0..part as u64).map(|at| ((range.offset + at) % 251) as u8).collect();
        let mut read = buffers.take(part);
        read.fill(&bytes);
        expected.extend_from_slice(&bytes);
        assert!(output.file_was_read(&range, read, &mut spares));
    }
    assert!(output.piece_count() <= RANGES * 10 / Spares::BYTES_MIN + 2, "{} pieces", output.piece_count());
    assert_eq!((output.memory_bytes(), output.window_bytes()), (RANGES * 10, 0));
    let batch = output.take_ready(&mut spares);
    assert!(bytes(&batch) == expected);
    assert_eq!(batch.len(), RANGES * 10);
}

#[test]
fn keeps_order_over_pieces_and_partial_sends() {
    let mut spares = Spares::default();
    let mut output = Output::default();
    output.tail(&mut spares).extend_from_slice(b"ab");
    output.push_chunk(Chunk::from_vec(b"cde".to_vec()), &mut spares);
    output.tail(&mut spares).extend_from_slice(b"fg");
    let mut second = Output::default();
    second.push_chunk(Chunk::from_vec(b"hi".to_vec()), &mut spares);
    output.append(second, &mut spares);
    assert_eq!(output.len(), 9);
    for step in 1..=9 {
        let mut copy = Output::default();
        copy.tail(&mut spares).extend_from_slice(b"ab");
        copy.push_chunk(Chunk::from_vec(b"cde".to_vec()), &mut spares);
        copy.tail(&mut spares).extend_from_slice(b"fghi");
        let mut batch = copy.take();
        let mut seen = Vec::new();
        while !batch.is_empty() {
            let left = bytes(&batch);
            assert_eq!(left.len(), batch.len());
            let take = step.min(left.len());
            seen.extend_from_slice(&left[..take]);
            batch.advance(take, &mut spares);
        }
        assert_eq!(seen, b"abcdefghi", "in steps of {step}");
    }
    assert_eq!(bytes(&output.take()), b"abcdefghi");
    assert!(output.is_empty());
}

#[test]
fn what_was_added_since_can_be_thrown_away() {
    let mut spares = Spares::default();
    for len in 0..=9 {
        let mut output = Output::default();
        output.tail(&mut spares).extend_from_slice(b"ab");
        output.push_chunk(Chunk::from_vec(b"cde".to_vec()), &mut spares);
        output.tail(&mut spares).extend_from_slice(b"fg");
        output.truncate(len);
        assert_eq!(output.len(), len.min(7));
        output.tail(&mut spares).extend_from_slice(b"!");
        let expected = [&b"abcdefg"[..len.min(7)], b"!"].concat();
        assert_eq!(bytes(&output.take()), expected, "{len}");
    }
}

#[test]
fn every_split_keeps_the_bytes_and_their_order() {
    let mut spares = Spares::default();
    for len in 0..=10 {
        let mut output = Output::default();
        output.tail(&mut spares).extend_from_slice(b"ab");
        output.push_chunk(Chunk::from_vec(b"cde".to_vec()), &mut spares);
        output.push_bytes(b"fg".to_vec(), &mut spares);
        output.tail(&mut spares).extend_from_slice(b"hi");
        let mut rest = output.split_off(len, &mut spares);
        let cut = len.min(9);
        assert_eq!((output.len(), rest.len()), (cut, 9 - cut));
        output.tail(&mut spares).extend_from_slice(b"!");
        assert_eq!(bytes(&output.take()), [&b"abcdefghi"[..cut], b"!"].concat(), "{len}");
        assert_eq!(bytes(&rest.take()), b"abcdefghi"[cut..], "{len}");
    }
}

/// Else a peer that takes none of its short replies would keep the memory of a long one.
#[test]
fn only_batches_that_outgrow_a_small_buffer_get_a_large_one() {
    let (mut spares, mut output) = (Spares::default(), Output::default());
    spares.give(Vec::with_capacity(1 << 20));
    output.tail(&mut spares).extend_from_slice(b"short");
    assert!(output.tail(&mut spares).capacity() <= Spares::SMALL_BYTES_MAX);
    output.tail(&mut spares).resize(40_000, 7);
    assert!(output.tail(&mut spares).capacity() >= 1 << 20, "more is to come");
    assert_eq!(output.take().len(), 40_000);
}

#[test]
fn fewer_slices_than_pieces_give_a_prefix() {
    let mut output = Output::default();
    for byte in 0..5 {
        output.push_chunk(Chunk::from_vec(vec![byte]), &mut Spares::default());
    }
    let batch = output.take();
    let mut slices = [&[][..]; 3];
    assert_eq!(batch.slices(&mut slices), 3);
    assert_eq!(slices.concat(), [0, 1, 2]);
}
