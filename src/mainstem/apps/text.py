"""Text <-> token ids: tokenizer, chat template, incremental detokeniser, stop strings.

    messages --template--> text --encode--> ids ... ids --Detokenizer--> text --StopChecker--> text

Everything comes from the model's folder. Templates run in a sandbox; what users write reaches
them as data only. A TextStream joins the two right-hand parts for one answer.
"""

import codecs
import json
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Protocol

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mainstem.core.errors import InvalidRequest, ModelNotFound
from mainstem.core.request import SamplingParams

Message = Mapping[str, object]
Json = Mapping[str, object]

MAX_RENDERED_CHARS = 1 << 25  # what a chat may become; far above any context window
SPECIAL_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


# --- tokenizer -----------------------------------------------------------------------------------


class Tokenizer:
    """The tokenizer and chat template of one model folder; immutable, safe between threads.

    Ids and texts equal those of Hugging Face's tokenizer for the same folder, except that decoding
    never "cleans up" spaces (which cannot be done in a stream).
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        eos_ids: frozenset[int] = frozenset(),
        special_tokens: Mapping[str, str] | None = None,
        templates: Mapping[str, str] | None = None,
    ) -> None:
        """`special_tokens`: role ("bos_token") -> text; `templates`: name -> chat template."""
        self._backend = backend
        self._templates = {
            name: ChatTemplate(source, special_tokens or {})
            for name, source in (templates or {}).items()
        }
        self.eos_ids = eos_ids
        self.special_tokens = dict(special_tokens or {})
        self.special_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self._alphabet = _TokenAlphabet(backend)

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read a model folder. Raises ModelNotFound when it has no usable tokenizer.json."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelNotFound(f"{folder} has no tokenizer.json, the only tokenizer format read")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the Rust side raises plain Exception
            raise ModelNotFound(f"{path} cannot be read: {error}") from error
        backend.no_padding()  # files in the wild carry training-time settings
        backend.no_truncation()
        settings = _read_json(folder / "tokenizer_config.json")
        special = _special_tokens(settings, _read_json(folder / "special_tokens_map.json"))
        return cls(
            backend, _eos_ids(folder, backend, special), special, _templates(folder, settings)
        )

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt, with the begin and end tokens that tokenizer.json puts around one.

        add_bos_token in tokenizer_config.json has no say, as in Hugging Face's loader.
        """
        _check_unicode("prompt", text)
        return self._backend.encode(text).ids

    def encode_plain(self, text: str) -> list[int]:
        """Ids of the text alone; special tokens written out in it still become their ids."""
        _check_unicode("prompt", text)
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` for many prompts, on all cores."""
        for text in texts:
            _check_unicode("prompt", text)
        return [encoding.ids for encoding in self._backend.encode_batch_fast(list(texts))]

    def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Json] | None = None,
        add_generation_prompt: bool = True,
        template_args: Json | None = None,
    ) -> list[int]:
        """Ids of a conversation; see `render_chat`."""
        text = self.render_chat(messages, tools, add_generation_prompt, template_args)
        _check_unicode("messages", text)
        return self._backend.encode(text, add_special_tokens=False).ids

    def render_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Json] | None = None,
        add_generation_prompt: bool = True,
        template_args: Json | None = None,
    ) -> str:
        """The conversation as the model was trained to read it.

        `template_args` are further variables of the template (Qwen3: enable_thinking). Raises
        InvalidRequest("messages") when the template refuses them or there is no template.
        """
        if not self._templates:
            raise InvalidRequest("messages", "this model has no chat template; send a prompt")
        template = self._template("tool_use" if tools else "default")
        return template.render(messages, tools, add_generation_prompt, template_args or {})

    @property
    def tool_template(self) -> str | None:
        """The source of the template that chats with tools go through; None: it has no tools."""
        template = self._template("tool_use") if self._templates else None
        return template.source if template is not None and template.reads_tools else None

    def _template(self, name: str) -> "ChatTemplate":
        """The template of this name, else the default one, else the first."""
        templates = self._templates
        return templates.get(name) or templates.get("default") or next(iter(templates.values()))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids; ids that the vocabulary lacks give nothing."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for, special tokens by name; for logprobs."""
        return self._alphabet.token_bytes(token_id)

    def speller(self, context: Sequence[int]) -> "_Speller":
        """A fresh incremental decoder for ids that follow `context`."""
        if self._alphabet.is_byte_level:
            return _ByteSpeller(self._alphabet.token_bytes)
        return _WindowSpeller(self.decode_all, self._alphabet.is_byte, context)

    @property
    def can_continue(self) -> bool:
        """Whether the ids of a text and of what follows it may be encoded one after the other."""
        return self._alphabet.is_byte_level and self.decode_all(self.encode_plain("x")) == "x"

    def to_json(self) -> str:
        """The tokenizer as tokenizer.json says it, for libraries that read that format."""
        return self._backend.to_str()

    def decode_all(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included."""
        return self._backend.decode(list(ids), skip_special_tokens=False)


def _check_unicode(field: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(field, "is not valid Unicode (lone surrogates)") from error


def _read_json(path: Path) -> dict[str, object]:
    """A JSON object, or an empty one when the file is absent."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelNotFound(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelNotFound(f"{path} does not hold a JSON object")
    return value


def _special_tokens(settings: Json, special_map: Json) -> dict[str, str]:
    """Role ("eos_token") -> text; the value is a string or an object with its content."""
    special = {}
    for role in (f"{short}_token" for short in SPECIAL_ROLES):
        value = settings.get(role, special_map.get(role))
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            special[role] = value
    return special


def _eos_ids(
    folder: Path, backend: tokenizers.Tokenizer, special: Mapping[str, str]
) -> frozenset[int]:
    """What generation_config (else config) names, one id or a list, and the tokenizer's own.

    The union, because fine-tuned chat models often set only one of the two.
    """
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        listed = value if isinstance(value, list) else [value]
        ids.update(token_id for token_id in listed if isinstance(token_id, int))
        if ids:
            break
    if (eos := special.get("eos_token")) is not None:
        token_id = backend.token_to_id(eos)
        ids.update(() if token_id is None else (token_id,))
    return frozenset(ids)


def _templates(folder: Path, settings: Json) -> dict[str, str]:
    """Chat templates by name; chat_template.jinja wins over tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return {"default": path.read_text(encoding="utf-8")}
    value = settings.get("chat_template")
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        return {str(entry["name"]): str(entry["template"]) for entry in value}
    return {}


# --- chat template -------------------------------------------------------------------------------


class _Generation(jinja2.ext.Extension):
    """Accepts `{% generation %}`, which marks answers for training and prints its body as is."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own attribute, a plain set there)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as Hugging Face's templates expect it: nothing escaped for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


class ChatTemplate:
    """A chat template in a sandbox, with the variables and filters Hugging Face gives it."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises ModelNotFound when the template is not valid Jinja."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._special_tokens = dict(special_tokens)
        self.source = source
        try:
            self._template = environment.from_string(source)
            variables = jinja2.meta.find_undeclared_variables(environment.parse(source))
            self.reads_tools = "tools" in variables
        except jinja2.TemplateError as error:
            raise ModelNotFound(f"the model's chat template is not valid: {error}") from error

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Json] | None,
        add_generation_prompt: bool,
        template_args: Json,
    ) -> str:
        """The conversation as text, or InvalidRequest("messages") with the template's complaint."""
        variables: dict[str, object] = {
            **self._special_tokens,
            "documents": None,
            **template_args,
            "messages": _checked_messages(messages),
            "tools": None if tools is None else list(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        parts: list[str] = []
        num_chars = 0
        try:
            for part in self._template.generate(variables):
                num_chars += len(part)
                if num_chars > MAX_RENDERED_CHARS:
                    raise InvalidRequest("messages", f"longer than {MAX_RENDERED_CHARS} characters")
                parts.append(part)
        except _TEMPLATE_FAULTS as error:
            reason = str(error) or type(error).__name__
            raise InvalidRequest("messages", f"refused by the chat template: {reason}") from error
        return "".join(parts)


# what foreign template code can raise over messages it did not expect
_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


def _checked_messages(messages: object) -> list[dict[str, object]]:
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidRequest("messages", "must be a list with at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidRequest("messages", f"message {index} must be an object")
        if not isinstance(message.get("role"), str):
            raise InvalidRequest("messages", f"message {index} needs a role, a string")
    return [dict(message) for message in messages]


# --- incremental detokenisation ------------------------------------------------------------------


class _TokenAlphabet:
    """How a vocabulary writes bytes: byte-level BPE, or sentencepiece with byte tokens."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._known: dict[int, bytes] = {}
        steps = _decoder_steps(backend)
        self.is_byte_level = steps == ["ByteLevel"]
        self._has_byte_tokens = "ByteFallback" in steps
        self._byte_of = _byte_level_characters() if self.is_byte_level else {}

    def is_byte(self, token_id: int) -> bool:
        """Whether the token is one raw byte that only makes sense with its neighbours."""
        token = self._backend.id_to_token(token_id) if self._has_byte_tokens else None
        return token is not None and _BYTE_TOKEN.fullmatch(token) is not None

    def token_bytes(self, token_id: int) -> bytes:
        if (known := self._known.get(token_id)) is None:
            known = self._known[token_id] = self._spell(self._backend.id_to_token(token_id) or "")
        return known

    def _spell(self, token: str) -> bytes:
        if self.is_byte_level:
            try:
                return bytes(self._byte_of[character] for character in token)
            except KeyError:  # an added token, written as it is
                return token.encode()
        if self._has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.replace("\u2581", " ").encode()


_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[str]:
    """The kinds of the decoder's steps, a sequence flattened; empty without a decoder."""
    if backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    inner = state.get("decoders", [state])
    return [str(step["type"]) for step in inner]


def _byte_level_characters() -> dict[str, int]:
    """GPT-2's table: printable bytes stand for themselves, the rest are moved up to 256 and on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}


class _Speller(Protocol):
    """Ids in, text out, holding back what a later id may still change."""

    @property
    def is_holding(self) -> bool: ...

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class _ByteSpeller:
    """For byte-level vocabularies: concatenate bytes, decode UTF-8 as it becomes complete."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def is_holding(self) -> bool:
        return bool(self._utf8.getstate()[0])

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._token_bytes(token_id))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowSpeller:
    """For all other decoders: the text of (last token + new ones) minus that of the last token.

    One token of context is enough: decoders treat the first token of a text specially (its
    leading space goes) and no other. A run of byte tokens is decoded when it has ended, because
    one bad byte turns the whole run into replacement characters.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        is_byte: Callable[[int], bool],
        context: Sequence[int],
    ) -> None:
        self._decode = decode
        self._is_byte = is_byte
        self._last = [token_id for token_id in context if not is_byte(token_id)][-1:]
        self._pending: list[int] = []

    @property
    def is_holding(self) -> bool:
        return bool(self._pending)

    def push(self, token_id: int) -> str:
        self._pending.append(token_id)
        return "" if self._is_byte(token_id) else self.finish()

    def finish(self) -> str:
        if not self._pending:
            return ""
        known = self._decode(self._last)
        whole = self._decode([*self._last, *self._pending])
        self._last = [self._pending[-1]]
        self._pending = []
        return whole[len(known) :]


class Detokenizer:
    """Text of an answer as its tokens arrive; never splits a character.

    The pieces joined equal `decode` of all ids (after `finish`). With `context`, the prompt's ids,
    the first word keeps the space that a sentencepiece decoder would strip at a text's start.
    """

    def __init__(
        self, tokenizer: Tokenizer, context: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._skipped: frozenset[int] = (
            tokenizer.special_ids if skip_special_tokens else frozenset()
        )
        shown = [token_id for token_id in context[-64:] if token_id not in self._skipped]
        self._speller = tokenizer.speller(shown)

    @property
    def is_holding(self) -> bool:
        """Whether a character has begun and not ended."""
        return self._speller.is_holding

    def push(self, token_id: int) -> str:
        """The text that has become certain; often the token's own, sometimes none or more."""
        return "" if token_id in self._skipped else self._speller.push(token_id)

    def finish(self) -> str:
        """What was held back: incomplete characters become U+FFFD."""
        return self._speller.finish()


# --- stop strings --------------------------------------------------------------------------------


@dataclass(slots=True)
class _State:
    """A prefix of some stop strings: where each character leads, and what ends here."""

    depth: int
    children: dict[str, "_State"]
    fallback: "_State | None" = None  # the longest proper suffix that is also a prefix
    found: str | None = None  # the longest stop string that ends here


class StopChecker:
    """Lets text through up to the first stop string (Aho-Corasick, one step per character).

    Text that may be the beginning of a stop string is held back. The stop string that ends first
    wins, of those the longest; so the result does not depend on how the text was cut up.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self._include_stop = include_stop
        self._root = _automaton(stops)
        self._state = self._root
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """The part of the text so far that is certain and not returned yet; none after a stop."""
        if self.found is not None:
            return ""
        if not self._root.children:
            return text
        text, start = self._held + text, len(self._held)
        for index in range(start, len(text)):
            self._state = _advance(self._root, self._state, text[index])
            if (stop := self._state.found) is not None:
                self.found, self._held = stop, ""
                return text[: index + 1 if self._include_stop else index + 1 - len(stop)]
        released = len(text) - self._state.depth
        self._held = text[released:]
        return text[:released]

    def finish(self) -> str:
        """What was held back, when no more text will come."""
        held, self._held = self._held, ""
        return held


def _automaton(stops: Sequence[str]) -> _State:
    root = _State(depth=0, children={})
    for stop in stops:
        state = root
        for character in stop:
            fresh = _State(depth=state.depth + 1, children={})
            state = state.children.setdefault(character, fresh)
        if state is not root:
            state.found = stop
    queue = deque([root])
    while queue:  # by depth, so that a fallback is complete before it is used
        state = queue.popleft()
        for character, child in state.children.items():
            fallback = state.fallback
            child.fallback = root if fallback is None else _advance(root, fallback, character)
            child.found = child.found or child.fallback.found
            queue.append(child)
    return root


def _advance(root: _State, state: _State, character: str) -> _State:
    current: _State | None = state
    while current is not None:
        if (child := current.children.get(character)) is not None:
            return child
        current = current.fallback
    return root


# --- one answer ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Piece:
    """New text of an answer."""

    text: str
    num_tokens: int  # tokens, from the answer's first, that all text so far covers
    stop: str | None  # the stop string that ended the answer


class TextStream:
    """The text of one answer: tokens in, pieces that are safe to send out.

    `num_tokens` counts tokens whose text has been returned; when a stop string ends the answer it
    counts those with at least one character in the text. Tokens pushed after that change nothing.
    """

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, prompt_ids: Sequence[int] = ()
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_ids, params.skip_special_tokens)
        self._checker = StopChecker(params.stop_strings, params.include_stop_str_in_output)
        self._min_tokens = params.min_tokens
        self._token_starts: deque[int] = deque()  # of tokens not covered yet, in characters
        self._num_pushed = 0
        self._num_chars = 0  # that came out of the detokeniser
        self._num_returned = 0
        self._num_tokens = 0

    def push(self, token_id: int) -> Piece:
        """Add the next token. Stop strings are not looked for in the first min_tokens tokens."""
        if self._checker.found is not None:
            return Piece("", self._num_tokens, self._checker.found)
        self._num_pushed += 1
        self._token_starts.append(self._num_chars)
        text = self._detokenizer.push(token_id)
        self._num_chars += len(text)
        if self._num_pushed > self._min_tokens:
            text = self._checker.push(text)
        return self._piece(text)

    def finish(self) -> Piece:
        """The rest, when no more tokens will come."""
        if self._checker.found is not None:
            return Piece("", self._num_tokens, self._checker.found)
        text = self._detokenizer.finish()
        self._num_chars += len(text)
        text = self._checker.push(text)
        if self._checker.found is None:
            text += self._checker.finish()
            self._token_starts.clear()
            self._num_tokens = self._num_pushed
        return self._piece(text)

    def _piece(self, text: str) -> Piece:
        self._num_returned += len(text)
        stop = self._checker.found
        while self._token_starts and self._is_covered(stop):
            self._token_starts.popleft()
            self._num_tokens += 1
        return Piece(text, self._num_tokens, stop)

    def _is_covered(self, stop: str | None) -> bool:
        """Whether the text returned covers the oldest token that was not covered so far."""
        start = self._token_starts[0]
        if stop is not None:
            return start < self._num_returned
        if start == self._num_chars and self._detokenizer.is_holding:
            return False  # its character is still incomplete
        # a token ends where the next one starts; the newest ends where the text ends
        end = self._token_starts[1] if len(self._token_starts) > 1 else self._num_chars
        return end <= self._num_returned
