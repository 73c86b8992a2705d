"""A wrapped client of openai gives its caller what it would have given, and what it asked is in the trace."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import helpers_proxy
import helpers_upstream
import httpx2
import pytest
from helpers_hooks import agrees, hooked, rows
from openai import APIConnectionError, APIStatusError, AsyncOpenAI, OpenAI

from memopd_trace import Segment, validate
from memopd_trace.errors import UsageError
from memopd_trace.record.hook import Turn
from memopd_trace.record.proxy.answer import Answer

MESSAGES: list[Any] = [{"role": "user", "content": "name a fruit"}]


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[helpers_proxy.Upstream]:
    with helpers_proxy.upstream(tmp_path_factory.mktemp("upstream")) as found:
        yield found


def plain(upstream: helpers_proxy.Upstream) -> OpenAI:
    return OpenAI(base_url=f"{upstream.url}/v1", api_key="-", max_retries=0)


def produced(upstream: helpers_proxy.Upstream, name: str) -> list[dict[str, Any]]:
    """What the server sampled for the request of this name, each output once."""
    found = [p for p in upstream.produced() if p["id"] == name]
    return sorted({p["choice"]: p for p in found}.values(), key=lambda p: p["choice"])


def named(name: str, **more: Any) -> dict[str, Any]:
    return {"model": "toy", "extra_body": {"request_id": name, **more}}


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_the_caller_gets_the_same_and_the_trace_gets_the_ids(
    upstream: helpers_proxy.Upstream, tmp_path: Path, kind: str, stream: bool, logprobs: bool
) -> None:
    name = f"same-{kind}-{stream}-{logprobs}"

    def ask(client: OpenAI) -> Any:
        more: dict[str, Any] = {"n": 2, "seed": 4, "stream": stream, **named(name)}
        if kind == "chat":
            found: Any = client.chat.completions.create(messages=MESSAGES, logprobs=logprobs, **more)
        else:
            found = client.completions.create(prompt=["one two", "three"], logprobs=1 if logprobs else None, **more)
        return [c.model_dump() for c in found] if stream else found.model_dump()

    with hooked(tmp_path / "t.parquet") as (recorder, hook, told):
        client = plain(upstream)
        episode = recorder.episode("e")
        with hook.into(episode) as made:
            shown = ask(hook.wrap(client))
        assert shown == ask(client), "as without the hook"
        episode.finish()
    assert not told and not hook.skipped and not hook.notes
    expected = produced(upstream, name)
    assert len(made) == len(expected) == (2 if kind == "chat" else 4)
    recorded = rows(tmp_path / "t.parquet")
    assert all(agrees(row, output) for row, output in zip(recorded, expected, strict=True))
    assert [i.relation for i in recorded][:2] == ["root", "fork"]
    assert validate(tmp_path / "t.parquet", "lineage").exit_code() == 0


def test_an_agents_turns_are_linked_by_their_ids_or_as_they_are_declared(
    upstream: helpers_proxy.Upstream, tmp_path: Path
) -> None:
    with hooked(tmp_path / "t.parquet") as (recorder, hook, _):
        client = hook.wrap(plain(upstream))
        episode = recorder.episode("e", group_id="g", task_id="t", agent_id="a", policy_version=7)
        with hook.into(episode) as made:
            first = client.chat.completions.create(messages=MESSAGES, **named("l1"))
            said: Any = {"role": "assistant", "content": first.choices[0].message.content}
            client.chat.completions.create(messages=[*MESSAGES, said, *MESSAGES], **named("l2"))
        turn = Turn(
            episode=episode, parent=made[0], rewrite_kind="memory", reward=0.5, segments=[Segment(0, 5, "task", 0, 0)]
        )
        short: list[Any] = [*MESSAGES, {"role": "user", "content": "go on"}]
        with hook.into(turn) as third:
            client.chat.completions.create(messages=short, **named("l3"))
        episode.finish()
    one, two, three = rows(tmp_path / "t.parquet")
    assert (one.group_id, one.task_id, one.agent_id, one.policy_version) == ("g", "t", "a", 7)
    assert two.parent_index == 0 and three.parent_index == 0
    assert (three.relation, three.rewrite_kind, three.rewrite_evidence) == ("rewrite", "memory", "explicit")
    assert (two.reward, three.reward) == (None, 0.5)
    assert [row.invocation_index for row in third] == [2]
    assert validate(tmp_path / "t.parquet", "lineage").exit_code() == 0


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"mode": "no_ids"}, "the upstream gives no ids"),
        ({"mode": "strict"}, "the upstream gives no ids"),
        ({"echo": True}, "echo"),
    ],
)
def test_an_answer_that_cannot_be_recorded_reaches_its_caller_and_is_told_once(
    upstream: helpers_proxy.Upstream, tmp_path: Path, more: dict[str, Any], reason: str
) -> None:
    with hooked(tmp_path / "t.parquet") as (recorder, hook, told):
        client, episode = hook.wrap(plain(upstream)), recorder.episode("e")
        with hook.into(episode) as made:
            for _ in range(2):
                found = client.chat.completions.create(messages=MESSAGES, **named("no", **more))
                assert found.choices[0].message.content
        episode.discard()
    assert not made and hook.skipped == {reason: 2}
    assert told == [f"a call was not recorded: {reason} (told once)"]


def test_a_failed_call_raises_as_ever_and_leaves_no_row(upstream: helpers_proxy.Upstream, tmp_path: Path) -> None:
    with hooked(tmp_path / "t.parquet") as (recorder, hook, _):
        client, episode = hook.wrap(plain(upstream)), recorder.episode("e")
        with hook.into(episode) as made, pytest.raises(APIStatusError) as error:
            client.chat.completions.create(messages=MESSAGES, **named("failed", mode="status503"))
        episode.discard()
    assert error.value.status_code == 503 and error.value.response.headers["x-reason"] == "because"
    assert not made and hook.skipped == {"upstream answered 503": 1}


@pytest.mark.parametrize("how", ["left", "cut", "error"])
def test_a_stream_that_does_not_end_is_an_attempt(upstream: helpers_proxy.Upstream, tmp_path: Path, how: str) -> None:
    with hooked(tmp_path / "t.parquet") as (recorder, hook, _):
        client, episode = hook.wrap(plain(upstream)), recorder.episode("e")
        more = {"ignore_eos": True} | ({} if how == "left" else {"mode": how})
        with hook.into(Turn(episode=episode, reward=1.0)) as made:
            stream = client.chat.completions.create(messages=MESSAGES, stream=True, **named(f"a-{how}", **more))
            if how == "left":
                for _ in range(4):
                    next(stream)
                stream.close()
            else:
                with pytest.raises(
                    Exception, match="out of memory" if how == "error" else "peer closed|Connection error"
                ):
                    list(stream)
        episode.finish()
    (row,) = rows(tmp_path / "t.parquet")
    sampled = helpers_upstream.sample(row.prompt_ids.tolist(), 0, 0, 16, True)[0]
    assert row.accepted is False and row.finish_reason == "abort" and row.reward is None and len(made) == 1
    ids = row.output_ids.tolist()
    assert 2 <= len(ids) < len(sampled) and sampled[: len(ids)] == ids


def test_a_call_that_was_sent_again_is_one_row(tmp_path: Path) -> None:
    seen: list[httpx2.Request] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        seen.append(request)
        if len(seen) == 1:
            return httpx2.Response(500, json={"error": {"message": "busy"}}, headers={"retry-after-ms": "1"})
        choice = {"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}
        more = {"token_ids": [9, 2], "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -0.25}]}}
        body = {"id": "c", "model": "toy", "choices": [choice | more], "prompt_token_ids": [5, 6]}
        return httpx2.Response(200, json=body)

    with hooked(tmp_path / "t.parquet") as (recorder, hook, _):
        inner = httpx2.Client(transport=httpx2.MockTransport(answer))
        client = hook.wrap(OpenAI(base_url="http://server/v1", api_key="-", http_client=inner, max_retries=2))
        episode = recorder.episode("e")
        with hook.into(episode):
            client.chat.completions.create(model="toy", messages=MESSAGES)
        episode.finish()
    assert len(seen) == 2 and all(b'"return_token_ids":true' in r.content for r in seen)
    (row,) = rows(tmp_path / "t.parquet")
    assert row.relation == "root" and row.output_ids.tolist() == [9, 2] and row.extra == {"response_id": "c"}


def test_many_tasks_and_threads_do_not_mix(upstream: helpers_proxy.Upstream, tmp_path: Path) -> None:
    async def run(hook: Any, recorder: Any) -> None:
        async with AsyncOpenAI(base_url=f"{upstream.url}/v1", api_key="-", max_retries=0) as inner:
            client = hook.wrap(inner)

            async def agent(number: int) -> None:
                episode = recorder.episode(f"task-{number}")
                with hook.into(episode):
                    for turn in range(2):
                        more = {**named(f"task-{number}-{turn}"), "seed": number}
                        said: Any = [*MESSAGES, {"role": "user", "content": f"{number} {turn}"}]
                        if number % 2:
                            await client.chat.completions.create(messages=said, **more)
                        else:
                            async for _ in await client.chat.completions.create(messages=said, stream=True, **more):
                                pass
                episode.finish()

            await asyncio.gather(*map(agent, range(16)))

    def threaded(hook: Any, recorder: Any, number: int) -> None:
        episode = recorder.episode(f"thread-{number}")
        with hook.into(episode):
            for turn in range(2):
                said: Any = [{"role": "user", "content": f"thread {number} {turn}"}]
                client.chat.completions.create(messages=said, **named(f"thread-{number}-{turn}"))
        episode.finish()

    with hooked(tmp_path / "t.parquet") as (recorder, hook, _):
        asyncio.run(run(hook, recorder))
        client = hook.wrap(plain(upstream))
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda number: threaded(hook, recorder, number), range(8)))
    found = rows(tmp_path / "t.parquet")
    by_name = {p["id"]: p for p in upstream.produced()}
    assert len(found) == 48 and not hook.skipped
    for row in found:
        name = (row.extra or {})["response_id"]
        assert name.rpartition("-")[0] == row.episode_id and agrees(row, by_name[name])


def test_a_call_outside_goes_through_and_one_into_a_strange_episode_is_refused(
    upstream: helpers_proxy.Upstream, tmp_path: Path
) -> None:
    with (
        hooked(tmp_path / "a.parquet") as (recorder, hook, told),
        hooked(tmp_path / "b.parquet") as (other, _, _),
    ):
        client = hook.wrap(plain(upstream))
        assert client.chat.completions.create(messages=MESSAGES, **named("out")).choices
        assert client.models.list().data[0].id == "toy", "what is no model call is not counted"
        strange = other.episode("e")
        with pytest.raises(UsageError, match="episodes of this hook's recorder"), hook.into(strange):
            pass
        strange.discard()
        mine = recorder.episode("e")
        with hook.into(mine, mine), pytest.raises(UsageError, match="2 turns for 1 calls"):
            client.chat.completions.create(messages=MESSAGES, **named("never"))
        mine.discard()
    assert hook.skipped == {"made outside of into()": 1} and len(told) == 1
    assert not produced(upstream, "never")


def test_what_is_no_client_is_refused(tmp_path: Path) -> None:
    with hooked(tmp_path / "t.parquet") as (_, hook, _), pytest.raises(UsageError, match="no client of openai"):
        hook.wrap("http://127.0.0.1")


def test_an_open_stream_that_is_collected_amid_another_call_is_recorded_behind_it(
    upstream: helpers_proxy.Upstream, tmp_path: Path
) -> None:
    """Garbage may be collected at any place, and an open stream ends then: also where rows are made of another call."""
    with hooked(tmp_path / "t.parquet") as (recorder, hook, _):
        client, episode = hook.wrap(plain(upstream)), recorder.episode("e")
        with hook.into(episode) as made:
            stream = client.chat.completions.create(messages=MESSAGES, stream=True, **named("open", ignore_eos=True))
            next(stream)
            next(stream)
            left = [stream]
            del stream
            known = hook._known

            def collecting(of: Any) -> Any:
                while left:
                    left.pop().close()
                return known(of)

            hook._known = collecting  # type: ignore[method-assign]
            client.chat.completions.create(messages=MESSAGES, **named("whole"))
        assert [row.accepted for row in made] == [None, False]
        episode.finish()
    whole, attempt = rows(tmp_path / "t.parquet")
    assert agrees(whole, produced(upstream, "whole")[0])
    expected = produced(upstream, "open")[0]["output"]
    assert len(attempt.output_ids) and attempt.output_ids.tolist() == expected[: len(attempt.output_ids)]


def sending(handler: Any) -> OpenAI:
    """A client whose requests a function answers."""
    inner = httpx2.Client(transport=httpx2.MockTransport(handler))
    return OpenAI(base_url="http://x/v1", api_key="-", max_retries=0, http_client=inner)


def test_a_call_that_breaks_off_is_counted_and_raises_as_ever(tmp_path: Path) -> None:
    class Torn(httpx2.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            yield b'{"id": '
            raise httpx2.ReadError("torn")

    def answer(request: httpx2.Request) -> httpx2.Response:
        if b'"torn"' in request.content:
            return httpx2.Response(200, stream=Torn())
        raise httpx2.ConnectError("nobody there")

    with hooked(tmp_path / "t.parquet") as (recorder, hook, _):
        client, episode = hook.wrap(sending(answer)), recorder.episode("e")
        with hook.into(episode) as made:
            for name in ("torn", "away"):
                with pytest.raises(APIConnectionError):
                    client.chat.completions.create(messages=MESSAGES, **named(name))
        episode.discard()
    assert not made and hook.skipped == {"no whole answer": 2}


def test_of_a_stream_of_which_one_event_is_not_understood_no_row_is_made(
    upstream: helpers_proxy.Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row without what stood in that event would hold what nobody sampled."""
    feed, fed = Answer.feed, []

    def failing(self: Answer, document: Any) -> None:
        fed.append(document)
        if len(fed) == 3:
            raise KeyError("odd")
        feed(self, document)

    monkeypatch.setattr(Answer, "feed", failing)
    with hooked(tmp_path / "t.parquet") as (recorder, hook, _):
        client, episode = plain(upstream), recorder.episode("e")
        with hook.into(episode) as made:
            more = {"seed": 4, "stream": True, **named("odd")}
            shown = [c.model_dump() for c in hook.wrap(client).chat.completions.create(messages=MESSAGES, **more)]
        assert shown == [c.model_dump() for c in client.chat.completions.create(messages=MESSAGES, **more)]
        episode.discard()
    assert len(fed) > 4 and not made and hook.skipped == {"not understood (KeyError: 'odd')": 1}


def test_a_generator_may_be_closed_in_another_context(tmp_path: Path) -> None:
    with hooked(tmp_path / "t.parquet") as (recorder, hook, _):
        episode = recorder.episode("e")

        def agent() -> Iterator[int]:
            with hook.into(episode):
                yield 1

        running = agent()
        contextvars.copy_context().run(next, running)
        running.close()
        assert hook.current() is None
        episode.discard()
