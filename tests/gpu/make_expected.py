"""The answers of a CPU in fp32, for `tests/gpu/test_equal.py` to compare a GPU with.

    python -m tests.gpu.make_expected carry/expected.json

Prompts are those of tests/data/prompts50.jsonl. For every answer token there are its logprob and
its margin over the next best token: where that is within rounding, either may be chosen.
"""

import json
import sys
from pathlib import Path

from mainstem import LLM, SamplingParams
from mainstem.core.request import TokenLogprobs
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


def margin(record: TokenLogprobs) -> float:
    """How far the chosen token is ahead of the best other one; below 0 where it is not."""
    others = zip(record.top_ids, record.top_logprobs, strict=True)
    return record.logprob - max(logprob for token, logprob in others if token != record.token_id)


def main(path: Path) -> None:
    llm = LLM("smollm2", dtype="float32", device="cpu")
    prompts = read_prompts(llm.tokenizer)
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, logprobs=2, ignore_eos=True)
    rows = []
    answers = llm.generate(list(prompts.values()), params)
    for (name, prompt_ids), answer in zip(prompts.items(), answers, strict=True):
        output = answer.outputs[0]
        assert output.logprobs is not None
        rows.append(
            {
                "id": name,
                "prompt_ids": prompt_ids,
                "answer_ids": list(output.token_ids),
                "logprobs": [round(record.logprob, 5) for record in output.logprobs],
                "margins": [round(margin(record), 5) for record in output.logprobs],
            }
        )
    path.write_text(json.dumps(rows))
    print(f"{len(rows)} prompts, {NEW_TOKENS} tokens each: {path}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
