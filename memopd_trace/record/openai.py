"""Record the calls of an `openai` client, sync or async, streamed or not, without anything in between.

    client.chat.completions.create(...) -> its HTTP client (ours) -> asks for ids too -> the server
                                        <- the answer as it would have been <- ids taken, and hidden again

It stands where the client sends its requests, so that `create`, `parse`, `stream` and raw responses are all recorded,
and every attempt of a call that is sent again. What it asks for, reads and hides is the proxy's (`record.proxy`:
`request`, `answer`, `dialect`). Nothing of a request or an answer is kept but ids, log-probabilities and settings.

Needs `openai` on httpx2 (3.0 and later).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeVar

import httpx2

from memopd_trace.errors import UsageError
from memopd_trace.invocation import Sampling
from memopd_trace.pieces import Pieces
from memopd_trace.record.hook import Hook, Into, now
from memopd_trace.record.proxy.answer import NO_IDS, UPSTREAM_ERROR, Answer, for_client
from memopd_trace.record.proxy.dialect import Dialect
from memopd_trace.record.proxy.request import Kind, Request, read_request
from memopd_trace.record.proxy.sse import Event, Splitter
from memopd_trace.record.recorder import TraceRecorder

PATHS: dict[str, Kind] = {"/chat/completions": "chat", "/completions": "completions"}
FOREIGN_FIELDS = (400, 422)  # what a server answers that does not know the fields that were added
CHANGED = ("content-length", "content-encoding", "transfer-encoding")
ClientT = TypeVar("ClientT")


class OpenAIHook(Hook):
    """Records the calls of the clients that it wraps.

    `logprob_kind`, `defaults`, `dialect` and `expert_routes` say of the server what `memopd-trace record` is told by
    its options.

    Example:
        with TraceRecorder("trace.parquet", metadata, profile="policy") as recorder:
            hook = OpenAIHook(recorder, logprob_kind="raw")
            client = hook.wrap(OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="-"))
            episode = recorder.episode("q1/0", group_id="q1", policy_version=0)
            with hook.into(episode):
                answer = client.chat.completions.create(model="m", messages=messages)
            episode.finish(reward=1.0)
    """

    def __init__(
        self,
        recorder: TraceRecorder,
        *,
        logprob_kind: str = "unknown",
        defaults: Sampling | None = None,
        dialect: Dialect = "vllm",
        expert_routes: bool = False,
        pieces: Pieces | None = None,
        notice: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(recorder, pieces=pieces, notice=notice)
        self.logprob_kind, self.defaults = logprob_kind, defaults
        self.dialect, self.expert_routes = dialect, expert_routes

    def wrap(self, client: ClientT) -> ClientT:
        """A copy of a client whose calls are recorded; it sends through the same connections.

        Raises:
            UsageError: it is no `OpenAI` or `AsyncOpenAI`, or sends by something else than httpx2.
        """
        inner = getattr(client, "_client", None)
        if isinstance(inner, httpx2.Client):
            return client.copy(http_client=_Client(self, inner))  # type: ignore[attr-defined]
        if isinstance(inner, httpx2.AsyncClient):
            return client.copy(http_client=_AsyncClient(self, inner))  # type: ignore[attr-defined]
        raise UsageError(
            f"{type(client).__name__}: no client of openai that sends by httpx2",
            hint="openai 3.0 or later, without a legacy http_client",
        )


class _Exchange:
    """One request, from what it asks to the end of its answer."""

    def __init__(self, hook: OpenAIHook, into: Into, sent: httpx2.Request, read: Request) -> None:
        self._hook, self._into, self._read = hook, into, read
        self._turn = into.turn(0, 1)
        self.sent, self.amended = sent, _with_body(sent, read.amended or b"")
        self._answer, self._splitter = Answer(read), Splitter()
        self._started, self._done = now(), False
        count = sent.headers.get("x-stainless-retry-count", "")
        self._retry = int(count[:4]) if count.isdecimal() else 0

    @contextlib.contextmanager
    def unanswered(self) -> Iterator[None]:
        """Wait for the answer: a call that fails, or that its caller cancels, is counted."""
        try:
            yield
        except BaseException:
            self._skip("no whole answer")
            raise

    def foreign(self, status: int) -> None:
        """The server took the request only as it was."""
        self._skip(NO_IDS if status < 300 else f"upstream answered {status}")

    def is_stream(self, response: httpx2.Response) -> bool:
        """Whether an answer is a stream of events."""
        return response.is_success and response.headers.get("content-type", "").startswith("text/event-stream")

    def whole(self, response: httpx2.Response) -> httpx2.Response:
        """The answer that the client gets, of one that was read."""
        data = response.content
        if response.is_success:
            data = self._document(data)
        else:
            self._skip(f"upstream answered {response.status_code}")
        made = self.response(response, content=data)
        with contextlib.suppress(RuntimeError):  # a transport of the caller's own may not measure it
            made.elapsed = response.elapsed
        return made

    def response(self, response: httpx2.Response, **body: Any) -> httpx2.Response:
        """The same answer with another body, to the request that the client made."""
        headers = [(k, v) for k, v in response.headers.multi_items() if k.lower() not in CHANGED]
        made = httpx2.Response(
            response.status_code, headers=headers, request=self.sent, extensions=response.extensions, **body
        )
        made.history = response.history
        return made

    def feed(self, chunk: bytes) -> bytes:
        """What the client gets of a stream's next bytes.

        Raises:
            ValueError: an event that is too large.
        """
        return b"".join(map(self._event, self._splitter.feed(chunk)))

    def end(self) -> bytes:
        """What the client gets behind the last event."""
        self.give_up("the upstream broke off")  # unless the end has come
        return self._splitter.rest

    def give_up(self, reason: str) -> None:
        """The call ends here: what was sampled so far is an attempt that nobody accepted."""
        if self._done:
            return
        if self._answer.why_not == UPSTREAM_ERROR:  # what came in front of it was sampled all the same
            self._answer.why_not = None
        with self._hook.answered():
            self._take(reason, broken_off=True)
        self._done = True

    def _read_on(self, document: Any, *, whole: bool) -> None:
        """Take in a whole answer, or the next event of one."""
        understood = False
        with self._hook.answered():
            self._answer.feed(document)
            if whole:
                self._take(NO_IDS)
            elif self._answer.finished:
                self._finish()
            understood = True
        self._done |= not understood  # of an answer that is not understood nothing is made

    def _document(self, data: bytes) -> bytes:
        try:
            text = data.decode()
            document = json.loads(text)
        except (ValueError, RecursionError):
            self._skip("unreadable answer")
            return data
        self._read_on(document, whole=True)
        shown = for_client(text, document, self._read)
        return data if shown is None else shown.encode()

    def _event(self, event: Event) -> bytes:
        if event.data is None:
            return event.raw
        if event.data.strip() == b"[DONE]":
            self._finish()
            return event.raw
        try:
            text = event.data.decode()
            document = json.loads(text)
        except (ValueError, RecursionError):
            self._skip("unreadable answer")
            return event.raw
        self._read_on(document, whole=False)
        shown = for_client(text, document, self._read)
        return b"" if shown is None else event.with_data(shown.encode())

    def _finish(self) -> None:
        if self._answer.why_not == UPSTREAM_ERROR:
            self.give_up(UPSTREAM_ERROR)
        else:
            self._take(NO_IDS)

    def _take(self, reason: str, *, broken_off: bool = False) -> None:
        if self._done:
            return
        outputs = self._answer.sampled(broken_off=broken_off)
        if not outputs:
            self._skip(reason if broken_off else self._answer.why_not or reason)
            return
        self._done = True
        named, mine = (self._answer.model, self._read.model), self._turn.episode.model_id
        self._hook.take(
            self._into,
            self._turn,
            outputs,
            sampling=self._read.sampling,
            logprob_kind=self._hook.logprob_kind,
            started=self._started,
            response_id=self._answer.id,
            model=mine if mine in named else next(filter(None, named), "?"),
            policy_version=self._answer.weight_version,
            accepted=False if broken_off else None,
            retry=self._retry,
            extra=self._read.extra,
        )

    def _skip(self, reason: str) -> None:
        if not self._done:
            self._done = True
            self._hook.skip(reason)


def _exchange(hook: OpenAIHook, request: httpx2.Request) -> _Exchange | None:
    """The exchange that a request begins; `None` where it is not to be recorded."""
    kind = next((k for end, k in PATHS.items() if request.url.path.endswith(end)), None)
    if kind is None or request.method != "POST":
        return None
    into = hook.current()
    if into is None:
        return None
    read = read_request(kind, request.content, hook.defaults, hook.dialect, hook.expert_routes)
    if read.amended is None:
        hook.skip(read.why_not or "malformed request")
        return None
    return _Exchange(hook, into, request, read)


def _with_body(request: httpx2.Request, body: bytes) -> httpx2.Request:
    headers = [(k, v) for k, v in request.headers.multi_items() if k.lower() not in CHANGED]
    return httpx2.Request(request.method, request.url, headers=headers, content=body, extensions=request.extensions)


class _Client(httpx2.Client):
    """Sends by another client, whose settings hold."""

    def __init__(self, hook: OpenAIHook, inner: httpx2.Client) -> None:
        super().__init__(transport=httpx2.BaseTransport(), timeout=inner.timeout)
        self._hook, self._inner = hook, inner

    @property
    def is_closed(self) -> bool:
        return self._inner.is_closed

    def build_request(self, *args: Any, **kwargs: Any) -> httpx2.Request:
        return self._inner.build_request(*args, **kwargs)

    def close(self) -> None:
        self._inner.close()

    def send(self, request: httpx2.Request, *, stream: bool = False, **kwargs: Any) -> httpx2.Response:
        exchange = _exchange(self._hook, request)
        if exchange is None:
            return self._inner.send(request, stream=stream, **kwargs)
        with exchange.unanswered():
            response = self._inner.send(exchange.amended, stream=True, **kwargs)
        if response.status_code in FOREIGN_FIELDS:  # perhaps for what was added
            response.close()
            response = self._inner.send(request, stream=stream, **kwargs)
            exchange.foreign(response.status_code)
            return response
        if exchange.is_stream(response):
            made = exchange.response(response, stream=_Stream(exchange, response))
            if not stream:
                made.read()
            return made
        try:
            with exchange.unanswered():
                response.read()
        finally:
            response.close()
        return exchange.whole(response)


class _Stream(httpx2.SyncByteStream):
    def __init__(self, exchange: _Exchange, response: httpx2.Response) -> None:
        self._exchange, self._response = exchange, response

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._response.iter_bytes():
            yield self._exchange.feed(chunk)
        yield self._exchange.end()

    def close(self) -> None:
        self._exchange.give_up("given up by the client")
        self._response.close()


class _AsyncClient(httpx2.AsyncClient):
    """Sends by another client, whose settings hold."""

    def __init__(self, hook: OpenAIHook, inner: httpx2.AsyncClient) -> None:
        super().__init__(transport=httpx2.AsyncBaseTransport(), timeout=inner.timeout)
        self._hook, self._inner = hook, inner

    @property
    def is_closed(self) -> bool:
        return self._inner.is_closed

    def build_request(self, *args: Any, **kwargs: Any) -> httpx2.Request:
        return self._inner.build_request(*args, **kwargs)

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def send(self, request: httpx2.Request, *, stream: bool = False, **kwargs: Any) -> httpx2.Response:
        exchange = _exchange(self._hook, request)
        if exchange is None:
            return await self._inner.send(request, stream=stream, **kwargs)
        with exchange.unanswered():
            response = await self._inner.send(exchange.amended, stream=True, **kwargs)
        if response.status_code in FOREIGN_FIELDS:  # perhaps for what was added
            await response.aclose()
            response = await self._inner.send(request, stream=stream, **kwargs)
            exchange.foreign(response.status_code)
            return response
        if exchange.is_stream(response):
            made = exchange.response(response, stream=_AsyncStream(exchange, response))
            if not stream:
                await made.aread()
            return made
        try:
            with exchange.unanswered():
                await response.aread()
        finally:
            await response.aclose()
        return exchange.whole(response)


class _AsyncStream(httpx2.AsyncByteStream):
    def __init__(self, exchange: _Exchange, response: httpx2.Response) -> None:
        self._exchange, self._response = exchange, response

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._response.aiter_bytes():
            yield self._exchange.feed(chunk)
        yield self._exchange.end()

    async def aclose(self) -> None:
        self._exchange.give_up("given up by the client")
        await self._response.aclose()
