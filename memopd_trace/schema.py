"""The columns of every table, declared once; Arrow is made from it here, Markdown and JSON by `schema_text`.

Nothing else in the project states a column's name, type or length. `spec/` holds the renderings, and a
test fails when they drift.

A column's `length` names what a per-token array must be as long as:

    prompt    len(prompt_ids)
    output    len(output_ids)
    sequence  n = len(prompt_ids) + len(output_ids), or len(prompt_ids) where `output_slots` is given
              (in-place generation fills prompt positions, so it appends nothing)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

SPEC_VERSION = "1.0"
Table = Literal["trace", "views", "scores"]
Length = Literal["prompt", "output", "sequence"]


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its name, Arrow type, meaning, and how a reader must treat it.

    `values` is the closed set of a registry column (`None` = open); `unit` is nats, tokens, bytes or
    empty; `items_nullable` says whether a null may stand inside the list.
    """

    name: str
    type: pa.DataType
    doc: str
    group: str
    required: bool = False
    length: Length | None = None
    values: tuple[str, ...] | None = None
    unit: str = ""

    @property
    def items_nullable(self) -> bool:
        """Whether list items may be null (only then does a null inside the list mean "no value")."""
        return bool(pa.types.is_list(self.type) and self.type.value_field.nullable)


def _list(item: pa.DataType, *, nullable: bool = False) -> pa.DataType:
    return pa.list_(pa.field("item", item, nullable=nullable))


STRING = pa.string()
CATEGORY = pa.dictionary(pa.int32(), pa.string())
SEGMENT = pa.struct(
    [
        pa.field("start", pa.int32(), nullable=False),
        pa.field("stop", pa.int32(), nullable=False),
        pa.field("kind", STRING, nullable=False),
        pa.field("source_index", pa.int32()),
        pa.field("source_start", pa.int32()),
    ]
)
MEDIA = pa.struct(
    [
        pa.field("start", pa.int32(), nullable=False),
        pa.field("stop", pa.int32(), nullable=False),
        pa.field("sha256", pa.binary(32), nullable=False),
        pa.field("mime", STRING),
        pa.field("uri", STRING),
    ]
)
SAMPLING = pa.struct(
    [
        pa.field("temperature", pa.float64()),
        pa.field("top_p", pa.float64()),
        pa.field("top_k", pa.int32()),
        pa.field("min_p", pa.float64()),
        pa.field("repetition_penalty", pa.float64()),
        pa.field("seed", pa.int64()),
    ]
)

RELATIONS = ("root", "extend", "rewrite", "fork", "retry", "spawn")
REWRITE_KINDS = (
    "memory",
    "summary",
    "truncate_left",
    "elide",
    "strip_thinking",
    "reencode",
    "reserialise",
    "rewind",
    "reset",
    "opaque",
)
EVIDENCE = ("explicit", "inferred")
LOGPROB_KINDS = ("raw", "tempered", "processed", "unknown")
FINISH_REASONS = ("stop", "length", "tool_calls", "abort", "content_filter")
TOKEN_SOURCES = ("engine", "retokenized")
RECORDED = "recorded"  # the view that is the row's own state; no file holds it
PERSISTENT_HISTORY = "persistent-history"  # a view that every row has, built without a file (`memopd_trace.views`)
FEATURES = ("visibility", "output_slots", "media", "routed_experts")

