"""Calls out of VCR.py's cassettes, which many test suites keep of real servers: YAML, one interaction a call.

Only the bodies are taken. Headers, and what stands behind the `?` of an address, may hold keys: they are left out.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from memopd_trace.convert.losses import Issue
from memopd_trace.convert.records import MAX_RECORD, PACKED, Record, json_records, open_text
from memopd_trace.errors import MissingExtraError, first_line

SUFFIXES = (".yaml", ".yml")
MAX_CASSETTE = 16 * 2**20  # bytes; YAML is read whole
NULLS = [("tag:yaml.org,2002:null", re.compile(r"~|null|Null|NULL|"))]
CODE = re.compile(r"[1-9]\d\d", re.ASCII)
PACKINGS = (b"\x1f\x8b", b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda")  # how gzip and zlib begin
GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS


def records(files: Iterable[Path]) -> Iterator[Record | Issue]:
    """The interactions of cassettes, and the records of JSON files."""
    for file in files:
        plain = file.with_suffix("") if file.suffix in PACKED else file
        yield from _interactions(file) if plain.suffix in SUFFIXES else json_records([file])


def _interactions(file: Path) -> Iterator[Record | Issue]:
    try:
        with open_text(file) as stream:
            data = stream.read(MAX_CASSETTE + 1)
        if len(data) > MAX_CASSETTE:
            yield Issue(str(file), f"a cassette of more than {MAX_CASSETTE} bytes")
            return
        found = _load(data.decode())
    except MissingExtraError:
        raise
    except Exception as error:  # a YAML reader raises whatever it likes
        yield Issue(str(file), f"is no YAML: {type(error).__name__}: {first_line(error)}")
        return
    interactions = found.get("interactions") if isinstance(found, dict) else None
    if not isinstance(interactions, list):
        yield Issue(str(file), "no cassette of VCR.py: no list 'interactions'")
        return
    for number, interaction in enumerate(interactions):
        place = f"{file}[{number}]"
        try:
            yield Record(place, _exchange(interaction))
        except (ValueError, zlib.error) as error:
            yield Issue(place, f"no interaction that can be read: {first_line(error)}")


def _load(text: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise MissingExtraError(
            "cassettes are read by the 'pyyaml' package",
            hint="pip install 'memopd-trace[chat]', or '.[chat]' in a clone",
        ) from None

    class Loader(yaml.SafeLoader):
        """Texts, bytes, nulls, lists and mappings, and nothing that costs more than it is long: no numbers (in base 60
        a long one takes hours) and no merged keys (which multiply)."""

        def flatten_mapping(self, node: Any) -> None:
            """Keys stay where they stand."""

    Loader.yaml_implicit_resolvers = {"~": NULLS, "n": NULLS, "N": NULLS, "": NULLS}
    for name in ("int", "float", "bool", "timestamp"):  # by a tag of their own
        Loader.add_constructor(f"tag:yaml.org,2002:{name}", _as_text)
    return yaml.load(text, Loader)


def _as_text(loader: Any, node: Any) -> Any:
    return loader.construct_scalar(node)


def _exchange(interaction: Any) -> dict[str, Any]:
    """A request and its answer, as logs of calls have them.

    Raises:
        ValueError: it is no interaction, or a body is packed in a way that is not known.
    """
    if not isinstance(interaction, dict):
        raise ValueError("it is no object")
    request, response = interaction.get("request"), interaction.get("response")
    if not isinstance(request, dict) or not isinstance(response, dict):
        raise ValueError("no 'request' or no 'response'")
    status = response.get("status")
    code = status.get("code") if isinstance(status, dict) else None
    body, uri = response.get("body"), request.get("uri")
    return {
        "request": _text(request.get("body")),
        "response": _text(body.get("string") if isinstance(body, dict) else body),
        "status_code": int(code) if isinstance(code, str) and CODE.fullmatch(code) else None,
        "uri": uri.partition("?")[0] if isinstance(uri, str) else None,  # anything else may be far larger than its text
    }


def _text(body: Any) -> str | None:
    """A body as text.

    Raises:
        ValueError: it is none.
    """
    if isinstance(body, bytes):
        if body[:2] in PACKINGS:
            unpack = zlib.decompressobj(GZIP_OR_ZLIB)
            body = unpack.decompress(body, MAX_RECORD)
            if unpack.unconsumed_tail:
                raise ValueError(f"a body of more than {MAX_RECORD} bytes")
        body = body.decode()
    if body is not None and not isinstance(body, str):
        raise ValueError("a body that is no text")
    return body or None
