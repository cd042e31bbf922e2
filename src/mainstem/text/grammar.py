"""Makes answers follow a form: JSON of a schema, a regular expression, one of some texts.

    response_format --wire/chat/forms.py--> form --Grammars.compile--> CompiledForm --> AnswerMask

A form is a text that llguidance understands; as text it can be part of SamplingParams. JSON is
written with one space after `,` and `:` and none elsewhere: small models that may choose white
space freely sometimes write nothing else.
"""

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields
from functools import partial
from math import prod
from threading import Lock
from time import thread_time
from typing import TYPE_CHECKING
from weakref import WeakSet

import numpy as np

from mainstem.core.errors import InvalidRequest, MissingPackage, TooManyForms
from mainstem.core.json import Json, JsonView
from mainstem.core.step import Bytes, Int32s
from mainstem.text.form_errors import FIELD, blamed
from mainstem.text.late_checks import broken_rule, lowered
from mainstem.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_FORM_CHARS = 1 << 16
MAX_CHOICES = 1024
CHECKS = "checks"  # in a form: schemas that parts of complete answers are checked against
JSON_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

# Limits for the cost of a form. Schemas of 64 KiB stay far below: they take 0.05 s and 1 MB.
_MAX_SYMBOLS = 100_000  # symbols of a grammar
_MAX_STATES = 50_000  # states of its lexer; text of limited length needs 7 for each character
_LEXER_FUEL = 200_000  # for text that a form prescribes at its beginning; each takes 150 bytes
_MAX_ITEMS = 20_000  # items of the parser, per token
# remainders that a lexer must distinguish for `multipleOf`; this many take 0.4 s and 25 MB
_MAX_REMAINDERS = 50_000
_MAX_SLOW_S = 1.0  # processor time of an answer's slow tokens: those that took _SLOW_S or more
_SLOW_S = 0.02
_RENEWABLE_S = 0.1  # a form that took longer to compile is not compiled again between two steps
_READ_TOKENS = 256  # tokens read in one call, when a new lexer reads the whole answer again
# an answer's lexer may be renewed twice, and once more for every 128 tokens of the answer
_RENEWAL_TOKENS = 128

# Limits for the memory of compiled forms, and rates for an upper estimate of it.
KEPT_BYTES = 1 << 30  # memory of forms that are kept for later use
OWNER_BYTES = 2 << 30  # memory of one owner's forms, kept or in use
_MIN_BYTES = 1 << 20
_BYTES_PER_S = 200e6  # memory per second of compile time
_BYTES_PER_TOKEN = 16_384  # memory that each token read adds to a form's lexer
_MAX_GROWTH = 64 << 20  # most memory that all tokens add to a form's lexer


# --- forms ---------------------------------------------------------------------------------------


def json_form(schema: object) -> str:
    """Return the form of JSON that a schema describes."""
    if not isinstance(schema, dict):
        raise InvalidRequest(FIELD, f"a JSON schema must be an object, got {schema!r}")
    return _form(*_schema_grammars("answer_json", schema))


def regex_form(pattern: str) -> str:
    """Return the form of text that a regular expression matches from beginning to end."""
    escaped = pattern.replace("/", r"\/")
    return lark_form(f"start: /{escaped}/")


def choice_form(choices: Sequence[str]) -> str:
    """Return the form that allows one of some texts."""
    if not 0 < len(choices) <= MAX_CHOICES or not all(choices):
        raise InvalidRequest(FIELD, f"needs 1 to {MAX_CHOICES} choices that are not empty")
    return lark_form("start: " + " | ".join(json.dumps(choice) for choice in choices))


def lark_form(text: str, schemas: Mapping[str, JsonView] | None = None) -> str:
    """Return the form of text that a grammar in llguidance's dialect of Lark describes. It may
    refer to JSON schemas as `@name`."""
    grammars: list[Json] = [{"lark_grammar": text}]
    checks: Json = {}
    for name, schema in (schemas or {}).items():
        (first, *others), more = _schema_grammars(f"{name}_json", schema)
        grammars += [{"name": name} | first, *others]
        checks |= more
    return _form(grammars, checks)


def joined_form(text: str, forms: Mapping[str, str]) -> str:
    """Return the form of text that a grammar in Lark describes, which refers to other forms as
    `@name`. Apart from these names, the forms' own must differ."""
    joined: list[Json] = [{"lark_grammar": text}]
    checks: Json = {}
    for name, form in forms.items():
        read = json.loads(form)
        first, *others = read["grammars"]
        joined += [first | {"name": name}, *others]
        checks |= read.get(CHECKS, {})
    return _form(joined, checks)


