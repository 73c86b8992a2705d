"""The way to the upstream: one request at a time through a pool of connections, without any memory between them.

A transport is used and not a client: a client keeps cookies and would send one caller's to the next, follows redirects,
and reads proxies and passwords from the environment.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2

from memopd_trace.record.proxy.headers import RawHeaders
from memopd_trace.record.proxy.options import Options

CONNECT_SECONDS = 10.0
TRIES = 3
IDLE_SECONDS = 2.0  # shorter than servers keep an idle connection, so that none is used as it is being closed


class UpstreamFailed(Exception):
    """No answer: `status` is what the client gets (502 or 504)."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class Busy(Exception):
    """As many calls as may are waiting already."""


class Upstream:
    """The server behind the proxy."""

    def __init__(self, options: Options) -> None:
        self._url = httpx2.URL(options.upstream)
        self._base = self._url.raw_path.rstrip(b"/")
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=IDLE_SECONDS)
        self._transport = httpx2.AsyncHTTPTransport(limits=limits, trust_env=False)
        self._timeout = {"connect": CONNECT_SECONDS, "read": options.timeout, "write": options.timeout, "pool": None}
        self._seconds = options.timeout
        self._slots = asyncio.Semaphore(options.max_calls)
        self._waiting, self._max_waiting = 0, options.max_waiting

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """One of the calls that may run at once.

        Raises:
            Busy: too many wait for one.
        """
        if self._slots.locked() and self._waiting >= self._max_waiting:
            raise Busy
        self._waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._slots.release()

    @asynccontextmanager
    async def send(
        self, method: str, target: bytes, headers: RawHeaders, body: bytes, *, again: bool = False
    ) -> AsyncIterator[httpx2.Response]:
        """Send a request (`target` is its path and query, as they came) and give the answer's head; leaving closes it.
        With `again` it is sent up to `TRIES` times where the connection was closed before an answer began: a server may
        close one that it takes for idle just then. A model call has no effect that could then happen twice.

        Raises:
            UpstreamFailed: no answer, or one that is no HTTP.
        """
        request = httpx2.Request(
            method,
            self._url.copy_with(raw_path=self._base + target),
            headers=headers,
            content=body if body or method not in ("GET", "HEAD", "OPTIONS", "DELETE") else None,
            extensions={"timeout": self._timeout},
        )
        response = await self._answer(request, TRIES if again else 1)
        try:
            yield response
        finally:
            await response.aclose()

    async def _answer(self, request: httpx2.Request, tries: int) -> httpx2.Response:
        while True:
            tries -= 1
            try:
                return await self._transport.handle_async_request(request)
            except httpx2.TransportError as error:
                closed = isinstance(error, httpx2.ReadError | httpx2.WriteError | httpx2.RemoteProtocolError)
                if not (closed and tries):
                    raise self._failed(error) from None

    async def chunks(self, response: httpx2.Response) -> AsyncIterator[bytes]:
        """The bytes of an answer's body as they come, in whatever encoding they are.

        Raises:
            UpstreamFailed: it broke off.
        """
        stream = response.stream
        assert isinstance(stream, httpx2.AsyncByteStream)
        try:
            async for chunk in stream:
                yield chunk
        except httpx2.TransportError as error:
            raise self._failed(error) from None

    async def body(self, response: httpx2.Response, limit: int) -> bytes:
        """The whole body.

        Raises:
            UpstreamFailed: it broke off, or exceeds `limit` bytes.
        """
        parts, size = [], 0
        async for chunk in self.chunks(response):
            size += len(chunk)
            if size > limit:
                raise UpstreamFailed(502, f"the upstream's answer exceeds {limit} bytes")
            parts.append(chunk)
        return b"".join(parts)

    async def aclose(self) -> None:
        """Close all connections."""
        await self._transport.aclose()

    def _failed(self, error: httpx2.TransportError) -> UpstreamFailed:
        if isinstance(error, httpx2.ConnectTimeout | httpx2.ConnectError):
            return UpstreamFailed(502, "the upstream cannot be reached")
        if isinstance(error, httpx2.TimeoutException):
            return UpstreamFailed(504, f"the upstream sent nothing for {self._seconds:g} s")
        return UpstreamFailed(502, f"the upstream broke off ({type(error).__name__})")
