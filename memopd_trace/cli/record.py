"""The command that records from running agents: `record`."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path

import typer

from memopd_trace.cli.console import notice, require
from memopd_trace.errors import UsageError

MIB = 2**20


class LogprobKind(StrEnum):
    """What the upstream's log-probabilities are."""

    unknown = "unknown"
    raw = "raw"
    tempered = "tempered"
    processed = "processed"


class SamplingDefaults(StrEnum):
    """How the upstream samples where a request is silent."""

    auto = "auto"
    neutral = "neutral"


class Dialect(StrEnum):
    """How the upstream is asked for ids."""

    auto = "auto"
    vllm = "vllm"
    sglang = "sglang"


def record(
    upstream: str | None = typer.Option(
        None, metavar="URL", help="An OpenAI-compatible server that tells ids (vLLM, SGLang)."
    ),
    listen: str = typer.Option("127.0.0.1:8100", metavar="HOST:PORT", help="Where agents find the proxy; port 0: any."),
    output: Path = typer.Option(..., "--output", "-o", help="The trace's folder; one of a killed run is gone on with."),
    tokenizer: Path | None = typer.Option(
        None, metavar="DIR", help="The model's folder: tokenizer.json, config.json, …"
    ),
    model: list[str] = typer.Option([], metavar="NAME", help="A model that the upstream serves; default: ask it."),
    episode: str | None = typer.Option(None, help="The episode of calls that name none; default: not recorded."),
    logprob_kind: LogprobKind = typer.Option(
        LogprobKind.unknown,
        help="What the upstream's logprobs are (vLLM's default, --logprobs-mode raw_logprobs: raw).",
    ),
    sampling_defaults: SamplingDefaults = typer.Option(
        SamplingDefaults.auto,
        help="What holds where a request is silent. auto: the model folder's generation_config.json. neutral: "
        "temperature 1, nothing cut (vllm serve --generation-config vllm).",
    ),
    policy_version: int | None = typer.Option(None, min=0, help="The weights' version, where a call names none."),
    dialect: Dialect = typer.Option(Dialect.auto, help="How the upstream is asked for ids. auto: as its models say."),
    expert_routes: bool = typer.Option(False, "--expert-routes", help="Record expert routes where the upstream tells."),
    require_ids: bool = typer.Option(False, "--require-ids", help="Answer 502 where the upstream gives no ids."),
    max_calls: int = typer.Option(256, min=1, help="Calls at the upstream at once; more wait."),
    max_body: int = typer.Option(64, min=1, metavar="MIB", help="The largest request."),
    idle: float = typer.Option(
        4 * 3600.0, min=0, metavar="SECONDS", help="End episodes of which nothing was heard for so long; 0: never."
    ),
    timeout: float = typer.Option(600.0, min=0.1, metavar="SECONDS", help="Longest silence of the upstream."),
    finish: bool = typer.Option(False, "--finish", help="Serve nothing: make the trace of a killed run whole."),
) -> None:
    """Record the model calls of running agents: an OpenAI-compatible proxy that writes a trace.

    End it with Ctrl-C; the folder is then a complete trace. See docs/record.md.

    Example: memopd-trace record --upstream http://127.0.0.1:8000 --tokenizer models/student -o runs/today
    """
    server = require("memopd_trace.record.proxy.server", "record", "recording")  # first: it needs the most
    proxy = require("memopd_trace.record.proxy", "record", "recording")
    folder = require("memopd_trace.record.modelfolder", "record", "recording")
    if upstream is None and not finish:
        raise UsageError("no --upstream", hint="for example --upstream http://127.0.0.1:8000")
    host, port = proxy.listen_address(listen)
    defaults = None
    if sampling_defaults is SamplingDefaults.neutral:
        defaults = folder.sampling_of({})
    elif tokenizer is not None:
        defaults = folder.sampling_defaults(tokenizer)
    options = proxy.Options(
        upstream=proxy.upstream_url(upstream or "http://127.0.0.1"),
        host=host,
        port=port,
        episode=episode,
        logprob_kind=logprob_kind.value,
        defaults=defaults,
        policy_version=policy_version,
        expert_routes=expert_routes,
        require_ids=require_ids,
        max_calls=max_calls,
        max_body=max_body * MIB,
        timeout=timeout,
        idle=idle,
    )
    summary = server.record(
        output,
        options,
        models=model or None,
        tokenizer=tokenizer,
        dialect=None if dialect is Dialect.auto else dialect.value,
        serve=not finish,
        notice=notice,
        ready=lambda host, port: notice(f"recording at http://{host}:{port}/v1 into {output}; Ctrl-C ends it"),
    )
    print(json.dumps(summary, indent=1))
    _check(output)


def _check(folder: Path) -> None:
    from memopd_trace.validate import validate

    report = validate(folder, "lineage")
    if report.clean:
        return
    notice(report.to_text())
    raise typer.Exit(report.exit_code())


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command()(record)