def _schema_grammars(name: str, schema: JsonView) -> tuple[list[Json], Json]:
    """Return the grammars of JSON that a schema describes. If answers must be checked against the
    schema when they are complete, also returns it by the name of the part to check."""
    low = lowered(schema)
    grammar: Json = {"json_schema": {**low.schema, "x-guidance": JSON_SPACING}}
    if not low.must_check:
        return [grammar], {}
    whole = f'start: whole\nwhole[capture="{name}"]: @{name}'
    return [{"lark_grammar": whole}, grammar | {"name": name}], {name: schema}


def _form(grammars: Sequence[Json], checks: JsonView | None = None) -> str:
    form: Json = {"grammars": grammars}
    if checks:
        form[CHECKS] = checks
    text = json.dumps(form, sort_keys=False)
    if len(text) > MAX_FORM_CHARS:
        raise InvalidRequest(
            FIELD, f"may have at most {MAX_FORM_CHARS} characters, has {len(text)}"
        )
    return text


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """The form an answer must have: exactly one of these fields. Names are as in vLLM.

    SamplingParams(structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
    """

    json: str | Mapping[str, object] | None = None  # a JSON schema, as an object or as text
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
        _ = self.form  # raises if it is wrong

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
        return make()  # a pydantic class
    try:
        return json.loads(given)
    except (ValueError, TypeError):
        reason = f"a JSON schema must be an object or JSON text, got {given!r:.80}"
        raise InvalidRequest("json", reason) from None


# --- compiled ------------------------------------------------------------------------------------


class Grammars:
    """Compiles forms for one tokenizer, and keeps them. May be used on any thread.

    Compiling may take a second, without the interpreter lock; callers that want another form do
    not wait for it. Forms belong to an owner (a tenant). When kept forms exceed KEPT_BYTES, the
    owner with the most bytes loses its least recently used form. So no owner can evict the forms of
    an owner with fewer bytes.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._words: LLTokenizer | None = None  # made when first needed: it takes half a second
        self._words_lock = Lock()
        # by owner and text, least recently used first
        self._forms: OrderedDict[tuple[str, str], Future[CompiledForm]] = OrderedDict()
        self._live: WeakSet[CompiledForm] = WeakSet()  # forms that are kept or still in use
        self._lock = Lock()  # guards the forms; held only briefly

    def compile(self, form: str, owner: str = "") -> "CompiledForm":
        """Return the compiled form. Raises InvalidRequest if the form is wrong, TooManyForms if the
        owner's forms in use take all the memory that one owner may have."""
        key = (owner, form)
        with self._lock:
            found = self._usable(key)
            if found is None:
                self._make_room(owner)
            wanted = found or self._forms.setdefault(key, Future())
            self._forms.move_to_end(key)
        if found is None:  # other callers that want this form wait for this thread
            self._fill(wanted, key)
        return wanted.result()

    def find(self, form: str, owner: str = "") -> "CompiledForm | None":
        """Return a form if it is compiled already; this counts as a use."""
        with self._lock:
            found = self._usable((owner, form))
            if found is not None:
                self._forms.move_to_end((owner, form))
        return found.result() if found is not None and found.done() else None

    @property
    def num_bytes(self) -> int:
        """Memory of forms that are kept or in use, by an upper estimate."""
        with self._lock:
            return sum(form.num_bytes for form in self._live)

    def _usable(self, key: tuple[str, str]) -> "Future[CompiledForm] | None":
        """Return a form that is kept or being compiled. A form that is used up is dropped."""
        found = self._forms.get(key)
        if found is not None and found.done() and found.result().is_spent:
            del self._forms[key]
            return None
        return found

    def _make_room(self, owner: str) -> None:
        """Evict forms above the limit; refuse a new form if too much of its owner's memory is in
        use."""
        held: dict[str, int] = {}
        ready = [(key, each.result()) for key, each in self._forms.items() if each.done()]
        for (name, _), form in ready:
            held[name] = held.get(name, 0) + form.num_bytes
        while sum(held.values()) > KEPT_BYTES:
            largest = max(held, key=lambda name: held[name])
            place = next(i for i, ((name, _), _) in enumerate(ready) if name == largest)
            key, form = ready.pop(place)
            held[largest] -= form.num_bytes
            del self._forms[key], form
        ready.clear()  # these may be the last references to some forms
        in_use = sum(form.num_bytes for form in self._live if form.owner == owner)
        if in_use > OWNER_BYTES:
            reason = f"forms in use hold {in_use >> 20} MiB; retry when some answers have ended"
            raise TooManyForms(FIELD, reason)

    def _fill(self, wanted: "Future[CompiledForm]", key: tuple[str, str]) -> None:
        owner, form = key
        try:
            words = self._load_words()  # not counted as this form's cost
            began_s = thread_time()
            form, checks = _without_checks(form)
            matcher = _matcher(form, words)
            cost_s = thread_time() - began_s
            again = partial(_matcher, form, words)
            compiled = CompiledForm(matcher, again, cost_s, owner, checks)
        except BaseException as error:
            with self._lock:
                if self._forms.get(key) is wanted:
                    del self._forms[key]
            if isinstance(error, InvalidRequest):
                # frames would keep tens of megabytes of the parser until garbage collection
                error.with_traceback(None)
            wanted.set_exception(error)
        else:
            with self._lock:
                self._live.add(compiled)
            wanted.set_result(compiled)

    def _load_words(self) -> "LLTokenizer":
        with self._words_lock:
            if self._words is None:
                self._words = _words_of(self._tokenizer)
            return self._words


