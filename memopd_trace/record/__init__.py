"""The recorder: write a trace from a running agent. `memopd_trace.record.transformers` (needs torch) samples for it.

Hooks on it are `record.openai` (a client), `record.vllm` (an `LLM`) and `record.generation` (a Transformers model).
"""

from __future__ import annotations

from memopd_trace.record.prompt import Prompt
from memopd_trace.record.recorder import EpisodeRecorder, TraceRecorder

__all__ = ["EpisodeRecorder", "Prompt", "TraceRecorder"]
