"""The model that benchmarks run where none is given: the demo's SmolLM2, unpacked once."""

from __future__ import annotations

from pathlib import Path

from memopd_trainer.models import export_gguf, find_demo_gguf

DEFAULT_MODEL = Path(__file__).parents[2] / ".cache" / "smollm2"


def unpack(folder: Path) -> None:
    """Put the demo's model there if nothing is."""
    if not folder.exists():
        folder.parent.mkdir(exist_ok=True)
        export_gguf(find_demo_gguf(), folder)
