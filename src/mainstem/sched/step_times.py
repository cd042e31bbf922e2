"""How long steps take, learned from steps that ran."""

LEARNING = 0.3  # weight of the latest step in the running means
SURPRISE = 2.0  # a step longer than twice its expectation is an outlier


class StepTimes:
    """How long a step takes: a fixed time for its decodes, and a time for each prompt token.

    Begins with the card's figures, or those of a first step. Then steps with few prompt tokens
    update the fixed time, and steps with many prompt tokens update the time of a token.
    """

    def __init__(self, token_s: float, floor_s: float = 0.0) -> None:
        self.token_s = token_s
        self.floor_s = floor_s
        self.interval_s = 0.0  # between the ends of the latest two steps

    @classmethod
    def of_first(cls, prompt_tokens: int, device_s: float) -> "StepTimes":
        """The figures if only one step is known. All of its time counts as time of tokens, so that
        a step is rather expected to take longer."""
        token_s = device_s / (prompt_tokens + 1)
        return cls(token_s, floor_s=token_s)

    def expect_s(self, prompt_tokens: int) -> float:
        """Expected seconds of a step with `prompt_tokens` tokens of prompts."""
        return self.floor_s + prompt_tokens * self.token_s

    def observe(self, prompt_tokens: int, device_s: float) -> None:
        """Record that a step, which waited for no load, took `device_s`."""
        seen_s = min(device_s, SURPRISE * self.expect_s(prompt_tokens))
        prompts_s = prompt_tokens * self.token_s
        if prompts_s < self.floor_s or not prompt_tokens:
            self.floor_s += LEARNING * (max(seen_s - prompts_s, 0.0) - self.floor_s)
        else:
            token_s = max(seen_s - self.floor_s, 0.0) / prompt_tokens
            self.token_s += LEARNING * (token_s - self.token_s)
