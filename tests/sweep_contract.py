"""Measure the scorer's exactness contract: models x layouts x backends x dtypes, and write docs/contract.md.

Every cell is |Δlogprob| in nats of all sampled tokens of the same episodes. Oracle: each invocation alone, unpadded,
through the plain model; in float64 for float64, else in float32. What half precision loses is compared with what it
loses one invocation at a time.

Run: python tests/sweep_contract.py [MODEL…] [--write docs/contract.md]   (about 10 minutes on one core)
Exit code 1 when a cell is beyond its limit.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from helpers_attention import model_of
from helpers_scorer import SIZE, compute_in_float64, growing_episode, memory_episode, sibling, tiny_model
from transformers import AutoTokenizer, CohereConfig, CohereForCausalLM, PreTrainedModel

from memopd_scorer.attention.forward import iter_states_at_rows
from memopd_scorer.head import head_of
from memopd_scorer.plan import Pack, plan
from memopd_scorer.probing import Capability, probe
from memopd_scorer.teacher import load_model, quiet_transformers
from memopd_trace.invocation import Episode, Invocation
from memopd_trainer.models import export_gguf, find_demo_gguf

HALF = (torch.bfloat16, torch.float16)
DTYPES = (torch.float64, torch.float32, *HALF)
BACKENDS = ("sdpa", "eager", "flex")
# What a pack without sharing asks of a backend is a part of what a tree does.
LAYOUTS = {"tree": BACKENDS, "tree in passes": BACKENDS, "packed": BACKENDS[:2], "single": BACKENDS[:1]}
REAL_LAYOUTS = {"tree": BACKENDS[:2], "tree in passes": BACKENDS[:1]}
MAX_TOKENS, PASS_TOKENS = 600, 128
REAL = "SmolLM2-135M"
# Largest |Δlogprob| in nats.
TOY_LIMITS = {torch.float64: 1e-10, torch.float32: 1e-5}
REAL_LIMIT = 1e-4
HALF_RATIO = 1.1  # of the mean |Δlogprob| one invocation at a time
# Rounding breaks a router's tie now and then, packed or not, and such a token weighs more than hundreds of others: in
# half precision, means of models with experts are taken over so many times the tokens.
EXPERTS_TIMES = 8
Key = tuple[str, int]


def cohere() -> PreTrainedModel:
    """A scale behind the head, layer norms with a mean, attention beside the feed-forward."""
    torch.manual_seed(0)
    config = CohereConfig(
        vocab_size=104, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, logit_scale=0.5, initializer_range=0.2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return CohereForCausalLM(config)


TOYS: dict[str, Callable[[], PreTrainedModel]] = {
    "Llama: grouped queries": lambda: tiny_model("llama"),
    "Qwen3: norms of queries and keys": lambda: tiny_model("qwen3"),
    "Gemma 2: windows, softcap of scores and of logits": lambda: model_of("softcap", torch.float32),
    "Gemma 3: windows, softcap of logits": lambda: tiny_model("gemma3"),
    "GPT-2: learned positions": lambda: tiny_model("gpt2"),
    "GPT-OSS: sinks, windows, experts": lambda: model_of("sinks", torch.float32),
    "Mixtral: experts": lambda: tiny_model("mixtral"),
    "Cohere: scale of logits": cohere,
    "Mamba: a recurrent state": lambda: tiny_model("mamba"),
}


@dataclass(frozen=True, slots=True)
class Errors:
    """|Δlogprob| over all sampled tokens, in nats."""

    largest: float
    p999: float
    mean: float

    @classmethod
    def of(cls, found: dict[Key, torch.Tensor], oracle: dict[Key, torch.Tensor]) -> Errors:
        """Compare the same tokens; a token that is missing or not finite is no small error."""
        assert found.keys() == oracle.keys()
        delta = torch.cat([(found[k].double() - oracle[k].double()).abs() for k in oracle]).nan_to_num(torch.inf)
        return cls(float(delta.max()), float(delta.quantile(0.999)), float(delta.mean()))


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement; `alone` is what the same dtype loses one invocation at a time through the plain model (half
    precision only). `reason` says why there is none."""

    model: str
    layout: str
    backend: str
    dtype: torch.dtype
    errors: Errors | None
    alone: Errors | None = None
    reason: str = ""

    @property
    def ratio(self) -> float | None:
        """The mean error over that of one invocation at a time."""
        return None if self.errors is None or self.alone is None else self.errors.mean / self.alone.mean

    @property
    def holds(self) -> bool:
        """Is the cell within the contract?"""
        if self.errors is None:
            return True
        if self.ratio is not None:
            return self.ratio <= HALF_RATIO
        return self.errors.largest <= limit_of(self.model, self.dtype)


