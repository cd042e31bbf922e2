"""`mainstem generate`: one prompt, the answer streamed to standard output."""

import argparse
import json
import sys
from time import perf_counter

import numpy as np

from mainstem.cli.flags import add_engine_flags, add_sampling_flags, engine_config, sampling_params
from mainstem.cli.parser import Parser
from mainstem.core.errors import AnswerFailed
from mainstem.core.ids import RequestId
from mainstem.core.interrupts import guarded_interrupts
from mainstem.core.request import Request
from mainstem.llm import LLM


def parser() -> argparse.ArgumentParser:
    made = Parser("mainstem generate", usage="%(prog)s PROMPT [flags]", description=__doc__)
    made.add_argument("prompt", help="the text to continue; -: standard input")
    made.add_argument("--chat", action="store_true", help="send the text as a chat message")
    made.add_argument("--json", action="store_true", help="print one JSON object at the end")
    add_sampling_flags(made, max_tokens=128)
    add_engine_flags(made)
    return made


@guarded_interrupts()
def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    prompt = args.prompt
    if prompt == "-":
        prompt = sys.stdin.read() if sys.stdin is not None else ""
    sampling = sampling_params(args)
    llm = LLM.from_config(engine_config(args))
    if args.chat:
        ids = llm.tokenizer.encode_chat([{"role": "user", "content": prompt}])
    else:
        ids = llm.tokenizer.encode(prompt)
    engine = llm.text_engine
    began_s = perf_counter()
    engine.submit(Request(RequestId("generate"), np.asarray(ids), sampling))
    text: list[str] = []
    num_tokens, first_s, reason = 0, 0.0, None
    while engine.has_work:
        for output in engine.step():
            first_s = first_s or perf_counter() - began_s
            num_tokens += len(output.token_ids)
            text.append(output.text)
            reason = output.finish_reason or reason
            if output.fault is not None:
                raise AnswerFailed(f"the prompt could not be answered: {output.fault}")
            if not args.json:
                print(output.text, end="", flush=True)
    if args.json:
        report = {
            "text": "".join(text),
            "finish_reason": reason.value if reason else None,
            "prompt_tokens": len(ids),
            "output_tokens": num_tokens,
            "first_token_s": round(first_s, 4),
            "seconds": round(perf_counter() - began_s, 4),
        }
        print(json.dumps(report))
    else:
        print()
    llm.close()
    return 0
