"""Computes a lower bound for a text's number of tokens, to refuse prompts that are too long without
encoding them."""

from dataclasses import dataclass

import tokenizers

from mainstem.text.incremental import byte_level_characters
from mainstem.text.parts import steps

# canonical composition shortens a text by a factor of at most 3 (Hangul); 4 to be safe
COMPOSED = 4
SLICE_CHARS = 1 << 17  # characters processed in one call; other threads run in between
# steps of a pre-tokenizer that drop no characters
_KEEPS = ("ByteLevel", "Digits", "Metaspace", "Split", "UnicodeScripts")


@dataclass(frozen=True, slots=True)
class TokenBound:
    """The most bytes that one token can stand for."""

    max_bytes: int
    dropped: bytes = b""  # bytes that are not in the vocabulary and give no token at all

    def least_tokens(self, text: str) -> int:
        """Return a lower bound for the number of tokens in `text`."""
        num_bytes = 0
        for start in range(0, len(text), SLICE_CHARS):
            data = text[start : start + SLICE_CHARS].encode("utf-8", "replace")
            num_bytes += len(data.translate(None, self.dropped))
        return -(-num_bytes // self.max_bytes)

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> "TokenBound | None":
        """Return the bound of a tokenizer; None if a long text may have few tokens. Byte-level BPE
        and BPE with byte tokens have a bound, unless an earlier step can drop characters. Takes a
        moment, since it reads the whole vocabulary.
        """
        shrinks = _shrinks(backend)
        added = backend.get_added_tokens_decoder().values()
        splits = steps(backend.pre_tokenizer, "pretokenizers")
        if (
            shrinks is None
            or not isinstance(backend.model, tokenizers.models.BPE)
            # these tokens include any white space around them
            or any(token.lstrip or token.rstrip for token in added)
            or any(step["type"] not in _KEEPS for step in splits)
            or any(step.get("behavior") == "Removed" for step in splits)
        ):
            return None
        vocab = backend.get_vocab(with_added_tokens=False)
        dropped = b""
        if any(step["type"] == "ByteLevel" for step in splits):
            names = byte_level_characters()
            dropped = bytes(byte for name, byte in names.items() if name not in vocab)
            longest = max(map(len, vocab), default=1)  # in byte-level BPE, a character is a byte
        elif backend.model.byte_fallback and all(f"<0x{byte:02X}>" in vocab for byte in range(256)):
            longest = max(len(token.encode()) for token in vocab)
        else:
            return None
        longest_added = max((len(token.content.encode()) for token in added), default=0)
        return cls(shrinks * max(longest, longest_added), dropped)


def _shrinks(backend: tokenizers.Tokenizer) -> int | None:
    """Return the largest factor by which normalizing can shorten a text; None if it is unknown."""
    shrinks = 1
    for step in steps(backend.normalizer, "normalizers"):
        if step["type"] in ("NFC", "NFD"):
            shrinks = COMPOSED
        elif step["type"] == "Replace":
            pattern, content = step["pattern"], step["content"]
            assert isinstance(pattern, dict)
            assert isinstance(content, str)
            replaced = pattern.get("String")
            if replaced is None or len(replaced.encode()) > len(content.encode()):
                return None
        elif step["type"] != "Prepend":
            return None
    return shrinks