def limit_of(model: str, dtype: torch.dtype) -> float:
    """Largest |Δlogprob| in nats, for float64 and float32."""
    return REAL_LIMIT if model == REAL else TOY_LIMITS[dtype]


def toy_episodes(times: int = 1) -> list[Episode]:
    """A thousand sampled tokens in few invocations: rewritten memories, a sibling of one, growing histories; so many
    times."""
    rng, found = np.random.default_rng(0), list[Episode]()
    for time in range(times):
        rollouts = [_rollout(rng, f"m{time}.{i}", group=f"g{time}") for i in range(3)]
        found += [*rollouts, sibling(rollouts[0], f"sibling{time}"), growing_episode(rng, f"grow{time}")]
    return found


def _rollout(rng: np.random.Generator, name: str, group: str) -> Episode:
    """As `memory_episode`, with a task of 60 tokens and outputs of 80."""
    task = np.random.default_rng(7).integers(3, SIZE, 60)
    short, memory, rows = memory_episode(rng, name, group=group), np.empty(0, np.int32), []
    for row in short:
        prompt = np.r_[task, memory, row.prompt_ids[-10:]].astype(np.int32)
        output = rng.integers(3, SIZE, 80).astype(np.int32)
        rows.append(row.replace(prompt_ids=prompt, output_ids=output, segments=None))
        memory = output
    return Episode(name, tuple(rows))


def build(name: str, dtype: torch.dtype) -> PreTrainedModel:
    """One of TOYS, from the same weights in every dtype."""
    model = TOYS[name]().to(dtype).eval()
    if dtype == torch.float64:
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("batched_mm")  # the default, grouped products, knows no float64
        compute_in_float64(model)
    return model


@contextmanager
def _softmax_as_wide_as(dtype: torch.dtype) -> Iterator[None]:
    """Plain attention takes its softmax in float32 whatever the dtype; in float64 it would be no oracle."""

    def softmax(scores: torch.Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> torch.Tensor:
        return scores.softmax(dim)

    if dtype != torch.float64:
        yield
        return
    with patch.object(torch.nn.functional, "softmax", softmax):
        yield


@torch.no_grad()
def logprobs(
    model: PreTrainedModel, size: int, packs: Sequence[Pack], backend: str, pass_tokens: int | None = None
) -> dict[Key, torch.Tensor]:
    """Log-probabilities (nats) of every sampled token, by invocation."""
    head, found = head_of(model, size), {}
    for pack in packs:
        with _softmax_as_wide_as(model.dtype):
            parts = iter_states_at_rows(model, pack, backend=backend, pass_tokens=pass_tokens)  # type: ignore[arg-type]
            hidden_RD = torch.cat(list(parts))
        rows, ids = (torch.from_numpy(a.astype(np.int64)) for a in (pack.target_row_M, pack.target_ids_M))
        logprob_M = head.logits(hidden_RD).log_softmax(-1)[rows, ids]
        for number, state in enumerate(pack.states):
            found[state.episode_id, state.invocation_index] = logprob_M[torch.from_numpy(pack.target_state_M == number)]
    return found


def measure(
    name: str,
    models: Callable[[torch.dtype], PreTrainedModel],
    data: list[Episode],
    size: int,
    *,
    dtypes: Sequence[torch.dtype] = DTYPES,
    backends: Sequence[str] = BACKENDS,
    layouts: Mapping[str, Sequence[str]] = LAYOUTS,
    max_tokens: int = MAX_TOKENS,
) -> Iterator[Cell]:
    """All cells of a model."""
    packs = {
        layout: list(plan(data, layout=layout.split()[0], max_tokens=max_tokens))  # type: ignore[arg-type]
        for layout in LAYOUTS
    }
    assert sum(len(p) for p in packs["tree"]) < 0.8 * sum(p.logical_tokens for p in packs["tree"]), "little was shared"
    assert any(len(p) > PASS_TOKENS for p in packs["tree in passes"]), "no pack took two passes"
    assert any(len(p.states) > 1 for p in packs["packed"]), "no boundary between states was seen"

    @cache
    def alone(dtype: torch.dtype) -> dict[Key, torch.Tensor]:
        return logprobs(models(dtype), size, packs["single"], "native")

    for dtype in dtypes:
        model = models(dtype)
        oracle = alone(dtype if dtype == torch.float64 else torch.float32)
        lost = Errors.of(alone(dtype), oracle) if dtype in HALF else None
        capability: Capability = probe(model, head_of(model, size))
        if capability.layout == "single":
            yield Cell(name, "single", "native", dtype, Errors.of(alone(dtype), oracle), lost, capability.reason)
            continue
        for layout, offered in layouts.items():
            for backend in (b for b in offered if b in backends):
                part = PASS_TOKENS if layout == "tree in passes" else None
                found = logprobs(model, size, packs[layout], backend, part)
                yield Cell(name, layout, backend, dtype, Errors.of(found, oracle), lost)


def measure_toy(
    name: str, dtypes: Sequence[torch.dtype] = DTYPES, backends: Sequence[str] = BACKENDS
) -> Iterator[Cell]:
    """All cells of one of TOYS."""
    models = cache(lambda dtype: build(name, dtype))
    for dtype in dtypes:
        data = toy_episodes(EXPERTS_TIMES if "experts" in name and dtype in HALF else 1)
        yield from measure(name, models, data, SIZE, dtypes=[dtype], backends=backends)


def measure_real(folder: Path, dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16)) -> Iterator[Cell]:
    """All cells of SmolLM2 on real text."""
    models = cache(lambda dtype: load_model(folder, dtype=name_of(dtype)))
    data = real_episodes(AutoTokenizer.from_pretrained(folder))
    return measure(REAL, models, data, 49152, dtypes=dtypes, layouts=REAL_LAYOUTS, max_tokens=2048)


