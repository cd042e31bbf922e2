"""Answers of a given form: JSON of a schema, a regular expression, one of some texts.

    response_format --rows.py--> form (text) --Grammars.compile--> Grammar --> a mask per answer

A form is plain text, so that it can be part of SamplingParams; llguidance understands it. JSON is
written with one space after `,` and `:` and none elsewhere: a free choice of white space is one
that small models do not come back from.
"""

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from mainstem.core.errors import InvalidRequest, MissingPackage
from mainstem.core.step import Bytes, Int32s
from mainstem.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_FORM_CHARS = 1 << 16
MAX_CHOICES = 1024
FORMS_KEPT = 256  # compiled, by their text
FIELD = "response_format"
JSON_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_MAX_SYMBOLS = 100_000  # of a grammar
_MAX_STATES = 50_000  # of its lexer, 1 to 2 kB each


# --- forms ---------------------------------------------------------------------------------------


def json_form(schema: object) -> str:
    """JSON that a schema describes."""
    if not isinstance(schema, dict):
        raise InvalidRequest(FIELD, f"a JSON schema must be an object, got {schema!r}")
    return _form({"json_schema": schema | {"x-guidance": JSON_SPACING}})


def regex_form(pattern: str) -> str:
    """Text that a regular expression matches from beginning to end."""
    escaped = pattern.replace("/", r"\/")
    return _form({"lark_grammar": f"start: /{escaped}/"})


def choice_form(choices: Sequence[str]) -> str:
    """One of some texts."""
    if not 0 < len(choices) <= MAX_CHOICES or not all(choices):
        raise InvalidRequest(FIELD, f"1 to {MAX_CHOICES} choices that are not empty")
    return lark_form("start: " + " | ".join(json.dumps(choice) for choice in choices))


def lark_form(text: str) -> str:
    """What a grammar in llguidance's dialect of Lark describes."""
    return _form({"lark_grammar": text})


def _form(grammar: dict[str, object]) -> str:
    text = json.dumps({"grammars": [grammar]}, sort_keys=False)
    if len(text) > MAX_FORM_CHARS:
        raise InvalidRequest(FIELD, f"may have {MAX_FORM_CHARS} characters, has {len(text)}")
    return text


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """The form an answer must have; one of these. Names as in vLLM.

    SamplingParams(structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
    """

    json: str | Mapping[str, object] | None = None  # a JSON schema, or one as text
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None  # in llguidance's dialect of Lark
    json_object: bool | None = None  # any JSON object

    def __post_init__(self) -> None:
        given = [
            each.name for each in fields(self) if getattr(self, each.name) not in (None, False)
        ]
        if len(given) != 1:
            names = ", ".join(each.name for each in fields(self))
            reason = f"needs one of {names}, got {', '.join(given) or 'none'}"
            raise InvalidRequest("structured_outputs", reason)
        _ = self.form  # raises what is wrong with it

    @property
    def form(self) -> str:
        """The form as text."""
        try:
            return self._form()
        except InvalidRequest as error:
            raise InvalidRequest("structured_outputs", error.reason) from None

    def _form(self) -> str:
        for name in ("regex", "grammar"):
            if not isinstance(getattr(self, name), str | None):
                raise InvalidRequest(name, f"{name} must be text, got {getattr(self, name)!r:.80}")
        if self.regex is not None:
            return regex_form(self.regex)
        if self.choice is not None:
            choices = self.choice
            if isinstance(choices, str) or not all(isinstance(each, str) for each in choices):
                raise InvalidRequest(
                    "choice", f"choice must be a list of texts, got {choices!r:.80}"
                )
            return choice_form(list(choices))
        if self.grammar is not None:
            return lark_form(self.grammar)
        return json_form({"type": "object"} if self.json is None else _schema(self.json))


