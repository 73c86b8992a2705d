"""An OpenAI-compatible server like vLLM's, whose sampler is a function of ids: run it, or ask it what it produced.

    python helpers_upstream.py LOG [PORT] [vllm|sglang]

prints its port. LOG gets a JSON line for each output it ever sampled, whole or given up: what a recording must agree
with. Its answers have the members, their order and the nulls of vLLM's; as SGLang it gives ids
with whole chats only, beside `meta_info`, and refuses to with a stream.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
import sys
import zlib
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

MODEL = "toy"
SIZE, STOP = 4096, 2
FIRST = 10  # ids below it are controls
LAYERS, CHOSEN, EXPERTS = 2, 2, 8  # of its expert routes
LOG: list[Any] = []


def encode(text: str) -> list[int]:
    """Text as ids: one a word."""
    return [FIRST + zlib.crc32(word.encode()) % (SIZE - FIRST) for word in text.split()]


def word(token: int) -> str:
    return "" if token == STOP else f" w{token}"


def render(messages: list[dict[str, Any]]) -> list[int]:
    """The chat template: role, content, end; and the header of the model's turn. Words `wN` are the ids N."""
    ids: list[int] = []
    for message in messages:
        role = {"system": 3, "user": 4, "assistant": 5, "tool": 6}[message["role"]]
        content = message.get("content") or ""
        parts = content if isinstance(content, str) else " ".join(p.get("text", "") for p in content)
        ids += [role, *(own(w) for w in parts.split()), STOP]
    return [*ids, 5]


def own(text: str) -> int:
    return int(text[1:]) if text[:1] == "w" and text[1:].isdecimal() else encode(text)[0]


def sample(prompt: list[int], choice: int, seed: int, limit: int, endless: bool) -> tuple[list[int], list[float], str]:
    """(ids, log-probabilities, finish reason): a function of its arguments."""
    rng = random.Random(f"{prompt} {choice} {seed}")
    ids, logprobs = [], []
    while len(ids) < limit:
        ids.append(STOP if rng.random() < 0.1 and ids and not endless else rng.randrange(FIRST, SIZE))
        logprobs.append(-rng.random() * 9)
        if ids[-1] == STOP:
            return ids, logprobs, "stop"
    return ids, logprobs, "length"


def routes(sequence: list[int]) -> Any:
    """Expert routes [n - 1, LAYERS, CHOSEN]: a function of the ids."""
    first = np.array(sequence[:-1], np.int32)[:, None] % EXPERTS + np.zeros((1, LAYERS), np.int32)
    return np.stack([first, (first + 1) % EXPERTS], axis=2)


def npy(array: Any) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