TRACE_COLUMNS: tuple[Column, ...] = (
    Column("episode_id", STRING, "One agent run.", "identity", required=True),
    Column(
        "invocation_index",
        pa.int32(),
        "0, 1, 2… in commit order; an episode's rows are contiguous in one file and in this order.",
        "identity",
        required=True,
    ),
    Column("model_id", CATEGORY, "Key into the file metadata's `models`.", "identity", required=True),
    Column(
        "prompt_ids",
        _list(pa.int32()),
        "Token ids exactly as the model consumed them.",
        "identity",
        required=True,
        length="prompt",
    ),
    Column(
        "output_ids",
        _list(pa.int32()),
        "Token ids exactly as sampled, stop token included.",
        "identity",
        required=True,
        length="output",
    ),
    Column(
        "parent_index",
        pa.int32(),
        "`invocation_index` of the invocation whose state this one follows; null = none.",
        "lineage",
    ),
    Column(
        "relation",
        CATEGORY,
        "How this state follows from the parent's. `root`: no parent; `extend`: the prompt starts with the "
        "parent's whole sequence, id for id; `rewrite`: a declared rewrite of the context; `fork`: another "
        "continuation of a prefix of the parent's prompt; `retry`: the same prompt again; `spawn`: a new "
        "context opened by the parent's call.",
        "lineage",
        values=RELATIONS,
    ),
    Column(
        "rewrite_kind",
        CATEGORY,
        "What the rewrite did; open registry, see `registry.md`.",
        "lineage",
        values=REWRITE_KINDS,
    ),
    Column(
        "rewrite_evidence",
        CATEGORY,
        "`explicit`: the producer recorded the rewrite; `inferred`: it was found by comparing ids.",
        "lineage",
        values=EVIDENCE,
    ),
    Column(
        "segments",
        _list(SEGMENT),
        "Spans `[start, stop)` of the sequence and what they hold. A span with a source claims to be an "
        "id-for-id copy of the stretch that begins at `source_start` of the sequence of invocation "
        "`source_index` of the same episode.",
        "lineage",
    ),
    Column("group_id", STRING, "Rollouts that are compared with each other.", "lineage"),
    Column("task_id", STRING, "The task of the episode.", "lineage"),
    Column("agent_id", STRING, "Which agent or role of a multi-agent run.", "lineage"),
    Column("attempt", pa.int32(), "0, 1, 2… for retries of one call; null = 0.", "lineage"),
    Column(
        "accepted",
        pa.bool_(),
        "False: the harness rejected this attempt; kept, never trained on. Null = true.",
        "lineage",
    ),
    Column("position_ids", _list(pa.int32()), "Position of each token; null = 0…n-1.", "state", length="sequence"),
    Column(
        "visible_from",
        _list(pa.int32()),
        "First query index that may attend to key k; null = k. A bidirectional block lowers it.",
        "state",
        length="sequence",
    ),
    Column(
        "visible_until",
        _list(pa.int32()),
        "Key k is visible to queries q < visible_until[k]; null = n. Eviction shortens it.",
        "state",
        length="sequence",
    ),
    Column(
        "output_slots",
        _list(pa.int32()),
        "In-place generation: the prompt index that each output token fills; null = outputs are appended.",
        "state",
        length="output",
    ),
    Column("media", _list(MEDIA), "Placeholder runs `[start, stop)` of the prompt and their content.", "state"),
    Column(
        "state_digest",
        pa.binary(32),
        "SHA-256 of the canonical bytes of the state and of what was sampled in it.",
        "state",
        unit="bytes",
    ),
    Column(
        "output_logprobs",
        _list(pa.float32(), nullable=True),
        "`output_logprobs[i]` = log p(output_ids[i] | state before it); null = there is none, never a filler.",
        "behaviour",
        length="output",
        unit="nats",
    ),
    Column(
        "logprob_kind",
        CATEGORY,
        "`raw`: temperature 1, whole vocabulary; `tempered`: after temperature; `processed`: after top-k/top-p/"
        "min-p, renormalised; `unknown`.",
        "behaviour",
        values=LOGPROB_KINDS,
    ),
    Column(
        "output_kept_logmass",
        _list(pa.float32(), nullable=True),
        "Log of the probability mass (after temperature) of the set kept by top-k/top-p/min-p.",
        "behaviour",
        length="output",
        unit="nats",
    ),
    Column(
        "output_sampled",
        _list(pa.bool_()),
        "Did the policy choose this token (false: forced by the harness or the grammar)? Null = all true.",
        "behaviour",
        length="output",
    ),
    Column(
        "output_loss_mask",
        _list(pa.bool_()),
        "Is this token to be trained? Null = the same as `output_sampled`.",
        "behaviour",
        length="output",
    ),
    Column("sampling", SAMPLING, "Sampling settings; a null field was not set.", "behaviour"),
    Column("policy_version", pa.int64(), "Version of the weights that sampled the output.", "behaviour"),
    Column(
        "output_policy_versions",
        _list(pa.int64()),
        "Per-token versions, only where one call spans several.",
        "behaviour",
        length="output",
    ),
    Column(
        "kv_policy_version",
        pa.int64(),
        "Oldest weights that computed any reused key or value; null = `policy_version`.",
        "behaviour",
    ),
    Column(
        "routed_experts",
        _list(pa.int16()),
        "Feature `routed_experts`: expert ids, flattened positions x layers x k, positions = n-1.",
        "behaviour",
    ),
    Column("finish_reason", CATEGORY, "Why the output ended.", "behaviour", values=FINISH_REASONS),
    Column(
        "token_source",
        CATEGORY,
        "`engine`: the engine's own ids; `retokenized`: derived from text, so never trainable by a ratio.",
        "behaviour",
        values=TOKEN_SOURCES,
    ),
    Column(
        "reward",
        pa.float64(),
        "Reward credited at this invocation; an episode's return is their sum; null = not scored.",
        "outcome",
    ),
    Column("rewards", pa.map_(STRING, pa.float64()), "Named parts of the reward.", "outcome"),
    Column("terminated", pa.bool_(), "The task reached an end; on an episode's last row.", "outcome"),
    Column("truncated", pa.bool_(), "A limit cut the episode; on an episode's last row.", "outcome"),
    Column("prompt_text", STRING, "Mirror of the prompt as text; never the state.", "mirror"),
    Column("output_text", STRING, "Mirror of the output as text; never the state.", "mirror"),
    Column("messages", STRING, "Mirror of the request's messages as JSON; never the state.", "mirror"),
    Column("started_at", pa.timestamp("us", tz="UTC"), "When the call began.", "mirror"),
    Column("ended_at", pa.timestamp("us", tz="UTC"), "When the call ended.", "mirror"),
    Column("extra", pa.map_(STRING, STRING), "The producer's own; never validated.", "mirror"),
)

