"""What all rows of a conversion say together: the trace's metadata, its gaps, and the profile it can be held to."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from memopd_trace import __version__
from memopd_trace.convert.chat import Renderer
from memopd_trace.convert.format import Format
from memopd_trace.convert.losses import Losses
from memopd_trace.invocation import Invocation
from memopd_trace.metadata import Gap, Input, Model, Producer, Source, Tokenizer, TraceMetadata
from memopd_trace.places import file_sha256

MAX_LISTED = 100  # inputs that the metadata names one by one
UNSEEN = ("lost_calls", "server_state", "opaque_content", "lossy_text")  # what no row shows
OF_EPISODES = ("no_reward", "no_end", "no_group")
FOREIGN = "ids that the tokenizer does not have: is it this model's?"
KEEPS_FROM = {
    "policy": ("no_token_ids", "no_logprobs", "no_logprob_kind", "no_sampling", "no_policy_version"),
    "train": OF_EPISODES,
}  # profiles, and the gaps with which a trace cannot keep them


@dataclass(slots=True)
class Known:
    """What the rows taken together say: the largest id of each model, and what they do not say."""

    largest: dict[str, int] = field(default_factory=dict)
    rows: int = 0
    lack: dict[str, int] = field(default_factory=dict)
    outcome: dict[str, set[str]] = field(default_factory=dict)

    def learn(self, row: Invocation) -> None:
        """One row."""
        ids = max(int(a.max()) if len(a) else 0 for a in (row.prompt_ids, row.output_ids))
        self.largest[row.model_id] = max(self.largest.get(row.model_id, 0), ids)
        self.rows += 1
        sampling = row.sampling
        for code, lacks in (
            ("no_token_ids", row.token_source == "retokenized"),
            ("no_logprobs", row.output_logprobs is None),
            ("no_logprob_kind", row.output_logprobs is not None and row.logprob_kind == "unknown"),
            ("no_sampling", sampling is None or sampling.temperature is None),
            ("no_policy_version", row.policy_version is None and row.output_policy_versions is None),
            ("no_finish_reason", row.finish_reason is None),
            ("no_model", row.model_id == "unknown"),
        ):
            self.lack[code] = self.lack.get(code, 0) + lacks
        has = self.outcome.setdefault(row.episode_id, set())
        has |= {"no_reward"} if row.reward is not None else set()
        has |= {"no_end"} if row.terminated is not None or row.truncated is not None else set()
        has |= {"no_group"} if row.group_id is not None or row.task_id is not None else set()

    def to_gaps(self, losses: Losses, chosen: Format, renderer: Renderer | None) -> None:
        """Count what is missing."""
        for code, number in self.lack.items():
            if number:
                losses.gap(code, f"{number} of {self.rows} calls", number)
        for code in OF_EPISODES:
            number = sum(code not in has for has in self.outcome.values())
            if number:
                losses.gap(code, f"{number} of {len(self.outcome)} episodes", number)
        if renderer is None:
            losses.gap("no_tokenizer", f"{self.rows} of {self.rows} calls", self.rows)
        elif len(self.largest) > 1:
            losses.gap("tokenizer_assumed", ", ".join(sorted(self.largest)[:5]))
        for code in chosen.unsaid:
            if code in UNSEEN and code not in losses.gaps:
                losses.gap(code, "as in every log of this format")


def metadata_of(
    chosen: Format, files: Sequence[Path], losses: Losses, known: Known, renderer: Renderer | None
) -> TraceMetadata:
    """The metadata of the trace that the rows make up."""
    digests = {str(file): digest for file in files if (digest := _digest(file, losses)) is not None}
    whole = hashlib.sha256("".join(f"{digest}  {name}\n" for name, digest in digests.items()).encode()).hexdigest()
    given = None if renderer is None else renderer.metadata()
    for name, largest in known.largest.items():
        if given is not None and largest >= given.vocab_size:
            losses.degraded.add(FOREIGN, f"{name}: id {largest}, and the tokenizer has {given.vocab_size}")
    models = {
        name: Model(name=name, tokenizer=given or _unknown_tokenizer(name, largest + 1, whole))
        for name, largest in known.largest.items()
    }
    inputs = [Input(name=name, sha256=digest) for name, digest in digests.items()]
    if len(inputs) > MAX_LISTED:
        inputs = [Input(name=f"{len(inputs)} files, as sha256sum lists them", sha256=whole)]
    gaps = [
        Gap(code=code, detail=(count.example or f"{count.number} of {known.rows} calls"))
        for code, count in losses.gaps.items()
    ]
    return TraceMetadata(
        producer=Producer(name="memopd-trace", version=__version__),
        models=models,
        source=Source(
            format=chosen.name,
            version=", ".join(sorted(losses.versions)) or None,
            converter=f"memopd-trace {__version__}",
            inputs=inputs,
            gaps=gaps,
        ),
    )


def _digest(file: Path, losses: Losses) -> str | None:
    """The SHA-256 of an input; `None` for one that cannot be read (any more)."""
    try:
        return file_sha256(file)
    except OSError:
        losses.place = str(file)
        losses.degrade("an input that cannot be read is not named in the metadata")
        return None


def _unknown_tokenizer(model: str, size: int, inputs: str) -> Tokenizer:
    """A tokenizer of which only the ids are known. Its fingerprint is like no other: nothing may be read by it."""
    digest = hashlib.sha256(f"{inputs} {model}".encode("utf-8", "surrogatepass")).hexdigest()
    return Tokenizer(fingerprint=f"unknown:{digest}", size=size, vocab_size=size)


def profile_of(losses: Losses) -> str:
    """The most that the trace may be held to."""
    profile = "lineage"
    for name, codes in KEEPS_FROM.items():
        if any(code in losses.gaps for code in codes):
            break
        profile = name
    return profile
