"""Rules about a scores folder as a whole: its metadata, its shards, and what it covers of the trace."""

# ruff: noqa: D103 - each function's entry says what it checks
from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from memopd_trace.places import Place
from memopd_trace.rules.joined import LAGS, ScoresContext, misfit_hit
from memopd_trace.rules.registry import Hit, rule
from memopd_trace.schema import RECORDED
from memopd_trace.scorefolder import RUN, SHARD_NAME, measured_kl
from memopd_trace.storage import MANIFEST
from memopd_trace.tiers import TIERS

SIGNALS = ("sampled", "topk", "hidden", "full")
SOURCES = ("teacher", "student")
STATE_TYPES = ("float64", "float32", "float16", "bfloat16")
KL_ROUNDING = 1e-6  # of a mean, by the order of its sum
HALF_NATS = 1.0  # what half precision may move one log-probability by, from one layout to another


@rule(
    "E-SCORES-META",
    "a run's metadata contradicts itself",
    phase="scores-file",
    clause="`topk`, `topk_source` and `hidden_dtype` MUST be given if and only if the signal is, `student` if and only "
    "if it chose the ids; a `hidden_tier` MUST have states; `topk` and the head's `vocab_size` MUST fit its `size`.",
    wants="scores",
    hint="run.json was edited, or written by a faulty scorer; score again",
)
def meta(file: ScoresContext) -> Iterator[Hit]:
    run, head = file.run, file.run.teacher.head
    facts = {
        "signals": all(s in SIGNALS for s in run.signals),
        "topk": (run.topk is not None) == ("topk" in run.signals) and (run.topk or 1) <= head.size,
        "topk_source": run.topk_source in (SOURCES if "topk" in run.signals else (None,)),
        "student": (run.student is not None) == (run.topk_source == "student"),
        "hidden_dtype": run.hidden_dtype in (STATE_TYPES if "hidden" in run.signals else (None,)),
        "hidden_tier": run.hidden_tier in (TIERS if "hidden" in run.signals else ("exact",)),
        "teacher.head.size": head.size <= head.vocab_size,
    }
    for name, holds in facts.items():
        if not holds:
            value = head.size if "." in name else getattr(run, name)
            yield Hit(None, f"{RUN}: '{name}' does not fit the rest", name, None, str(value))


@rule(
    "E-SCORES-DAMAGED",
    "a shard or the head of a scores folder is damaged",
    phase="scores-file",
    clause="A shard's bytes MUST match the hash in its name, and the head its digest.",
    wants="scores",
    hint="run the same `memopd-trace score` with --repair",
)
def damaged(file: ScoresContext) -> Iterator[Hit]:
    for path, fault in file.faults.items():
        yield Hit(None, f"'{path.name}': {fault}")


@rule(
    "E-SCORES-COLUMN",
    "a shard's column is missing, does not fit its type, or holds a null",
    phase="scores-file",
    clause="A shard MUST have the required columns and those of the run's signals, in their types, without a null.",
    wants="scores",
    hint="`memopd-trace schema scores` prints the columns",
)
def column(file: ScoresContext) -> Iterator[Hit]:
    for path, misfits in file.misfits.items():
        for misfit in misfits:
            yield misfit_hit(misfit, where=f"'{path.name}': ")


@rule(
    "E-SCORES-MANIFEST",
    "the scores' manifest counts other rows, or sums up another divergence",
    phase="scores-file",
    clause="The manifest's `rows` MUST be the number of rows, for each shard and in total, and its `hidden_kl` the "
    "mean and the largest of the column.",
    wants="scores",
    hint="a shard was replaced after the manifest was written; run the same `memopd-trace score` again",
)
def manifest(file: ScoresContext) -> Iterator[Hit]:
    for path, part in zip(file.folder.files, file.folder.manifest["files"], strict=True):
        rows = file.rows.get(path)
        if rows is not None and part.get("rows") != rows:
            yield Hit(None, f"{MANIFEST} states other rows for '{path.name}'", None, str(part.get("rows")), str(rows))
    if len(file.rows) < len(file.folder.files):
        return
    total, stated = sum(file.rows.values()), file.folder.manifest.get("rows")
    if stated != total:
        yield Hit(None, f"{MANIFEST} states other rows in all", None, str(stated), str(total))
    if file.run.hidden_tier != "exact":
        yield from _other_kl(file.folder.manifest.get("hidden_kl"), measured_kl(file.folder.files))


def _other_kl(stated: object, measured: dict[str, float] | None) -> Iterator[Hit]:
    for name, value in (measured or {}).items():
        there = stated.get(name) if isinstance(stated, dict) else None
        fits = isinstance(there, int | float) and abs(there - value) <= KL_ROUNDING * abs(value)
        if not fits and np.isfinite(value):  # of a value that is not, another rule speaks
            yield Hit(None, f"{MANIFEST} states another {name} divergence", "hidden_kl", str(value), str(there))


