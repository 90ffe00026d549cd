"""Frames of a connection with channels: decoded alike however the stream is cut; oversized ones are refused."""

from __future__ import annotations

import random

import pytest

from rallypoint.protocol import BadMessage, channels, native
from rallypoint.protocol.channels import (
    ChannelFrame,
    ChannelFrames,
    close_frame,
    credit_frame,
    data_frames,
    shared_frames,
    split_shared,
)


def test_frames_are_decoded_alike_at_every_cut() -> None:
    stream = data_frames(1, b"ask") + credit_frame(2, 65_536) + data_frames(7, b"") + close_frame(3, "why: ü")
    expected = [
        ChannelFrame(1, channels.DATA, 3, b"ask"),
        ChannelFrame(2, channels.CREDIT, 65_536, b""),
        ChannelFrame(7, channels.DATA, 0, b""),
        ChannelFrame(3, channels.CLOSE, 7, "why: ü".encode()),
    ]
    for cut in range(len(stream) + 1):
        frames = ChannelFrames()
        assert [*frames.feed(stream[:cut]), *frames.feed(stream[cut:])] == expected
        assert frames.held == 0
    frames = ChannelFrames()
    assert [frame for byte in stream for frame in frames.feed(bytes([byte]))] == expected


def test_long_data_is_sent_in_chunks() -> None:
    data = random.Random(1).randbytes(2 * channels.MAX_CHUNK + 5)
    chunks = list(ChannelFrames().feed(data_frames(4, data)))
    assert [frame.size for frame in chunks] == [channels.MAX_CHUNK, channels.MAX_CHUNK, 5]
    assert b"".join(frame.body for frame in chunks) == data
    assert {(frame.channel, frame.kind) for frame in chunks} == {(4, channels.DATA)}


def test_an_unknown_kind_and_an_oversized_chunk_are_refused() -> None:
    with pytest.raises(BadMessage, match="kind of frame: 6"):
        list(ChannelFrames().feed(b"\1\0\0\0" + (6 << 24).to_bytes(4, "little")))
    with pytest.raises(BadMessage, match="a frame of 65537 bytes, the limit is 65536"):
        list(ChannelFrames().feed(b"\1\0\0\0" + (channels.MAX_CHUNK + 1).to_bytes(4, "little")))


@pytest.mark.parametrize("size", [0, 5, channels.MAX_CHUNK // 2, channels.MAX_CHUNK // 2 + 1, 3 * channels.MAX_CHUNK])
@pytest.mark.parametrize("sharers", [1, 2, 128, 129, 300])
def test_shared_data_reaches_each_channel_behind_its_own_head(sharers: int, size: int) -> None:
    data = random.Random(2).randbytes(size)
    heads = [(7 * number + 1, b"h" * (number % (channels.MAX_HEAD + 1))) for number in range(sharers)]
    frames = list(ChannelFrames().feed(b"".join(shared_frames(heads, data))))
    got: dict[int, bytes] = {}
    for frame in frames:
        assert frame.kind == channels.SHARED and frame.size <= channels.MAX_CHUNK
        for number, part in split_shared(frame.channel, frame.body):
            got[number] = got.get(number, b"") + part
    assert got == {number: head + data for number, head in heads}


def test_a_shared_frame_too_short_for_its_channels_is_refused() -> None:
    with pytest.raises(BadMessage, match="too short for 3 channels"):
        split_shared(3, b"\1\0\0\0\0\2\0\0\0\0")


def test_a_long_reason_is_truncated() -> None:
    (frame,) = ChannelFrames().feed(close_frame(1, "ü" * 5000))
    assert frame.size <= 1024


def test_prefaces_and_their_answers_are_distinct() -> None:
    assert len(channels.PREFACE) == len(native.PREFACE) and channels.PREFACE[:-4] == native.PREFACE[:-4]
    assert len({channels.PREFACE[-4:], native.PREFACE[-4:], channels.ACCEPTED, native.ACCEPTED}) == 4
