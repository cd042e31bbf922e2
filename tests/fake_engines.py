"""Engines over FakeRunner that take and give text, with a tokenizer of one token per byte."""

from collections.abc import Callable

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from mainstem.core.config import EngineConfig
from mainstem.core.events import EventBus, SequenceFinished, StepFinished
from mainstem.core.ids import RequestId
from mainstem.core.request import Request, SamplingParams
from mainstem.core.step import Step
from mainstem.server.link.engine_host import PROBE
from mainstem.text.text_engine import TextEngine
from mainstem.text.tokenizer import Tokenizer
from tests.builders import VOCAB, an_engine
from tests.fakes import FakeRunner, fake_answer

EOS_ID = 96
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def a_tokenizer(
    template: str = TEMPLATE,
    sampling_defaults: dict[str, object] | None = None,
    allow_special_tokens: bool = False,
) -> Tokenizer:
    """One token per byte: printable ASCII is 0 to 94, the line end 95, the end token 96.

    Other bytes come after that, outside the vocabulary of the fake model.
    """
    first = [chr(code) for code in range(0x21, 0x7F)]
    alphabet = ["\u0120", *first, "\u010a"]  # byte-level names of space and line end
    others = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(alphabet))
    vocab = {name: place for place, name in enumerate([*alphabet, "<|end|>", *others])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    eos_ids, templates = frozenset({EOS_ID}), {"default": template}
    return Tokenizer(backend, eos_ids, {}, templates, sampling_defaults, allow_special_tokens)


class FakeEngines:
    """Makes engines for `main`, and keeps the last config and engine for tests to look at."""

    def __init__(
        self,
        num_pages: int = 256,
        max_model_len: int = 400,
        template: str = TEMPLATE,
        sampling_defaults: dict[str, object] | None = None,
    ) -> None:
        self._template = template
        self._sampling_defaults = sampling_defaults
        self.samplings: dict[str, SamplingParams] = {}  # sampling settings by request id
        self._num_pages = num_pages
        self._max_model_len = max_model_len
        self.config: EngineConfig | None = None
        self.engine: TextEngine | None = None
        self.finished: list[RequestId] = []  # requests by the end of each answer
        self.at_step: Callable[[StepFinished], None] | None = None
        self.at_launch: Callable[[Step], None] | None = None  # if it raises, the step fails

    def __call__(self, config: EngineConfig, bus: EventBus | None = None) -> TextEngine:
        bus = bus or EventBus()
        bus.subscribe(StepFinished, self._stepped)
        bus.subscribe(SequenceFinished, self._ended)
        runner = FakeRunner(self._num_pages, 4, VOCAB)
        runner.at_launch = self._launched
        engine = an_engine(
            self._num_pages,
            runner=runner,
            config=config.sched,
            max_model_len=config.sched.max_model_len or self._max_model_len,
            bus=bus,
        )
        tokenizer = a_tokenizer(self._template, self._sampling_defaults)
        self.config, self.engine = config, TextEngine(engine, tokenizer)
        submit = engine.submit

        def seen(request: Request) -> None:
            if request.request_id != PROBE:
                self.samplings[request.request_id] = request.sampling
            submit(request)

        engine.submit = seen  # type: ignore[method-assign]  # records the settings
        return self.engine

    def _launched(self, step: Step) -> None:
        if self.at_launch is not None:
            self.at_launch(step)

    def _ended(self, event: SequenceFinished) -> None:
        if event.request_id != PROBE:
            self.finished.append(event.request_id)

    def _stepped(self, event: StepFinished) -> None:
        if self.at_step is not None:
            self.at_step(event)


def expected_text(prompt: str, max_tokens: int) -> str:
    """The fake model's answer to a text."""
    tokenizer = a_tokenizer()
    ids = fake_answer(tokenizer.encode(prompt), max_tokens, VOCAB)
    if EOS_ID in ids:
        ids = ids[: ids.index(EOS_ID)]
    return tokenizer.decode(ids)
