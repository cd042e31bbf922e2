"""LoadedModel: what LLM and AsyncLLM have in common."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import count
from os import PathLike
from pathlib import Path
from threading import Lock
from typing import NoReturn, Self, TypeVar, Unpack

import numpy as np

from mainstem.checkpoints.fetch import fetch_model
from mainstem.checkpoints.progress import StageBar
from mainstem.core.config import EngineConfig, with_arguments
from mainstem.core.errors import ConfigError, InvalidRequest
from mainstem.core.events import EventBus
from mainstem.core.ids import RequestId, SessionId
from mainstem.core.metrics import Counters
from mainstem.core.request import (
    Delivery,
    Grammar,
    Overflow,
    Request,
    SamplingParams,
    id_array,
)
from mainstem.core.weights import (
    BOTH_TAGS,
    FolderUpdate,
    Tag,
    TensorUpdate,
    Update,
    UpdateMode,
)
from mainstem.engine.build import build_engine
from mainstem.llm.rollouts import (
    RolloutGroup,
    RolloutPart,
    check_continuable,
    new_group,
    parts_of,
)
from mainstem.text.encoding import Chat, Prompt
from mainstem.text.prompts import (
    Conversation,
    Message,
    ScriptPrompt,
    is_conversation,
    listed_params,
    listed_sessions,
    read_conversation,
    read_prompt,
)
from mainstem.text.scoring import SCORE_SAMPLING, ContextScoring, encode_scoring
from mainstem.text.sessions import SessionLimits, Sessions, said_before, spoken_chat
from mainstem.text.text_engine import TextEngine
from mainstem.text.tokenizer import GENERATION_FILE, Tokenizer
from mainstem.vllm_names import SamplingParams as ScriptSamplingParams
from mainstem.vllm_names import VllmArguments, own_arguments

# the weights of an update: a folder, or tensors (of torch) by their names in a checkpoint
Weights = str | PathLike[str] | Iterable[tuple[str, object]] | Mapping[str, object]


class LoadedModel:
    """A model with its engine and tokenizer: what LLM and AsyncLLM have in common."""

    def __init__(  # noqa: PLR0913  # the settings a script may name, all by keyword
        self,
        model: str | Path = "smollm2",
        *,
        dtype: str = "auto",
        device: str = "auto",
        quantize: str = "none",
        page_size: int = 16,
        kv_dtype: str = "auto",
        kv_tokens: int | None = None,
        expected_tokens: int | None = None,
        states: int | None = None,
        gpu_memory_utilization: float | None = None,
        chunk_tokens: int | None = None,
        step_ms: float | None = None,
        max_seqs: int | None = None,
        share: str = "reads",
        siblings: str = "auto",
        span_levels: int | None = None,
        max_model_len: int | None = None,
        threads: int | None = None,
        chat_template: str | Path | None = None,
        allow_special_tokens: bool = False,
        deterministic: bool = False,
        tensor_parallel: int = 1,
        ranks_on_one_gpu: bool = False,
        ignore_config_fields: str | Sequence[str] | None = None,
        seed: int = 0,
        truncation_ratio: float = 0.5,
        sink_tokens: int | None = None,
        host_gb: float | None = None,
        disk_dir: str | Path | None = None,
        disk_gb: float = 20.0,
        remote: str | None = None,
        remote_gb: float = 20.0,
        remote_ttl: float = 86400.0,
        remote_secrets: str | Path | None = None,
        store_ttl: float | None = None,
        store_policy: str = "lookahead",
        store_save: str = "decoding",
        store_fetch: str = "auto",
        preload: str = "auto",
        **others: Unpack[VllmArguments],
    ) -> None:
        """Settings have the same meaning as the flags of the same names (docs/settings.md).
        `others` are arguments of vLLM: accepted if they mean the same here, otherwise refused
        (vllm_names.py)."""
        given = dict(locals())  # all arguments; those removed below are not settings
        del given["self"], given["others"]
        config = with_arguments(EngineConfig(), own_arguments(given, others), "LLM")
        self._connect(config)

    @classmethod
    def from_config(cls, config: EngineConfig) -> Self:
        """An LLM from a complete EngineConfig, as the command line makes it."""
        llm = cls.__new__(cls)
        llm._connect(config)
        return llm

    def _connect(self, config: EngineConfig) -> None:
        with StageBar() as bar:
            folder, tokenizer = fetch_model(config.model, bar)
        bus = EventBus()
        self.counters = Counters().attach(bus)
        engine = build_engine(folder, config, bus)
        self.text_engine = TextEngine(engine, tokenizer)
        self._request_ids = count()
        self._is_closed = False
        self._sessions = Sessions(SessionLimits())
        self._sessions_lock = Lock()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled or copied: it holds a model and an engine. "
            "Make one in each process that needs one, and send prompts and results between them"
        )

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    @property
    def tokenizer(self) -> Tokenizer:
        return self.text_engine.tokenizer

    @property
    def weights_version(self) -> str:
        """The name of the weights in force; an answer's `weights` names those that made it."""
        return self.text_engine.engine.weights_version

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer and chat template: `encode`, `decode`, `render_chat`."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Default sampling parameters, from the model's generation_config.json."""
        try:
            return ScriptSamplingParams(**self.tokenizer.sampling_defaults)  # type: ignore[arg-type]
        except InvalidRequest as error:
            raise ConfigError(f"{GENERATION_FILE}: {error}; give SamplingParams instead") from None

    def encode_turn(self, session: str | None, text: str) -> list[int]:
        """Return the ids of a conversation whose text is from `Tokenizer.chat_text`. If it
        continues `session`, the session's ids are kept: encoding an answer again could give other
        ids, whose pages are not cached."""
        with self._sessions_lock:
            known = None if session is None else self._sessions.find("", session)
        before = said_before(known, text, self.tokenizer)
        if known is None or before is None:
            return self.tokenizer.encode_chat_text(text)
        rest = self.tokenizer.encode_chat_text(text[len(known.text) :])
        return [*before.tolist(), *rest]

    def keep_turn(
        self, session: str | None, text: str, prompt_ids: list[int], output_ids: list[int]
    ) -> None:
        """Remember a turn that has ended, for `encode_turn` of the next turn."""
        if session is not None:
            said = spoken_chat(text, output_ids, self.tokenizer)
            token_ids = np.array([*prompt_ids, *output_ids], np.int32)
            with self._sessions_lock:
                self._sessions.keep("", session, token_ids, said)

    def _check_open(self) -> None:
        self.text_engine.engine.check_process()
        if self._is_closed:
            raise InvalidRequest("LLM", "is closed")

    def _next_id(self) -> RequestId:
        return RequestId(f"{next(self._request_ids)}")

    def _compiled(self, sampling: SamplingParams) -> Grammar | None:
        """The form that answers must have, if any; raises InvalidRequest."""
        if sampling.grammar is None:
            return None
        try:
            return self.text_engine.grammars.compile(sampling.grammar)
        except InvalidRequest as error:
            raise InvalidRequest("structured_outputs", error.reason) from None

    def _turn(
        self,
        prompt: ScriptPrompt | Conversation,
        sampling_params: SamplingParams | None,
        session: str | None,
        overflow: Overflow | str | None,
        delivery: Delivery = Delivery.EACH_STEP,
    ) -> "ReadyPrompt":
        """One prompt or conversation, ready to be submitted; raises InvalidRequest."""
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        (sampling,) = listed_params(sampling_params, 1)
        (session,) = listed_sessions(session, 1)
        text: str | None
        if is_conversation(prompt):
            text = self.tokenizer.chat_text(read_conversation(prompt))
            ids = self.encode_turn(session, text)
        else:
            given = read_prompt(prompt)
            if not isinstance(given, str) and any(isinstance(item, str) for item in given):
                raise InvalidRequest("prompt", "must be one prompt here; open a stream for each")
            text = given if isinstance(given, str) else None
            ids = self.tokenizer.encode(given) if isinstance(given, str) else given
        request = Request(
            self._next_id(),
            id_array(ids),
            sampling,
            grammar=self._compiled(sampling),
            delivery=delivery,
            session=None if session is None else SessionId(session),
            overflow=overflow_policy(overflow),
        )
        return ReadyPrompt(request, text, session if is_conversation(prompt) else None, ids)

    def _rollout_parts(
        self,
        prompts: Iterable[ScriptPrompt | RolloutGroup],
        n: int,
        sampling: SamplingParams | None,
        budget: int | None,
    ) -> list[list[tuple[Request, RolloutPart]]]:
        """The requests of each group; raises InvalidRequest."""
        if sampling is None:
            sampling = self.get_default_sampling_params()
        if sampling.logprobs is None:
            sampling = replace(sampling, logprobs=0)
        check_continuable(sampling, budget)
        groups: list[list[tuple[Request, RolloutPart]]] = []
        for index, given in enumerate(prompts):
            group = given
            if not isinstance(group, RolloutGroup):
                assert not isinstance(given, RolloutGroup)
                prompt = read_prompt(given)
                ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
                group = new_group(index, ids, n)
            parts = parts_of(group, sampling, budget)
            if not parts:
                raise InvalidRequest("prompts", f"number {index} is a group that is whole already")
            groups.append([(self._rollout_request(part), part) for part in parts])
        return groups

    def _rollout_request(self, part: RolloutPart) -> Request:
        return Request(
            self._next_id(), id_array(part.prompt_ids), part.sampling, delivery=Delivery.AT_END
        )

    def _scoring(
        self, context: str | list[int] | list[Message], choices: Sequence[str]
    ) -> ContextScoring:
        """A context and its choices as tokens; raises InvalidRequest."""
        prompt: Prompt
        if isinstance(context, str):
            prompt = context
        elif is_conversation(context):
            prompt = Chat([dict(message) for message in read_conversation(context)])
        else:
            ids = [each for each in context if not isinstance(each, Mapping)]
            prompt = array("i", id_array(ids).tolist())
        return encode_scoring(self.tokenizer, prompt, choices)

    def _score_requests(self, scoring: ContextScoring) -> list[Request]:
        return [
            Request(
                self._next_id(),
                id_array(ids),
                SCORE_SAMPLING,
                delivery=Delivery.AT_END,
                scoring=asked,
            )
            for ids, asked in scoring.prompts()
        ]

    def _keep(self, turn: "ReadyPrompt", output_ids: list[int]) -> None:
        if turn.text is not None:
            self.keep_turn(turn.session, turn.text, turn.prompt_ids, output_ids)


