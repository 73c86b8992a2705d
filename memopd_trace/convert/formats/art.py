"""ART (OpenPipe): trajectories and their groups, as JSON, as its compact JSON, and from its Parquet files.

    {"exchanges": {"chat_completions": [{"request", "response", "start_time", …}], …}, "reward": …}    newer
    {"messages_and_choices": [message, choice, …], "additional_histories": […], "reward": …}           older

In the older form each choice among the messages is a call whose prompt was all in front of it. A reward that is not
there is 0.0, as ART reads it: its serializer leaves defaults out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from memopd_trace.convert import exchange, responses
from memopd_trace.convert.draft import MAX_DEPTH, Call, Draft
from memopd_trace.convert.fields import Fields, as_ids, as_logprobs
from memopd_trace.convert.format import Format
from memopd_trace.convert.formats import anthropic
from memopd_trace.convert.losses import BrokenRecord, Losses, NotACall
from memopd_trace.convert.records import SUFFIXES, from_json
from memopd_trace.convert.tables import PARQUET, rows_or_json

PROTOCOLS = ("chat_completions", "completions", "responses", "messages")
KINDS = {"raw_logprobs": "raw", "processed_logprobs": "processed"}  # of log-probabilities, as vLLM names its modes
SCORES = ("compact_logprobs", "art_completion_logprobs")  # log-probabilities by themselves, one for each of `token_ids`
GROUP = ("metadata", "metrics", "logs")
TOLD = "token_id:"


def read(value: Any, losses: Losses) -> Iterator[Draft]:
    """A group, a trajectory, or a row of a table."""
    record = Fields(value, losses)
    if "trajectory_json" in record or ("group_index" in record and "messages" in record):
        yield _row(record)
    elif record.peek("format") == "art.trajectories":
        losses.version(f"compact {record.peek('version')}")
        yield from _compact(record)
    elif "trajectories" in record:
        yield from _group(record, losses.place)
    elif _is_trajectory(record):
        yield _trajectory(record, losses.place, None)
    else:
        raise BrokenRecord("neither a trajectory (exchanges, messages_and_choices) nor a group (trajectories)")


def _is_trajectory(record: Fields) -> bool:
    return "exchanges" in record or isinstance(record.peek("messages_and_choices"), list)


def _compact(record: Fields) -> Iterator[Draft]:
    """Values with their repeated strings in a table; tokenized ones have their trajectories beside the tokens."""
    strings = record.fields("strings")
    table = {k: v for k, v in strings.value.items() if isinstance(v, str)} if strings is not None else {}
    data = _with_strings(record.any("data"), table, MAX_DEPTH)
    place = record.losses.place
    several = isinstance(data, list)
    for number, value in enumerate(data if several else [data]):
        item = Fields(value, record.losses, f"data[{number}]" if several else "data")
        name = f"{place}/{number}" if several else place
        for inner in ("trajectory", "trajectory_group"):  # of a tokenized one
            item = (item.maybe_fields(inner)) or item
        if "trajectories" in item:
            yield from _group(item, name)
        elif str(record.peek("kind")).startswith(("tokenized_histor", "tensorized_histor")):
            raise NotACall("a history without its trajectory")
        else:
            yield _trajectory(item, name, None)


def _with_strings(value: Any, table: dict[str, str], depth: int) -> Any:
    if isinstance(value, str):
        return table.get(value, value)
    if not isinstance(value, dict | list):
        return value
    if not depth:
        raise BrokenRecord(f"is nested in more than {MAX_DEPTH} levels")
    if isinstance(value, list):
        return [_with_strings(v, table, depth - 1) for v in value]
    return {table.get(k, k): _with_strings(v, table, depth - 1) for k, v in value.items()}


def _row(record: Fields) -> Draft:
    """A row of a table: the trajectory as JSON, or of the older ones messages, of which some are marked trainable."""
    losses = record.losses
    file, index = losses.place.rsplit("[", 1)[0], record.name("group_index")
    group = f"{file}/{index}" if index is not None else None
    about = from_json(record.any("group_json"))
    if "trajectory_json" in record:
        losses.version("table 2")
        record.drop()  # the other columns repeat what is in the JSON
        inner = Fields(from_json(record.peek("trajectory_json")), losses, "trajectory_json")
    else:
        losses.version("table 1")
        for name in ("metrics", "metadata", "tools"):
            record.value[name] = from_json(record.peek(name))
        items = [_unflattened(message) for message in record.each("messages")]
        inner = Fields({**record.value, "messages": None, "messages_and_choices": items}, losses)
    draft = _trajectory(inner, losses.place, group)
    draft.extra |= {"group": about} if about else {}
    return draft


def _unflattened(message: Fields) -> dict[str, Any]:
    """A message of the older table; one that was trainable is a choice, of which nothing else was kept."""
    found = {name: message.any(name) for name in ("role", "content", "tool_call_id") if name in message}
    calls = from_json(message.any("tool_calls"))
    found |= {"tool_calls": calls} if isinstance(calls, list) and calls else {}
    return {"message": found, "finish_reason": None} if message.flag("trainable") else found


def _group(record: Fields, name: str) -> Iterator[Draft]:
    losses = record.losses
    shared = {n: record.any(n) for n in GROUP if record.peek(n)}
    failed = record.items("exceptions")
    if failed:
        losses.gap("lost_calls", "rollouts that failed", len(failed))
        shared["exceptions"] = failed
    drafts = [_trajectory(t, f"{name}/{i}", name) for i, t in enumerate(record.each("trajectories"))]
    if not drafts:
        raise NotACall("a group without a trajectory")
    rest = {n: v for n, v in record.rest().items() if n != "trajectories"} | shared
    for draft in drafts:
        draft.extra |= {"group": rest} if rest else {}
    yield from drafts


def _trajectory(record: Fields, name: str, group: str | None) -> Draft:
    draft = Draft(episode_id=name, group_id=group)
    exchanges = record.fields("exchanges")
    if exchanges is not None and any(exchanges.peek(p) for p in PROTOCOLS):
        draft.calls = _exchanges(exchanges)
    else:
        histories = [record, *record.each("additional_histories")]
        for number, history in enumerate(histories):
            draft.calls += _history(history, f"{number}/")
    draft.reward = record.number("reward") if "reward" in record else 0.0
    first, last = record.whole("initial_policy_version"), record.whole("final_policy_version")
    if first is not None and first == last:
        for call in draft.calls:
            call.policy_version = first
    elif first is not None or last is not None:
        record.losses.degrade("versions of the weights are kept as extra: which call saw which is not told")
        draft.extra |= {"initial_policy_version": first, "final_policy_version": last}
    draft.extra |= {name: value for name, value in record.rest().items() if value not in ([], {})}
    return draft


def _history(history: Fields, prefix: str) -> list[Call]:
    """The calls of a list of messages in which the answers are choices."""
    calls: list[Call] = []
    before: list[dict[str, Any]] = []
    tools = history.items("tools")
    for item in history.each("messages_and_choices"):
        if not isinstance(item.peek("message"), dict):
            before.append(dict(item.value))
            item.drop()
            continue
        request = Fields({"messages": list(before), "tools": tools}, item.losses)
        response = Fields({"choices": [item.value]}, item.losses)
        (call,) = exchange.calls(request, response, item.losses)
        (choice,) = response.each("choices")
        _add_told(call, choice, response)
        call.place = f"{item.losses.place} {item.path}"
        call.key, call.parent = f"{prefix}{len(calls)}", calls[-1].key if calls else None
        call.extra |= choice.rest()
        item.drop()
        calls.append(call)
        said = item.value["message"]
        before.append({"role": "assistant", "content": said.get("content") or ""})
        if said.get("tool_calls"):
            before[-1]["tool_calls"] = said["tool_calls"]
    return calls


def _exchanges(exchanges: Fields) -> list[Call]:
    """The calls of all protocols in the order in which they began; how they follow from one another is not told."""
    found: list[Call] = []
    for protocol in PROTOCOLS:
        for item in exchanges.each(protocol):
            request, response = item.fields("request"), item.fields("response")
            if response is None:
                raise BrokenRecord(f"{item.path}: an exchange without a response")
            for call in _calls(protocol, request, response, item):
                call.place = f"{item.losses.place} {item.path}"
                call.started_at, call.ended_at = item.time("start_time"), item.time("end_time")
                call.order = call.started_at.timestamp() if call.started_at else None
                call.model = call.model or item.text("model")
                found.append(call)
            item.any("model")
            if found:
                found[-1].extra |= item.rest()
    return found


def _calls(protocol: str, request: Fields | None, response: Fields, item: Fields) -> list[Call]:
    losses = item.losses
    if protocol == "messages":
        pair = {"request": request.value if request else None, "response": response.value, "episode_id": "-"}
        calls = [call for draft in anthropic.read(pair, losses) for call in draft.calls]
        for call in calls:
            _add_told(call, response, response)
        response.drop()
    elif protocol == "responses":
        made = _generations(request, response)
        kept = request is not None and any(request.peek(name) is not None for name in responses.KEPT_BY_SERVER)
        calls = responses.calls(request, response, losses) if len(made) < 2 and not (made and kept) else made
        if len(calls) == len(made) == 1 and calls is not made:  # one call, as text and as ids
            calls[0].prompt_ids, calls[0].output_ids = made[0].prompt_ids, made[0].output_ids
            calls[0].logprobs, calls[0].logprob_kind = made[0].logprobs, made[0].logprob_kind
            calls[0].extra |= made[0].extra
        if calls:
            calls[-1].extra |= response.rest()
    else:
        if request is not None and request.peek("echo"):
            losses.lose("an answer that repeats its prompt (echo)")
            return []
        calls = exchange.calls(request, response, losses)
        asked = exchange.prompt_ids_of(request)
        for call, choice in zip(calls, response.each("choices"), strict=True):
            call.prompt_ids = asked if call.prompt_ids is None else call.prompt_ids
            _add_told(call, choice, response)
    return calls


def _add_told(call: Call, choice: Fields, response: Fields) -> None:
    """What ART and the servers that it knows tell beside an answer: ids, log-probabilities and their kind."""
    losses = choice.losses
    if call.output_ids is None and choice is response:
        call.prompt_ids, call.output_ids = choice.ids("prompt_token_ids"), choice.ids("token_ids")
    for name in SCORES:
        scores = choice.logprobs(name)
        call.logprobs = scores if call.logprobs is None else call.logprobs
    mode = choice.any("logprobs_mode") or response.any("logprobs_mode")
    _name_kind(call, mode, losses)
    if call.output_ids is not None and call.prompt_ids is None:
        losses.degrade("output ids without those of their prompt are kept as extra")
        call.extra["output_token_ids"] = call.output_ids.tolist()


def _name_kind(call: Call, mode: Any, losses: Losses) -> None:
    call.logprob_kind = KINDS.get(mode) if isinstance(mode, str) else None
    if mode is not None and call.logprob_kind is None and call.logprobs is not None:
        losses.degrade("log-probabilities left out: they are none", str(mode)[:60])
        call.extra |= {"logprobs_mode": mode, "log_probabilities": call.logprobs.tolist()}
        call.logprobs = None


def _generations(request: Fields | None, response: Fields) -> list[Call]:
    """The calls that a server of the Responses form made for an answer, each with its ids (`token_generations`)."""
    losses, found = response.losses, []
    for number, item in enumerate(response.each("token_generations")):
        ids, logprobs = item.ids("token_ids"), item.logprobs("compact_logprobs")
        told = item.items("output_tokens")
        if ids is None and told:
            pairs = [_pair(v, f"{item.path}.output_tokens[{i}]") for i, v in enumerate(told)]
            ids = as_ids([p[0] for p in pairs], item.path)
            logprobs = as_logprobs([p[1] for p in pairs], losses, item.path)
        call = Call(place=losses.place, prompt_ids=item.ids("prompt_token_ids"), output_ids=ids, logprobs=logprobs)
        name = response.name("id")
        call.key = None if name is None else f"{name}/{number}"
        call.model = response.text("model")
        call.sampling = None if request is None else exchange.sampling(request)
        _name_kind(call, item.any("logprobs_mode"), losses)
        call.extra = item.rest()
        found.append(call)
    return found


def _pair(value: Any, path: str) -> tuple[Any, Any]:
    """(id, log-probability) of a token, whose id stands by itself or in its text."""
    token = Fields(value, Losses(), path)
    number, text = token.any("token_id"), token.peek("token")
    if number is None and isinstance(text, str) and text.startswith(TOLD) and text[len(TOLD) :].isdecimal():
        number = int(text[len(TOLD) :][:12])
    return number, token.any("logprob")


FORMAT = Format(
    name="art",
    title="ART: trajectories and groups, as JSON and in its tables",
    exactness="some ids",
    read=read,
    unsaid=("no_logprob_kind", "no_end", "no_parent", "no_rewrite_kind", "lossy_text"),
    note="Ids are there where the server gave those of the prompt with its answer. Tables and JSON Lines of version "
    "0.5.18 and before hold text alone, without log-probabilities: write `model_dump_json` of the group instead.",
    records=rows_or_json,
    suffixes=(PARQUET, *SUFFIXES),
)
