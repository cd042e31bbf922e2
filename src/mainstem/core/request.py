"""Requests and their outputs, as token ids only; `text` turns them into text."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mainstem.core.errors import InvalidRequest
from mainstem.core.ids import RequestId, SessionId

MAX_N = 128
MIN_TEMPERATURE = 1e-5  # a lower temperature counts as 0: only the likeliest token is left
MIN_TOP_P = 1e-6  # a lower top_p counts as temperature 0, too
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024
MAX_NEXT_IDS = 4096
MAX_INT = 2**31 - 1

# field of SamplingParams: (least, largest) value. An int means that only whole numbers are allowed
SAMPLING_RANGES: dict[str, tuple[float, float]] = {
    "n": (1, MAX_N),
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, MAX_INT),
    "min_p": (0.0, 1.0),
    "seed": (-(2**63), 2**63 - 1),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
    "max_tokens": (1, MAX_INT),
    "min_tokens": (0, MAX_INT),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}
OPEN_FIELDS = frozenset({"seed", "max_tokens", "logprobs", "prompt_logprobs"})  # None: not set


def _check_range(field_name: str, value: float, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(field_name, f"must be a number, got {value!r}")
    if not low <= value <= high:  # also refuses NaN
        low_text, high_text = (f"{x:,}" if isinstance(x, int) else f"{x:g}" for x in (low, high))
        raise InvalidRequest(
            field_name, f"must be between {low_text} and {high_text}, got {value!r}"
        )


def _check_int(field_name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(field_name, f"must be a whole number, got {value!r}")
    _check_range(field_name, value, low, high)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    The constructor raises InvalidRequest, which names the field and the allowed range.
    """

    n: int = 1
    temperature: float = 1.0  # below MIN_TEMPERATURE: greedy
    top_p: float = 1.0  # below MIN_TOP_P: greedy
    top_k: int = 0  # 0 (or -1): no limit
    min_p: float = 0.0
    seed: int | None = None  # None: a fresh one per request
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    stop: str | Sequence[str] = ()  # None means no stop strings
    stop_token_ids: Sequence[int] = ()
    max_tokens: int | None = 16  # None: up to the context window
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None  # top tokens in addition to each chosen one; 0: the chosen one only
    prompt_logprobs: int | None = None
    grammar: str | None = None  # the form of the answer, in the format of text/grammar.py
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        for name, (low, high) in SAMPLING_RANGES.items():
            value = getattr(self, name)
            if value is None and name in OPEN_FIELDS:
                continue
            if isinstance(low, int):
                _check_int(name, value, low, int(high))
            else:
                _check_range(name, value, low, high)
        if self.top_p < MIN_TOP_P:
            object.__setattr__(self, "temperature", 0.0)
            object.__setattr__(self, "top_p", 1.0)
        if self.temperature < MIN_TEMPERATURE:  # logits divided by it would overflow
            object.__setattr__(self, "temperature", 0.0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                "min_tokens", f"must be at most max_tokens={self.max_tokens}, got {self.min_tokens}"
            )
        for name, value in (("min_tokens", self.min_tokens), ("ignore_eos", self.ignore_eos)):
            if self.grammar is not None and value:
                raise InvalidRequest(name, "cannot be combined with a form of the answer")
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(name, f"must be true or false, got {getattr(self, name)!r}")
        self._normalise_stops()
        self._normalise_logit_bias()

    def _normalise_stops(self) -> None:
        for name in ("stop", "stop_token_ids"):
            if not isinstance(getattr(self, name), Sequence | None):
                raise InvalidRequest(name, f"must be a list, got {getattr(self, name)!r}")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if len(stop) > MAX_STOP_STRINGS:
            raise InvalidRequest("stop", f"at most {MAX_STOP_STRINGS} strings, got {len(stop)}")
        for text in stop:
            if not isinstance(text, str) or not text:
                raise InvalidRequest("stop", f"must be non-empty strings, got {text!r}")
        object.__setattr__(self, "stop", stop)
        ids = tuple(self.stop_token_ids or ())
        if len(ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest(
                "stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} ids, got {len(ids)}"
            )
        for token_id in ids:
            _check_int("stop_token_ids", token_id, 0, 2**31 - 1)
        object.__setattr__(self, "stop_token_ids", ids)

    def _normalise_logit_bias(self) -> None:
        if self.logit_bias is None:
            return
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest("logit_bias", f"at most {MAX_LOGIT_BIAS} entries")
        bias: dict[int, float] = {}
        for token_id, value in self.logit_bias.items():
            _check_int("logit_bias", token_id, 0, 2**31 - 1)
            _check_range("logit_bias", value, -100.0, 100.0)
            bias[token_id] = float(value)
        object.__setattr__(self, "logit_bias", bias or None)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        assert isinstance(self.stop, tuple)
        return self.stop

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        )

    @property
    def edits_logits(self) -> bool:
        """Whether logits must be changed before a token is chosen."""
        return self.has_penalties or self.logit_bias is not None or self.min_tokens > 0


