"""Writes the answers of a CPU in fp32; `tests/gpu/test_equal.py` compares a GPU with them.

    python -m tests.gpu.make_expected carry/expected.json

Prompts are those of tests/data/prompts50.jsonl. Every answer token has its logprob and
its margin over the next best token: if the margin is within rounding, either may be chosen.
"""

import json
import sys
from pathlib import Path

from mainstem import LLM, SamplingParams
from mainstem.text.results import PlaceLogprobs
from mainstem.text.tokenizer import Tokenizer

DATA = Path(__file__).parent.parent / "data" / "prompts50.jsonl"
NEW_TOKENS = 64


def read_prompts(tokenizer: Tokenizer) -> dict[str, list[int]]:
    """Token ids by name."""
    prompts = {}
    for line in DATA.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "messages" in row:
            prompts[row["id"]] = tokenizer.encode_chat(row["messages"])
        else:
            prompts[row["id"]] = tokenizer.encode(row["prompt"])
    return prompts


def margin(chosen_id: int, place: PlaceLogprobs) -> float:
    """Logprob of the chosen token minus that of the best other one; may be below 0."""
    others = [found.logprob for token_id, found in place.items() if token_id != chosen_id]
    return place[chosen_id].logprob - max(others)


def main(path: Path) -> None:
    llm = LLM("smollm2", dtype="float32", device="cpu")
    prompts = read_prompts(llm.tokenizer)
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, logprobs=2, ignore_eos=True)
    rows = []
    answers = llm.generate(list(prompts.values()), params)
    for (name, prompt_ids), answer in zip(prompts.items(), answers, strict=True):
        output = answer.outputs[0]
        assert output.logprobs is not None
        places = list(zip(output.token_ids, output.logprobs, strict=True))
        rows.append(
            {
                "id": name,
                "prompt_ids": prompt_ids,
                "answer_ids": list(output.token_ids),
                "logprobs": [round(place[chosen].logprob, 5) for chosen, place in places],
                "margins": [round(margin(chosen, place), 5) for chosen, place in places],
            }
        )
    path.write_text(json.dumps(rows))
    print(f"{len(rows)} prompts, {NEW_TOKENS} tokens each: {path}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
