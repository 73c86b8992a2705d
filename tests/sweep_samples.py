"""Real logs of other projects through the converters: what each becomes, checked, as the page docs/samples.md.

The folder of samples is given; it is no part of this project. Of each file in it (with the files that belong to it)
one conversion is made without a tokenizer, and where that gives no rows one with the small tokenizer of the tests,
whose chat template renders tools and reasoning. What must hold of every one is in `faults`.

Run: python tests/sweep_samples.py FOLDER [--write docs/samples.md]   (FOLDER defaults to $MEMOPD_TRACE_SAMPLES)
Exit code 1 when something does not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
from helpers_convert import toy_tokenizer

from memopd_trace import read, validate
from memopd_trace.convert import Conversion, convert
from memopd_trace.convert.formats import find
from memopd_trace.convert.known import KEEPS_FROM, profile_of
from memopd_trace.convert.losses import Tally
from memopd_trace.errors import UsageError

PROFILES = ("core", "lineage", "policy", "train")
LIST = "SOURCES.md"  # of the samples: where each is from
FORMATS = {  # by what a file's path matches first
    "atif/rfc_examples/gemini-cli*": "gemini-cli",
    "atif/rfc_examples/openhands*": "openhands",
    "atif/*.traces.json": "messages",  # Harbor's exported traces
    "atif/*": "atif",
    "claude_code/*": "claude-code",
    "gemini_cli/*": "gemini-cli",
    "hf_messages/*": "messages",
    "inspect_ai/*": "inspect",
    "langfuse/*": "langfuse",
    "mini_swe_agent/*": "mini-swe-agent",
    "nemo_gym/*": "nemo-gym",
    "openai_anthropic_api/anthropic*": "anthropic",
    "openai_anthropic_api/*": "openai",
    "openhands*": "openhands",
    "openinference/*": "openinference",
    "otel_genai/*": "otel",
    "swe_agent/*": "swe-agent",
    "tau2_bench/*": "tau",
    "verifiers_prime_rl/*": "verifiers",
}
TERMINUS = "atif/golden/terminus_2/hello-world-context-summarization"
TOGETHER = {  # a main file, what precedes its name, and the files that belong to it
    f"{TERMINUS}.trajectory.json": (
        "hello-world-context-summarization.",
        [f"{TERMINUS}.trajectory.summarization-1-{part}.json" for part in ("summary", "questions", "answers")],
    ),
    f"{TERMINUS}-linear-history.trajectory.json": (
        "hello-world-context-summarization-linear-history.",
        [f"{TERMINUS}-linear-history.trajectory.cont-1.json"],
    ),
    "verifiers_prime_rl/verifiers_legacy_eval/results.jsonl": (
        "",
        ["verifiers_prime_rl/verifiers_legacy_eval/metadata.json"],
    ),
}
REFUSED = {  # and why that is right
    "gemini_cli/agent-resume-session.json": "recorded answers of the API: no prompt, no session",
    "openhands_sdk/base_state.json": "the settings of a conversation, without its events",
    "otel_genai/otel_genai_tool_execution_span.json": "a tool's span: no model was called",
    "otel_genai/schema-gen-ai-input-messages.json": "a JSON schema, no log",
    "otel_genai/schema-gen-ai-output-messages.json": "a JSON schema, no log",
    "tau2_bench/results.json": "a voice run's settings: its simulations are not in the file",
}
EXACT_ROWS = {  # calls whose ids the log holds: fewer rows than these would be a loss
    "nemo_gym/vllm_two_call_token_ids_real.json": 2,
    f"{TERMINUS}.trajectory.json": 10,
    "atif/golden/terminus_2/hello-world-timeout.trajectory.json": 3,
}
IDS = re.compile(r"(prompt|completion|generation|output|response)_token_ids|token_ids|output_ids")
LOGPROBS = ("logprobs", "generation_log_probs")
RENDERING = "the rendered "  # told of every text sample: the tests' tokenizer is not the model's


@dataclass(slots=True)
class Sample:
    """One file with what belongs to it, and what became of it."""

    name: str
    format: str
    origin: str
    files: list[str]
    made: Conversion
    with_tokenizer: bool
    sources: Counter[str] = field(default_factory=Counter)
    relations: Counter[str] = field(default_factory=Counter)
    clean: str | None = None  # the strictest profile of which it breaks no rule
    faults: list[str] = field(default_factory=list)


def sweep(samples: Path, scratch: Path) -> list[Sample]:
    """Every file under `samples`, in order; `scratch` is an empty folder."""
    names = sorted(f.relative_to(samples).as_posix() for f in samples.rglob("*") if f.is_file() and f.name != LIST)
    inner = {other for _, others in TOGETHER.values() for other in others}
    tokenizer = toy_tokenizer(scratch / "tokenizer")
    origins = _origins(samples / LIST)
    found = []
    for number, name in enumerate(n for n in names if n not in inner):
        folder = scratch / str(number)
        folder.mkdir()
        prefix, others = TOGETHER.get(name, ("", []))
        files = [name, *others]
        for file in files:  # under the names by which they call each other, and without this machine's paths
            shutil.copyfile(samples / file, folder / Path(file).name.removeprefix(prefix))
        with contextlib.chdir(folder):
            found.append(_converted(name, files, tokenizer, next((o for p, o in origins if fnmatch(name, p)), "")))
    return found


def _converted(name: str, files: list[str], tokenizer: Path, origin: str) -> Sample:
    format = next((f for pattern, f in FORMATS.items() if fnmatch(name, pattern)), None)
    if format is None:
        raise SystemExit(f"{name}: name its format in FORMATS")
    inputs = sorted(p.name for p in Path().iterdir())
    made = None
    with contextlib.suppress(UsageError):  # a text format says at once that it needs a tokenizer
        made = convert(format, inputs, "without.parquet")
    alone = made is not None and made.trace is not None
    if not alone:
        if made is None:
            assert find(format).exactness == "text", format
        made = convert(format, inputs, "with.parquet", tokenizer=tokenizer)
    assert made is not None
    sample = Sample(name, format, origin, files, made, with_tokenizer=not alone)
    if made.trace is not None:
        _look(sample, made.trace, inputs)
    sample.faults += _faults(sample)
    return sample


def _look(sample: Sample, trace: Path, inputs: list[str]) -> None:
    """Read the trace back, and hold it to each profile."""
    exact: set[tuple[str, bytes]] = set()
    for row in read(trace).iter_invocations():
        sample.sources[row.token_source or "engine"] += 1
        kind = f"{row.relation} {row.rewrite_kind} ({row.rewrite_evidence})" if row.rewrite_kind else row.relation
        sample.relations[str(kind)] += 1
        if row.token_source == "engine":
            exact |= {("prompt", row.prompt_ids.tobytes()), ("output", row.output_ids.tobytes())}
            if row.output_logprobs is not None:
                exact.add(("logprobs", row.output_logprobs.filled(np.nan).tobytes()))
    logged = {ids for file in inputs if file.endswith((".json", ".jsonl")) for ids in _numbers_of(Path(file))}
    if exact != logged:
        sample.faults.append(f"{len(logged - exact)} lists of numbers are lost, {len(exact - logged)} are new")
    sample.clean = strictest(trace)


def strictest(trace: Path) -> str | None:
    """The strictest profile of which a trace breaks no rule."""
    clean = None
    for profile in PROFILES:
        if validate(trace, profile).errors:
            break
        clean = profile
    return clean


def _numbers_of(file: Path) -> Iterator[tuple[str, bytes]]:
    """Every list of token ids, and of their log-probabilities, in a file, by its field's name alone."""
    text = file.read_text(encoding="utf-8")
    try:
        values = [json.loads(text)]
    except ValueError:
        values = [json.loads(line) for line in text.splitlines() if line.strip()]
    while values:
        value = values.pop()
        if isinstance(value, list):
            values += value
        for name, inner in value.items() if isinstance(value, dict) else ():
            numbers = isinstance(inner, list) and inner and isinstance(inner[0], int | float)
            if numbers and name in LOGPROBS:
                yield "logprobs", np.array(inner, np.float32).tobytes()
            elif numbers and IDS.fullmatch(name):
                yield "prompt" if name.startswith("prompt") else "output", np.array(inner, np.int32).tobytes()
            else:
                values.append(inner)