class TokenMask(Protocol):
    """Decides which tokens may come next in one answer. It remembers how far the answer is."""

    def allowed(self, output_ids: NDArray[np.int32]) -> NDArray[np.uint8]:
        """Return the tokens that may follow `output_ids`, which must begin with the ids of the last
        call. Token t is bit t % 8 of byte t // 8; tokens past the last byte are not allowed. Never
        raises.
        """

    @property
    def fault(self) -> str | None:
        """Why the answer cannot continue after the last call; None: it can, or it is complete."""


class Grammar(Protocol):
    """A form that answers must have."""

    def start(self) -> TokenMask:
        """The state at the beginning of an answer."""


class Overflow(Enum):
    """What happens when a conversation outgrows the context window."""

    KV = "kv"  # drops the oldest tokens; the KV of the others moves to its new positions
    IMPORTANT = "important"  # like KV, but drops the pages that the last tokens attend to least
    RECOMPUTE = "recompute"  # drops the oldest tokens; the others are computed again
    ERROR = "error"

    @property
    def moves_kv(self) -> bool:
        """Whether the kept tokens keep their KV, which only the session can use afterwards."""
        return self in (Overflow.KV, Overflow.IMPORTANT)


class Delivery(Enum):
    """When outputs are handed out."""

    EACH_STEP = "each step"
    AT_END = "at end"  # one Output with everything: least host work


class FinishReason(Enum):
    STOP = "stop"  # an end token, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the context window
    ABORT = "abort"  # the caller aborted it
    ERROR = "error"  # steps failed on it, or its form cannot be followed; see `Output.fault`


def id_array(given: Sequence[int] | NDArray[np.int32]) -> NDArray[np.int32]:
    """A read-only copy of a prompt's ids as an array; raises InvalidRequest."""
    try:
        found = np.asarray(given)
    except (ValueError, OverflowError, TypeError):  # lists of different lengths, for instance
        raise InvalidRequest("prompt", "token ids must be one row of whole numbers") from None
    if found.ndim > 1:
        raise InvalidRequest("prompt", "token ids must be one row of whole numbers")
    if found.ndim == 0 or len(found) == 0:
        raise InvalidRequest("prompt", "must hold at least one token")
    if found.dtype.kind not in "iu":
        raise InvalidRequest("prompt", f"token ids must be whole numbers, got {found.dtype}")
    if int(found.min()) < 0:
        raise InvalidRequest("prompt", f"token id {int(found.min())} is negative")
    if found.dtype == np.int32:
        if not found.flags["W"] and found.base is None:
            return found  # it was made here
    elif int(found.max()) >= 2**31:
        raise InvalidRequest("prompt", f"token id {int(found.max())} is out of range")
    ids = found.astype(np.int32)  # a copy: the caller may change its array
    ids.setflags(write=False)
    return ids


@dataclass(frozen=True, slots=True)
class Rendering:
    """How an answer becomes text, in addition to its sampling settings; not used by the engine."""

    shown_ids: frozenset[int] = frozenset()  # special tokens that are shown as text
    opening: str = ""  # the part of the prompt's end that counts as the beginning of the answer


