"""The model of a server, as its clients know it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

from mainstem import __version__
from mainstem.text.parsers.formats import AnswerFormats, find_formats
from mainstem.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the model is called; the first name is the one replies use by default.

    `sampling` has fields of SamplingParams for requests that leave them open.
    """

    names: tuple[str, ...]
    created: int
    sampling: Mapping[str, object] = field(default_factory=dict)
    settings: str = ""  # everything else an answer may depend on
    formats: AnswerFormats | None = None  # None: as its chat template says

    def formats_of(self, tokenizer: Tokenizer) -> AnswerFormats:
        """How the model writes tool calls and reasoning."""
        return find_formats(tokenizer) if self.formats is None else self.formats

    @property
    def fingerprint(self) -> str:
        """`system_fingerprint` of replies: another one means that answers may differ."""
        identity = repr((__version__, self.names[0], sorted(self.sampling.items()), self.settings))
        return f"fp_{blake2b(identity.encode(), digest_size=6).hexdigest()}"
