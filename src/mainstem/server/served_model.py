"""The model of a server, as its clients know it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

from mainstem.core.version import __version__
from mainstem.text.parsers.formats import AnswerFormats, find_formats
from mainstem.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model's names; replies use the first one by default. `sampling` has defaults for fields
    of SamplingParams that a request leaves out.
    """

    names: tuple[str, ...]
    created: int
    sampling: Mapping[str, object] = field(default_factory=dict)
    settings: str = ""  # all other settings that answers may depend on
    formats: AnswerFormats | None = None  # None: found in the chat template

    def formats_of(self, tokenizer: Tokenizer) -> AnswerFormats:
        """How the model writes tool calls and reasoning."""
        return find_formats(tokenizer) if self.formats is None else self.formats

    @property
    def fingerprint(self) -> str:
        """`system_fingerprint` of replies: if it changes, answers may change."""
        identity = repr((__version__, self.names[0], sorted(self.sampling.items()), self.settings))
        return f"fp_{blake2b(identity.encode(), digest_size=6).hexdigest()}"