def _faults(sample: Sample) -> list[str]:
    """What must hold of every sample and does not."""
    made, found = sample.made, []
    if not made.losses.balanced():
        found.append("something vanished uncounted")
    if sample.name in REFUSED:
        if made.exit_code() != 3 or made.trace is not None:
            found.append("converts, and was held to be no log of calls")
        elif len(_refusal(made).splitlines()) != 1:
            found.append("is refused without one clear line")
        return found
    if made.exit_code() != 0:
        return [*found, f"exit code {made.exit_code()}: {_refusal(made)}"]
    allowed = profile_of(made.losses)
    if sample.clean != allowed:
        found.append(f"clean under {sample.clean}; its gaps say {allowed}")
    if made.report is None or not made.report.clean:
        found.append("its own report is not clean")
    if PROFILES.index(sample.clean or "core") < PROFILES.index("lineage"):
        found.append("not even clean under lineage")
    if sample.sources["engine"] != EXACT_ROWS.get(sample.name, 0):
        found.append(f"{sample.sources['engine']} exact rows, expected {EXACT_ROWS.get(sample.name, 0)}")
    if sample.with_tokenizer and sample.sources["engine"]:
        found.append("exact ids needed a tokenizer")
    return found


def _refusal(made: Conversion) -> str:
    losses = made.losses
    if losses.issues:
        return losses.issues[0].reason
    return "; ".join([*losses.dropped_records, *losses.dropped_calls]) or "nothing in it"