@rule(
    "W-SCORES-STRAY",
    "a shard lies in the folder that the manifest does not list",
    phase="scores-file",
    clause="A scores folder SHOULD hold no shard that its manifest does not list.",
    wants="scores",
    hint="left over from a repair? it is not read",
)
def stray(file: ScoresContext) -> Iterator[Hit]:
    listed = {path.name for path in file.folder.files}
    for name in sorted(path.name for path in file.folder.path.iterdir()):
        if SHARD_NAME.fullmatch(name) and name not in listed:
            yield Hit(None, f"'{name}' is not listed in {MANIFEST}")


@rule(
    "E-SCORES-TOKENIZER",
    "a teacher has another tokenizer than the trace",
    phase="scores-file",
    clause="The teacher's tokenizer fingerprint and `size` MUST be those of the models of the rows it scored.",
    wants="scores",
    hint="to a teacher of another tokenizer the ids are other text; its scores mean nothing",
)
def tokenizer(file: ScoresContext) -> Iterator[Hit]:
    teacher = file.run.teacher
    own = (teacher.tokenizer_fingerprint, teacher.head.size)
    for number, (name, model) in enumerate(file.index.metadata.models.items()):
        theirs = (model.tokenizer.fingerprint, model.tokenizer.size)
        if number in file.models and theirs != own:
            message = f"the trace's model '{name}' has another tokenizer (fingerprint, size)"
            yield Hit(None, message, None, str(theirs), str(own))


@rule(
    "W-SCORES-TEMPERATURE",
    "a teacher's scores are of another temperature than the sampling",
    phase="scores-file",
    clause="Log-probabilities without states or logits SHOULD be of the temperature that the tokens were sampled at.",
    wants="scores",
    unless=lambda file: (
        "states or logits give every temperature" if {"hidden", "full"} & set(file.run.signals) else None
    ),
    hint="a log-probability cannot be converted to another temperature; score with --signal hidden",
)
def temperature(file: ScoresContext) -> Iterator[Hit]:
    if file.tempered:
        yield Hit(
            None, "rows were sampled at another temperature than the teacher's", None, None, f"{file.run.temperature}"
        )


def _partly_known(file: ScoresContext) -> str | None:
    if len(file.rows) < len(file.folder.files):
        return "not every shard could be read"
    known = file.of_every_row or file.views is not None
    return None if known else "which rows have the view needs --views"


@rule(
    "E-SCORES-MISSING",
    "a trained token has no score",
    phase="scores-file",
    clause="Every token to be trained that a teacher can score MUST have a score.",
    wants="scores",
    unless=_partly_known,
    hint="score the same trace again; training refuses this folder",
)
def missing(file: ScoresContext) -> Iterator[Hit]:
    """Hits carry the row of the trace, in its own file."""
    lacking = file.index.trained(file.run.teacher.head.size) - file.covered
    if not file.of_every_row and file.views is not None:
        lacking[file.views.digests_of(file.run.view) == b""] = 0
    for at in np.flatnonzero(lacking > 0):
        yield Hit(int(at), f"{lacking[at]} tokens to be trained have no score in '{file.folder.path}'", "output_index")


def _other_policy(file: ScoresContext) -> str | None:
    if file.run.view != RECORDED:
        return "under a view the teacher read another prompt than the policy"
    return None if file.lags[:, 1].any() else "the teacher's weights sampled no token with a raw log-probability"


@rule(
    "E-SCORES-SHIFT",
    "scores are shifted against the tokens",
    phase="scores-file",
    clause="`logprob` of `output_index` i MUST be of `output_ids[i]`, not of its neighbour.",
    wants="scores",
    unless=_other_policy,
    hint="the usual cause is one shift of labels too many or too few",
)
def shift(file: ScoresContext) -> Iterator[Hit]:
    sums, counts = file.lags.T
    means = np.divide(sums, counts, out=np.full(len(LAGS), np.inf), where=counts > 0)
    best, none = int(means.argmin()), LAGS.index(0)
    if means[none] > file.run.tolerance and means[best] < means[none] / 2:
        message = f"logprob[i] fits the recorded value of output token i{LAGS[best]:+d}"
        yield Hit(None, message, "logprob", f"{means[none]:.4f} nats mean difference", f"{means[best]:.4f} nats")


def _one_folder(file: ScoresContext) -> str | None:
    return None if file.others else "no two folders of one teacher, view and dtype were given"


@rule(
    "E-SCORES-DISAGREE",
    "two scorings by one teacher disagree",
    phase="scores-file",
    clause="Two scores of one token by one teacher under one view MUST agree to the larger `tolerance` (in half "
    "precision: to 1 nat).",
    wants="scores",
    unless=_one_folder,
    hint="a cache that was not reset, dropout left on, or values of the wrong positions",
)
def disagree(file: ScoresContext) -> Iterator[Hit]:
    for other, difference, count in file.differences(HALF_NATS):
        message = f"{count} tokens have another logprob than in '{other}'"
        yield Hit(None, message, "logprob", None, f"{difference:.4f} nats apart at most")


def shown_at(file: ScoresContext, hit: Hit) -> tuple[Place, int | None]:
    """Where a hit of the folder is to be shown: the trace's own row, where it names one."""
    if hit.row is None:
        return file.folder.path, None
    row = file.index.rows[hit.row]
    return file.index.files[row["file"]], int(row["row"])
