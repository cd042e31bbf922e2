"""What a body asks for, in one form for all APIs."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from mainstem.core.request import Overflow, Rendering, SamplingParams
from mainstem.core.step import Int32s
from mainstem.text.parsers.formats import ReasoningFormat, ToolUse, make_parser, opening_of
from mainstem.text.parsers.parser import AnswerParser
from mainstem.text.tokenizer import Tokenizer

MAX_TOKEN_ID = 2**31 - 1
SCORE_URL = "/v1/score"  # its prompts are those of chats and completions
# reasoning may begin within this many last tokens of a prompt
END_TOKENS = 16
CONTINUED_TOKENS = 4096  # if the prompt ends with a message to continue


class CallKind(Enum):
    """The kind of an answer; the value is the url."""

    CHAT = "/v1/chat/completions"
    COMPLETION = "/v1/completions"

    @property
    def prompt_field(self) -> str:
        return "messages" if self is CallKind.CHAT else "prompt"


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """How much one body may ask for."""

    max_prompts: int = 128
    max_answers: int = 128  # prompts times n
    max_stop_chars: int = 4096  # of all stop strings; each character is a state of an automaton


@dataclass(frozen=True, slots=True)
class Call:
    """What a body asks for, without its prompts; kept until the answer is written."""

    kind: CallKind
    sampling: SamplingParams
    num_prompts: int = 1
    cache_salt: bytes = b""
    priority: int = 0
    model: str | None = None
    app: str | None = None
    is_streaming: bool = False
    includes_usage: bool = False
    has_running_usage: bool = False  # each chunk has the usage of its choice so far
    returns_token_ids: bool = False
    # how many last tokens to keep; -1: as many as leave room for the answer
    kept_prompt_tokens: int | None = None
    has_echo: bool = False
    is_scoring: bool = False  # echo with max_tokens 0: the prompt's logprobs and no answer
    wants_prompt_logprobs: bool = False  # in vLLM's format, not as OpenAI's echo
    tools: ToolUse | None = None
    has_one_tool_call: bool = False  # further calls are not returned
    # the format of reasoning in the answer; None: it is part of the text
    reasoning: ReasoningFormat | None = None
    shown_ids: frozenset[int] = frozenset()  # special tokens that `parser` must see
    continues_message: bool = False  # the prompt ends within an answer
    session_id: str | None = None
    overflow: Overflow = Overflow.ERROR
    choices: tuple[str, ...] = ()  # texts that are scored after the prompt; there is no answer

    @property
    def num_answers(self) -> int:
        return self.num_prompts * self.sampling.n

    @property
    def url(self) -> str:
        """The path to which the call would be sent on a server."""
        return SCORE_URL if self.choices else self.kind.value

    def kept_prompt(self, token_ids: list[int], context_tokens: int) -> list[int]:
        """Return a prompt cut to its last tokens, as many as the call asks for."""
        count = self.kept_prompt_tokens
        if count is None:
            return token_ids
        if count < 0:
            count = max(1, context_tokens - (self.sampling.max_tokens or 1))
        return token_ids[-count:]

    @property
    def is_parsed(self) -> bool:
        """Whether an answer may be more than plain text."""
        return self.tools is not None or self.reasoning is not None

    def parser(self) -> AnswerParser:
        """Return the parser of one answer."""
        tools, form = self.tools, self.sampling.grammar
        is_call_or_form = tools is not None and form not in (None, tools.form)
        return make_parser(tools, self.reasoning, is_call_or_form=is_call_or_form)

    def rendering(self, prompt_ids: Sequence[int] | Int32s, tokenizer: Tokenizer) -> Rendering:
        """Return how answers to a prompt become the text that `parser` reads.

        A form applies from the first token on, so an answer with a form never begins inside
        reasoning.
        """
        opening = ""
        if self.reasoning is not None and self.sampling.grammar is None:
            count = CONTINUED_TOKENS if self.continues_message else END_TOKENS
            last_ids = [int(each) for each in prompt_ids[-count:]]
            if self.continues_message:  # earlier messages may contain the mark
                borders = tokenizer.special_ids - self.shown_ids
                places = [place for place, each in enumerate(last_ids) if each in borders]
                last_ids = last_ids[places[-1] + 1 if places else 0 :]
            end = tokenizer.decode_all(last_ids)
            opening = opening_of(self.reasoning, end, self.continues_message)
        return Rendering(self.shown_ids, opening) if opening or self.shown_ids else _PLAIN


_PLAIN = Rendering()
