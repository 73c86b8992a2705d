"""What a trace holds, in totals: one pass, in memory that does not grow with the trace's tokens.

Beside one batch of rows it holds the keys of one group's prefix tree (`sharing.TREE_TOKENS`), a lineage of
one episode, histograms of lengths, 16 bytes for each group's name, and at most `MAX_VALUES` values of anything else
that is counted by name.

`Stats.to_dict`, `stats_version` "1" (new keys may be added; these stay). A *count by value* is `{"values": {value: n},
"null": n, "others": n}`, most frequent first, `others` those beyond `MAX_VALUES` different values. *Lengths* are
`{"count", "total", "mean", "p50", "p95", "max"}`, percentiles by nearest rank. *Moments* are `{"count", "mean", "std",
"min", "max", "nonfinite"}`: of the finite values, `std` with n - 1. What cannot be told is null.

    stats_version, path, spec_version, producer, source (format of the log it came from)
    rows, rows_unsound (arrays do not fit together: only counted, not looked into), episodes, groups
    models, agents, finish_reasons, token_sources    counts by value, in rows
    tokens      prompt, output, sampled (chosen by the policy), trained (in the loss)
    lengths     prompt, output, sequence (tokens of a row), episode (rows of an episode): lengths
    sharing     logical (tokens of all sequences), and for `within_episodes` and `within_groups` (neighbouring episodes
                of one group or task; else of one episode): distinct (nodes of the prefix trees), ratio, parts (see
                `memopd_trace.look.sharing`; above 0 `distinct` is an upper bound)
    lineage     relations, rewrite_kinds, rewrite_evidence: counts by value, in rows; depth (of an episode's deepest
                row below its root): lengths; rows_with_children, branched_rows (two children or more),
                most_children, rejected (rows with `accepted` false)
    segments    kinds: counts by value, in tokens; copied (tokens with a source)
    logprobs    rows, tokens (that have one), coverage (of output tokens), trained_coverage (of trained ones), mean
                (nats, of finite ones), kinds: counts by value, in rows
    policy      versions: counts by value, in output tokens; oldest, newest, mean_lag, max_lag (versions behind the
                newest of the trace, by token), mixed_rows (several versions in one call), mixed_episodes,
                stale_kv_rows, max_kv_lag (versions that reused keys and values were behind)
    rewards     reward (of a row), return (of an episode), parts {name: …}: moments; parts_others
    ends        terminated, truncated (episodes)
    features    declared (names), used {feature: rows}
    gaps        what the source could not tell: code, detail
    time        first, last (ISO 8601), span_s, timed_rows, calls_s (sum of the calls' durations)
"""

from __future__ import annotations

import json
import os
from hashlib import blake2b
from typing import Any

from memopd_trace.invocation import Episode, Invocation, invocations_from_batch
from memopd_trace.look.sharing import PrefixTree, prefix_key
from memopd_trace.look.tallies import Lengths, Tally
from memopd_trace.look.totals import Clock, Lineage, Logprobs, Outcome, Policy
from memopd_trace.metadata import TraceMetadata
from memopd_trace.schema import FEATURES, TRACE_COLUMNS
from memopd_trace.storage import TraceReader

STATS_VERSION = "1"
_FEATURE_COLUMNS = {
    "visibility": ("visible_from", "visible_until"),
    "output_slots": ("output_slots",),
    "media": ("media",),
    "routed_experts": ("routed_experts",),
}
_UNREAD = ("state_digest", "sampling", "prompt_text", "output_text", "messages", "extra")
_COLUMNS = [c.name for c in TRACE_COLUMNS if c.name not in _UNREAD]
_SIZED = [(c.name, str(c.length)) for c in TRACE_COLUMNS if c.length in ("output", "sequence")]


def stats(path: str | os.PathLike[str]) -> Stats:
    """The totals of a trace.

    It need not be valid, only readable: rows whose arrays do not fit together are counted in `rows_unsound`.

    Raises:
        InputError: as `memopd_trace.read`.
    """
    reader = TraceReader(path)
    totals = Stats(str(path), reader.metadata)
    for batch in reader.iter_batches():
        for invocation in invocations_from_batch(batch, _COLUMNS):
            totals.add(invocation)
    totals.finish()
    return totals


def fits(invocation: Invocation) -> bool:
    """Whether its per-token arrays have the lengths that their columns declare, and its spans lie in the sequence."""
    lengths = {"output": len(invocation.output_ids), "sequence": len(invocation)}
    for name, length in _SIZED:
        array = getattr(invocation, name)
        if array is not None and len(array) != lengths[length]:
            return False
    return all(0 <= s.start <= s.stop <= len(invocation) for s in invocation.segments or ())