VIEWS_COLUMNS: tuple[Column, ...] = (
    Column("episode_id", STRING, "The trace row's episode.", "key", required=True),
    Column("invocation_index", pa.int32(), "The trace row's index.", "key", required=True),
    Column("view", CATEGORY, "Which view this is; a key of the metadata's `views`.", "key", required=True),
    Column(
        "state_digest",
        pa.binary(32),
        "The trace row's state digest: this view is for these output tokens and no others.",
        "key",
        required=True,
        unit="bytes",
    ),
    Column(
        "prompt_ids",
        _list(pa.int32()),
        "The prompt to score the row's `output_ids` under, as the teacher is to consume it.",
        "state",
        required=True,
        length="prompt",
    ),
    Column(
        "position_ids",
        _list(pa.int32()),
        "Position of each token of the viewed sequence; null = 0…n-1.",
        "state",
        length="sequence",
    ),
    Column(
        "visible_from",
        _list(pa.int32()),
        "First query index of the viewed sequence that may attend to key k; null = k.",
        "state",
        length="sequence",
    ),
    Column(
        "visible_until",
        _list(pa.int32()),
        "Key k is visible to queries q < visible_until[k]; null = n.",
        "state",
        length="sequence",
    ),
    Column(
        "output_slots",
        _list(pa.int32()),
        "In-place generation: the index of this `prompt_ids` that each output token fills; null = appended.",
        "state",
        length="output",
    ),
    Column("media", _list(MEDIA), "Placeholder runs `[start, stop)` of this `prompt_ids`.", "state"),
    Column(
        "view_digest",
        pa.binary(32),
        "State digest of the viewed sequence: this prompt and the row's `output_ids`; null = not computed.",
        "state",
        unit="bytes",
    ),
)

