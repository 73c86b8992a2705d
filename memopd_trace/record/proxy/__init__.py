"""A recording proxy for OpenAI-compatible servers that tell the ids of their tokens (vLLM): `memopd-trace record`.

    request -> asked with ids (`request`) -> upstream -> ids taken (`answer`), and hidden again (`jsonedit`)
                                                      -> journal on disk (`journal`, `records`)
                                                      -> the end of the answer goes to the client (`calls`)
    records -> rows (`rows`, `episodes`) -> parts of the trace (`recording`)

Needs the extra `record`: starlette, uvicorn, httpx2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memopd_trace.record.proxy.options import Options, listen_address, upstream_url

if TYPE_CHECKING:
    from memopd_trace.record.proxy.server import record

__all__ = ["Options", "listen_address", "record", "upstream_url"]


def __getattr__(name: str) -> Any:
    """`record` needs the extra; what hooks share with the proxy does not."""
    if name != "record":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from memopd_trace.record.proxy.server import record

    return record
