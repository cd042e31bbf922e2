"""The bar of a call: how many prompts were read, and how many were answered."""

from typing import Any

from tqdm import tqdm

from mainstem.core.metrics import Counters
from mainstem.text.results import RequestOutput

SHAPE = "{percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"


class PromptBar:
    """A bar that moves while prompts are read, too, which may take most of the time: half of it
    stands for their tokens, and half for answers that have ended."""

    def __init__(self, counters: Counters, bar: "tqdm[Any]") -> None:
        self._counters = counters
        self._bar = bar
        self._bar.bar_format = SHAPE
        self._num_prompt = 0  # tokens of all prompts
        self._total = self._num_ended = 0  # prompts
        self._prefilled = counters.computed_tokens + counters.cached_tokens
        self._decoded = counters.decoded_tokens

    def add(self, result: RequestOutput) -> None:
        """Count a prompt that was submitted."""
        self._num_prompt += len(result.prompt_token_ids) * len(result.outputs)

    def reset(self, total: int) -> None:
        self._total = total
        self._bar.reset(total)

    def update(self, n: int) -> None:
        """Show a step in which `n` more prompts have ended."""
        self._num_ended += n
        counters = self._counters
        prefilled = counters.computed_tokens + counters.cached_tokens - self._prefilled
        num_read = min(self._num_prompt, prefilled)
        share = num_read / self._num_prompt if self._num_prompt else 1.0
        if self._num_ended == self._total:  # one of them may have failed before it was read
            share = 1.0
        seconds = max(self._bar.format_dict["elapsed"], 1e-9)
        rate = (counters.decoded_tokens - self._decoded) / seconds
        self._bar.set_postfix_str(
            f"{self._num_ended:,}/{self._total:,} req, {num_read:,}/{self._num_prompt:,} prompt "
            f"tok, {counters.saving_ratio:.0%} saved, {rate:.0f} tok/s out",
            refresh=False,
        )
        place = (self._num_ended + share * self._total) / 2
        self._bar.update(max(0.0, place - self._bar.n))
