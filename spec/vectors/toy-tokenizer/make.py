"""Write the toy tokenizer of the vectors: 64 ids, each with a piece that a person can read.

    python make.py > tokenizer.json

Text is the pieces one after the other; there is nothing to learn and no rule to cut text by.
"""

from __future__ import annotations

import json

CONTROLS = ["<|pad|>", "<|bos|>", "<|end|>", "<|start|>", "<|image|>"]  # ids 0 to 4, flagged special
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]  # added pieces that are text all the same
TEXT = [
    *("user", "assistant", "system", "tool", "\n", "\n\n", " ", "?", "=", ".", "1", "11", "2"),
    *("{", "}", '"', ":", ": ", ",", ", ", '\\"', "a", "b", "aa"),
    *("What", " is", " it", "hello", " world", "be", " good", "be good", "yes", "no", "hmm", " so", "sum", "more"),
    *("Memory", "part", " one", " two", "find", "found", "\n ", "é"),
]


def main() -> None:
    """Print the file."""
    pieces = [*CONTROLS, *MARKS, *TEXT]
    pieces += [f"<unused{i}>" for i in range(len(pieces), 64)]
    added = [
        {"id": i, "content": p, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        | {"special": p in CONTROLS}
        for i, p in enumerate([*CONTROLS, *MARKS])
    ]
    document = {
        "version": "1.0",
        "added_tokens": added,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": {p: i for i, p in enumerate(pieces)}, "unk_token": "<unused63>"},
    }
    print(json.dumps(document, ensure_ascii=False, indent=1))


if __name__ == "__main__":
    main()
