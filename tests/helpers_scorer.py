"""Tiny random models, saved as folders with a toy tokenizer, and agents' episodes to score with them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import MethodType

import numpy as np
import torch
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.models import WordLevel
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from memopd_scorer.attention import states_at_rows
from memopd_scorer.head import head_of
from memopd_scorer.plan import Pack, plan
from memopd_trace.invocation import Episode, Invocation, Segment
from memopd_trace.metadata import Model, Producer, Tokenizer, TraceMetadata
from memopd_trace.record.fingerprint import tokenizer_fingerprint
from memopd_trace.storage import write

SIZE = 97  # the toy tokenizer's ids
PADDED = 104  # the models' vocabulary
PACKABLE = ("llama", "qwen3", "gemma3", "gpt2", "mixtral")


def tiny_model(
    kind: str = "llama",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    *,
    vocab_size: int = PADDED,
    layers: int = 3,
) -> PreTrainedModel:
    """A random model of about 50k weights; windows are shorter than the sequences the tests use."""
    torch.manual_seed(seed)
    shape = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,  # wide enough that attention is far from uniform
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    gemma = {"head_dim": 8, "sliding_window": 8, "final_logit_softcapping": 10.0}
    windows = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    model: PreTrainedModel
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**shape))
    elif kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=8))
    elif kind == "gemma3":
        model = Gemma3ForCausalLM(Gemma3TextConfig(**shape, **gemma, layer_types=windows))
    elif kind == "gpt2":
        config = GPT2Config(vocab_size=vocab_size, n_embd=32, n_layer=layers, n_head=4, n_positions=512)
        config.initializer_range = 0.2
        model = GPT2LMHeadModel(config)
    elif kind == "mixtral":
        model = MixtralForCausalLM(MixtralConfig(**shape, num_local_experts=4, num_experts_per_tok=2))
        if dtype == torch.float64:
            model.set_experts_implementation("batched_mm")  # the default, grouped products, knows no float64
    elif kind == "mamba":
        model = MambaForCausalLM(
            MambaConfig(vocab_size=PADDED, hidden_size=32, num_hidden_layers=2, state_size=8, use_mambapy=False)
        )
    else:
        raise ValueError(kind)
    model = model.to(dtype).eval()
    if dtype == torch.float64:
        compute_in_float64(model)
    return model


def compute_in_float64(model: PreTrainedModel) -> None:
    """Transformers' RMS norms and routers round to float32 whatever the dtype; without that, float64 means float64."""

    def forward(module: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
        weight = 1.0 + module.weight if type(module).__name__.startswith("Gemma") else module.weight
        return weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + eps)

    def route(module: torch.nn.Module, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = hidden.reshape(-1, module.hidden_dim) @ module.weight.T
        scores, experts = logits.softmax(-1).topk(module.top_k, dim=-1)
        return logits, scores / scores.sum(-1, keepdim=True), experts

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = MethodType(forward, module)
        elif type(module).__name__ == "MixtralTopKRouter":
            module.forward = MethodType(route, module)


def save_model(model: PreTrainedModel, folder: Path, words: str = "w") -> Path:
    """Save a model with a toy tokenizer of SIZE words; other `words` make another tokenizer."""
    model.save_pretrained(folder)
    raw = RawTokenizer(WordLevel({f"{words}{i}": i for i in range(SIZE)}, unk_token=f"{words}0"))
    PreTrainedTokenizerFast(tokenizer_object=raw).save_pretrained(folder)
    return folder


def metadata_for(folder: Path, features: tuple[str, ...] = ()) -> TraceMetadata:
    """Trace metadata whose one model, `m`, has the tokenizer of `folder`."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    described = Tokenizer(
        fingerprint=tokenizer_fingerprint(tokenizer), size=SIZE, vocab_size=PADDED, eos_ids=[2], stop_ids=[2]
    )
    return TraceMetadata(
        producer=Producer(name="tests"),
        models={"m": Model(name="toy", tokenizer=described)},
        required_features=list(features),
    )


def memory_episode(rng: np.random.Generator, name: str, calls: int = 4, group: str | None = None) -> Episode:
    """An agent that rewrites its memory: task + memory (a copy of its last output) + new chunk -> output."""
    task = np.random.default_rng(7).integers(3, SIZE, 12)
    rows: list[Invocation] = []
    for index in range(calls):
        memory = rows[-1].output_ids if rows else np.empty(0, np.int32)
        chunk = np.r_[rng.integers(3, SIZE, 9), index % 3 + 3]
        segments = [Segment(0, 12, "task"), Segment(12 + len(memory), 22 + len(memory), "observation")]
        if rows:
            source = len(rows[-1].prompt_ids)
            segments.insert(1, Segment(12, 12 + len(memory), "memory", index - 1, source))
        rows.append(
            Invocation(
                episode_id=name,
                invocation_index=index,
                model_id="m",
                prompt_ids=np.r_[task, memory, chunk],
                output_ids=rng.integers(3, SIZE, 6),
                parent_index=index - 1 if rows else None,
                relation="rewrite" if rows else "root",
                rewrite_kind="memory" if rows else None,
                rewrite_evidence="explicit" if rows else None,
                segments=segments,
                group_id=group,
                token_source="engine",
            )
        )
    return Episode(name, tuple(rows))


def growing_episode(rng: np.random.Generator, name: str, calls: int = 4) -> Episode:
    """An agent whose history only grows: each prompt extends the last sequence; the last call forks off the first."""
    rows: list[Invocation] = []
    history = rng.integers(3, SIZE, 20)
    for index in range(calls):
        output = rng.integers(3, SIZE, 5)
        prompt = history
        parent, relation = (index - 1, "extend") if rows else (None, "root")
        if index == calls - 1 and calls > 2:
            prompt, parent, relation = np.r_[rows[0].prompt_ids[:15], rng.integers(3, SIZE, 3)], 0, "fork"
        rows.append(
            Invocation(
                episode_id=name,
                invocation_index=index,
                model_id="m",
                prompt_ids=prompt,
                output_ids=output,
                parent_index=parent,
                relation=relation,
                token_source="engine",
            )
        )
        history = np.r_[prompt, output, rng.integers(3, SIZE, 4)]
    return Episode(name, tuple(rows))


def tree_episodes(seed: int = 0) -> list[Episode]:
    """Three rollouts of one group, a sibling of the first, and a growing history: forks, and forks of forks."""
    rng = np.random.default_rng(seed)
    rollouts = [memory_episode(rng, f"m{i}", group="g") for i in range(3)]
    return [*rollouts, sibling(rollouts[0], "sibling"), growing_episode(rng, "grow")]


def by_state(pack: Pack, hidden_RD: torch.Tensor) -> dict[tuple[str, int], torch.Tensor]:
    """hidden_MD of every invocation of a pack, in the order of its targets."""
    rows = [torch.from_numpy(pack.target_row_M[pack.target_state_M == n]).long() for n in range(len(pack.states))]
    return {state.key: hidden_RD[r] for state, r in zip(pack.states, rows, strict=True)}


def oracle(model: PreTrainedModel, episodes: list[Episode]) -> Iterator[tuple[Pack, torch.Tensor]]:
    """Each invocation alone, unpadded, through the plain model: (its pack, hidden_RD)."""
    for pack in plan(episodes, layout="single"):
        with torch.no_grad():  # never across a yield: two of these in turns would leave gradients off
            hidden_RD = states_at_rows(model, pack, backend="native")
        yield pack, hidden_RD


def oracle_logprobs(model: PreTrainedModel, episodes: list[Episode]) -> dict[tuple[str, int], np.ndarray]:
    """The oracle's log-probabilities of every output token, by (episode_id, invocation_index)."""
    head = head_of(model, SIZE)
    found = {}
    for pack, hidden in oracle(model, episodes):
        logprobs = head.logits(hidden).log_softmax(-1).detach()
        rows, ids = (torch.from_numpy(a.astype(np.int64)) for a in (pack.target_row_M, pack.target_ids_M))
        state = pack.states[0]
        found[state.episode_id, state.invocation_index] = logprobs[rows, ids].numpy()
    return found


def write_trace(path: Path, folder: Path, model: PreTrainedModel, episodes: list[Episode]) -> Path:
    """Write episodes with the model's own raw log-probabilities as recorded behaviour."""
    logprobs = oracle_logprobs(model, episodes)
    rows = [
        i.replace(output_logprobs=logprobs[i.key].astype(np.float32), logprob_kind="raw", policy_version=0)
        for e in episodes
        for i in e
    ]
    write(path, metadata_for(folder), rows)
    return path


def sibling(episode: Episode, name: str) -> Episode:
    """Another rollout of the first call: the same prompt, other tokens, so that one row predicts two targets."""
    first = episode.invocations[0]
    output = (first.output_ids - 3 + 1) % (SIZE - 3) + 3
    return Episode(name, (first.replace(episode_id=name, output_ids=output),))
