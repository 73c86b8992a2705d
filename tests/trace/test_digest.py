"""The state digest is a documented byte layout: this file builds it by hand, and shows what it tells apart."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from memopd_trace.invocation import IDS, Invocation, Media


def row(**fields: object) -> Invocation:
    base: dict[str, object] = {
        "episode_id": "e",
        "invocation_index": 0,
        "model_id": "m",
        "prompt_ids": [7, 8, 9],
        "output_ids": [10, 11],
    }
    return Invocation(**{**base, **fields})  # type: ignore[arg-type]


def defaults(n: int) -> dict[str, IDS]:
    counting = np.arange(n, dtype=np.int32)
    return {"position_ids": counting, "visible_from": counting, "visible_until": np.full(n, n, np.int32)}


def by_hand(*arrays: list[int], media: tuple[tuple[int, int, bytes], ...] = ()) -> bytes:
    data = b"memopd-trace/state/1"
    for array in arrays:
        data += struct.pack("<Q", len(array)) + struct.pack(f"<{len(array)}i", *array)
    data += struct.pack("<Q", len(media))
    for start, stop, sha256 in media:
        data += struct.pack("<ii", start, stop) + sha256
    return hashlib.sha256(data).digest()


def test_a_default_is_a_length_of_zero_left_out_or_written_out() -> None:
    assert row().compute_digest() == by_hand([7, 8, 9], [10, 11], [], [], [], [])
    explicit = row(position_ids=range(5), visible_from=range(5), visible_until=[5] * 5)
    assert explicit.compute_digest() == row().compute_digest()


def test_what_is_no_default_is_written_whole() -> None:
    evicted = row(position_ids=range(1, 6), visible_until=[5, 3, 5, 5, 5])
    assert evicted.compute_digest() == by_hand([7, 8, 9], [10, 11], [1, 2, 3, 4, 5], [], [5, 3, 5, 5, 5], [])


def test_in_place_generation_and_media_are_part_of_the_state() -> None:
    image = Media(0, 2, b"\x05" * 32)
    slots = row(prompt_ids=[1, 0, 2], output_ids=[9], output_slots=[1], media=[image])
    assert slots.compute_digest() == by_hand([1, 0, 2], [9], [], [], [], [1], media=((0, 2, b"\x05" * 32),))


ids = st.lists(st.integers(0, 2**31 - 1), max_size=12)
STATE = ("position_ids", "visible_from", "visible_until")


@given(prompt=ids, output=ids, slots=st.booleans(), written=st.sets(st.sampled_from(STATE), min_size=1))
def test_each_default_may_be_written_out(prompt: list[int], output: list[int], slots: bool, written: set[str]) -> None:
    plain = row(prompt_ids=prompt, output_ids=output, output_slots=range(len(output)) if slots else None)
    explicit = plain.replace(**{name: defaults(len(plain))[name] for name in written})
    assert explicit.compute_digest() == plain.compute_digest()


@given(
    data=st.data(), prompt=ids, output=ids, name=st.sampled_from(("prompt_ids", "output_ids", "output_slots", *STATE))
)
def test_one_changed_value_changes_the_digest(
    data: st.DataObject, prompt: list[int], output: list[int], name: str
) -> None:
    slots = range(len(output)) if name == "output_slots" or data.draw(st.booleans()) else None
    before = row(prompt_ids=prompt, output_ids=output, output_slots=slots)
    before = before.replace(**{each: defaults(len(before))[each] for each in STATE if data.draw(st.booleans())})
    values = defaults(len(before)).get(name, getattr(before, name))
    assume(len(values))
    changed = np.array(values)
    changed[data.draw(st.integers(0, len(values) - 1))] ^= 1 << data.draw(st.integers(0, 30))
    assert before.replace(**{name: changed}).compute_digest() != before.compute_digest()


def test_slots_have_no_default() -> None:
    assert row(output_slots=[3, 4]).compute_digest() != row().compute_digest(), "though 3 and 4 is where they would go"


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
