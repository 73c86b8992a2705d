"""Running the proxy: from a folder to a recording, and from the last signal to a trace."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn

from memopd_trace import __version__
from memopd_trace.errors import InputError
from memopd_trace.metadata import Gap, Model, Producer, Source, TraceMetadata
from memopd_trace.pieces import Pieces
from memopd_trace.record.modelfolder import read_model, unknown_model
from memopd_trace.record.proxy.app import Proxy
from memopd_trace.record.proxy.dialect import Dialect, dialect_of
from memopd_trace.record.proxy.options import Options
from memopd_trace.record.proxy.recording import Begun, Notice, Recording, begin
from memopd_trace.record.proxy.upstream import Upstream, UpstreamFailed
from memopd_trace.storage import MANIFEST

KEEP_ALIVE = 75  # seconds; longer than clients keep an idle connection, so that none is closed as it is being used
MAX_HEAD = 2**18  # bytes of a request's headers: segments can be many
BACKLOG = 2048  # connections that may wait to be taken
MAX_MODELS_BODY = 2**20


def record(
    folder: Path,
    options: Options,
    *,
    models: list[str] | None = None,
    tokenizer: Path | None = None,
    dialect: Dialect | None = None,
    serve: bool = True,
    notice: Notice = lambda message: None,
    ready: Callable[[str, int], None] = lambda host, port: None,
) -> dict[str, Any]:
    """Record into `folder` until SIGINT or SIGTERM, and return the summary (`Recording.summary`). Without `serve` a
    recording that was killed is only finished. `models` are the names by which the upstream calls its models (asked of
    it where not given), `tokenizer` is their folder; without a `dialect` it is asked what it is. `ready` is told where
    the proxy listens.

    Raises:
        UsageError: as `begin`.
        InputError: the upstream does not tell its models, the address cannot be listened at, the disk took no more, or
            there is nothing to finish.
    """
    if not serve and not (folder.is_dir() and any(folder.iterdir())):
        raise InputError(f"{folder}: no recording to finish", hint="give the folder of the recording that was killed")
    pieces: Pieces | None = None
    first: Model | None = None
    if tokenizer is not None:
        first, pieces = read_model(tokenizer, "")

    def metadata() -> TraceMetadata:
        if first is None:
            notice(
                "no tokenizer: the trace will not say what its ids mean, and cannot be scored; give the model's folder"
            )
        names = models or [str(card["id"]) for card in asyncio.run(_ask_models(options))]
        return make_metadata(names, first, routes=options.expert_routes)

    if serve and dialect is None:
        options = replace(options, dialect=_dialect(options, notice))
    if not serve:
        with begin(folder, metadata, pieces, notice) as begun:
            return asyncio.run(_finish(begun, options))
    with listen(options) as found, begin(folder, metadata, pieces, notice) as begun:
        proxy = Proxy(begun, options)
        server = Server(server_config(proxy, options), ready)
        proxy.failed = server.stop
        server.run(sockets=[found])
    hint = "what was finished is in the journal; run the same command with --finish"
    if proxy.recording.failure is not None:
        raise InputError(f"recording stopped: {proxy.recording.failure}", hint=hint)
    if not (folder / MANIFEST).exists():
        raise InputError(f"{folder}: ended at once, before the trace was whole", hint=hint)
    return proxy.recording.summary()


def listen(options: Options) -> socket.socket:
    """A socket at the proxy's address.

    Raises:
        InputError: another process has it, or it is none of this machine's.
    """
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        found = socket.create_server((options.host, options.port), family=family, backlog=BACKLOG)
        # asyncio sets it on connections of its own sockets only; without it an answer's end waits for the client to
        # acknowledge its head, which takes up to 40 ms. Connections have it from the socket that they came by.
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return found
    except OSError as error:
        raise InputError(
            f"{options.host}:{options.port}: cannot be listened at: {error.strerror or error}",
            hint="is another process there?",
        ) from None


def make_metadata(names: list[str], first: Model | None, *, routes: bool = False) -> TraceMetadata:
    """The metadata of a recording of these models; `first` is what their folder says, `None` where none was given. With
    `routes` rows may have expert routes."""
    known = {name: unknown_model(name) if first is None else first.model_copy(update={"name": name}) for name in names}
    gaps = [] if first is not None else [Gap(code="no_tokenizer", detail="what the ids mean was not told")]
    return TraceMetadata(
        producer=Producer(name="memopd-trace record", version=__version__),
        models=known,
        source=Source(format="openai-api", gaps=gaps),
        required_features=["routed_experts"] if routes else [],
    )


def _dialect(options: Options, notice: Notice) -> Dialect:
    """What the upstream says that it is; one that cannot be asked yet is taken for vLLM."""
    try:
        return dialect_of(asyncio.run(_ask_models(options)))
    except InputError as error:
        notice(f"{error.message}; taken for vLLM (--dialect says otherwise)")
        return "vllm"


async def _ask_models(options: Options) -> list[dict[str, Any]]:
    """The models that the upstream serves: each has an `id`."""
    upstream = Upstream(options)
    way_out = "start it first, or name its models with --model"
    try:
        async with upstream.send("GET", b"/v1/models", [(b"accept", b"application/json")], b"") as response:
            body = await upstream.body(response, MAX_MODELS_BODY)
            cards = [dict(model) for model in json.loads(body)["data"] if model["id"]]
    except UpstreamFailed as failed:
        raise InputError(f"{options.upstream}: {failed.message}", hint=way_out) from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InputError(f"{options.upstream}: does not tell its models", hint=way_out) from None
    finally:
        await upstream.aclose()
    if not cards:
        raise InputError(f"{options.upstream}: serves no model", hint=way_out)
    return cards


async def _finish(begun: Begun, options: Options) -> dict[str, Any]:
    found = Recording(begun, options)
    await found.close()
    if found.failure is not None:
        raise InputError(f"{begun.folder}: {found.failure}", hint="make room and run it again")
    return found.summary()


def server_config(proxy: Proxy, options: Options) -> uvicorn.Config:
    """How uvicorn runs the proxy: silent, and without headers of its own."""
    return uvicorn.Config(
        proxy.app,
        host=options.host,
        port=options.port,
        log_level="critical",
        access_log=False,
        server_header=False,  # the upstream's own go on
        date_header=False,
        proxy_headers=False,
        lifespan="on",
        ws="none",
        limit_concurrency=options.max_calls + options.max_waiting + 256,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE,
        h11_max_incomplete_event_size=MAX_HEAD,
        timeout_graceful_shutdown=max(1, round(options.grace)),
    )


class Server(uvicorn.Server):
    """A server that says where it listens, and that ends without raising the signal that ended it anew."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[str, int], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: Any = None) -> None:
        """Begin to listen."""
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self._ready(host, port)

    def stop(self) -> None:
        """End as by a signal."""
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM end the recording; a second one does not wait for calls that are under way."""
        before = {s: signal.signal(s, self.handle_exit) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
