"""The proxy's routes: two that are recorded, three of its own, and all others as they are."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from memopd_trace.errors import UsageError
from memopd_trace.record.proxy.calls import Call, pass_through
from memopd_trace.record.proxy.exchange import BrokenOff, Client, ClientGone, Refused
from memopd_trace.record.proxy.headers import MAX_LABEL, read_labels
from memopd_trace.record.proxy.journal import JournalFailed
from memopd_trace.record.proxy.options import Options
from memopd_trace.record.proxy.recording import Begun, Recording
from memopd_trace.record.proxy.records import EndRecord, Record, RewardRecord
from memopd_trace.record.proxy.request import Kind
from memopd_trace.record.proxy.upstream import Upstream, UpstreamFailed

RECORDED: dict[str, Kind] = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}
CANCEL_SECONDS = 5.0
MAX_OWN_BODY = 64 * 1024
OWN_KEYS = {"episode", "reward", "rewards", "response_id", "truncated"}


class Proxy:
    """The proxy as a Starlette application (`app`); its lifespan opens and closes the recording. `failed` is called
    when the disk takes no more."""

    def __init__(self, begun: Begun, options: Options) -> None:
        self._begun, self.options = begun, options
        self._active: set[asyncio.Task[Any]] = set()
        self.failed: Callable[[], None] = lambda: None
        self.recording: Recording
        self._upstream: Upstream
        routes = [Route(path, _Endpoint(self, self._call)) for path in RECORDED]
        routes += [
            Route("/memopd/reward", _Endpoint(self, self._reward)),
            Route("/memopd/end", _Endpoint(self, self._end)),
            Route("/memopd/status", _Endpoint(self, self._status)),
            Route("/{path:path}", _Endpoint(self, self._other)),
        ]
        self.app = Starlette(routes=routes, lifespan=self._lifespan)
        self.app.router.redirect_slashes = False

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self.recording, self._upstream = Recording(self._begun, self.options), Upstream(self.options)
        try:
            yield
        finally:
            if self._active:  # what the server has just cancelled still has to say what became of it
                await asyncio.wait(self._active, timeout=CANCEL_SECONDS)
            await self._upstream.aclose()
            await self.recording.close()

    async def answer(self, client: Client, work: Callable[[Client, bytes], Awaitable[None]]) -> None:
        """Run one exchange and turn what goes wrong into an answer."""
        task = asyncio.current_task()
        assert task is not None
        self._active.add(task)
        task.add_done_callback(self._active.discard)
        try:
            await client.until_gone(_awaited(work(client, await client.body(self.options.max_body))))
        except ClientGone:
            pass
        except Refused as refused:
            await self._refuse(client, refused)
        except UpstreamFailed as failed:
            self.recording.skip(failed.message)
            await self._refuse(client, Refused(failed.status, failed.message, "upstream_failed"))
        except JournalFailed as failed:
            self.failed()
            await self._refuse(client, Refused(503, f"recording failed: {failed}", "recording_failed"))

    async def _refuse(self, client: Client, refused: Refused) -> None:
        if client.started:  # nothing that looks like an end
            raise BrokenOff(refused.message)
        await client.refuse(refused)

    async def _call(self, client: Client, body: bytes) -> None:
        kind = RECORDED.get(client.target.partition(b"?")[0].decode("latin-1"))
        if kind is None or client.method != "POST":
            await pass_through(client, self._upstream, body)
        else:
            await Call(client, self._upstream, self.recording, self.options).run(kind, body)

    async def _other(self, client: Client, body: bytes) -> None:
        if not client.target.startswith(b"/"):
            raise Refused(400, "no path", "bad_target")
        await pass_through(client, self._upstream, body)

    async def _status(self, client: Client, body: bytes) -> None:
        await client.json(200, self.recording.summary())

    async def _reward(self, client: Client, body: bytes) -> None:
        asked = _own_body(client, body)
        await self._take(client, _reward_of(asked))

    async def _end(self, client: Client, body: bytes) -> None:
        asked = _own_body(client, body)
        end = "truncated" if asked.get("truncated") is True else "terminated"
        if asked.get("reward") is not None or asked.get("rewards") is not None:
            await self._commit(_reward_of(asked))
        await self._take(client, EndRecord(episode=asked["episode"], end=end))

    async def _take(self, client: Client, record: Record) -> None:
        await self._commit(record)
        await client.json(200, {"episode": record.episode})

    async def _commit(self, record: Record) -> None:
        try:
            await self.recording.commit(record)
        except UsageError as error:
            raise Refused(409, error.message, "conflict") from None


class _Endpoint:
    """An ASGI application that runs one of the proxy's methods."""

    def __init__(self, proxy: Proxy, work: Callable[[Client, bytes], Awaitable[None]]) -> None:
        self._proxy, self._work = proxy, work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._proxy.answer(Client(scope, receive, send, self._proxy.options.stall), self._work)


async def _awaited(work: Awaitable[None]) -> None:
    await work


def _own_body(client: Client, body: bytes) -> dict[str, Any]:
    """The JSON object that a reward or an end comes with. A page in a browser cannot send one here: it would have to
    ask first, and is not answered."""
    if client.method != "POST":
        raise Refused(405, "only POST", "method")
    if not client.header(b"content-type").lower().startswith("application/json") or len(body) > MAX_OWN_BODY:
        raise Refused(400, "no application/json", "bad_body")
    try:
        asked = json.loads(body.decode())
        labels = read_labels(client.headers)
    except UsageError as error:
        raise Refused(400, error.message, "bad_label") from None
    except (ValueError, RecursionError):
        asked = None
    if not isinstance(asked, dict):
        raise Refused(400, "the body is no JSON object", "bad_body")
    unknown = sorted(set(asked) - OWN_KEYS)
    if unknown:
        raise Refused(400, f"'{unknown[0][:100]}': no such key", "bad_body", f"there are {', '.join(sorted(OWN_KEYS))}")
    episode = asked.get("episode") or labels.episode
    if not isinstance(episode, str):
        raise Refused(400, "names no episode", "bad_body")
    return asked | {"episode": episode}


def _reward_of(asked: dict[str, Any]) -> RewardRecord:
    reward, rewards, response_id = asked.get("reward"), asked.get("rewards"), asked.get("response_id")
    parts = rewards if isinstance(rewards, dict) else {}
    numbers = [*([] if reward is None else [reward]), *parts.values()]
    fits = all(_is_finite(v) for v in numbers)
    if not fits or not numbers or (rewards is not None and not isinstance(rewards, dict)):
        raise Refused(400, "a reward is a finite number, rewards an object of such", "bad_body")
    if not all(0 < len(name) <= MAX_LABEL and name.isprintable() for name in parts):
        raise Refused(400, f"a reward's name is printable and has 1 to {MAX_LABEL} characters", "bad_body")
    if response_id is not None and not isinstance(response_id, str):
        raise Refused(400, "response_id is a string", "bad_body")
    return RewardRecord(
        episode=asked["episode"],
        reward=None if reward is None else float(reward),
        rewards={k: float(v) for k, v in parts.items()} or None,
        response_id=response_id,
    )


def _is_finite(value: Any) -> bool:
    """Whether it is a number that a float can hold."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # a whole number of some hundred digits
        return False
