"""The file metadata: pydantic models of the JSON under the schema key `memopd_trace`.

Unknown keys are ignored, so that a newer minor version can be read; known keys are checked. Every model is
frozen: metadata describes bytes that never change.
"""

from __future__ import annotations

import json
import re
import reprlib
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema

from memopd_trace.errors import InputError
from memopd_trace.schema import FEATURES, SPEC_VERSION, Table
from memopd_trace.tiers import scales_of

KEY = b"memopd_trace"
VIEWS_KEY = b"memopd_trace_views"
SCORES_KEY = b"memopd_trace_scores"
MAX_METADATA_BYTES = 16 * 2**20
MAX_TOLERANCE = 0.01  # nats: with more, the check of states would pass whatever they are
SAMPLED_COLUMNS = ("logprob", "logsumexp", "entropy")
TIER_COLUMNS = ("hidden_scale", "hidden_logsumexp", "hidden_kl")

Id = Annotated[int, Field(ge=-(2**31), lt=2**31)]  # what an int32 column can hold; rules say what is no id
Count = Annotated[int, Field(ge=0, le=2**15)]  # of layers or experts: expert ids are int16


_VERSION = r"^(0|[1-9][0-9]{0,5})\.(0|[1-9][0-9]{0,5})$"


def _version(text: str) -> str:
    if not re.fullmatch(_VERSION, text):
        raise ValueError(f"'{text}' is not MAJOR.MINOR")
    return text


Version = Annotated[str, AfterValidator(_version), WithJsonSchema({"type": "string", "pattern": _VERSION})]