class Call:
    """One request, as vLLM reads it."""

    def __init__(self, chat: bool, asked: dict[str, Any], name: str) -> None:
        self.chat, self.asked, self.name = chat, asked, name
        self.ids = bool(asked.get("return_token_ids"))
        self.logprobs = bool(asked.get("logprobs")) if chat else asked.get("logprobs") is not None
        self.n = asked.get("n") or 1
        self.limit = asked.get("max_tokens") or 16
        self.prompts = [render(asked["messages"])] if chat else self._prompts(asked["prompt"])
        seed = asked.get("seed") or 0
        self.outputs = [
            (p, number, *sample(prompt, number, seed, self.limit, bool(asked.get("ignore_eos"))))
            for p, prompt in enumerate(self.prompts)
            for number in range(self.n)
        ]

    @staticmethod
    def _prompts(prompt: Any) -> list[list[int]]:
        if isinstance(prompt, str):
            return [[own(w) for w in prompt.split()]]
        if isinstance(prompt[0], int):
            return [prompt]
        return [[own(w) for w in p.split()] if isinstance(p, str) else p for p in prompt]

    def log(self, place: int, ids: list[int], logprobs: list[float], finish: str | None) -> None:
        prompt, number = self.outputs[place][:2]
        line = {
            "id": self.name,
            "choice": place,
            "prompt": self.prompts[prompt],
            "output": ids,
            "logprobs": logprobs,
            "finish": finish,
            "number": number,
        }
        print(json.dumps(line), file=LOG[0], flush=True)

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.name, "object": kind, "created": 1700000000, "model": MODEL}

    def shown_logprobs(self, ids: list[int], logprobs: list[float]) -> Any:
        if not self.logprobs:
            return None
        if self.chat:
            pairs = zip(ids, logprobs, strict=True)
            items = [
                {"token": word(i), "logprob": p, "bytes": list(word(i).encode()), "top_logprobs": []} for i, p in pairs
            ]
            return {"content": items}
        words = [word(i) for i in ids]
        return {
            "text_offset": [0] * len(ids),
            "token_logprobs": logprobs,
            "tokens": words,
            "top_logprobs": [None] * len(ids),
        }

    def whole(self) -> dict[str, Any]:
        choices = []
        for place, (prompt, _, ids, logprobs, finish) in enumerate(self.outputs):
            self.log(place, ids, logprobs, finish)
            text = "".join(map(word, ids))
            choice: dict[str, Any] = {"index": place}
            if self.chat:
                choice["message"] = {"role": "assistant", "content": text, "refusal": None, "tool_calls": []}
            else:
                choice["text"] = text
            choice |= {"logprobs": self.shown_logprobs(ids, logprobs), "finish_reason": finish, "stop_reason": None}
            choice["token_ids"] = ids if self.ids else None
            if not self.chat:
                choice["prompt_token_ids"] = self.prompts[prompt] if self.ids else None
            if self.asked.get("mode") == "routes":
                choice["routed_experts"] = npy(routes(self.prompts[prompt] + ids))
            choices.append(choice)
        count = sum(len(o[2]) for o in self.outputs)
        given = sum(map(len, self.prompts))
        usage = {"prompt_tokens": given, "total_tokens": given + count, "completion_tokens": count}
        answer = {
            **self.head("chat.completion" if self.chat else "text_completion"),
            "choices": choices,
            "usage": usage,
        }
        return answer | ({"prompt_token_ids": self.prompts[0] if self.ids else None} if self.chat else {})

    def as_sglang(self) -> dict[str, Any]:
        """The whole answer as SGLang gives it."""
        whole = self.whole()
        whole.pop("prompt_token_ids", None)
        for choice, (prompt, _, ids, logprobs, finish) in zip(whole["choices"], self.outputs, strict=True):
            for name in ("token_ids", "stop_reason"):
                choice.pop(name, None)
            choice["matched_stop"] = STOP if finish == "stop" else None
            if self.asked.get("return_prompt_token_ids"):
                choice["prompt_token_ids"] = self.prompts[prompt]
            if self.asked.get("return_meta_info"):
                triples = [[p, i, None] for i, p in zip(ids, logprobs, strict=True)]
                choice["meta_info"] = {
                    "id": self.name,
                    "finish_reason": {"type": finish},
                    "weight_version": "7",
                    "completion_tokens": len(ids),
                }
                if self.logprobs:
                    choice["meta_info"]["output_token_logprobs"] = triples
        if self.asked.get("return_routed_experts"):
            data = routes(self.prompts[0] + self.outputs[0][2]).astype("<i4").tobytes()
            whole["sglext"] = {"routed_experts": base64.b64encode(data).decode()}
        return whole

    async def stream(self, delay: float) -> AsyncIterator[str]:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        told = [0] * len(self.outputs)
        try:
            if self.chat:
                for place in range(len(self.outputs)):
                    delta = {"role": "assistant", "content": ""}
                    choices = [{"index": place, "delta": delta, "logprobs": None, "finish_reason": None}]
                    first = {**self.head(kind), "choices": choices}
                    yield event({**first, "prompt_token_ids": self.prompts[0] if self.ids else None})
            while any(told[p] < len(o[2]) for p, o in enumerate(self.outputs)):
                for place, (prompt, number, ids, logprobs, finish) in enumerate(self.outputs):
                    start, stop = told[place], min(told[place] + 1 + number, len(ids))
                    if start == stop:
                        continue
                    held = self.chat and self.asked.get("hold_back") and stop < len(ids) and start % 2
                    if delay:
                        await asyncio.sleep(delay)
                    told[place] = stop
                    if held and not self.ids and not self.logprobs:
                        continue  # a parser that is not ready: nothing is sent, unless ids are asked for
                    text = "".join(map(word, ids[start:stop]))
                    choice: dict[str, Any] = {"index": place}
                    choice |= {"delta": {} if held else {"content": text}} if self.chat else {"text": text}
                    choice["logprobs"] = self.shown_logprobs(ids[start:stop], logprobs[start:stop])
                    choice["finish_reason"] = finish if stop == len(ids) else None
                    if stop == len(ids) or not self.chat:
                        choice["stop_reason"] = None
                    if not self.chat:
                        choice["prompt_token_ids"] = self.prompts[prompt] if self.ids and not start else None
                    choice["token_ids"] = ids[start:stop] if self.ids else None
                    yield event({**self.head(kind), "choices": [choice]})
                    if stop == len(ids):
                        self.log(place, ids, logprobs, finish)
            if (self.asked.get("stream_options") or {}).get("include_usage"):
                yield event({**self.head(kind), "choices": [], "usage": {"completion_tokens": sum(told)}})
            yield "data: [DONE]\n\n"
        finally:
            for place, (*_, ids, logprobs, _) in enumerate(self.outputs):
                if 0 < told[place] < len(ids):
                    self.log(place, ids[: told[place]], logprobs[: told[place]], None)


