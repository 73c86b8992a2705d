"""Results as text: one table a workload, for a terminal or between the markers of a page."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memopd_trace.disk import atomic_file

RESULTS = Path(__file__).parents[1] / "results"
HEADER = (
    "contender", "executed", "seconds (least-most)", "times the tree's", "utilisation", "peak MiB", "bytes/target",
    "max error",
)  # fmt: skip


def save(path: Path, result: dict[str, Any]) -> Path:
    """Write a result as JSON."""
    path.parent.mkdir(exist_ok=True)
    with atomic_file(path) as out:
        out.write(json.dumps(result, indent=1, allow_nan=True).encode() + b"\n")
    return path


def add_options(parser: argparse.ArgumentParser, name: str) -> None:
    """`--json` keeps what a script has measured, and `--write` puts what was kept into a page."""
    file = RESULTS / f"{name}.json"
    parser.add_argument("--json", type=Path, nargs="?", const=file, help="keep the result, in benchmarks/results")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="only put the kept result into a page")


def kept(name: str) -> dict[str, Any]:
    """What a script has kept last.

    Raises:
        SystemExit: nothing.
    """
    file = RESULTS / f"{name}.json"
    if not file.exists():
        sys.exit(f"{file} is not there: measure with --json first")
    result: dict[str, Any] = json.loads(file.read_text())
    return result


def as_text(result: dict[str, Any]) -> Iterator[str]:
    """Lines for a terminal."""
    yield from _about(result)
    for name, work in result["workloads"].items():
        yield f"\n{_title(name, work)}"
        yield from aligned(rows_of(work, result["tolerance"]))
    yield ""
    yield from _goal_lines(result)


def as_markdown(result: dict[str, Any]) -> Iterator[str]:
    """Lines for a page."""
    for line in _about(result):
        yield line
        yield ""
    for name, work in result["workloads"].items():
        yield f"**{_title(name, work)}**"
        yield ""
        header, *rows = rows_of(work, result["tolerance"])
        yield from markdown([header, *rows])
        yield ""
    yield from (f"- {line}" for line in _goal_lines(result))


def rows_of(work: dict[str, Any], tolerance: float | None) -> list[list[str]]:
    """The cells of one workload's table, header first; an error beyond `tolerance` nats is marked."""
    rows = [list(HEADER)]
    for name, row in work["contenders"].items():
        if "failed" in row:
            rows.append([name, row["failed"], *[""] * (len(HEADER) - 2)])
            continue
        right = tolerance is None or row["max_error"] <= tolerance
        rows.append(
            [
                name,
                f"{row['executed']:,}",
                spread(row["seconds"]),
                spread(row["times_tree"]) if "times_tree" in row else "",
                f"{row['utilisation']:.0%}",
                "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:,.0f}",
                f"{row['bytes_per_target']:,.0f}",
                f"{row['max_error']:.1e}" + ("" if right else " WRONG"),
            ]
        )
    return rows


def spread(values: dict[str, float]) -> str:
    """Median and range."""
    digits = 2 if values["median"] >= 0.1 else 4
    return f"{values['median']:.{digits}f} ({values['least']:.{digits}f}-{values['largest']:.{digits}f})"


def aligned(rows: list[list[str]]) -> Iterator[str]:
    """Columns under each other, the first to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *rest in rows:
        cells = [first.ljust(widths[0]), *(c.rjust(w) for c, w in zip(rest, widths[1:], strict=True))]
        yield "  ".join(cells).rstrip()


def markdown(rows: list[list[str]]) -> Iterator[str]:
    """A table of a page; the first row is its header."""
    header, *body = rows
    yield f"| {' | '.join(header)} |"
    yield f"|---|{'---:|' * (len(header) - 1)}"
    yield from (f"| {' | '.join(row)} |" for row in body)


def write_between_markers(page: Path, name: str, lines: Iterator[str]) -> None:
    """Replace what stands between `<!-- NAME -->` and `<!-- /NAME -->`.

    Raises:
        ValueError: the page has no such markers.
    """
    text = page.read_text(encoding="utf-8")
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"{page} has no markers {begin} and {end}")
    before, rest = text.split(begin)
    _, after = rest.split(end)
    with atomic_file(page) as out:
        out.write(f"{before}{begin}\n{chr(10).join(lines).strip()}\n{end}{after}".encode())


def _about(result: dict[str, Any]) -> Iterator[str]:
    machine = result["machine"]
    where = machine.get("device", machine["processor"])
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    yield (
        f"{result['model']}; {where}, {machine['threads']} threads; {machine['date']}; {result['repeats']} rounds, "
        f"scale {result['scale']:g}; "
        f"GEMM peak {result['gemm_flops'] / 1e9:,.0f} GFLOP/s"
    )
    yield versions
    for name, reason in result["absent"].items():
        yield f"absent: {name}: {reason}"


def _title(name: str, work: dict[str, Any]) -> str:
    return (
        f"{name}: {work['invocations']} invocations, {work['logical']:,} logical tokens, {work['executed']:,} in the "
        f"tree ({work['sharing']:.2f}x), {work['targets']:,} targets"
    )


def _goal_lines(result: dict[str, Any]) -> Iterator[str]:
    for goal in result["goals"]:
        mark = "reached" if goal["value"] >= goal["wanted"] else "missed"
        bound = f" (estimated FLOPs alone would give {goal['bound']:.2f})" if "bound" in goal else ""
        yield f"goal {mark}: {goal['name']}: {goal['value']:.2f}, wanted {goal['wanted']:.2f}{bound}"
