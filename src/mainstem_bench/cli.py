"""`mainstem bench NAME`: the benchmarks that the results in the docs come from."""

import sys
from importlib import import_module

from mainstem.core.spelling import did_you_mean

BENCHES = {
    "host": ("mainstem_bench.host", "scheduler time per step at 1,000 sequences"),
    "cpu": ("mainstem_bench.cpu", "64 requests over one prefix; also with other installed engines"),
    "attention": ("mainstem_bench.attention", "CPU decode attention over a shared prefix"),
    "batch": ("mainstem_bench.batch", "a batch over shared documents, with and without planning"),
    "plan": ("mainstem_bench.plan", "seconds and memory of planning up to 1M prompts"),
    "shares": ("mainstem_bench.shares", "a plan of 10M rows cut for 1,000 workers"),
    "serve": ("mainstem_bench.serve", "load on any OpenAI-compatible server"),
    "scaled": (
        "mainstem_bench.scaled",
        "what a served model should take, by the measurement of another",
    ),
    "gaps": ("mainstem_bench.gaps", "how long streams stop beside another client's prompt"),
    "replay": ("mainstem_bench.replay", "recorded requests of a server, on the engine alone"),
    "policies": ("mainstem_bench.policies", "the same arrivals under lookahead, LRU and FIFO"),
    "valleys": ("mainstem_bench.valleys", "tokens per step over a job, planner off and on"),
    "tails": (
        "mainstem_bench.tails",
        "the slowest requests of a served load, by the longest step",
    ),
    "offline": (
        "mainstem_bench.offline",
        "a whole job on random weights, compared with the card's limit",
    ),
    "checkpoint": (
        "mainstem_bench.checkpoint",
        "write a folder of random weights that any server can load",
    ),
    "score": ("mainstem_bench.score", "choices after shared contexts, on random weights"),
    "columns": ("mainstem_bench.columns", "the order of a table's columns, against all orders"),
    "tables": ("mainstem_bench.tables", "a table's rows, by order of columns and of rows"),
    "fewshot": ("mainstem_bench.fewshot", "few-shot questions with and without sharing"),
    "decode": ("mainstem_bench.decode", "milliseconds per decode step on random weights"),
    "rollouts": (
        "mainstem_bench.rollouts",
        "updates of weights, sleep, and many answers of each prompt, on random weights",
    ),
    "ranks": ("mainstem_bench.ranks", "time of a step on several cards, projected from one card"),
    "soak": (
        "mainstem_bench.soak",
        "checks that random requests, aborts and preemptions lose nothing",
    ),
    "sessions": ("mainstem_bench.sessions", "times of returning conversations, by tier"),
    "agree": (
        "mainstem_bench.agree",
        "returning conversations in real time, on the engine and in the simulator",
    ),
    "truncation": (
        "mainstem_bench.truncation",
        "quality after a conversation was cut to the window",
    ),
    "quantized": ("mainstem_bench.quantized", "perplexity of a model that we quantize to 4 bits"),
    "kv-dtype": (
        "mainstem_bench.kv_dtype",
        "perplexity of texts with K and V in fp8, compared with unrounded",
    ),
    "kv-answers": (
        "mainstem_bench.kv_answers",
        "few-shot questions and needles in long texts, with K and V in 16 bits and in fp8",
    ),
    "kernel": (
        "mainstem_bench.kernel",
        "span attention on a GPU, compared with its least possible time",
    ),
    "kernel-fp8": (
        "mainstem_bench.kernel_fp8",
        "span attention of prompts on a GPU over pages in fp8, in two ways, and in 16 bits",
    ),
    "recurrent": (
        "mainstem_bench.recurrent",
        "decodes of a recurrent layer on a GPU, with states that siblings share",
    ),
    "heads": ("mainstem_bench.heads", "the same for many head layouts"),
    "paper": ("mainstem_bench.paper.command", "figures and tables of three papers, measured again"),
    "guard": ("mainstem_bench.guard", "what became slower, by a set of the others"),
    "cuts": ("mainstem_bench.cuts", "how well the attention planner chooses, on random steps"),
}


def main(argv: list[str]) -> int:
    if not argv or argv[0] not in BENCHES:
        if argv and not argv[0].startswith("-"):
            hint = did_you_mean(argv[0], BENCHES)
            print(f"mainstem bench: no benchmark {argv[0]!r}.{hint}\n", file=sys.stderr)
        print("usage: mainstem bench NAME [flags]\n", file=sys.stderr)
        for name, (_, summary) in BENCHES.items():
            print(f"  {name:<10} {summary}", file=sys.stderr)
        return 0 if argv and argv[0] in ("-h", "--help") else 2
    module, _ = BENCHES[argv[0]]
    status: int = import_module(module).main(argv[1:])
    return status
