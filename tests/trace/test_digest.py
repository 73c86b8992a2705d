"""The state digest is a documented byte layout: this file builds it by hand, and shows what it tells apart."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest

from memopd_trace.invocation import Invocation, Media


def row(**fields: object) -> Invocation:
    base: dict[str, object] = {
        "episode_id": "e",
        "invocation_index": 0,
        "model_id": "m",
        "prompt_ids": [7, 8, 9],
        "output_ids": [10, 11],
    }
    return Invocation(**{**base, **fields})  # type: ignore[arg-type]


def by_hand(*arrays: list[int], media: tuple[tuple[int, int, bytes], ...] = ()) -> bytes:
    data = b"memopd-trace/state/1"
    for array in arrays:
        data += struct.pack("<Q", len(array)) + struct.pack(f"<{len(array)}i", *array)
    data += struct.pack("<Q", len(media))
    for start, stop, sha256 in media:
        data += struct.pack("<ii", start, stop) + sha256
    return hashlib.sha256(data).digest()


def test_defaults_are_written_out() -> None:
    expected = by_hand([7, 8, 9], [10, 11], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [5] * 5, [3, 4])
    assert row().compute_digest() == expected
    explicit = row(position_ids=range(5), visible_from=range(5), visible_until=[5] * 5)
    assert explicit.compute_digest() == expected


def test_in_place_generation_and_media_are_part_of_the_state() -> None:
    image = Media(0, 2, b"\x05" * 32)
    slots = row(prompt_ids=[1, 0, 2], output_ids=[9], output_slots=[1], media=[image])
    assert slots.compute_digest() == by_hand(
        [1, 0, 2], [9], [0, 1, 2], [0, 1, 2], [3] * 3, [1], media=((0, 2, b"\x05" * 32),)
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_ids": [7, 8], "output_ids": [9, 10, 11]},  # the same sequence, split elsewhere
        {"position_ids": [0, 1, 2, 3, 5]},
        {"visible_until": [5, 4, 5, 5, 5]},
        {"visible_from": [0, 0, 2, 3, 4]},
        {"output_ids": [10, 12]},
        {"media": [Media(0, 1, b"\0" * 32)]},
    ],
)
def test_another_state_has_another_digest(fields: dict[str, object]) -> None:
    assert row(**fields).compute_digest() != row().compute_digest()


@pytest.mark.parametrize(
    "fields",
    [
        {"episode_id": "other"},
        {"invocation_index": 5},
        {"relation": "root"},
        {"output_logprobs": [-1.0, -2.0]},
        {"reward": 1.0},
        {"prompt_text": "mirror"},
    ],
)
def test_identity_lineage_and_behaviour_are_no_part_of_the_state(fields: dict[str, object]) -> None:
    assert row(**fields).compute_digest() == row().compute_digest()


def test_the_digest_does_not_depend_on_how_the_arrays_are_held() -> None:
    ids = np.arange(20, dtype=np.int64)
    assert row(prompt_ids=ids[::2]).compute_digest() == row(prompt_ids=list(range(0, 20, 2))).compute_digest()