class Stats:
    """The totals; see the module's docstring. Rows are added in the trace's order, then it is finished."""

    def __init__(self, path: str, metadata: TraceMetadata) -> None:
        self.path, self.metadata = path, metadata
        self.rows = self.rows_unsound = self.episodes = 0
        self.tokens = {"prompt": 0, "output": 0, "sampled": 0, "trained": 0}
        self.copied = 0
        self.lengths = {name: Lengths() for name in ("prompt", "output", "sequence", "episode")}
        self.tallies = {name: Tally() for name in ("model_id", "agent_id", "finish_reason", "token_source", "segment")}
        self.features: dict[str, int] = dict.fromkeys(FEATURES, 0)
        self.lineage, self.logprobs, self.policy = Lineage(), Logprobs(), Policy()
        self.outcome, self.clock = Outcome(), Clock()
        self.trees = {"within_episodes": PrefixTree(), "within_groups": PrefixTree()}
        self._groups: set[bytes] = set()
        self._open: tuple[str, tuple[str, str]] | None = None  # episode and group
        self._episode_rows = 0

    @property
    def groups(self) -> int:
        """Different groups (or tasks, or episodes without either)."""
        return len(self._groups)

    def add(self, invocation: Invocation) -> None:
        """Count the next row."""
        if self._open is None or self._open[0] != invocation.episode_id:
            self._close_episode()
            self._open_episode(invocation)
        self.rows += 1
        self._episode_rows += 1
        for name in ("prompt", "output"):
            length = len(getattr(invocation, f"{name}_ids"))
            self.tokens[name] += length
            self.lengths[name].add(length)
        self.lengths["sequence"].add(len(invocation))
        for name in ("model_id", "agent_id", "finish_reason", "token_source"):
            self.tallies[name].add(getattr(invocation, name))
        for feature, columns in _FEATURE_COLUMNS.items():
            self.features[feature] += any(getattr(invocation, c) is not None for c in columns)
        for part in (self.lineage, self.outcome, self.clock):
            part.add(invocation)
        if fits(invocation):
            self._add_sound(invocation)
        else:
            self.rows_unsound += 1

    def finish(self) -> None:
        """All rows were added."""
        self._close_episode()
        self.trees["within_groups"].cut()

    def to_dict(self) -> dict[str, Any]:
        """As plain data; see the module's docstring."""
        metadata, tally = self.metadata, self.tallies
        return {
            "stats_version": STATS_VERSION,
            "path": self.path,
            "spec_version": metadata.spec_version,
            "producer": metadata.producer.model_dump(),
            "source": None if metadata.source is None else metadata.source.format,
            "rows": self.rows,
            "rows_unsound": self.rows_unsound,
            "episodes": self.episodes,
            "groups": self.groups,
            "models": tally["model_id"].to_dict(),
            "agents": tally["agent_id"].to_dict(),
            "tokens": dict(self.tokens),
            "lengths": {name: lengths.to_dict() for name, lengths in self.lengths.items()},
            "sharing": {
                "logical": self.trees["within_groups"].logical,
                **{
                    name: {"distinct": tree.distinct, "ratio": tree.ratio, "parts": tree.parts}
                    for name, tree in self.trees.items()
                },
            },
            "lineage": self.lineage.to_dict(),
            "segments": {"kinds": tally["segment"].to_dict(), "copied": self.copied},
            "logprobs": self.logprobs.to_dict(self.tokens["output"], self.tokens["trained"]),
            "policy": self.policy.to_dict(),
            "finish_reasons": tally["finish_reason"].to_dict(),
            "token_sources": tally["token_source"].to_dict(),
            "rewards": self.outcome.to_dict(),
            "ends": {"terminated": self.outcome.terminated, "truncated": self.outcome.truncated},
            "features": {"declared": list(metadata.required_features), "used": dict(self.features)},
            "gaps": [gap.model_dump() for gap in (metadata.source.gaps if metadata.source else [])],
            "time": self.clock.to_dict(),
        }

    def to_json(self) -> str:
        """As JSON text, ending in a newline."""
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    def _add_sound(self, invocation: Invocation) -> None:
        self.tokens["sampled"] += int(invocation.sampled().sum())
        self.tokens["trained"] += int(invocation.loss_mask().sum())
        for segment in invocation.segments or ():
            length = segment.stop - segment.start
            self.tallies["segment"].add(segment.kind, length)
            self.copied += 0 if segment.source_index is None else length
        self.logprobs.add(invocation)
        self.policy.add(invocation)
        key = prefix_key(invocation)
        for tree in self.trees.values():
            tree.add(invocation, key)

    def _open_episode(self, first: Invocation) -> None:
        group = Episode(first.episode_id, (first,)).group_key
        if self._open is not None and self._open[1] != group:
            self.trees["within_groups"].cut()
        self._open = first.episode_id, group
        self._groups.add(blake2b("\0".join(group).encode("utf-8", "surrogatepass"), digest_size=16).digest())

    def _close_episode(self) -> None:
        if self._open is None:
            return
        self.episodes += 1
        self.lengths["episode"].add(self._episode_rows)
        self._episode_rows = 0
        self.trees["within_episodes"].cut()
        for part in (self.lineage, self.policy, self.outcome):
            part.close_episode()
