"""A model call through the proxy: asked with ids, given to the client without them, and recorded before its end is."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from typing import Any

import httpx2

from memopd_trace.errors import UsageError
from memopd_trace.record.call import CallRecord, Labels
from memopd_trace.record.proxy.answer import NO_IDS, UPSTREAM_ERROR, Answer, for_client
from memopd_trace.record.proxy.exchange import BrokenOff, Client, ClientGone, Refused
from memopd_trace.record.proxy.headers import read_labels, to_client, to_upstream
from memopd_trace.record.proxy.options import Options
from memopd_trace.record.proxy.recording import Recording
from memopd_trace.record.proxy.request import Kind, Request, inflate, read_request
from memopd_trace.record.proxy.sse import Event, Splitter
from memopd_trace.record.proxy.upstream import Busy, Upstream, UpstreamFailed

FOREIGN_FIELDS = (400, 422)  # what an upstream answers that does not know `return_token_ids`


async def pass_through(client: Client, upstream: Upstream, body: bytes) -> None:
    """Send a request on as it came, and its answer back as it comes."""
    try:
        async with upstream.slot():
            headers = to_upstream(client.headers, identity=False)
            async with upstream.send(client.method, client.target, headers, body) as response:
                await relay(client, upstream, response)
    except Busy:
        raise Refused(503, "too many calls wait for the upstream", "busy") from None


async def relay(client: Client, upstream: Upstream, response: httpx2.Response) -> None:
    """Give an answer to the client byte for byte."""
    await client.start(response.status_code, to_client(response.headers.raw, changed=False))
    try:
        async for chunk in upstream.chunks(response):
            await client.write(chunk)
    except UpstreamFailed as failed:
        raise BrokenOff(failed.message) from None
    await client.write(b"", more=False)


class Call:
    """One call, from its body to the end of its answer."""

    def __init__(self, client: Client, upstream: Upstream, recording: Recording, options: Options) -> None:
        self._client, self._upstream, self._recording, self._options = client, upstream, recording, options
        self._started = _now()
        self._done = False  # recorded, or counted as not recorded

    async def run(self, kind: Kind, body: bytes) -> None:
        """Answer the client.

        Raises:
            Refused: the client gets an error.
            BrokenOff: an answer that had begun cannot be ended.
        """
        labels = self._labels()
        request = self._request(kind, body)
        why_not = request.why_not or self._why_not(labels)
        if why_not or request.amended is None:
            self._skip(why_not or "malformed request")
            await pass_through(self._client, self._upstream, body)
            return
        self._request_read, self._answer = request, Answer(request)
        assert self._episode is not None  # else `why_not` said so
        self._recording.episodes.begin_call(self._episode)
        try:
            async with self._upstream.slot():
                await self._ask(request, request.amended)
        except Busy:
            raise Refused(503, "too many calls wait for the upstream", "busy") from None
        except (asyncio.CancelledError, ClientGone):
            self._give_up("given up by the client")
            raise
        finally:
            self._recording.episodes.end_call(self._episode)

    def _labels(self) -> Labels:
        try:
            labels = read_labels(self._client.headers)
            self._episode = labels.episode or self._options.episode
            if self._episode is not None:
                self._recording.episodes.check(self._episode, labels)
        except UsageError as error:
            raise Refused(400, error.message, "bad_label", error.hint) from None
        self._labels_read = labels
        return labels

    def _request(self, kind: Kind, body: bytes) -> Request:
        try:
            plain = inflate(body, self._client.header(b"content-encoding").strip().lower(), self._options.max_body)
        except ValueError:
            return Request(kind, body, why_not="malformed request")
        if plain is None:
            raise Refused(413, f"the body exceeds {self._options.max_body} bytes", "body_too_large")
        return read_request(kind, plain, self._options.defaults, self._options.dialect, self._options.expert_routes)

    def _why_not(self, labels: Labels) -> str | None:
        if self._episode is None:
            return "names no episode"
        return "the episode has ended" if self._recording.episodes.has_ended(self._episode) else None

    async def _ask(self, request: Request, amended: bytes) -> None:
        headers = to_upstream(self._client.headers, identity=True)
        method, target = self._client.method, self._client.target
        async with self._upstream.send(method, target, headers, amended, again=True) as response:
            if response.status_code not in FOREIGN_FIELDS:
                await self._take(response)
                return
        if self._options.require_ids:
            raise self._refuse_without_ids()
        # perhaps it is the fields that we added that it does not take: ask as the client did
        async with self._upstream.send(method, target, headers, request.body, again=True) as response:
            self._skip(NO_IDS if response.status_code < 300 else f"upstream answered {response.status_code}")
            await relay(self._client, self._upstream, response)

    async def _take(self, response: httpx2.Response) -> None:
        if not 200 <= response.status_code < 300:
            self._skip(f"upstream answered {response.status_code}")
            await relay(self._client, self._upstream, response)
        elif response.headers.get("content-type", "").lower().startswith("text/event-stream"):
            await self._take_stream(response)
        else:
            await self._take_document(response)

    async def _take_document(self, response: httpx2.Response) -> None:
        limit = self._options.max_answer
        raw = await self._upstream.body(response, limit)
        headers = to_client(response.headers.raw, changed=True)
        try:
            plain = inflate(raw, response.headers.get("content-encoding", "").lower(), limit)
            text = (plain or b"").decode()
            document = json.loads(text)
            if not isinstance(document, dict):
                raise ValueError("no object")
        except (ValueError, RecursionError):
            self._without_ids("unreadable answer")
            await self._client.whole(response.status_code, to_client(response.headers.raw, changed=False), raw)
            return
        self._answer.feed(document)
        await self._commit()
        shown = for_client(text, document, self._request_read)
        await self._client.whole(response.status_code, headers, (text if shown is None else shown).encode())

    async def _take_stream(self, response: httpx2.Response) -> None:
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise Refused(502, "the upstream's stream is encoded, which was not asked for", "encoded_stream")
        splitter, status = Splitter(), response.status_code
        headers = to_client(response.headers.raw, changed=True)
        try:
            async for chunk in self._upstream.chunks(response):
                out = [await self._event(event) for event in splitter.feed(chunk)]
                await self._pass(status, headers, b"".join(out))
        except UpstreamFailed as failed:
            self._give_up(failed.message)
            if not self._client.started:
                raise
            raise BrokenOff(failed.message) from None
        except ValueError as error:
            self._give_up("unreadable answer")
            raise BrokenOff(str(error)) from None
        self._give_up("the upstream broke off")  # unless the end has come
        await self._pass(status, headers, splitter.rest, more=False)

    async def _pass(self, status: int, headers: list[tuple[bytes, bytes]], data: bytes, *, more: bool = True) -> None:
        if not self._client.started and (data or not more):
            await self._client.start(status, headers)
        if data or not more:
            await self._client.write(data, more=more)

    async def _event(self, event: Event) -> bytes:
        """What the client gets of an event; the one that ends the last output only once the call is on disk."""
        if event.data is None:
            return event.raw
        if event.data.strip() == b"[DONE]":
            await self._commit()
            return event.raw
        try:
            text = event.data.decode()
            document = json.loads(text)
            if not isinstance(document, dict):
                raise ValueError("no object")
        except (ValueError, RecursionError):
            self._without_ids("unreadable answer")
            return event.raw
        self._answer.feed(document)
        if self._answer.finished:
            await self._commit()
        elif not self._answer.prompt_known and self._answer.why_not != UPSTREAM_ERROR:
            self._refuse_at_once()
        shown = for_client(text, document, self._request_read)
        return b"" if shown is None else event.with_data(shown.encode())

    async def _commit(self) -> None:
        """Put the call on disk; the client has not had the end of its answer yet."""
        if self._done:
            return
        if self._answer.why_not == UPSTREAM_ERROR:
            self._give_up(UPSTREAM_ERROR)
            return
        outputs = self._answer.sampled()
        record = self._record(outputs, None) if outputs else None
        if record is None:
            self._without_ids(self._answer.why_not or NO_IDS)
            return
        self._done = True
        if not await self._recording.commit(record):
            self._recording.skip("no valid row")

    def _give_up(self, reason: str) -> None:
        """The call ends here: what was sampled so far is an attempt that nobody accepted."""
        if self._done:
            return
        if self._answer.why_not == UPSTREAM_ERROR:  # what came in front of it was sampled all the same
            self._answer.why_not = None
        outputs = self._answer.sampled(broken_off=True)
        record = self._record(outputs, False) if outputs else None
        if record is None:
            self._skip(reason)
            return
        self._done = True
        self._recording.give_up(record)

    def _record(self, outputs: Any, accepted: bool | None) -> CallRecord | None:
        models, request, labels = self._recording.metadata.models, self._request_read, self._labels_read
        model = next((m for m in (self._answer.model, request.model) if m in models), None)
        if model is None or self._episode is None:
            self._answer.why_not = "a model that the recording does not know"
            return None
        version = self._answer.weight_version if labels.policy_version is None else labels.policy_version
        if accepted is False:  # nothing was earned or ended by it
            labels = dataclasses.replace(labels, reward=None, end=None)
        return CallRecord(
            episode=self._episode,
            model_id=model,
            response_id=self._answer.id,
            labels=labels,
            outputs=outputs,
            sampling=request.sampling,
            logprob_kind=self._options.logprob_kind,
            policy_version=self._options.policy_version if version is None else version,
            started=self._started,
            ended=_now(),
            accepted=accepted,
            extra=request.extra,
        )

    def _without_ids(self, reason: str) -> None:
        """The answer came, and cannot be recorded."""
        if self._done:
            return
        if self._options.require_ids and not self._client.started:
            raise self._refuse_without_ids(reason)
        self._skip(reason)

    def _refuse_at_once(self) -> None:
        """The first event of a stream tells the prompt's ids, or it will have none."""
        if self._options.require_ids and not self._client.started:
            raise self._refuse_without_ids()

    def _refuse_without_ids(self, reason: str = NO_IDS) -> Refused:
        self._skip(reason)
        return Refused(502, reason, "no_token_ids", "the proxy runs with --require-ids")

    def _skip(self, reason: str) -> None:
        if not self._done:
            self._done = True
            self._recording.skip(reason)


def _now() -> int:
    """Microseconds since 1970."""
    return time.time_ns() // 1000