def _words_of(tokenizer: Tokenizer) -> "LLTokenizer":
    try:
        from llguidance import LLTokenizer  # noqa: PLC0415  # an optional package
    except ImportError:
        reason = "needs llguidance: pip install 'mainstem[server]'"
        raise MissingPackage(FIELD, reason) from None
    if not tokenizer.eos_ids:
        raise InvalidRequest(FIELD, "this model's files name no end token")
    try:
        return LLTokenizer(tokenizer.to_json(), eos_token=sorted(tokenizer.eos_ids))
    except ValueError as error:
        raise InvalidRequest(
            FIELD, f"is not supported with this model's tokenizer: {error}"
        ) from None


def _without_checks(form: str) -> tuple[str, JsonView]:
    """Return a form as llguidance takes it, and what is to be checked at the end of an answer."""
    if f'"{CHECKS}"' not in form:
        return form, {}
    try:
        read = json.loads(form)
    except ValueError:
        return form, {}
    checks = read.pop(CHECKS, {}) if isinstance(read, dict) else {}
    return (json.dumps(read), checks) if checks else (form, {})


def _matcher(form: str, words: "LLTokenizer") -> "LLMatcher":
    """Return a new matcher; raises InvalidRequest."""
    from llguidance import LLMatcher, LLParserLimits  # noqa: PLC0415

    if (count := _num_remainders(form)) > _MAX_REMAINDERS:
        reason = f"multipleOf has {count} remainders, at most {_MAX_REMAINDERS} are allowed"
        raise InvalidRequest(FIELD, _too_much(reason))
    limits = LLParserLimits(
        max_grammar_size=_MAX_SYMBOLS,
        max_lexer_states=_MAX_STATES,
        initial_lexer_fuel=_LEXER_FUEL,
        step_max_items=_MAX_ITEMS,
        verbose_errors=False,
    )
    error = LLMatcher.validate_grammar(form, words, limits=limits)
    if error:
        raise blamed(form, error, limits)
    matcher = LLMatcher(words, form, limits=limits, log_level=0)
    allowed = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    if matcher.is_error():
        reason = _reason(matcher)
        is_empty = reason.startswith("NoExtension")
        raise InvalidRequest(FIELD, "no text matches it" if is_empty else _too_much(reason))
    first = np.flatnonzero(np.unpackbits(allowed, bitorder="little"))
    first = first[~np.isin(first, words.eos_tokens)]
    if len(first):  # text that the form prescribes at its beginning may exceed the lexer's limits
        trial = matcher.deep_copy()
        trial.consume_token(int(first[0]))
        trial.compute_bitmask()
        if trial.is_error():
            raise InvalidRequest(FIELD, _too_much(_reason(trial)))
    return matcher


def _num_remainders(form: str) -> int:
    """Return how many remainders a lexer must distinguish for `multipleOf`: the sum of the divisors
    or, if schemas are joined, their product."""
    text = re.sub(r"\\+u([0-9a-fA-F]{4})", lambda code: chr(int(code[1], 16)), form)
    found = re.findall(r'multipleOf\\*"\s*:\s*([0-9.]+)', text)
    divisors = {int("0" + digits.replace(".", "").rstrip("0")[:18]) for digits in found}
    is_joined = "allOf" in text or "$ref" in text
    return prod(divisors) if is_joined else sum(divisors)


def _reason(matcher: "LLMatcher") -> str:
    return " ".join(matcher.get_error().replace("<non-verbose/>", "").split())


def _too_much(reason: str) -> str:
    return f"the form is too complex: {reason}"


