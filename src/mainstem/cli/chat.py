"""`mainstem chat`: a conversation in the terminal; answers stream, history is not recomputed."""

import argparse
import re
import sys
from contextlib import suppress
from signal import SIGINT
from time import perf_counter

import numpy as np

from mainstem.cli.flags import add_engine_flags, add_sampling_flags, engine_config, sampling_params
from mainstem.cli.parser import Parser
from mainstem.cli.stop_signals import StopSignals
from mainstem.core.errors import InvalidRequest
from mainstem.core.ids import RequestId, SessionId
from mainstem.core.interrupts import guarded_interrupts
from mainstem.core.request import Overflow, Request, SamplingParams
from mainstem.llm import LLM
from mainstem.text.tokenizer import Tokenizer

HELP = "/reset forgets the conversation, /exit (or Ctrl-D) leaves, Ctrl-C stops an answer"
SESSION = SessionId("chat")


def parser() -> argparse.ArgumentParser:
    made = Parser("mainstem chat", usage="%(prog)s [flags]", description=__doc__)
    made.add_argument("--system", metavar="TEXT", help="system prompt")
    made.add_argument(
        "--context-overflow",
        choices=[policy.value for policy in Overflow],
        default=Overflow.KV.value,
        help="what happens if a conversation outgrows the window. kv: drop the oldest tokens, and "
        "keep the KV of the others; recompute: the same, but compute their KV again; important: "
        "drop the pages that the last tokens attend to least; error: refuse the turn "
        "(%(default)s)",
    )
    made.add_argument("--stats", action="store_true", help="show timing after each answer")
    add_sampling_flags(made, max_tokens=512)
    add_engine_flags(made)
    return made


@guarded_interrupts()
def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    with suppress(ImportError):
        import readline  # noqa: F401, PLC0415  # line editing for input(), where Python has it
    sampling = sampling_params(args)
    llm = LLM.from_config(engine_config(args))
    start = [{"role": "system", "content": args.system}] if args.system else []
    num_fixed = common_tokens(llm.tokenizer, start)
    messages = list(start)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print(HELP)
    while True:
        try:
            line = input("> " if is_terminal else "")
        except (EOFError, KeyboardInterrupt):
            print()
            break
        if line.strip() in ("/exit", "/quit"):
            break
        if line.strip() == "/reset":
            messages = list(start)
            continue
        if line.strip() == "/help":
            print(HELP)
            continue
        if not line.strip():
            continue
        if re.fullmatch(r"/[a-z]+", line.strip()):
            print(f"(unknown command {line.strip()}; {HELP})")
            continue
        messages.append({"role": "user", "content": line})
        try:
            answer = stream_answer(
                llm, messages, num_fixed, sampling, args.stats, Overflow(args.context_overflow)
            )
        except InvalidRequest as error:
            print(f"({error}; /reset starts a new conversation)")
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": answer})
    llm.close()
    return 0


def common_tokens(tokenizer: Tokenizer, start: list[dict[str, str]]) -> int:
    """Return how many leading tokens all conversations with this system prompt share."""
    a, b = (tokenizer.encode_chat([*start, {"role": "user", "content": said}]) for said in "ab")
    differ = (number for number, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differ, min(len(a), len(b)))  # a template may leave out the messages


def stream_answer(
    llm: LLM,
    messages: list[dict[str, str]],
    num_fixed: int,
    sampling: SamplingParams,
    shows_stats: bool,
    overflow: Overflow = Overflow.KV,
) -> str:
    """Stream one answer. Ctrl-C keeps the text so far; it waits for the running step, since an
    engine that is interrupted during a step loses its cache. A second Ctrl-C does not wait."""
    engine = llm.text_engine
    prompt = llm.tokenizer.chat_text(messages)
    ids = llm.encode_turn(SESSION, prompt)
    began_s, first_s = perf_counter(), 0.0
    engine.submit(
        Request(
            RequestId("chat"),
            np.asarray(ids),
            sampling,
            session=SESSION,
            overflow=overflow,
            keep_tokens=num_fixed,
        )
    )
    text: list[str] = []
    token_ids: list[int] = []
    num_cached, num_dropped = 0, 0
    stop = StopSignals(SIGINT)
    with stop.caught():
        while engine.has_work:
            for output in engine.step():
                first_s = first_s or perf_counter() - began_s
                token_ids += output.token_ids
                num_cached = output.num_cached_tokens
                num_dropped = output.num_dropped_tokens
                text.append(output.text)
                print(output.text, end="", flush=True)
                if output.fault is not None:
                    print(f"(the answer ends here, {output.fault})", end="")
            if stop.is_set():
                engine.abort("chat")
    print()
    llm.keep_turn(SESSION, prompt, ids, token_ids)
    if num_dropped:
        part = "a part" if overflow is Overflow.IMPORTANT else "the first part"
        print(f"({part} of this conversation, {num_dropped} tokens, is out of the window)")
    if shows_stats:
        seconds = perf_counter() - began_s
        rate = max(len(token_ids) - 1, 0) / max(seconds - first_s, 1e-9)
        print(
            f"({len(ids)} prompt tokens, {num_cached} cached; first token {first_s * 1e3:.0f} ms; "
            f"{len(token_ids)} tokens, {rate:.1f} tokens/s)"
        )
    return "".join(text)
