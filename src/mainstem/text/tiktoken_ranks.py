"""A file of tiktoken -> a tokenizer of the `tokenizers` library.

Each line has a token in base64 and its rank, which is its id. How text is split into words before
merging is not in the file: it is known for the encodings below, which their sizes tell apart.
"""

import base64
import binascii

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from mainstem.core.errors import ModelNotFound
from mainstem.text.incremental import byte_level_characters

_ENDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
)
PATTERNS = {  # number of ranks -> how text is split
    100_256: rf"{_ENDS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",  # cl100k_base
    128_000: rf"{_ENDS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",  # Llama 3
    151_643: rf"{_ENDS}|{_WORDS}|\p{{N}}|{_REST}",  # Qwen
    199_998: (  # o200k_base
        rf"{_CASED}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}


def is_tiktoken(data: bytes) -> bool:
    """Whether the first line is a token in base64 and a rank."""
    words = data.partition(b"\n")[0].split()
    try:
        return (
            len(words) == 2 and words[1].isdigit() and bool(base64.b64decode(words[0], None, True))
        )
    except binascii.Error:
        return False


def tiktoken_tokenizer(data: bytes, patterns: dict[int, str] = PATTERNS) -> Tokenizer:
    """Return a tokenizer with the same ids. Raises ModelNotFound if the file is damaged, or its
    encoding is not known."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ModelNotFound(f"line {number} is not a token in base64 and a rank") from None
    pattern = patterns.get(len(ranks))
    if pattern is None:
        known = ", ".join(f"{size:,}" for size in patterns)
        raise ModelNotFound(
            f"tiktoken's encoding with {len(ranks):,} ranks is not known, only those with {known}"
        )
    names = {byte: name for name, byte in byte_level_characters().items()}
    spelled = {token: "".join(names[byte] for byte in token) for token in ranks}
    tokenizer = Tokenizer(
        models.BPE(
            vocab={spelled[token]: rank for token, rank in ranks.items()},
            merges=_merges(ranks, spelled),
            ignore_merges=True,  # a word that is a token stays whole
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merges(ranks: dict[bytes, int], spelled: dict[bytes, str]) -> list[tuple[str, str]]:
    """All pairs of tokens that form a token, in the order of what they form."""
    found = [
        (rank, ranks[token[:cut]], ranks[token[cut:]], token, cut)
        for token, rank in ranks.items()
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    found.sort()
    return [(spelled[token[:cut]], spelled[token[cut:]]) for *_, token, cut in found]