def _origins(listing: Path) -> list[tuple[str, str]]:
    """(pattern of names, repository) as the samples' own list tells it; the pattern with a folder in front."""
    folder, found = "", []
    for line in listing.read_text(encoding="utf-8").splitlines() if listing.is_file() else ():
        if line.startswith("## "):
            folder = line[3:].strip()
        elif match := re.match(r"- (\S+) \| (?:repo=(\S+)|same repo)", line):
            found.append((f"{folder}/{match[1].replace('**', '*')}", match[2] or found[-1][1]))
    return found


HEAD = """# What real logs become

*Generated by `make samples SAMPLES=FOLDER`; not written by hand.*

{files} files that other projects publish, each through the converter of its format. They are no part of this project;
the repository that each is from is named, and `MEMOPD_TRACE_SAMPLES=FOLDER pytest tests/convert/test_samples.py`
compares this page with a fresh run.

- **ids**: `exact` are the engine's own: ids and log-probabilities are bit for bit those in the file, converted without
  a tokenizer. `encoded` are made from text: without `--tokenizer` such a file is refused; the tokenizer here is the
  small one of the tests. That it counts other tokens than the log is left out below.
- **lineage**: how many calls are of which relation; rewrites with their kind, and whether the log tells it
  (`explicit`) or the ids do (`inferred`).
- **clean under**: the strictest profile under which the trace has no finding, and what of the next one's needs the log
  does not tell. It is always the profile that the gaps allow, and never less than `lineage`.
- **lost**: calls and records that are no rows, what rows lost, and gaps of this file beyond those of its format.

{converted} converted, {rows} rows, {exact} of them exact. {refused} refused. The ids in ATIF's golden files are made up
by a server for their project's own tests, and so are the rewrites that they show.

| file | from | format | rows | ids | lineage | clean under | lost |
|---|---|---|---|---|---|---|---|
"""
TAIL = """
## Refused

Nothing is written, and the exit code is 3.

| file | from | format | the converter says | what it is |
|---|---|---|---|---|
"""


def page(samples: list[Sample]) -> str:
    """The page, as Markdown."""
    good = [s for s in samples if s.made.trace is not None]
    bad = [s for s in samples if s.made.trace is None]
    text = HEAD.format(
        files=sum(len(s.files) for s in samples),
        converted=sum(len(s.files) for s in good),
        refused=sum(len(s.files) for s in bad),
        rows=sum(s.made.losses.rows for s in good),
        exact=sum(s.sources["engine"] for s in good),
    )
    text += "".join(_line(s) for s in good) + TAIL
    for s in bad:
        text += f"| {_files(s)} | {s.origin} | `{s.format}` | {_cell(_refusal(s.made))} | {REFUSED.get(s.name, '')} |\n"
    return text


def _line(sample: Sample) -> str:
    losses = sample.made.losses
    ids = ", ".join(w for source, w in (("engine", "exact"), ("retokenized", "encoded")) if sample.sources[source])
    lineage = ", ".join(f"{number} {name}" for name, number in sample.relations.items())
    clean = f"`{sample.clean}`"
    if sample.clean != PROFILES[-1]:
        following = PROFILES[PROFILES.index(sample.clean or "core") + 1]
        lacks = [f"`{code}`" for code in KEEPS_FROM.get(following, ()) if code in losses.gaps]
        clean += f"; for `{following}`: {', '.join(lacks)}"
    told = [*_counted(losses.dropped_records), *_counted(losses.dropped_calls), *_counted(losses.degraded)]
    usual = {*find(sample.format).unsaid, *(code for codes in KEEPS_FROM.values() for code in codes), "no_tokenizer"}
    told += [f"`{code}`" for code in losses.gaps if code not in usual]
    cells = (_files(sample), sample.origin, f"`{sample.format}`", str(losses.rows), ids, lineage, clean)
    return "| " + " | ".join(cells) + f" | {_cell('; '.join(told))} |\n"


def _files(sample: Sample) -> str:
    names = [f"`{sample.files[0]}`", *(f"`{Path(f).name}`" for f in sample.files[1:])]
    return ", ".join(names)


def _counted(tally: Tally) -> list[str]:
    return [f"{count.number} {reason}" for reason, count in tally.items() if not reason.startswith(RENDERING)]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> int:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=os.environ.get("MEMOPD_TRACE_SAMPLES"))
    parser.add_argument("--write", type=Path, help="where to write the page, which is printed otherwise")
    options = parser.parse_args()
    if options.folder is None or not Path(options.folder).is_dir():
        print("no folder of samples: give one, or set MEMOPD_TRACE_SAMPLES", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        found = sweep(Path(options.folder).resolve(), Path(scratch))
        text = page(found)
    if options.write:
        options.write.write_text(text, encoding="utf-8")
    else:
        print(text, end="")
    for sample in found:
        for fault in sample.faults:
            print(f"{sample.name}: {fault}", file=sys.stderr)
    return int(any(s.faults for s in found))


if __name__ == "__main__":
    sys.exit(main())
