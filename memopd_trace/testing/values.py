"""The small things that traces are made of: kinds, token ids, strings, models."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from memopd_trace.errors import UsageError
from memopd_trace.metadata import Model, Policy, Producer, Tokenizer, TraceMetadata
from memopd_trace.rules.registry import PROFILES, Profile

PAD, BOS, STOP, EOS, PLACEHOLDER, MASK, FIRST_ID = range(
    7
)  # the control ids of every generated tokenizer, and the rest

REWRITES = ("memory", "summary", "truncate_left", "elide", "strip_thinking", "reencode", "rewind", "reset", "opaque")
STEPS = ("extend", *REWRITES, "fork", "retry", "spawn")
STATES = ("eviction", "positions", "bidirectional", "in_place", "media", "routed")
BEHAVIOURS = ("versions", "nulls", "tempered", "processed")
FORMS = ("groups", "models", "unicode", "mirrors")
KINDS = (*STEPS, *STATES, *BEHAVIOURS, *FORMS)

ordinary_text = st.text(st.sampled_from("abcxyz019-_/"), min_size=1, max_size=6)
rarely = st.sampled_from([False, False, False, True])
any_text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6)


@dataclass(frozen=True, slots=True)
class Plan:
    """What may be drawn: the metadata, the kinds, and the profile that the rows must hold under."""

    metadata: TraceMetadata
    kinds: frozenset[str]
    profile: Profile

    def needs(self, profile: Profile) -> bool:
        """Whether what `profile` asks for must be there."""
        return self.profile in (profile, "train")

    def may(self, kind: str, draw: st.DrawFn) -> bool:
        """Whether this call shows `kind`: never where it was not asked for, else in one of two."""
        return kind in self.kinds and draw(st.booleans())

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that all models share."""
        return next(iter(self.metadata.models.values())).tokenizer

    @property
    def stop_ids(self) -> list[int]:
        """Ids that end an output; may be empty."""
        return self.tokenizer.stops

    def ids(self, draw: st.DrawFn, least: int, most: int) -> list[int]:
        """`least` to `most` ids that are no control ids."""
        return draw(st.lists(st.integers(FIRST_ID, self.tokenizer.size - 1), min_size=least, max_size=most))

    def text(self) -> st.SearchStrategy[str]:
        """A name; any characters where `unicode` was asked for."""
        return any_text if "unicode" in self.kinds else ordinary_text


def checked_kinds(kinds: Iterable[str]) -> frozenset[str]:
    """`kinds` as a set; a single word is one kind.

    Raises:
        UsageError: a kind that there is not.
    """
    found = frozenset([kinds] if isinstance(kinds, str) else kinds)
    if unknown := sorted(found - set(KINDS)):
        raise UsageError(f"no kind '{unknown[0]}'", hint=f"one of {', '.join(KINDS)}")
    return found


def checked_profile(profile: str) -> Profile:
    """`profile`, if there is one of that name.

    Raises:
        UsageError: there is not.
    """
    for known in PROFILES:
        if known == profile:
            return known
    raise UsageError(f"no profile '{profile}'", hint=f"one of {', '.join(PROFILES)}")


@st.composite
def tokenizers(draw: st.DrawFn) -> Tokenizer:
    """A tokenizer whose control ids are those of this module; some have no begin id, or name no stop id."""
    size = draw(st.integers(16, 64))
    eos, stop = draw(st.sampled_from([([EOS], [STOP]), ([STOP], []), ([EOS, STOP], []), ([], [])]))
    return Tokenizer(
        fingerprint=draw(st.binary(min_size=32, max_size=32)).hex(),
        size=size,
        vocab_size=size + draw(st.sampled_from([0, 1, 64])),
        bos_id=draw(st.sampled_from([None, BOS])),
        eos_ids=eos,
        pad_id=draw(st.sampled_from([None, PAD])),
        stop_ids=stop,
    )


@st.composite
def metadata(draw: st.DrawFn, kinds: Iterable[str] = KINDS) -> TraceMetadata:
    """Metadata of one to three models that share a tokenizer; no feature is declared yet."""
    chosen = checked_kinds(kinds)
    names = any_text if "unicode" in chosen else ordinary_text
    count = draw(st.integers(1, 3)) if "models" in chosen else 1
    tokenizer = draw(tokenizers())
    models = {}
    for name in draw(st.lists(names, min_size=count, max_size=count, unique=True)):
        routing: dict[str, Any] = {}
        if "routed" in chosen:
            experts = draw(st.integers(2, 8))
            routing = {"num_moe_layers": draw(st.integers(1, 2)), "experts_per_token": 2, "num_experts": experts}
        padded = tokenizer.vocab_size + draw(st.sampled_from([0, 8]))
        own = tokenizer.model_copy(update={"vocab_size": padded})
        policies = {"0": Policy(weights_digest=draw(st.binary(min_size=4, max_size=4)).hex())}
        models[name] = Model(name=name, tokenizer=own, dtype="bfloat16", policies=policies, **routing)
    return TraceMetadata(producer=Producer(name=draw(names), version="1"), models=models)
