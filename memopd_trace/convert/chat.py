"""Text to token ids: messages by the tokenizer's own chat template, answers by encoding what it makes of them.

Ids made here are a reconstruction (`token_source` is `retokenized`), never the engine's. Templates run in the sandbox
that Transformers gives them; a template inside a log is never run, and no code of a tokenizer's folder. Needs the extra
`chat`.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from memopd_trace.convert.bounds import Overrun, bounded
from memopd_trace.convert.draft import Call, Chat
from memopd_trace.errors import InputError, MissingExtraError, first_line, printable
from memopd_trace.invocation import IDS
from memopd_trace.metadata import Tokenizer
from memopd_trace.pieces import FILE_NAME, Pieces, load_pieces

FILES = (
    FILE_NAME,
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
)
MAX_TEXT = 64 * 2**20  # characters of one prompt
TEMPLATE_SECONDS = 20.0  # of processor time for one rendering: templates come with models, which anyone may upload
TEMPLATE_BYTES = 2 * 2**30  # that one rendering may allocate
MAX_OVERRUNS = 3  # renderings that take more, after which there are none
SAID = ("content", "reasoning_content", "reasoning")  # what an answer may say beside the tools that it calls


class CannotRender(Exception):
    """Why a call's text gives no ids, in a few words."""


