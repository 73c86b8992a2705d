"""memopd-trace: record, check, score and train on the model calls of agents that rewrite their context."""

__version__ = "0.1.0"

from memopd_trace.invocation import Episode, Invocation, Media, Sampling, Segment
from memopd_trace.metadata import TraceMetadata
from memopd_trace.report import Finding, Report
from memopd_trace.storage import TraceReader, TraceWriter, read, write
from memopd_trace.validate import validate

__all__ = [
    "Episode",
    "Finding",
    "Invocation",
    "Media",
    "Report",
    "Sampling",
    "Segment",
    "TraceMetadata",
    "TraceReader",
    "TraceWriter",
    "__version__",
    "read",
    "validate",
    "write",
]
