"""Reads traces of requests: their times, lengths and pages.

    format     a line                                                      page, tokens
    mooncake   {"timestamp": ms, "input_length", "output_length",                   512
                "hash_ids": [one per page of the prompt]}
    qwen       {"chat_id", "parent_chat_id", "timestamp": s, "turn", ...,            16
                "hash_ids": [...]}                       (Qwen-Bailian usage traces)
    weka       {"session", "block_size": 64, "requests": [{"t": s, "agent",          64
                "input_length", "output_length", "think_s",
                "hash_runs": [[start, count], ...]}, ...]}
    azure      timestamp, prompt tokens, answer tokens   (CSV with a header)        128
    servegen   client,t_s,rate_rps,cv,pattern,p1,p2      (CSV with a header)        128
    sessions   {"turns": [[user tokens, answer tokens], ...]}                       128
    chitchat   {"turns": [[first message s, last message s, tokens], ...]}          128

Only whole pages are reused, as in the engine. Azure and ServeGen traces have no contents of
prompts, so nothing in them can be shared.
"""

import csv
import json
from collections.abc import Callable
from pathlib import Path

from mainstem.core.errors import ConfigError, InvalidRequest
from mainstem.core.files import open_plain_or_gzip
from mainstem_simulate.hash_traces import read_mooncake, read_qwen, read_weka
from mainstem_simulate.length_traces import (
    azure_columns,
    is_servegen,
    read_azure,
    read_servegen,
)
from mainstem_simulate.session_traces import read_chitchat, read_sessions
from mainstem_simulate.trace_records import (
    Lines,
    Outgrown,
    ReadOptions,
    Trace,
    TraceFormat,
    TraceRequest,
)

PAGE_TOKENS = {
    TraceFormat.MOONCAKE: 512,
    TraceFormat.QWEN: 16,
    TraceFormat.WEKA: 64,
    TraceFormat.AZURE: 128,
    TraceFormat.SERVEGEN: 128,
    TraceFormat.SESSIONS: 128,
    TraceFormat.CHITCHAT: 128,
}

Reader = Callable[[Lines, int, ReadOptions], list[TraceRequest]]
READERS: dict[TraceFormat, Reader] = {
    TraceFormat.MOONCAKE: read_mooncake,
    TraceFormat.QWEN: read_qwen,
    TraceFormat.WEKA: read_weka,
    TraceFormat.AZURE: read_azure,
    TraceFormat.SERVEGEN: read_servegen,
    TraceFormat.SESSIONS: read_sessions,
    TraceFormat.CHITCHAT: read_chitchat,
}


def read_trace(path: Path, options: ReadOptions | None = None) -> Trace:
    """Read a trace, plain or gzip. Its format is found from its first line, unless it is given."""
    options = options or ReadOptions()
    try:
        with open_plain_or_gzip(path) as stream:
            first = next(iter(Lines(path, stream)), "")
        trace_format = options.format or detect(first, path)
        page_tokens = options.page_tokens or PAGE_TOKENS[trace_format]
        _check_outgrown(trace_format, options)
        with open_plain_or_gzip(path) as stream:
            requests = READERS[trace_format](Lines(path, stream), page_tokens, options)
    except OSError as error:
        raise InvalidRequest(str(path), error.strerror or str(error)) from None
    if not requests:
        raise InvalidRequest(str(path), "the trace holds no request")
    if options.limit is not None:
        requests = requests[: options.limit]
    return Trace(trace_format, page_tokens, requests)


def _check_outgrown(trace_format: TraceFormat, options: ReadOptions) -> None:
    """Refuse `outgrown` without a window, and for traces other than session lengths: a trace with
    ids of pages does not have the ids of a truncated prompt's pages."""
    if options.outgrown is Outgrown.LEFT_OUT:
        return
    if trace_format not in (TraceFormat.SESSIONS, TraceFormat.CHITCHAT):
        raise ConfigError(
            f"--overflow {options.outgrown.value} needs a trace of session lengths (sessions, "
            f"chitchat), and this one is {trace_format.value}: leave --overflow out"
        )
    if options.context_tokens is None:
        raise ConfigError(f"--overflow {options.outgrown.value} needs --context-tokens")


def detect(first_line: str, path: Path) -> TraceFormat:
    """The format of a trace, by the names in its first line."""
    try:
        row = json.loads(first_line)
    except ValueError:
        row = None
    if isinstance(row, dict):
        if "turns" in row:
            return TraceFormat.CHITCHAT if _has_times(row["turns"]) else TraceFormat.SESSIONS
        if "block_size" in row and "requests" in row:
            return TraceFormat.WEKA
        if "hash_ids" in row:
            return TraceFormat.QWEN if "chat_id" in row else TraceFormat.MOONCAKE
    else:
        header = next(csv.reader([first_line]), [])
        if is_servegen(header):
            return TraceFormat.SERVEGEN
        if azure_columns(header) is not None:
            return TraceFormat.AZURE
    known = ", ".join(member.value for member in TraceFormat)
    raise InvalidRequest(f"{path}:1", f"not a trace in a known format ({known})")


def _has_times(turns: object) -> bool:
    """Whether turns are ChitChat's: three numbers each instead of two."""
    is_list = isinstance(turns, list) and bool(turns) and isinstance(turns[0], list)
    return is_list and len(turns[0]) == 3  # type: ignore[index]  # it is a list
