"""Measures 64 requests over one shared prefix on a CPU, and compares with installed rivals.

The workload: a prefix of 1,024 tokens, 32 further prompt tokens per request, 32 generated tokens;
greedy, end tokens are ignored. `--batch-1` measures decoding alone at batch size 1 instead.
"""

import argparse
import random
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from time import perf_counter

import numpy as np

from mainstem.checkpoints.hub import resolve_model
from mainstem.cli.flag_types import positive_count
from mainstem.cli.flags import add_engine_flags, engine_config
from mainstem.cli.parser import Parser
from mainstem.core.config import EngineConfig
from mainstem.core.ids import RequestId
from mainstem.core.request import Request
from mainstem.llm import LLM
from mainstem_bench.feed import greedy
from mainstem_bench.report import load_average, show_all
from mainstem_bench.settings import empty_folder

Prompts = list[list[int]]


def parser() -> argparse.ArgumentParser:
    made = Parser("mainstem bench cpu", description=__doc__)
    made.add_argument("--requests", type=positive_count, default=64)
    made.add_argument("--prefix", type=int, default=1024)
    made.add_argument("--own", type=int, default=32)
    made.add_argument("--output", type=positive_count, default=32)
    made.add_argument("--batch-1", action="store_true", help="one short prompt, 128 tokens out")
    made.add_argument(
        "--rivals",
        nargs="*",
        default=[],
        choices=sorted(RIVALS),
        help="also run these, if they are installed",
    )
    made.add_argument("--json", action="store_true")
    add_engine_flags(made)
    return made


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    if args.batch_1:
        args.requests, args.prefix, args.own, args.output = 1, 0, 16, 128
    config = engine_config(args)
    prompts = make_prompts(args.requests, args.prefix, args.own)
    with empty_folder(config.store.disk_dir) as folder:
        if config.store.disk_dir is not None:
            config = replace(config, store=replace(config.store, disk_dir=folder))
        results = [ours(config, prompts, args.output)]
    for name in args.rivals:
        package, run = RIVALS[name]
        if find_spec(package) is None:
            print(f"{name}: {package} is not installed")
            continue
        results.append(run(config, prompts, args.output) | {"engine": name})
    show_all("cpu", results, args.json)
    return 0


def make_prompts(requests: int, prefix: int, own: int, vocab: int = 30_000) -> Prompts:
    """Make random prompts; equal arguments give equal prompts."""
    rng = random.Random(0)
    head = [rng.randrange(10, vocab) for _ in range(prefix)]
    return [head + [rng.randrange(10, vocab) for _ in range(own)] for _ in range(requests)]


def ours(config: EngineConfig, prompts: Prompts, output: int) -> dict[str, object]:
    """Return the seconds for all prompts. The model is loaded and warmed up before the clock
    starts."""
    llm = LLM.from_config(config)
    llm.generate([prompts[0][-8:]], greedy(4), use_tqdm=False)
    llm.text_engine.engine.clear_cache()
    load = load_average()
    first_s = 0.0
    began_s = perf_counter()
    for index, ids in enumerate(prompts):
        llm.text_engine.submit(
            Request(RequestId(f"bench-{index}"), np.asarray(ids), greedy(output))
        )
    num_tokens = 0
    while llm.text_engine.has_work:
        for news in llm.text_engine.step():
            first_s = first_s or perf_counter() - began_s
            num_tokens += len(news.token_ids)
    seconds = perf_counter() - began_s
    llm.close()
    assert num_tokens == len(prompts) * output, "an answer is missing"
    return {
        "engine": "mainstem",
        "quantize": config.model.quantize.value,
        "share": config.sched.share.value,
        "requests": len(prompts),
        "seconds": round(seconds, 2),
        "requests_per_s": round(len(prompts) / seconds, 3),
        "first_token_s": round(first_s, 3),
        "decode_tokens_per_s": round((num_tokens - 1) / (seconds - first_s), 1),
        "saving_ratio": round(llm.counters.saving_ratio, 3),
        "host_s": round(llm.counters.host_s, 3),
        "load_before": load,
    }


def transformers_generate(config: EngineConfig, prompts: Prompts, output: int) -> dict[str, object]:
    """Measure Hugging Face's generate; returns the best of several batch sizes. Prompts must be
    equally long, since they are not padded."""
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    model = AutoModelForCausalLM.from_pretrained(
        resolve_model(config.model.model), dtype=torch.float32
    )
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    best: dict[str, object] = {}
    for batch_size in (64, 16) if len(prompts) > 1 else (1,):
        began_s = perf_counter()
        with torch.inference_mode():
            for start in range(0, len(prompts), batch_size):
                ids = torch.tensor(prompts[start : start + batch_size])
                model.generate(ids, max_new_tokens=output, do_sample=False)
        seconds = perf_counter() - began_s
        if not best or seconds < float(str(best["seconds"])):
            best = _speed(prompts, output, seconds) | {"batch_size": batch_size}
    return best


def vllm_generate(config: EngineConfig, prompts: Prompts, output: int) -> dict[str, object]:
    """Measure vLLM's CPU build in fp32, with prefix caching."""
    from vllm import LLM as VLLM  # noqa: PLC0415
    from vllm import SamplingParams as VLLMParams  # noqa: PLC0415

    llm = VLLM(
        model=str(resolve_model(config.model.model)),
        dtype="float32",
        enable_prefix_caching=True,
        enforce_eager=True,
    )
    params = VLLMParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    began_s = perf_counter()
    llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    return _speed(prompts, output, perf_counter() - began_s)


def _speed(prompts: Prompts, output: int, seconds: float) -> dict[str, object]:
    return {
        "seconds": round(seconds, 2),
        "requests_per_s": round(len(prompts) / seconds, 3),
        "decode_tokens_per_s": round(len(prompts) * output / seconds, 1),
    }


RIVALS: dict[str, tuple[str, Callable[[EngineConfig, Prompts, int], dict[str, object]]]] = {
    "transformers": ("transformers", transformers_generate),
    "vllm": ("vllm", vllm_generate),
}
