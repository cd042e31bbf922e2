"""GRPO in plain torch: smollm2 learns to answer with the name of a capital and nothing else.

    python examples/grpo.py                # 10 minutes on two cores; writes grpo.jsonl

Each round samples 8 answers of each prompt, rewards them, takes one step of gradient descent on the
policy, and gives the engine its new weights. The reward can be checked by reading: 0 without the
right capital, otherwise 1 divided by the number of words. GRPO: https://arxiv.org/abs/2402.03300,
without the division by the standard deviation (https://arxiv.org/abs/2503.20783).
"""

import argparse
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter, process_time

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from mainstem import LLM, SamplingParams
from mainstem.checkpoints.fetch import fetch_model
from mainstem.core.config import ModelConfig
from mainstem.llm.rollouts import Rollout, RolloutGroup

CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin",
    "Japan": "Tokyo", "China": "Beijing", "Russia": "Moscow", "Egypt": "Cairo",
    "Greece": "Athens", "England": "London", "Ireland": "Dublin", "Portugal": "Lisbon",
    "Austria": "Vienna", "Hungary": "Budapest", "Poland": "Warsaw", "Norway": "Oslo",
    "Sweden": "Stockholm", "Finland": "Helsinki", "Denmark": "Copenhagen", "Belgium": "Brussels",
    "Cuba": "Havana", "Peru": "Lima", "Canada": "Ottawa", "Thailand": "Bangkok",
}  # fmt: skip
CLIP = 0.2  # how far the policy may move from what has sampled an answer, in one round


def reward(country: str, answer: str) -> float:
    """1 for the capital alone, less for each other word, 0 without the capital.

    >>> reward("France", "The capital is Paris.")
    0.25
    """
    words = re.findall(r"[A-Za-z]+", answer)
    return 1 / len(words) if CAPITALS[country] in words else 0.0


def prompt_ids(llm: LLM, country: str) -> list[int]:
    return llm.tokenizer.encode(f"Question: What is the capital of {country}?\nAnswer:")


def token_logprobs(model: PreTrainedModel, prompt: list[int], answers: Sequence[Rollout]) -> Tensor:
    """[answers, tokens] what the policy says about the sampled tokens; 0 after an answer's end."""
    longest = max(len(answer.token_ids) for answer in answers)
    rows = torch.zeros(len(answers), len(prompt) + longest, dtype=torch.long)
    mask = torch.zeros(len(answers), longest)
    rows[:, : len(prompt)] = torch.tensor(prompt)
    for row, answer in enumerate(answers):
        length = len(answer.token_ids)
        rows[row, len(prompt) : len(prompt) + length] = torch.from_numpy(answer.token_ids)
        mask[row, :length] = 1.0
    # an answer never reads what is after its end, so no attention mask is needed
    logits = model(rows[:, :-1], logits_to_keep=longest).logits
    logprobs = F.log_softmax(logits.float(), dim=-1)
    return logprobs.gather(2, rows[:, -longest:, None])[:, :, 0] * mask


def group_loss(model: PreTrainedModel, group: RolloutGroup, rewards: Tensor) -> Tensor:
    """The clipped objective of GRPO: answers that were better than their group's mean become
    likelier, the others less likely."""
    advantages = (rewards - rewards.mean())[:, None]
    now = token_logprobs(model, group.prompt_token_ids, group.answers)
    before = torch.zeros_like(now)
    for row, answer in enumerate(group.answers):
        before[row, : len(answer.raw_logprobs)] = torch.from_numpy(answer.raw_logprobs)
    ratio = torch.exp(now - before)
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    lengths = torch.tensor([len(answer.token_ids) for answer in group.answers])
    is_token = torch.arange(now.shape[1]) < lengths[:, None]
    return -(gain * is_token).sum() / is_token.numel()


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    chosen = random.Random(0)
    folder, _ = fetch_model(ModelConfig(model="smollm2"))
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    policy.train()
    policy.requires_grad_(False)
    policy.model.layers[-args.layers :].requires_grad_(True)
    changing = {name: each for name, each in policy.named_parameters() if each.requires_grad}
    learned = [*changing.values()]
    optimizer = torch.optim.AdamW(learned, lr=args.lr, weight_decay=0.0)
    llm = LLM("smollm2", dtype="float32", kv_tokens=32_768)
    sampling = SamplingParams(temperature=1.0, max_tokens=args.max_tokens, stop="\n")
    began_s = perf_counter()
    with Path(args.out).open("w", buffering=1) as out:
        for number in range(args.rounds):
            if perf_counter() - began_s > args.minutes * 60:
                break
            countries = chosen.sample(list(CAPITALS), args.prompts)
            prompts = [prompt_ids(llm, country) for country in countries]
            earned: list[float] = []
            for group in llm.rollouts(prompts, args.answers, sampling):
                country = countries[group.index]
                rewards = torch.tensor([reward(country, each.text) for each in group.answers])
                earned += rewards.tolist()
                if rewards.max() > rewards.min():  # otherwise there is nothing to learn
                    (group_loss(policy, group, rewards) / args.prompts).backward()
            torch.nn.utils.clip_grad_norm_(learned, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            version = llm.update_weights(changing)  # all others stay
            record = {
                "round": number,
                "reward": round(sum(earned) / len(earned), 4),
                "seconds": round(perf_counter() - began_s, 1),
                "cpu_seconds": round(process_time(), 1),  # of all cores
                "weights": version,
                "answer": group.answers[0].text,
            }
            print(json.dumps(record), flush=True)
            out.write(json.dumps(record) + "\n")


def draw(results: Path, picture: Path) -> None:
    """Draw the rewards of a finished run over its minutes."""
    from matplotlib.figure import Figure  # noqa: PLC0415  # not needed to train

    rounds = [json.loads(row) for row in results.read_text().splitlines()]
    minutes = [each["seconds"] / 60 for each in rounds]
    rewards = torch.tensor([each["reward"] for each in rounds])
    means = [float(rewards[max(0, i - 5) : i + 1].mean()) for i in range(len(rounds))]
    figure = Figure(figsize=(7, 3.6), layout="tight")
    axes = figure.subplots()
    axes.plot(minutes, rewards, color="#bbb", linewidth=1, label="one round")
    axes.plot(minutes, means, color="#1f5fa8", linewidth=2, label="mean of 6 rounds")
    axes.set(xlabel="minutes", ylabel="reward", ylim=(0, 1.05))
    axes.legend(loc="lower right")
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=12)
    parser.add_argument("--layers", type=int, default=10, help="how many last layers learn")
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--out", default="grpo.jsonl")
    parser.add_argument("--draw", metavar="FILE.png", help="only draw the results in --out")
    given = parser.parse_args()
    if given.draw is None:
        train(given)
    else:
        draw(Path(given.out), Path(given.draw))
