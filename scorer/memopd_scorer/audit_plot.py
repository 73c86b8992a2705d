"""An audit as a figure: how large the differences are, and where in an episode they lie.

Needs the extra `[plot]` (matplotlib). Two views differ by colour (blue and vermilion, which colour-blind people tell
apart), by line style and by marker.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from memopd_scorer.audit_report import AuditReport, Tables
from memopd_scorer.audit_tally import BINS_PER_DECADE, LOWEST, Comparison, upper_edges
from memopd_trace.disk import atomic_file
from memopd_trace.errors import UsageError

FORMATS = (".png", ".svg")
STYLES = (("#0072B2", "-", "o"), ("#D55E00", "--", "s"))
BINS_A_BAR = BINS_PER_DECADE // 10


def check_format(path: Path) -> None:
    """Refuse a name that does not end in `.png` or `.svg`.

    Raises:
        UsageError: naming what is drawn.
    """
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"{path}: a plot is a .png or an .svg file", hint="give it such a name")


def plot(report: AuditReport, path: Path) -> None:
    """Write the figure, whole or not at all.

    Raises:
        UsageError: a name that `check_format` refuses, or a folder.
    """
    check_format(path)
    kind = path.suffix.lower()[1:]
    metadata = {"Date": None} if kind == "svg" else {"Software": None}
    with atomic_file(path) as out:
        draw(report).savefig(out, format=kind, dpi=150, metadata=metadata)


def draw(report: AuditReport) -> Figure:
    """Three panels: the histogram of |Δ|, and |Δ| by output index and by lineage depth (median and p99)."""
    figure = Figure(figsize=(13, 4.5), layout="constrained")
    sizes, by_index, by_depth = figure.subplots(1, 3)
    tables = {"recorded state": report.tables}
    if report.other_view is not None:
        tables[report.other_view.view] = report.other_view.tables
    for name, counts, style in zip(tables, report.histograms.values(), STYLES, strict=False):
        _draw_histogram(sizes, counts, name, style)
        for axes, table in ((by_index, "by_output_index"), (by_depth, "by_depth")):
            _draw_table(axes, tables[name][table], _labels(tables, table), name, style)
    sizes.set(xscale="log", xlabel="|Δ log-probability| (nats)", ylabel="tokens (share)", title="Size of differences")
    by_index.set(xlabel="index of the token in its output", title="By output index")
    by_depth.set(xlabel="ancestors of the invocation", title="By lineage depth")
    for axes in (by_index, by_depth):
        axes.set(yscale="log", ylabel="|Δ log-probability| (nats)")
    for axes in (sizes, by_index, by_depth):
        axes.grid(alpha=0.3)
    sizes.legend(fontsize="small")
    figure.legend(*by_index.get_legend_handles_labels(), loc="outside lower right", ncols=4, fontsize="small")
    figure.suptitle(f"Audit of {report.recorded.tokens:,} tokens with {report.model}")
    return figure


def _draw_histogram(axes: Axes, counts_B: np.ndarray, name: str, style: tuple[str, str, str]) -> None:
    """Ten steps a decade; what is below the first bin stands in the lowest one, where no difference is zero."""
    inner = counts_B[1:-1].reshape(-1, BINS_A_BAR).sum(1).astype(float)
    inner[0] += counts_B[0]
    inner[-1] += counts_B[-1]
    edges = np.r_[10.0**LOWEST, upper_edges()[BINS_A_BAR:-1:BINS_A_BAR]]
    color, line, _ = style
    axes.stairs(inner / max(1, counts_B.sum()), edges, color=color, linestyle=line, label=name)


def _labels(tables: dict[str, Tables], table: str) -> list[str]:
    """The labels of all views, in the order of the first that has them."""
    return list(dict.fromkeys(label for of_view in tables.values() for label in of_view[table]))


def _draw_table(
    axes: Axes, found: dict[str, Comparison], labels: list[str], name: str, style: tuple[str, str, str]
) -> None:
    color, line, marker = style
    places = [i for i, label in enumerate(labels) if label in found]
    rows = [found[labels[i]] for i in places]
    axes.plot(places, [c.p99_abs for c in rows], color=color, linestyle=line, marker=marker, label=f"{name}, p99")
    medians = [c.p50_abs for c in rows]
    axes.plot(places, medians, color=color, linestyle=":", marker=marker, fillstyle="none", label=f"{name}, median")
    step = -(-len(labels) // 12)
    axes.set_xticks(range(0, len(labels), step), labels[::step], rotation=45, ha="right", fontsize="small")
