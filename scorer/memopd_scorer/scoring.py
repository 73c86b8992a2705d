"""The scoring verb: a trace and a teacher in, a folder of scores out; running it again continues it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

from memopd_scorer.deep import KEPT_BYTES
from memopd_scorer.engines import local, torchrun
from memopd_scorer.job import SHARD_BYTES, SHARD_TOKENS, Job
from memopd_scorer.plan import Layout
from memopd_scorer.run import Order, ScoreResult
from memopd_scorer.teacher import LoadedModel, load
from memopd_trace.errors import MissingExtraError, UsageError
from memopd_trace.places import PathLike, place
from memopd_trace.schema import RECORDED

Engine = Literal["local", "torchrun", "ray"]


def score(
    trace: PathLike,
    teacher: PathLike | LoadedModel,
    out: PathLike,
    *,
    signals: Sequence[str] = ("sampled", "hidden"),
    topk: int = 64,
    student: PathLike | LoadedModel | None = None,
    states: str = "exact",
    layout: Layout = "tree",
    attention: str = "auto",
    dtype: str = "float32",
    device: str = "cpu",
    max_tokens: int = 8192,
    kept_bytes: int = KEPT_BYTES,
    view: str = RECORDED,
    views: PathLike | None = None,
    repair: bool = False,
    shard_bytes: int = SHARD_BYTES,
    shard_tokens: int = SHARD_TOKENS,
    device_map: str | None = None,
    tp_plan: str | None = None,
    engine: Engine = "local",
    workers: int | None = None,
    gpus_per_worker: float | None = None,
    on_pack: Callable[[int, int], None] = lambda done, total: None,
    on_notice: Callable[[str], None] = lambda text: None,
) -> ScoreResult:
    """Score every sampled token of a trace under its own recorded state, or under another `view` of it.

    A view is one of the file `views`, whose rows alone are scored, or `persistent-history`, which is built here.

    The signal `topk` takes the teacher's best ids, or those of a `student`, which is loaded as the teacher is and runs
    the recorded states, whatever the view. `states` is the tier in which the signal `hidden` is stored
    (`memopd_trace.tiers`).

    Finished shards of an earlier, killed run are verified and skipped; a kill loses at most one shard's work, which
    `shard_bytes` of scores or `shard_tokens` packed tokens end. `on_pack(done, total)` follows each pack.
    A history beyond `max_tokens` is run in passes of as many that hand on up to `kept_bytes` of keys and values (where
    that is too little: in one forward, and shared prefixes in every pack). A pack for which the device has no memory is
    run in passes of half the tokens, rows and shards staying as planned; `on_notice` is told.

    `engine` says who scores (`memopd_scorer.engines`): this process; all processes that torchrun started, of which each
    calls this and a `device` "cuda" is the one of its own; or `workers` actors (default 1) of a Ray cluster, each with
    `gpus_per_worker` (default 1 on a CUDA device, else 0). Of a teacher too large for one device, `device_map` ("auto",
    "balanced", …) puts layers on several, and `tp_plan` ("auto") gives each rank of torchrun a part of every layer.

    Raises:
        InputError: an unreadable trace, a teacher or student of another tokenizer, a folder that holds another run,
            views that are not of this trace, an invocation that alone exceeds the device's memory…
        UsageError: an unknown signal, tier, layout, dtype, device, view or engine, an option that the engine does not
            have, a tier without states, a student without the signal `topk`.
        MissingExtraError: the engine `ray` without Ray.
    """
    if engine == "ray":
        trace, out, teacher = _absolute(trace), _absolute(out, new=True), _absolute(teacher)
        views, student = _absolute(views), _absolute(student)
    job = Job(
        trace=os.fspath(trace),
        signals=tuple(dict.fromkeys(signals)),
        topk=topk,
        states=states,
        layout=layout,
        max_tokens=max_tokens,
        kept_bytes=kept_bytes,
        view=view,
        views=None if views is None else os.fspath(views),
        shard_bytes=shard_bytes,
        shard_tokens=shard_tokens,
    )
    _check_engine(engine, [teacher, student], workers, gpus_per_worker, device_map, tp_plan)
    own_device = torchrun.local_device(device) if engine == "torchrun" else device
    how: dict[str, Any] = {"dtype": dtype, "device": own_device, "device_map": device_map, "tp_plan": tp_plan}
    load_with = partial(_model, backend=attention, **how)
    order = Order(
        job=job,
        folder=place(out),
        load_teacher=partial(load_with, teacher),
        load_student=None if student is None else partial(load_with, student),
        repair=repair,
        on_pack=on_pack,
        on_notice=on_notice,
    )
    if engine == "local":
        return local.score(order)
    if engine == "torchrun":
        return torchrun.score(order, as_one=tp_plan is not None)
    gpus = float(device.startswith("cuda")) if gpus_per_worker is None else gpus_per_worker
    return _ray_engine().score(order, workers=workers or 1, gpus=gpus)


def _model(model: PathLike | LoadedModel, **how: Any) -> LoadedModel:
    return model if isinstance(model, LoadedModel) else load(model, **how)


def _check_engine(
    engine: str,
    models: Sequence[PathLike | LoadedModel | None],
    workers: int | None,
    gpus_per_worker: float | None,
    device_map: str | None,
    tp_plan: str | None,
) -> None:
    """Refuse what an engine does not have, by name."""
    if engine not in get_args(Engine):
        raise UsageError(f"unknown engine '{engine}'", hint=f"one of {', '.join(get_args(Engine))}")
    if engine != "ray" and (workers is not None or gpus_per_worker is not None):
        raise UsageError(f"the engine {engine} has no workers of its own", hint="--workers is for --engine ray")
    if engine != "torchrun" and tp_plan is not None:
        raise UsageError("tensor parallelism needs a process for each part of the teacher", hint=torchrun.START)
    if engine == "torchrun" and device_map is not None:
        raise UsageError(
            "under torchrun every process would put a teacher on the same devices",
            hint="--device-map is for one process with several devices; here --tp-plan auto shares one teacher",
        )
    if workers is not None and workers < 1:
        raise UsageError(f"{workers} workers", hint="at least 1")
    if engine == "ray" and any(isinstance(model, LoadedModel) for model in models):
        raise UsageError("Ray's workers load their models themselves", hint="give a folder or a name")


def _absolute(path: Any, *, new: bool = False) -> Any:
    """The same local path for a process that was started elsewhere; what is none (a URI, a hub name) stays."""
    if isinstance(path, LoadedModel | None) or not isinstance(place(path), Path):
        return path
    return os.path.abspath(path) if new or Path(path).exists() else path  # noqa: PTH100 - without ".."


def _ray_engine() -> ModuleType:
    try:
        return importlib.import_module("memopd_scorer.engines.ray_data")
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"the engine ray needs '{error.name}'", hint="pip install 'memopd-trace[ray]', or '.[ray]' in a clone"
        ) from None