@dataclass(frozen=True, slots=True)
class ReadyPrompt:
    """A prompt that is ready to be submitted to the engine."""

    request: Request
    text: str | None  # with marks in a chat (text/control_tokens.py); None: given as ids
    session: str | None  # the session that keeps the turn after it has ended
    prompt_ids: list[int]


def read_update(weights: Weights, mode: UpdateMode | str) -> tuple[Update, UpdateMode]:
    """The arguments of `update_weights`; raises InvalidRequest."""
    update: Update
    if isinstance(weights, str | PathLike):
        folder = Path(weights).expanduser()
        if not folder.is_dir():
            raise InvalidRequest("weights", f"{folder} is not a folder")
        update = FolderUpdate(folder)
    else:
        update = TensorUpdate(weights.items() if isinstance(weights, Mapping) else weights)
    return update, read_mode(mode)


def read_mode(mode: UpdateMode | str) -> UpdateMode:
    """What happens to open requests; raises InvalidRequest."""
    return _one_of("mode", UpdateMode, mode)


def read_tags(tags: Iterable[Tag | str] | None) -> frozenset[Tag]:
    """The `tags` of `wake_up`; None means all. Raises InvalidRequest."""
    return BOTH_TAGS if tags is None else frozenset(_one_of("tags", Tag, tag) for tag in tags)


_Choice = TypeVar("_Choice", bound=Enum)


def _one_of(field: str, kind: type[_Choice], given: _Choice | str) -> _Choice:
    known = {each.value: each for each in kind}
    if isinstance(given, kind):
        return given
    if given not in known:
        raise InvalidRequest(field, f"must be one of {[*known]}, got {given!r}")
    return known[given]


def overflow_policy(given: Overflow | str | None) -> Overflow | None:
    """What happens to prompts that are longer than the context window."""
    if not isinstance(given, str):
        return given
    known = [policy.value for policy in Overflow]
    if given not in known:
        raise InvalidRequest("overflow", f"must be one of {known}, got {given!r}")
    return Overflow(given)
