"""Converts between text and token ids, with the tokenizer and templates of the model's folder.

messages --chat_template--> text --parts--> ids ... ids --answer_stream--> text
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import tokenizers

from mainstem.core.errors import InvalidRequest, ModelNotFound
from mainstem.core.json import JsonView
from mainstem.text.chat_template import ROLES, ChatTemplate, Message, checked_messages
from mainstem.text.control_tokens import (
    ESCAPED_MARK,
    MARK,
    ControlTokens,
    control_texts,
    has_text,
    map_texts,
    without_marks,
)
from mainstem.text.incremental import ByteDecoder, IncrementalDecoder, TokenAlphabet, WindowDecoder
from mainstem.text.parts import PartEncoder, Pending, encode_whole
from mainstem.text.token_bound import TokenBound
from mainstem.text.tokenizer_files import load_backend, read_json

GENERATION_FILE = "generation_config.json"
SETTINGS_FILE = "tokenizer_config.json"
# sampling fields of generation_config.json that are used; requests set the others, or only Hugging
# Face uses them
ADVISED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
MANY_IDS = 1 << 10  # decoding this many ids takes longer than a change of threads
SPECIAL_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


class Tokenizer:
    """The tokenizer and chat template of one model folder; thread-safe.

    Ids and texts equal those of Hugging Face's tokenizer for the same folder, except that decoding
    never "cleans up" spaces (which cannot be done in a stream).
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        eos_ids: frozenset[int] = frozenset(),
        special_tokens: Mapping[str, str] | None = None,
        templates: Mapping[str, str] | None = None,
        sampling_defaults: JsonView | None = None,
        allow_special_tokens: bool = False,
    ) -> None:
        """`special_tokens`: role ("bos_token") -> text. `templates`: name -> chat template.
        `sampling_defaults`: sampling settings that the model's authors recommend, unchecked.
        `allow_special_tokens`: special tokens written in messages are control tokens, and any role
        is allowed."""
        self._backend = backend
        self._templates = {
            name: ChatTemplate(source, special_tokens or {})
            for name, source in (templates or {}).items()
        }
        self.eos_ids = eos_ids
        self.sampling_defaults = dict(sampling_defaults or {})
        self.special_tokens = dict(special_tokens or {})
        self.special_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self._alphabet = TokenAlphabet(backend)
        ends = [backend.id_to_token(token_id) or "" for token_id in eos_ids]
        control = control_texts(backend, [*self.special_tokens.values(), *ends])
        self._parts = PartEncoder(backend, control)
        is_plain = self._parts.can_split or backend.normalizer is None
        self._control = ControlTokens(control) if is_plain else ControlTokens(control, self._normal)
        self._control_ids = frozenset(map(backend.token_to_id, control))
        self.allows_special_tokens = allow_special_tokens

    @classmethod
    def load(
        cls, folder: Path, template: str | None = None, allow_special_tokens: bool = False
    ) -> "Tokenizer":
        """Read a model folder; chats use the template in the file `template`, if one is given.

        Raises ModelNotFound when there is no usable tokenizer, or a template is not valid.
        """
        settings = read_json(folder / SETTINGS_FILE)
        special = _special_tokens(settings, read_json(folder / "special_tokens_map.json"))
        backend = load_backend(folder, settings, special)
        backend.no_padding()  # published files contain settings for training
        backend.no_truncation()
        return cls(
            backend,
            _eos_ids(folder, backend, special),
            special,
            _templates(folder, settings) if template is None else _own_template(Path(template)),
            _advice(folder),
            allow_special_tokens,
        )

    def prepare(self) -> None:
        """Do work for which the first prompts would otherwise wait."""
        self._parts.prepare()
        _ = self._bound, self.can_continue

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    # --- encoding -------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """Return the ids of a prompt, with the begin and end tokens that tokenizer.json puts around
        a prompt.

        add_bos_token in tokenizer_config.json is ignored, as in Hugging Face's loader.
        """
        check_unicode("prompt", text)
        return encode_whole(self._backend, text, add_special_tokens=True)

    def encode_plain(self, text: str) -> list[int]:
        """Return the ids of the text only. Special tokens written out in the text still become
        their ids."""
        check_unicode("prompt", text)
        return encode_whole(self._backend, text)

    def encode_as_text(self, text: str) -> list[int]:
        """Like `encode`, but special tokens written out in the text are text; raises
        InvalidRequest if the tokenizer cannot read one as text."""
        before, after = self._frame
        return [*before, *self.encode_chat_text(self._fenced(text)), *after]

    @cached_property
    def _frame(self) -> tuple[list[int], list[int]]:
        """The ids that `encode` puts before and after those of a text."""
        whole, inner = self.encode("x"), self.encode_plain("x")
        for begin in range(len(whole) - len(inner) + 1):
            if whole[begin : begin + len(inner)] == inner:
                return whole[:begin], whole[begin + len(inner) :]
        raise AssertionError("a prompt's ids do not contain those of its text")

    def _fenced(self, text: str) -> str:
        """A text in which nothing can become a special token."""
        return self._control.mark(text) if self._parts.can_split else self._control.refuse(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Like `encode`, for many prompts, on all cores."""
        for text in texts:
            check_unicode("prompt", text)
        return [encoding.ids for encoding in self._backend.encode_batch_fast(list(texts))]

    def least_tokens(self, text: str) -> int:
        """Return a lower bound for the number of tokens in `text`; quick for any length."""
        return 0 if self._bound is None else self._bound.least_tokens(text)

    @cached_property
    def _bound(self) -> TokenBound | None:
        return TokenBound.of(self._backend)

    # --- conversations --------------------------------------------------------------------------

    def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[JsonView] | None = None,
        add_generation_prompt: bool = True,
        template_args: JsonView | None = None,
    ) -> list[int]:
        """Return the ids of a conversation; see `render_chat`. Special tokens that the messages
        spell out are text."""
        text = self.chat_text(messages, tools, add_generation_prompt, template_args)
        return self.encode_chat_text(text)

    def encode_chat_text(self, text: str) -> list[int]:
        """Return the ids of the result of `chat_text`."""
        return self.look_up_chat_text(text).finish()

    def look_up_chat_text(self, text: str, salt: bytes = b"") -> Pending:
        """Like `encode_chat_text`, in two steps: parts that were encoded before with this salt are
        found at once."""
        check_unicode("messages", text)
        return self._parts.look_up(text, salt)

    def render_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[JsonView] | None = None,
        add_generation_prompt: bool = True,
        template_args: JsonView | None = None,
    ) -> str:
        """Return the conversation as the model was trained to read it.

        `template_args` are further variables of the template (Qwen3: enable_thinking). Raises
        InvalidRequest("messages") when the template refuses the messages or there is no template.
        """
        return without_marks(self.chat_text(messages, tools, add_generation_prompt, template_args))

    def chat_text(
        self,
        messages: Sequence[Message],
        tools: Sequence[JsonView] | None = None,
        add_generation_prompt: bool = True,
        template_args: JsonView | None = None,
    ) -> str:
        """Like `render_chat`, with marks in the special tokens that the messages spell out
        (text/control_tokens.py)."""
        if not self._templates:
            reason = "this model has no chat template; send a prompt, or set --chat-template"
            raise InvalidRequest("messages", reason)
        checked = checked_messages(messages, None if self.allows_special_tokens else ROLES)
        given: tuple[Sequence[Message], Sequence[JsonView] | None, JsonView]
        given = (checked, tools, template_args or {})
        if not self.allows_special_tokens:
            given = self._as_text(*given)
        template = self._template("tool_use" if tools else "default")
        text = template.render(given[0], given[1], add_generation_prompt, given[2])
        if ESCAPED_MARK in text and not has_text(given, ESCAPED_MARK):
            text = text.replace(ESCAPED_MARK, MARK)  # the template printed a list, or ASCII JSON
        return text

    def _as_text(
        self, messages: Sequence[Message], tools: Sequence[JsonView] | None, template_args: JsonView
    ) -> tuple[Sequence[Message], Sequence[JsonView] | None, JsonView]:
        """Return the messages of a request, with marks, so that nothing in them becomes a special
        token."""
        change = self._fenced
        try:
            changed = [
                {**_object(map_texts(message, change)), "role": message["role"]}
                for message in messages
            ]
            offered = (
                None if tools is None else [_object(map_texts(tool, change)) for tool in tools]
            )
            return changed, offered, _object(map_texts(template_args, change))
        except RecursionError:
            raise InvalidRequest("messages", "are nested too deeply") from None

    def mark(self, text: str) -> str:
        """A message's text, marked as in `chat_text`."""
        if self.allows_special_tokens:
            return text
        return self._control.mark(text) if self._parts.can_split else self._control.fence(text)

    def _normal(self, text: str) -> str:
        """Return a text as the tokenizer normalizes it before it looks for special tokens."""
        check_unicode("messages", text)
        assert self._backend.normalizer is not None
        normalized: str = self._backend.normalizer.normalize_str(text)
        return normalized

    def is_control(self, token_id: int) -> bool:
        """Whether a token is a control token, not text."""
        return token_id in self._control_ids

    def token_id(self, token: str) -> int | None:
        """The id of a token by its name; None: the vocabulary has none."""
        return self._backend.token_to_id(token)

    def special_id(self, token: str) -> int | None:
        """The id of a special token by its name; None if the vocabulary has no such special
        token."""
        token_id = self.token_id(token)
        return token_id if token_id in self.special_ids else None

    @property
    def chat_template(self) -> str | None:
        """The source of the template for chats."""
        return self._template("default").source if self._templates else None

    @property
    def tool_template(self) -> str | None:
        """The source of the template for chats with tools; None if the template does not support
        tools."""
        template = self._template("tool_use") if self._templates else None
        return template.source if template is not None and template.reads_tools else None

    def _template(self, name: str) -> ChatTemplate:
        """Return the template of this name, or else the default one, or else the first."""
        templates = self._templates
        return templates.get(name) or templates.get("default") or next(iter(templates.values()))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids; ids that are not in the vocabulary are skipped."""
        if len(ids) < MANY_IDS:
            return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        # `decode` would hold the interpreter lock all the time: 0.3 s for a million ids
        return self._backend.decode_batch([list(ids)], skip_special_tokens)[0]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for; for a special token, its name. Used for logprobs."""
        return self._alphabet.token_bytes(token_id)

    def incremental_decoder(self, context: Sequence[int]) -> IncrementalDecoder:
        """Make an incremental decoder for ids that follow `context`."""
        if self._alphabet.is_byte_level:
            return ByteDecoder(self._alphabet.token_bytes)
        return WindowDecoder(self.decode_all, self._alphabet.is_byte, context)

    @cached_property
    def can_continue(self) -> bool:
        """Whether a text may be encoded alone, and its ids appended to those of the text before."""
        return self._alphabet.is_byte_level and self.decode_all(self.encode_plain("x")) == "x"

    def to_json(self) -> str:
        """The tokenizer in the format of tokenizer.json, for libraries that read it."""
        return self._backend.to_str()

    def decode_all(self, ids: Sequence[int]) -> str:
        """Return the text of ids, including special tokens."""
        return self.decode(ids, skip_special_tokens=False)