class Renderer:
    """A tokenizer with its chat template, from a local folder.

    Raises:
        InputError: the folder holds no tokenizer that can be loaded without code of its own.
        MissingExtraError: Transformers is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise InputError(f"{folder}: no such folder", hint="give the folder that holds the model's tokenizer.json")
        if not any((self.folder / name).is_file() for name in FILES):
            raise InputError(f"{folder}: no tokenizer: none of {', '.join(FILES)}")
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise MissingExtraError(
                "text becomes ids by the 'transformers' package",
                hint="pip install 'memopd-trace[chat]', or '.[chat]' in a clone",
            ) from None
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(
                str(self.folder), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:
            raise InputError(f"{folder}: no tokenizer: {printable(first_line(error))}") from None
        self._overruns = 0
        added = self.tokenizer.added_tokens_decoder.values()
        self._marks = sorted({t.content for t in added if t.special}, key=len, reverse=True)  # what may end a turn

    def pieces(self) -> Pieces | None:
        """The same tokenizer for reading ids; `None` where it has no `tokenizer.json`."""
        return load_pieces(self.folder) if (self.folder / FILE_NAME).is_file() else None

    def metadata(self) -> Tokenizer:
        """What the trace says of it. The width of the model is that of the `config.json` beside it, if there is one."""
        from memopd_trace.record.fingerprint import tokenizer_metadata, tokenizer_size

        size = tokenizer_size(self.tokenizer)
        width = _config(self.folder / "config.json").get("vocab_size")
        return tokenizer_metadata(self.tokenizer, vocab_size=max(size, width) if type(width) is int else size)

    def encode(self, text: str) -> IDS:
        """int32 ids of a text that holds its special pieces already.

        Raises:
            CannotRender: it is too long, or the tokenizer fails.
        """
        if len(text) > MAX_TEXT:
            raise CannotRender(f"a text of more than {MAX_TEXT} characters")
        try:
            return np.array(self.tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
        except Exception as error:
            raise CannotRender(f"the tokenizer: {first_line(error)}") from None

    def prompt_text(self, prompt: Chat | str) -> str:
        """The prompt as the model would read it, up to where its answer begins.

        Raises:
            CannotRender: the template does not take these messages, or they hold more than text.
        """
        return prompt if isinstance(prompt, str) else self._render(prompt, prompt.messages, answer=False)

    def answer_text(self, prompt: Chat | str, text: str, answer: dict[str, Any] | str, ended: bool) -> tuple[str, bool]:
        """(the text of an output, whether the template's rendering of it follows on `text`, its prompt's). The piece
        that ends the turn belongs to it where the output `ended` by itself.

        Raises:
            CannotRender: as `prompt_text`.
        """
        if isinstance(answer, str):
            return answer, True
        if isinstance(prompt, str):
            return str(answer.get("content") or ""), True
        whole = self._render(prompt, [*prompt.messages, answer], answer=True)
        if whole.startswith(text):
            new = whole[len(text) :]
            end = next((m for m in self._marks if new.rstrip().endswith(m)), "")
            return (new.rstrip().removesuffix(end) + end * ended if end else new), True
        content = _plain(answer).get("content")
        if not content or answer.get("tool_calls"):
            raise CannotRender("the template does not render the answer behind its prompt")
        return content + str(self.tokenizer.eos_token or "") * ended, False

    def _render(self, prompt: Chat, messages: list[dict[str, Any]], answer: bool) -> str:
        if self.tokenizer.chat_template is None:
            raise CannotRender("the tokenizer has no chat template (chat_template.jinja in its folder)")
        if self._overruns >= MAX_OVERRUNS:
            raise CannotRender(f"the chat template: took too much {MAX_OVERRUNS} times, and is not run again")
        try:
            with bounded(TEMPLATE_SECONDS, TEMPLATE_BYTES):
                text = self._apply(prompt, messages, answer)
            if len(text) > MAX_TEXT:
                raise CannotRender(f"a text of more than {MAX_TEXT} characters")
            return text
        except (Overrun, MemoryError) as error:
            what = "takes too much memory" if isinstance(error, MemoryError) else "takes too long"
        except CannotRender:
            raise
        except Exception as error:  # a template raises whatever it likes
            raise CannotRender(f"the chat template: {printable(first_line(error))}") from None
        self._overruns += 1
        gc.collect()  # what it had allocated
        raise CannotRender(f"the chat template: {what}")

    def _apply(self, prompt: Chat, messages: list[dict[str, Any]], answer: bool) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                [_plain(m) for m in messages],
                tools=prompt.tools or None,
                add_generation_prompt=not answer,
                tokenize=False,
                **{k: v for k, v in prompt.options.items() if k.isidentifier() and k not in RESERVED},
            )
        )


RESERVED = (
    "conversation", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message",
    "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
    "tokenizer_kwargs",
)  # fmt: skip


def rendered(call: Call, renderer: Renderer) -> tuple[IDS, IDS, list[str]]:
    """(prompt ids, output ids, what the template did not do well) of a call's text.

    Raises:
        CannotRender: with the reason.
    """
    if call.prompt is None or call.answer is None:
        raise CannotRender("no prompt" if call.prompt is None else "no answer")
    text = renderer.prompt_text(call.prompt)
    ended = call.finish_reason in ("stop", "tool_calls")
    answer, follows = renderer.answer_text(call.prompt, text, call.answer, ended)
    faults = [] if follows else ["the answer is encoded without its template, which renders it elsewhere"]
    messages = [] if isinstance(call.prompt, str) else call.prompt.messages
    if any(name not in answer for name in _functions([call.answer])):
        if isinstance(call.answer, dict) and not any(call.answer.get(name) for name in SAID):
            raise CannotRender("the chat template leaves tool calls out, and the answer is nothing else")
        faults.append("the chat template leaves tool calls out")
    elif any(name not in text for name in _functions(messages)):
        faults.append("the chat template leaves tool calls out")
    return renderer.encode(text), renderer.encode(answer), faults


def _functions(messages: Sequence[Any]) -> list[str]:
    """The names of the functions that messages call."""
    calls = [c for m in messages if isinstance(m, dict) for c in m.get("tool_calls") or () if isinstance(c, dict)]
    functions = [c.get("function") for c in calls]
    return [f["name"] for f in functions if isinstance(f, dict) and isinstance(f.get("name"), str)]


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: text parts joined, arguments of tool calls as objects.

    Raises:
        CannotRender: a part is no text.
    """
    message = {name: value for name, value in message.items() if value is not None}
    content = message.get("content")
    if isinstance(content, list):
        parts = [p if isinstance(p, dict) else {"type": "text", "text": p} for p in content]
        other = [str(p.get("type")) for p in parts if not isinstance(p.get("text"), str)]
        if other:
            raise CannotRender(f"a message holds a part of type '{printable(other[0], 40)}'")
        message["content"] = "\n".join(p["text"] for p in parts)
    elif not isinstance(content, str | None):
        raise CannotRender("a message's content is neither text nor a list of parts")
    message.setdefault("content", "")
    if isinstance(message.get("tool_calls"), list):
        message["tool_calls"] = [_tool_call(c) for c in message["tool_calls"]]
    return message


def _tool_call(call: Any) -> Any:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        return call
    function = dict(call["function"])
    try:
        arguments = json.loads(function.get("arguments"))  # type: ignore[arg-type]
        function["arguments"] = arguments if isinstance(arguments, dict) else function["arguments"]
    except (TypeError, ValueError, RecursionError):
        pass
    return {**call, "function": function}


def _config(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