class _Model(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class Producer(_Model):
    """The program that wrote the file."""

    name: str
    version: str | None = None


class Tokenizer(_Model):
    """What the ids mean. `size` counts real ids; `vocab_size` is the model's padded width."""

    fingerprint: str
    size: int = Field(gt=0, lt=2**31)
    vocab_size: int = Field(gt=0, lt=2**31)
    bos_id: Id | None = None
    eos_ids: list[Id] = []
    pad_id: Id | None = None
    stop_ids: list[Id] = []
    chat_template_digest: str | None = None

    @property
    def stops(self) -> list[int]:
        """The ids that end an output, each once."""
        return list(dict.fromkeys([*self.eos_ids, *self.stop_ids]))

    @property
    def controls(self) -> list[int]:
        """The ids that steer the model and are no text, as far as the metadata names them."""
        return [i for i in (self.bos_id, self.pad_id, *self.stops) if i is not None]


class Policy(_Model):
    """One version of a model's weights."""

    weights_digest: str | None = None
    adapter: str | None = None


class Model(_Model):
    """A model that rows name by `model_id`. The last three are needed by `routed_experts`."""

    name: str
    revision: str | None = None
    weights_digest: str | None = None
    config_digest: str | None = None
    dtype: str | None = None
    tokenizer: Tokenizer
    policies: dict[str, Policy] = {}
    num_moe_layers: Count | None = None
    experts_per_token: Count | None = None
    num_experts: Count | None = None


class Gap(_Model):
    """Something the source could not tell."""

    code: str
    detail: str | None = None


class Input(_Model):
    """A file that a converted trace was made from; of very many, one entry for all."""

    name: str
    sha256: str


class Source(_Model):
    """The log a converted trace was made from."""

    format: str
    version: str | None = None
    converter: str | None = None
    inputs: list[Input] = []
    gaps: list[Gap] = []


class _Table(_Model):
    """What the metadata of every table begins with."""

    spec_version: Version = SPEC_VERSION
    producer: Producer
    required_features: list[str] = []


class TraceMetadata(_Table):
    """Metadata of a trace file."""

    models: dict[str, Model]
    source: Source | None = None

    def to_schema_metadata(self) -> dict[bytes, bytes]:
        """The Arrow schema metadata that carries this object."""
        return {KEY: self.model_dump_json(exclude_none=False).encode()}


class ViewInfo(_Model):
    """One view that rows name; `description` says how its prompts were made."""

    description: str | None = None


class ViewsMetadata(_Table):
    """Metadata of a views file. `tokenizer_fingerprint` names the tokenizer that all its ids come from."""

    tokenizer_fingerprint: str
    views: dict[str, ViewInfo]

    def to_schema_metadata(self) -> dict[bytes, bytes]:
        """The Arrow schema metadata that carries this object."""
        return {VIEWS_KEY: self.model_dump_json().encode()}


M = TypeVar("M", bound=_Table)


def parse_metadata(schema_metadata: dict[bytes, bytes] | None, *, where: str) -> TraceMetadata:
    """Read and check the metadata of a trace.

    Raises:
        InputError: `E-META-MISSING`, `E-META-INVALID`, `E-VERSION-MAJOR` or `E-FEATURE-UNKNOWN`, naming `where`.
    """
    return _parse(TraceMetadata, KEY, schema_metadata, where)


def parse_views_metadata(schema_metadata: dict[bytes, bytes] | None, *, where: str) -> ViewsMetadata:
    """Read and check the metadata of a views file; raises as `parse_metadata`."""
    return _parse(ViewsMetadata, VIEWS_KEY, schema_metadata, where)


def _parse(kind: type[M], key: bytes, schema_metadata: dict[bytes, bytes] | None, where: str) -> M:
    raw = (schema_metadata or {}).get(key)
    if raw is None:
        hint = "another tool may have dropped it on rewriting: write the file again with its metadata"
        if key == KEY:
            hint += "; a first file needs little: spec/files.md, section 1, has the smallest"
        if SCORES_KEY in (schema_metadata or {}):
            hint = "this is a scores folder: a trace is what was scored, and --scores takes this"
        raise InputError(f"{where}: no '{key.decode()}' key in the schema metadata", code="E-META-MISSING", hint=hint)
    if len(raw) > MAX_METADATA_BYTES:
        raise InputError(f"{where}: metadata of {len(raw)} bytes, limit {MAX_METADATA_BYTES}", code="E-META-INVALID")
    try:
        metadata = kind.model_validate_json(raw)
    except (ValidationError, RecursionError) as error:
        raise InputError(f"{where}: metadata: {first_error(error)}", code="E-META-INVALID") from None
    check_version(metadata.spec_version, where=where)
    for feature in metadata.required_features:
        if feature not in FEATURES:
            raise InputError(
                f"{where}: requires the feature '{feature}', this reader knows {', '.join(FEATURES)}",
                code="E-FEATURE-UNKNOWN",
                hint="read it with a newer memopd-trace",
            )
    return metadata


def check_version(spec_version: str, *, where: str) -> None:
    """Refuse a newer major version; a newer minor one is read (and warned of by a rule).

    Raises:
        InputError: `E-VERSION-MAJOR`, naming both versions.
    """
    if spec_version_of(spec_version)[0] != spec_version_of(SPEC_VERSION)[0]:
        raise InputError(
            f"{where}: spec version {spec_version}, this reader knows {SPEC_VERSION}",
            code="E-VERSION-MAJOR",
            hint="read it with a release of memopd-trace that knows that major version",
        )


def spec_version_of(text: str) -> tuple[int, int]:
    """`"1.2"` as `(1, 2)`."""
    major, minor = text.split(".")
    return int(major), int(minor)


class _Short(reprlib.Repr):
    """A value in a few words, at a cost that does not grow with it: what is shown may hold itself many times over."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = self.maxlist = self.maxtuple = self.maxset = self.maxdict = 2
        self.maxstring = self.maxother = 60

    def repr_int(self, x: int, level: int) -> str:
        """Python refuses to print a very long one."""
        return repr(x) if x.bit_length() < 200 else f"a number of {x.bit_length()} bits"


_SHORT = _Short()


def first_error(error: Exception) -> str:
    """The first fault of a pydantic error as one line: where, what, and the value."""
    if not isinstance(error, ValidationError):
        return str(error) or type(error).__name__
    fault: Any = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in fault["loc"]) or "document"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    value = "" if fault["type"] in ("missing", "json_invalid") else f", got {_SHORT.repr(fault.get('input'))}"
    return f"{place}: {fault['msg'].lower()}{value}{more}"


class HeadInfo(_Model):
    """The output head that turns a stored state into logits: softcap(logit_scale * (W h + b)), cut to `size`."""

    bias: bool
    logit_scale: float
    softcap: float | None
    vocab_size: int = Field(gt=0, lt=2**31)
    size: int = Field(gt=0, lt=2**31)
    width: int = Field(gt=0, lt=2**31)
    digest: str


class TeacherInfo(_Model):
    """Who scored, in which precision."""

    name: str
    dtype: str
    weights_digest: str
    config_digest: str
    tokenizer_fingerprint: str
    head: HeadInfo


class StudentInfo(_Model):
    """Whose most probable ids were scored, in which precision."""

    name: str
    dtype: str
    weights_digest: str
    config_digest: str


class ScoresMetadata(_Model):
    """Metadata of a scores folder: everything that two runs must agree on to continue each other.

    `plan_digest` covers the trace's states, the layout and the pack budget. `attention` names what computed them,
    `flash+sdpa` where sdpa ran the packs with recorded visibility and flash the others. `hidden_dtype` is that of the
    teacher's states, `None` where none are stored; `hidden_tier` says how they are (`memopd_trace.tiers`).
    `temperature` is the teacher's; `topk_source` says whose k ids `topk_ids` are, and `student` who that is, if not the
    teacher. `tolerance` is how far, in nats, a reader's `logsumexp` and `logprob` from (state, head) may be off.
    """

    spec_version: Version = SPEC_VERSION
    producer: Producer
    teacher_id: str
    teacher: TeacherInfo
    view: str
    signals: list[str]
    topk: int | None = Field(gt=0, lt=2**31)
    topk_source: str | None
    student: StudentInfo | None = None
    temperature: float = Field(1.0, gt=0, allow_inf_nan=False)
    hidden_dtype: str | None
    hidden_tier: str = "exact"
    layout: str
    attention: str
    max_tokens: int
    shard_bytes: int
    shard_tokens: int
    plan_digest: str
    tolerance: float = Field(1e-3, gt=0, le=MAX_TOLERANCE, allow_inf_nan=False)

    @property
    def hidden_type(self) -> str | None:
        """What the items of a stored state are: of the teacher's dtype, or the codes of a tier."""
        return self.hidden_dtype if self.hidden_tier == "exact" else self.hidden_tier

    @property
    def signal_columns(self) -> tuple[str, ...]:
        """The columns that hold the signals of the run, a list by target each."""
        hidden = ("hidden",) if self.hidden_tier == "exact" else ("hidden", *TIER_COLUMNS)
        more = {"topk": ("topk_ids", "topk_logprobs", "tail_logprob"), "hidden": hidden, "full": ("logits",)}
        return (*SAMPLED_COLUMNS, *(name for signal in more if signal in self.signals for name in more[signal]))

    def width_of(self, column: str) -> int | None:
        """How many values a target has in a column of lists of lists; `None` in one of plain lists."""
        head = self.teacher.head
        widths = {"hidden": head.width, "hidden_scale": scales_of(self.hidden_tier, head.width), "logits": head.size}
        return self.topk or 0 if column in ("topk_ids", "topk_logprobs") else widths.get(column)

    def to_schema_metadata(self) -> dict[bytes, bytes]:
        """The Arrow schema metadata that carries this object."""
        return {SCORES_KEY: self.model_dump_json().encode()}


def json_schema(table: Table) -> str:
    """The JSON schema of a table's metadata, as `spec/` holds it."""
    models: dict[Table, type[BaseModel]] = {"trace": TraceMetadata, "views": ViewsMetadata, "scores": ScoresMetadata}
    return json.dumps(models[table].model_json_schema(), indent=1) + "\n"