def _object(value: object) -> JsonView:
    assert isinstance(value, dict)
    return value


def check_unicode(field: str, text: str) -> None:
    """Raise InvalidRequest if a text cannot be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(field, "is not valid Unicode (lone surrogates)") from error


def _special_tokens(settings: JsonView, special_map: JsonView) -> dict[str, str]:
    """Return role ("eos_token") -> text. In the file a value is a string, or an object with a
    `content`."""
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
    """Return the end tokens of generation_config (or else config), one id or a list, together with
    the tokenizer's own end token. Fine-tuned chat models often set only one of the two.
    """
    ids: set[int] = set()
    for name in (GENERATION_FILE, "config.json"):
        value = read_json(folder / name).get("eos_token_id")
        listed = value if isinstance(value, list) else [value]
        ids.update(token_id for token_id in listed if isinstance(token_id, int))
        if ids:
            break
    if (eos := special.get("eos_token")) is not None:
        token_id = backend.token_to_id(eos)
        ids.update(() if token_id is None else (token_id,))
    return frozenset(ids)


def _advice(folder: Path) -> dict[str, object]:
    """Return the fields of SamplingParams that generation_config.json sets."""
    advice = read_json(folder / GENERATION_FILE)
    return {name: advice[name] for name in ADVISED if advice.get(name) is not None}


def _own_template(path: Path) -> dict[str, str]:
    """Read a file with one template for all chats."""
    try:
        return {"default": path.read_text(encoding="utf-8")}
    except (OSError, UnicodeDecodeError) as error:
        raise ModelNotFound(f"the chat template {path} cannot be read: {error}") from None


def _templates(folder: Path, settings: JsonView) -> dict[str, str]:
    """Chat templates by name: "default", "tool_use".

    The first of chat_template.jinja, tokenizer_config.json and chat_template.json (written by
    multimodal processors) that has a template, and additional_chat_templates/NAME.jinja.
    """
    path = folder / "chat_template.jinja"
    if path.is_file():
        found = _own_template(path)
    else:
        found = _listed_templates(folder / SETTINGS_FILE, settings)
    if not found:
        path = folder / "chat_template.json"
        found = _listed_templates(path, read_json(path))
    for path in sorted(folder.glob("additional_chat_templates/*.jinja")):
        found[path.stem] = _own_template(path)["default"]
    return found


def _listed_templates(path: Path, settings: JsonView) -> dict[str, str]:
    """The templates in `chat_template` of the file at `path`: one text, or several by name, as a
    list or as an object."""
    value = settings.get("chat_template")
    if isinstance(value, dict):
        value = [{"name": name, "template": template} for name, template in value.items()]
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if not isinstance(value, list):
        raise _bad_template(path, "chat_template", "must be a text or a list of named templates")
    found = {}
    for place, entry in enumerate(value):
        named = entry if isinstance(entry, dict) else {}
        name, template = named.get("name"), named.get("template")
        if not isinstance(name, str) or not isinstance(template, str):
            reason = "must be an object with `name` and `template`, both texts"
            raise _bad_template(path, f"chat_template[{place}]", reason)
        found[name] = template
    return found


def _bad_template(path: Path, field: str, reason: str) -> ModelNotFound:
    return ModelNotFound(f"{path}: {field} {reason}. Use another template with --chat-template")