def _schema(given: str | Mapping[str, object]) -> object:
    if isinstance(given, Mapping):
        return dict(given)
    if callable(make := getattr(given, "model_json_schema", None)):
        return make()  # a class of pydantic
    try:
        return json.loads(given)
    except (ValueError, TypeError):
        reason = f"a JSON schema must be an object, or one as text, got {given!r:.80}"
        raise InvalidRequest("json", reason) from None


# --- compiled ------------------------------------------------------------------------------------


class Grammars:
    """Compiles forms for one tokenizer. May be used on any thread.

    Compiling may take seconds: whoever wants another form does not wait for it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._words: LLTokenizer | None = None  # made when first needed: it takes half a second
        self._words_lock = Lock()
        self._forms: OrderedDict[str, Future[CompiledForm]] = OrderedDict()  # least used first
        self._lock = Lock()  # of the forms, never held for long

    def compile(self, form: str) -> "CompiledForm":
        """Raises InvalidRequest with what is wrong with the form."""
        with self._lock:
            found = self._forms.get(form)
            wanted = self._forms.setdefault(form, Future())
            self._forms.move_to_end(form)
            if len(self._forms) > FORMS_KEPT:
                self._forms.popitem(last=False)
        if found is None:  # others who want it wait for this thread
            self._fill(wanted, form)
        return wanted.result()

    def find(self, form: str) -> "CompiledForm | None":
        """A form that is compiled already."""
        with self._lock:
            found = self._forms.get(form)
        return found.result() if found is not None and found.done() else None

    def _fill(self, wanted: "Future[CompiledForm]", form: str) -> None:
        try:
            wanted.set_result(CompiledForm(self._matcher(form)))
        except BaseException as error:
            with self._lock:
                if self._forms.get(form) is wanted:
                    del self._forms[form]
            wanted.set_exception(error)

    def _matcher(self, form: str) -> "LLMatcher":
        try:
            from llguidance import LLMatcher, LLParserLimits  # noqa: PLC0415  # an optional package
        except ImportError:
            reason = "needs llguidance: pip install 'mainstem[server]'"
            raise MissingPackage(FIELD, reason) from None
        with self._words_lock:
            words = self._words or self._load_words()
        limits = LLParserLimits(
            max_grammar_size=_MAX_SYMBOLS, max_lexer_states=_MAX_STATES, verbose_errors=False
        )
        error = LLMatcher.validate_grammar(form, words, limits=limits)
        if error:
            raise InvalidRequest(FIELD, " ".join(error.split()))
        matcher = LLMatcher(words, form, limits=limits, log_level=0)
        matcher.compute_bitmask()
        if matcher.is_error():
            raise InvalidRequest(FIELD, "no text satisfies it")
        return matcher

    def _load_words(self) -> "LLTokenizer":
        from llguidance import LLTokenizer  # noqa: PLC0415

        tokenizer = self._tokenizer
        if not tokenizer.eos_ids:
            raise InvalidRequest(FIELD, "this model names no end token")
        try:
            self._words = LLTokenizer(tokenizer.to_json(), eos_token=sorted(tokenizer.eos_ids))
        except ValueError as error:
            raise InvalidRequest(FIELD, f"not with this model's tokenizer: {error}") from None
        return self._words


class CompiledForm:
    """A form that answers can be held to; a `Grammar` of core.request."""

    def __init__(self, matcher: "LLMatcher") -> None:
        self._matcher = matcher

    def start(self) -> "AnswerMask":
        return AnswerMask(self._matcher.deep_copy())


class AnswerMask:
    """How far one answer has come in its form; a `TokenMask` of core.request.

    When the form is complete, or the parser gives up, only the end token is allowed.
    """

    def __init__(self, matcher: "LLMatcher") -> None:
        self._matcher = matcher
        self._num_seen = 0

    def allowed(self, output_ids: Int32s) -> Bytes:
        self._matcher.consume_tokens(output_ids[self._num_seen :].tolist())
        self._num_seen = len(output_ids)
        return np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