SCORES_COLUMNS: tuple[Column, ...] = (
    Column("episode_id", STRING, "The trace row's episode.", "key", required=True),
    Column("invocation_index", pa.int32(), "The trace row's index.", "key", required=True),
    Column(
        "state_digest", pa.binary(32), "The trace row's state digest; another one is refused.", "key", required=True
    ),
    Column("teacher_id", CATEGORY, "The teacher of the run's metadata.", "key", required=True),
    Column("view", CATEGORY, "The prompt that was scored; `recorded` = the row's own state.", "key", required=True),
    Column(
        "view_digest",
        pa.binary(32),
        "State digest of the viewed sequence that was run; null under the view `recorded`.",
        "key",
    ),
    Column(
        "output_index",
        _list(pa.int32()),
        "Indices into `output_ids` that were scored; every list below has this length.",
        "signal",
        required=True,
    ),
    Column("logprob", _list(pa.float32()), "Teacher log-probability of the sampled id.", "signal", unit="nats"),
    Column("logsumexp", _list(pa.float32()), "log sum exp of the teacher's logits (real ids).", "signal", unit="nats"),
    Column("entropy", _list(pa.float32()), "Entropy of the teacher's distribution.", "signal", unit="nats"),
    Column("topk_ids", _list(_list(pa.int32())), "The k ids chosen, best first.", "signal"),
    Column("topk_logprobs", _list(_list(pa.float32())), "Their log-probabilities.", "signal", unit="nats"),
    Column(
        "tail_logprob",
        _list(pa.float32()),
        "Log of the mass outside the k ids; -inf where there is none.",
        "signal",
        unit="nats",
    ),
    Column(
        "hidden",
        _list(pa.list_(pa.float32(), 1)),
        "The input of the teacher's output head: list<fixed_size_list<T>[D]>, T = float32, float64, float16, uint16 "
        "holding bfloat16 bits, or int8; D, and with the tier T, are in the metadata.",
        "signal",
    ),
    Column(
        "hidden_scale",
        _list(_list(pa.float32())),
        "What the items of `hidden` are times, in a tier that is not `exact`.",
        "signal",
    ),
    Column(
        "hidden_logsumexp",
        _list(pa.float32()),
        "log sum exp of the logits that the state rebuilt from `hidden` and its scales gives.",
        "signal",
        unit="nats",
    ),
    Column(
        "hidden_kl",
        _list(pa.float32()),
        "KL divergence of the rebuilt state's distribution from the one that was scored, as measured.",
        "signal",
        unit="nats",
    ),
    Column("logits", _list(_list(pa.float32())), "Signal `full`: logits of the real ids.", "signal"),
)

TABLES: Mapping[str, tuple[Column, ...]] = {"trace": TRACE_COLUMNS, "views": VIEWS_COLUMNS, "scores": SCORES_COLUMNS}
COLUMN: Mapping[str, Column] = {column.name: column for column in TRACE_COLUMNS}


def arrow_schema(table: Table = "trace", metadata: Mapping[bytes, bytes] | None = None) -> pa.Schema:
    """The Arrow schema of `table`, every column in declared order; required ones are not nullable."""
    fields = [pa.field(c.name, c.type, nullable=not c.required) for c in TABLES[table]]
    return pa.schema(fields, metadata=dict(metadata) if metadata else None)


def type_name(data_type: pa.DataType) -> str:
    """A type as the specification writes it, e.g. `list<int32>`, `list<float32 | null>`, `dictionary<string>`."""
    if pa.types.is_dictionary(data_type):
        return f"dictionary<{type_name(data_type.value_type)}>"
    if pa.types.is_fixed_size_list(data_type):
        return f"fixed_size_list<T>[{'D' if data_type.list_size == 1 else data_type.list_size}]"
    if pa.types.is_list(data_type):
        null = " | null" if data_type.value_field.nullable else ""
        return f"list<{type_name(data_type.value_type)}{null}>"
    if pa.types.is_map(data_type):
        return f"map<{type_name(data_type.key_type)}, {type_name(data_type.item_type)}>"
    if pa.types.is_struct(data_type):
        return "struct<" + ", ".join(f"{f.name}: {type_name(f.type)}" for f in data_type) + ">"
    return {"double": "float64", "float": "float32", "halffloat": "float16"}.get(str(data_type), str(data_type))