@dataclass(frozen=True, slots=True)
class Scoring:
    """Asks for logprobs at the end of a prompt. The tokens before `first` may come from the
    cache."""

    # the first place in the prompt whose logprob is wanted; the prompt's length if none is
    first: int
    next_ids: tuple[int, ...] = ()  # tokens whose logprob after the prompt is wanted


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One prompt and how to answer it; immutable. The scheduler checks it against its limits."""

    request_id: RequestId
    prompt_ids: NDArray[np.int32]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    eos_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None
    salt: bytes = b""  # requests share pages only with requests of the same salt
    public_tokens: int = 0  # leading tokens whose pages requests of any salt may share
    priority: int = 0  # lower goes first
    session: SessionId | None = None
    overflow: Overflow | None = None  # None: KV in a session, ERROR without one
    keep_tokens: int = 0  # leading tokens (the system prompt) that no truncation may drop
    delivery: Delivery = Delivery.EACH_STEP
    # numbers of leading tokens that later requests may have in common with it, such as the ends of
    # messages: states of recurrent layers are kept there
    boundaries: tuple[int, ...] = ()
    plan_place: int | None = None  # its place in the announced order of a known workload
    expected_tokens: int | None = None  # length of the answer, if the caller knows it
    rendering: Rendering = Rendering()
    # logprobs that are wanted; the answer is one token, which is ignored
    scoring: Scoring | None = None

    def __post_init__(self) -> None:
        ids = id_array(self.prompt_ids)
        object.__setattr__(self, "prompt_ids", ids)
        _check_int("priority", self.priority, -(2**31), 2**31 - 1)
        _check_int("public_tokens", self.public_tokens, 0, len(ids))
        _check_int("keep_tokens", self.keep_tokens, 0, 2**31 - 1)
        if self.overflow is not None and self.overflow.moves_kv and self.session is None:
            raise InvalidRequest(
                "overflow", f"{self.overflow.value} needs a session; recompute does not"
            )
        if self.scoring is not None:
            self._check_scoring(self.scoring, len(ids))

    def _check_scoring(self, scoring: Scoring, num_prompt: int) -> None:
        _check_int("scoring", scoring.first, 1, num_prompt)
        if len(scoring.next_ids) > MAX_NEXT_IDS:
            got = len(scoring.next_ids)
            raise InvalidRequest("scoring", f"at most {MAX_NEXT_IDS:,} next tokens, got {got:,}")
        for token_id in scoring.next_ids:
            _check_int("scoring", token_id, 0, MAX_INT)
        sampling = self.sampling
        if (sampling.n, sampling.max_tokens, sampling.prompt_logprobs) != (1, 1, None):
            raise InvalidRequest("scoring", "needs n=1, max_tokens=1 and no prompt_logprobs")
        if self.overflow_policy is not Overflow.ERROR:
            raise InvalidRequest("scoring", "a prompt that is scored cannot be truncated")

    @property
    def overflow_policy(self) -> Overflow:
        """What happens if the prompt is longer than the context window."""
        if self.overflow is not None:
            return self.overflow
        return Overflow.ERROR if self.session is None else Overflow.KV

    @property
    def must_see_each_token(self) -> bool:
        """Whether each token must be read before the next one is computed: stop strings may end the
        answer, and a grammar restricts the next token."""
        return bool(self.sampling.stop_strings) or self.grammar is not None

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Every token that ends the answer."""
        eos = () if self.sampling.ignore_eos else self.eos_ids
        return tuple(dict.fromkeys((*eos, *self.sampling.stop_token_ids)))


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one place: of the token there, and of the likeliest tokens."""

    token_id: int
    logprob: float
    rank: int  # 1 is the likeliest
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]
    # of the token in the distribution it was drawn from, after penalties, masks, temperature and
    # filters; None: it was not drawn. 0.0 if it was the only possible one
    drawn_logprob: float | None = None

    def __post_init__(self) -> None:
        assert not math.isnan(self.logprob)

    def ranked(self) -> dict[int, tuple[float, int]]:
        """Token -> its logprob and rank: first the token at this place, then the likeliest ones."""
        places = {self.token_id: (self.logprob, self.rank)}
        pairs = zip(self.top_ids, self.top_logprobs, strict=True)
        for rank, (token_id, logprob) in enumerate(pairs, start=1):
            places.setdefault(token_id, (logprob, rank))
        return places


@dataclass(slots=True)  # not frozen: a thousand are made per step, and frozen costs 3x
class Output:
    """What one sequence produced since its last Output: news of an answer. The engine knows only
    tokens; `text` and `stop_reason` are filled in by an AnswerReader (text/text_engine.py)."""

    request_id: RequestId
    index: int  # which of the n answers
    token_ids: tuple[int, ...]  # new ones; an end token is included
    logprobs: tuple[TokenLogprobs, ...] = ()
    # given once, in the first Output of the first answer; with Scoring, the logprobs it asked for
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0  # prompt tokens that were not computed for this sequence
    num_dropped_tokens: int = 0  # prompt tokens that did not fit into the context window
    fault: str | None = None  # the error that ended the answer (FinishReason.ERROR)
    is_form_fault: bool = False  # whether it ended because it cannot continue in its form
    weights: tuple[str, ...] = ()  # versions of the weights that made the answer so far, in order
    text: str = ""  # text that is now certain
    stop_reason: str | int | None = None  # the stop string or token that ended it

    def next_token(self, token_id: int) -> "Output":
        """The Output after this one, if it adds only a token."""
        return Output(
            self.request_id,
            self.index,
            (token_id,),
            num_cached_tokens=self.num_cached_tokens,
            num_dropped_tokens=self.num_dropped_tokens,
            weights=self.weights,
        )
