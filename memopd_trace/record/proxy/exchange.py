"""The client's side of one request: its body read within limits, its answer sent at its pace or until it is gone."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Coroutine
from typing import Any

from starlette.types import Receive, Scope, Send

from memopd_trace.record.proxy.headers import RawHeaders

PIECE = 256 * 1024  # bytes that a client has to take in time


class Refused(Exception):
    """The client gets an error instead of an answer."""

    def __init__(self, status: int, message: str, code: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code
        self.message = f"{message} ({hint})" if hint else message


class ClientGone(Exception):
    """The client closed the connection, or took nothing for too long."""


class BrokenOff(Exception):
    """An answer that has begun cannot be ended: the connection is closed, so that it does not look whole."""


class Client:
    """The client's side of one exchange. `stall` is how many seconds it may take to send or to accept a chunk."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, stall: float) -> None:
        self._receive, self._send, self._stall = receive, send, stall
        self.method: str = scope["method"]
        self.headers: RawHeaders = list(scope["headers"])
        self.target: bytes = scope.get("raw_path") or scope["path"].encode()
        if scope.get("query_string"):
            self.target += b"?" + scope["query_string"]
        self.started = False

    def header(self, name: bytes) -> str:
        """The first value of a header; empty where it is not there."""
        return next((v.decode("latin-1") for n, v in self.headers if n.lower() == name), "")

    async def body(self, limit: int) -> bytes:
        """The request's body.

        Raises:
            Refused: it exceeds `limit` bytes (413), or nothing of it came for `stall` seconds (408).
            ClientGone: the client went away meanwhile.
        """
        too_large = Refused(413, f"the body exceeds {limit} bytes", "body_too_large")
        stated = self.header(b"content-length")
        if stated.isdecimal() and int(stated[:20]) > limit:
            raise too_large
        parts, size = [], 0
        while True:
            try:
                async with asyncio.timeout(self._stall):
                    message = await self._receive()
            except TimeoutError:
                raise Refused(408, f"nothing of the body came for {self._stall:g} s", "body_stalled") from None
            if message["type"] == "http.disconnect":
                raise ClientGone
            size += len(message.get("body", b""))
            if size > limit:
                raise too_large
            parts.append(message.get("body", b""))
            if not message.get("more_body"):
                return b"".join(parts)

    async def start(self, status: int, headers: RawHeaders) -> None:
        """Send the answer's head."""
        self.started = True
        await self._put({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes, *, more: bool = True) -> None:
        """Send some of the answer's body.

        Raises:
            ClientGone: it was not taken in time.
        """
        for start in range(0, len(data), PIECE):
            piece = data[start : start + PIECE]
            await self._put(
                {"type": "http.response.body", "body": piece, "more_body": more or start + PIECE < len(data)}
            )
        if not data:
            await self._put({"type": "http.response.body", "body": b"", "more_body": more})

    async def whole(self, status: int, headers: RawHeaders, body: bytes) -> None:
        """Send a whole answer."""
        kept = [(name, value) for name, value in headers if name.lower() != b"content-length"]
        await self.start(status, [*kept, (b"content-length", str(len(body)).encode())])
        await self.write(body, more=False)

    async def json(self, status: int, document: Any) -> None:
        """Send a JSON document."""
        body = json.dumps(document, separators=(",", ":")).encode()
        await self.whole(status, [(b"content-type", b"application/json")], body)

    async def refuse(self, refused: Refused) -> None:
        """Send an error in the form that OpenAI's clients read."""
        error = {"message": f"memopd-trace: {refused.message}", "type": "proxy_error", "code": refused.code}
        await self.json(refused.status, {"error": error})

    async def until_gone(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`, and cancel it when the client goes away. The body must have been read."""
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(self._gone())
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not task.done():
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _put(self, message: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(self._stall):
                await self._send(message)
        except (TimeoutError, OSError):
            raise ClientGone from None