class CompiledForm:
    """A compiled form, which answers can follow; a `Grammar` of core.request.

    All its answers share one lexer, which grows with the text it reads. When the lexer reaches its
    limits, it fails for all answers. The form is then compiled again, and the answers continue with
    the new lexer. A form that took long to compile is not compiled again: it is used up.
    """

    def __init__(
        self,
        matcher: "LLMatcher",
        compile_again: "Callable[[], LLMatcher]",
        cost_s: float,
        owner: str = "",
        checks: JsonView | None = None,
    ) -> None:
        """`cost_s`: processor time of compiling. `checks`: the schemas that the answer's parts of
        these names must match when it is complete."""
        self.owner = owner
        self._checks = checks or {}
        self.is_spent = False
        self._matcher = matcher
        self._compile_again = compile_again
        self._cost_s = cost_s
        self._num_tokens = 0  # tokens that its lexer has read
        self.generation = 0  # number of the current lexer

    @property
    def num_bytes(self) -> int:
        """An upper estimate of its memory."""
        grown = min(self._num_tokens * _BYTES_PER_TOKEN, _MAX_GROWTH)
        return int(_MIN_BYTES + self._cost_s * _BYTES_PER_S + grown)

    def start(self) -> "AnswerMask":
        return AnswerMask(self)

    def matcher(self) -> "LLMatcher":
        """A matcher at the beginning of an answer."""
        return self._matcher.deep_copy()

    def fault(self, matcher: "LLMatcher") -> str | None:
        """Return what a complete answer breaks that the form could not prevent; None: nothing, or
        it is not complete."""
        if not self._checks or not matcher.is_accepting():
            return None
        for name, text in matcher.get_captures():
            schema = self._checks.get(name)
            if isinstance(schema, Mapping) and (broken := broken_rule(text, schema)) is not None:
                return f"it does not follow its schema: {broken}"
        return None

    def count(self, num_tokens: int) -> None:
        """Record that answers have read `num_tokens` more tokens."""
        self._num_tokens += num_tokens

    def renew(self, failed: int) -> bool:
        """Make sure that there is a newer lexer than the one that failed; False: there is none."""
        if failed < self.generation:
            return True  # another answer has renewed it already
        try:
            if self._cost_s <= _RENEWABLE_S:
                self._matcher = self._compile_again()
                self._num_tokens = 0
                self.generation += 1
                return True
        except InvalidRequest:
            pass
        self.is_spent = True
        return False


class AnswerMask:
    """The progress of one answer in its form; a `TokenMask` of core.request.

    When the form is complete only the end token is allowed.
    """

    def __init__(self, form: CompiledForm) -> None:
        self.fault: str | None = None
        self._form = form
        self._matcher, self._generation = form.matcher(), form.generation
        self._num_seen = 0
        self._allowed: Bytes | None = None  # tokens allowed after those read so far
        self._num_renewals = 0
        self._slow_s = 0.0

    def allowed(self, output_ids: Int32s) -> Bytes:
        if self._allowed is not None and self._num_seen == len(output_ids):
            return self._allowed
        began_s = thread_time()
        num_read = len(output_ids) - self._num_seen
        self._read(output_ids[self._num_seen :])
        if self._matcher.is_error():
            if self._renew(output_ids):
                num_read = len(output_ids)
        else:
            self._note_time(thread_time() - began_s)
        self._form.count(num_read)
        if self.fault is None and not self._matcher.is_error():
            self.fault = self._form.fault(self._matcher)
        self._num_seen = len(output_ids)
        assert self._allowed is not None
        return self._allowed

    def _read(self, new_ids: Int32s) -> None:
        for start in range(0, len(new_ids), _READ_TOKENS):
            self._matcher.consume_tokens(new_ids[start : start + _READ_TOKENS].tolist())
            if start + _READ_TOKENS < len(new_ids):
                self._matcher.compute_bitmask()  # resets the fuel, which is counted per mask
        self._allowed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)

    def _renew(self, output_ids: Int32s) -> bool:
        """After an error: read the whole answer again with a new lexer, if that may help. Returns
        whether it was read again."""
        form, was_read = self._form, False
        may_renew = self._num_renewals < 2 + len(output_ids) // _RENEWAL_TOKENS
        if "lexer error" in _reason(self._matcher) and may_renew and form.renew(self._generation):
            self._num_renewals += 1
            self._matcher, self._generation = form.matcher(), form.generation
            self._read(output_ids)
            was_read = True
        if self._matcher.is_error():
            self.fault = f"the parser of the form reached its limits: {_reason(self._matcher)}"
        return was_read

    def _note_time(self, seconds: float) -> None:
        """Count the time of slow tokens: all requests wait for them, so an answer may have only a
        few."""
        if seconds >= _SLOW_S:
            self._slow_s += seconds
        if self._slow_s > _MAX_SLOW_S and self.fault is None:
            self.fault = "the parser of the form takes too long"