def event(document: Any) -> str:
    return f"data: {json.dumps(document, separators=(',', ':'), ensure_ascii=False)}\n\n"


async def answer(request: Request) -> Response:
    chat = request.url.path.endswith("chat/completions")
    app = request.app.state
    app.seen.append(
        {"path": request.url.path, "headers": dict(request.headers), "body": (await request.body()).decode()}
    )
    app.calls += 1
    app.running += 1
    app.most = max(app.most, app.running)
    try:
        return await _answer(app, chat)
    finally:
        app.running -= 1


async def _answer(app: Any, chat: bool) -> Response:
    asked = json.loads(app.seen[-1]["body"])
    mode = asked.get("mode", "")
    if mode.startswith("status"):
        return JSONResponse({"error": {"message": "no", "code": mode}}, int(mode[6:]), {"x-reason": "because"})
    if mode == "strict" and ("return_token_ids" in asked or "logprobs" in asked):
        return JSONResponse({"error": {"message": "unrecognized field"}}, 400)
    if mode == "never":
        await asyncio.sleep(3600)
    if mode == "held":
        await app.release.wait()
    if mode in ("no_ids", "strict"):
        asked.pop("return_token_ids", None)
    if app.dialect == "sglang":
        asked.pop("return_token_ids", None)
        if asked.get("stream") and asked.get("return_prompt_token_ids"):
            return JSONResponse({"error": {"message": "no ids with a stream"}}, 400)
    call = Call(chat, asked, asked.get("request_id") or f"call-{app.calls}")
    if asked.get("stream"):
        body = call.stream(asked.get("delay") or 0)
        if mode in ("cut", "error"):
            body = _cut(body, mode)
        return StreamingResponse(body, media_type="text/event-stream")
    if asked.get("delay"):
        await asyncio.sleep(asked["delay"])
    return JSONResponse(call.as_sglang() if app.dialect == "sglang" else call.whole())


async def _cut(body: AsyncIterator[str], mode: str) -> AsyncIterator[str]:
    """Dies after three events, or says that it failed."""
    count = 0
    async for part in body:
        yield part
        count += 1
        if count == 3 and mode == "error":
            yield event({"error": {"message": "out of memory"}})
            yield "data: [DONE]\n\n"
            return
        if count == 3:
            raise RuntimeError("the server dies")


async def models(request: Request) -> Response:
    card = {"id": MODEL, "object": "model", "owned_by": request.app.state.dialect}
    return JSONResponse({"object": "list", "data": [card]})


async def seen(request: Request) -> Response:
    return JSONResponse(request.app.state.seen)


async def most(request: Request) -> Response:
    return JSONResponse(request.app.state.most)


async def release(request: Request) -> Response:
    """Let those go on that are held now."""
    app = request.app.state
    app.release.set()
    app.release = asyncio.Event()
    return Response()


async def echo(request: Request) -> Response:
    headers = {k: v for k, v in request.headers.items() if k.startswith("x-")}
    return Response(
        await request.body(), int(request.query_params.get("status", 200)), {"x-path": request.url.path, **headers}
    )


def application(dialect: str = "vllm") -> Starlette:
    paths = ["/v1/chat/completions", "/v1/completions"]
    routes = [Route(path, answer, methods=["POST"]) for path in paths]
    routes += [Route("/v1/models", models), Route("/seen", seen), Route("/most", most), Route("/release", release)]
    routes += [Route("/{path:path}", echo, methods=["GET", "POST", "PUT", "DELETE"])]
    app = Starlette(routes=routes)
    app.state.dialect, app.state.release = dialect, asyncio.Event()
    app.state.seen, app.state.calls, app.state.running, app.state.most = [], 0, 0, 0
    return app


class _Server(uvicorn.Server):
    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        print(self.servers[0].sockets[0].getsockname()[1], flush=True)


if __name__ == "__main__":
    LOG.append(open(sys.argv[1], "a"))  # noqa: PTH123, SIM115 - open until the process ends
    port = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    _Server(uvicorn.Config(application(*sys.argv[3:]), port=port, log_level="critical", backlog=2048)).run()