TASK = "You keep a short memory of a long report. Question: which of the three harbours was closed in the spring?"
PARTS = (
    "The northern harbour was dredged in January, and the ferries were sent to the old quay for eleven days.",
    "In March ice came down the river. The pilots refused to work at night and the eastern harbour lay empty.",
    "By May the eastern harbour was open again; the southern one had never closed, whatever the papers wrote.",
)
MEMORIES = (
    " The eastern harbour was closed for ice, and the pilots would not work at night until the thaw had come.",
    " Nothing about the spring so far; the northern quay was dredged, which took the ferries eleven days in all.",
    " I am sorry, but as a harbour master I cannot say which of the three it was before the papers have come.",
    " Dredging in January, ice in March, open again by May: so it must have been the eastern one, not the south.",
)


def real_episodes(tokenizer: object) -> list[Episode]:
    """Rollouts of a memory agent over real text: the same task and parts, different memories."""

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])  # type: ignore[operator]

    found = []
    for number, memory in enumerate(MEMORIES):
        rows = []
        for index, part in enumerate(PARTS):
            row = Invocation(
                episode_id=f"rollout {number}",
                invocation_index=index,
                model_id="m",
                prompt_ids=[*ids(TASK), *(ids(memory) if index else []), *ids(part)],
                output_ids=[*ids(memory), 2],
                group_id="g",
            )
            rows.append(row)
        found.append(Episode(f"rollout {number}", tuple(rows)))
    return found


def to_json(cell: Cell) -> str:
    """One line, for `--rows`."""
    return json.dumps({**asdict(cell), "dtype": name_of(cell.dtype)})


def from_json(line: str) -> Cell:
    """The cell of `to_json`."""
    fields = json.loads(line)
    for name in ("errors", "alone"):
        fields[name] = None if fields[name] is None else Errors(**fields[name])
    return Cell(**{**fields, "dtype": getattr(torch, fields["dtype"])})


def name_of(dtype: torch.dtype) -> str:
    """`torch.float32` -> `float32`."""
    return str(dtype).removeprefix("torch.")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=[*TOYS, REAL], help="default: all")
    parser.add_argument("--smollm2", type=Path, default=Path(".cache/smollm2"), help="folder of the real model")
    parser.add_argument("--write", type=Path, help="write the page here")
    parser.add_argument("--rows", type=Path, help="keep the cells of finished models in this file, and go on from it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.smollm2.exists():
        options.smollm2.parent.mkdir(exist_ok=True)
        export_gguf(find_demo_gguf(), options.smollm2)
    cells = [from_json(line) for line in options.rows.read_text().splitlines()] if _is_file(options.rows) else []
    for name in options.models:
        if any(cell.model == name for cell in cells):
            continue
        with quiet_transformers(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = list(measure_real(options.smollm2) if name == REAL else measure_toy(name))
        for cell in found:
            shown = "" if cell.ratio is None else f" {cell.ratio:.3f} times alone"
            print(
                f"{name:50} {cell.layout:14} {cell.backend:6} {name_of(cell.dtype):8} {cell.errors}{shown}", flush=True
            )
        if options.rows:
            with options.rows.open("a") as file:
                file.writelines(to_json(cell) + "\n" for cell in found)
        cells += found
    if options.write:
        from contract_page import to_markdown

        cells = [cell for name in options.models for cell in cells if cell.model == name]
        real = real_episodes(AutoTokenizer.from_pretrained(options.smollm2))
        options.write.write_text(to_markdown(cells, _targets(toy_episodes()), _targets(real)))
    return int(not all(cell.holds for cell in cells))


def _targets(episodes: Sequence[Episode]) -> int:
    return sum(len(invocation.output_ids) for episode in episodes for invocation in episode)


def _is_file(path: Path | None) -> bool:
    return path is not None and path.is_file()


if __name__ == "__main__":
    sys.exit(main())
