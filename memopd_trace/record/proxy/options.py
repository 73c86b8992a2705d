"""What a recording proxy is told: where it listens, whom it asks, how much it takes, and what it cannot see itself."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from memopd_trace.errors import UsageError
from memopd_trace.invocation import Sampling
from memopd_trace.record.proxy.dialect import Dialect

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Sizes are bytes, times seconds.

    `upstream` has no path behind which `/v1/...` stands (see `upstream_url`). `episode` takes the calls that name none;
    without it they are not recorded. `dialect` is how the upstream is asked for ids, `expert_routes` whether for these
    too. `logprob_kind` is what the upstream's log-probabilities are; `defaults` how it samples where a request is
    silent (`None` = not known). `max_calls` run at the upstream at once, `max_waiting` more wait for it. `timeout`
    bounds the wait for the upstream's next byte, `stall` that for a client to take one. An episode of which nothing was
    heard for `idle` is ended (0 = never).
    """

    upstream: str
    host: str = "127.0.0.1"
    port: int = 8100
    episode: str | None = None
    dialect: Dialect = "vllm"
    expert_routes: bool = False
    logprob_kind: str = "unknown"
    defaults: Sampling | None = None
    policy_version: int | None = None
    require_ids: bool = False
    max_calls: int = 256
    max_waiting: int = 1024
    max_body: int = 64 * MIB
    max_answer: int = 256 * MIB
    timeout: float = 600.0
    stall: float = 120.0
    idle: float = 4 * 3600.0
    grace: float = 10.0
    part_rows: int = 4096
    part_seconds: float = 60.0


def upstream_url(text: str) -> str:
    """The upstream's address as requests are put behind it: without a trailing `/v1` or slash.

    Raises:
        UsageError: no http(s) address, or one that holds a password, a query or a fragment.
    """
    try:
        url = urlsplit(text)
        fits = url.scheme in ("http", "https") and url.hostname and url.port != 0
    except ValueError:
        fits = False
    if not fits:
        raise UsageError(f"upstream '{text}': no http address", hint="for example http://127.0.0.1:8000")
    if url.username is not None or url.password is not None:
        raise UsageError("upstream: holds a user name or password", hint="clients send their key; it is passed on")
    if url.query or url.fragment:
        raise UsageError(f"upstream '{text}': a query or fragment", hint="give the address alone")
    return f"{url.scheme}://{url.netloc}{url.path.rstrip('/').removesuffix('/v1')}"


def listen_address(text: str) -> tuple[str, int]:
    """`HOST:PORT` (or `[v6]:PORT`, or `:PORT` on 127.0.0.1) as a pair.

    Raises:
        UsageError: it is none.
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
    if not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"listen '{text}': no HOST:PORT", hint="for example 127.0.0.1:8100")
    return host, int(port)
