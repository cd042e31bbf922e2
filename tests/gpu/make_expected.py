"""Writes a small model of real weights, and a CPU's answers in fp32; `tests/gpu/test_equal.py`
compares a GPU with them.

    python -m tests.gpu.make_expected carry            a part of smollm2, 52 MB, and its answers
    python -m tests.gpu.make_expected carry --whole    the answers of all of smollm2

The part has the first and the last layers of smollm2 in bf16, and the rows of the embedding for the
tokens of the prompts and the most frequent ones. Its tokens are numbered anew: it has no tokenizer.
Prompts are those of tests/data/prompts50.jsonl. Every answer token has its logprob and its margin
over the next best token: if the margin is within rounding, either may be chosen.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from mainstem.checkpoints.hub import resolve_model
from mainstem.core.config import CacheConfig, Device, DType, EngineConfig, ModelConfig
from mainstem.core.ids import RequestId
from mainstem.core.request import Request, SamplingParams, TokenLogprobs
from mainstem.engine.build import build_engine
from mainstem.text.tokenizer import Tokenizer
from tests.gpu import PART

DATA = Path(__file__).parent.parent / "data" / "prompts50.jsonl"
NEW_TOKENS = 64
LAYERS = (0, 1, 2, 27, 28, 29)
VOCAB = 8192

Prompts = dict[str, list[int]]  # token ids by name


def read_prompts(tokenizer: Tokenizer) -> Prompts:
    prompts = {}
    for line in DATA.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "messages" in row:
            prompts[row["id"]] = tokenizer.encode_chat(row["messages"])
        else:
            prompts[row["id"]] = tokenizer.encode(row["prompt"])
    return prompts


def write_part(
    model: Path, folder: Path, prompts: Prompts, layers: Iterable[int] = LAYERS, vocab: int = VOCAB
) -> Prompts:
    """Write a part of smollm2; returns the prompts in the numbers of its tokens."""
    used = {token for ids in prompts.values() for token in ids}
    others = (token for token in range(1 << 20) if token not in used)  # merged first: frequent
    kept = sorted(used | {next(others) for _ in range(vocab - len(used))})
    number = {token: index for index, token in enumerate(kept)}
    place = {layer: index for index, layer in enumerate(layers)}
    tensors = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        match name.split("."):
            case ["model", "layers", layer, *rest]:
                if int(layer) in place:
                    tensors[".".join(["model.layers", str(place[int(layer)]), *rest])] = tensor
            case ["model", "embed_tokens", *_] | ["lm_head", *_]:
                tensors[name] = tensor[kept]
            case _:
                tensors[name] = tensor
    folder.mkdir(parents=True, exist_ok=True)
    save_file({n: t.to(torch.bfloat16).contiguous() for n, t in tensors.items()},
              folder / "model.safetensors")  # fmt: skip
    config = json.loads((model / "config.json").read_text())
    config |= {"num_hidden_layers": len(place), "vocab_size": len(kept), "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return {name: [number[token] for token in ids] for name, ids in prompts.items()}


def write_answers(model: Path, prompts: Prompts, path: Path, new_tokens: int = NEW_TOKENS) -> None:
    """Write the answers of a CPU, in fp32."""
    sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, logprobs=2, ignore_eos=True)
    config = EngineConfig(
        ModelConfig(str(model), DType.FP32, Device.CPU), CacheConfig(kv_tokens=65_536)
    )
    answers: dict[str, list[TokenLogprobs]] = {name: [] for name in prompts}
    engine = build_engine(model, config)
    for name, ids in prompts.items():
        engine.submit(Request(RequestId(name), np.array(ids, np.int32), sampling))
    while engine.has_work:
        for news in engine.step():
            answers[news.request_id] += news.logprobs
    engine.close()
    rows = [
        {
            "id": name,
            "prompt_ids": prompts[name],
            "answer_ids": [place.token_id for place in places],
            "logprobs": [round(place.logprob, 5) for place in places],
            "margins": [round(margin(place), 5) for place in places],
        }
        for name, places in answers.items()
    ]
    path.write_text(json.dumps(rows))
    print(f"{len(rows)} prompts, {new_tokens} tokens each: {path}")


def margin(place: TokenLogprobs) -> float:
    """Logprob of the chosen token minus that of the best other one; may be below 0."""
    top = zip(place.top_ids, place.top_logprobs, strict=True)
    return place.logprob - max(logprob for token_id, logprob in top if token_id != place.token_id)


def main(folder: Path, is_whole: bool) -> None:
    model = resolve_model("smollm2")
    prompts = read_prompts(Tokenizer.load(model))
    if not is_whole:
        prompts = write_part(model, folder / PART, prompts)
        model = folder / PART
    folder.mkdir(parents=True, exist_ok=True)
    write_answers(model, prompts, folder / "expected.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]), "--whole" in sys.argv[2:])
