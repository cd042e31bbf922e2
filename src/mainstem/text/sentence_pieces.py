"""SentencePiece's tokenizer.model -> a tokenizer of the `tokenizers` library.

The file is a protobuf message: pieces with scores, how they were trained, and how text is
normalized. BPE and unigram models are read; others are refused. A map of characters is applied to
whole graphemes, as in transformers: an accent after a character that it maps is lost.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from mainstem.core.errors import ModelNotFound
from mainstem.core.json import JsonView

SPACE = "\u2581"  # stands for a space in pieces
_UNIGRAM, _BPE = 1, 2


class PieceKind(IntEnum):
    """What a piece stands for, by its number in the file."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(slots=True)
class SentencePieces:
    """The fields of a file that decide which ids a text has; defaults are those of the format."""

    pieces: list[tuple[str, float, PieceKind]] = field(default_factory=list)
    model_type: int = _UNIGRAM
    has_byte_fallback: bool = False
    is_suffix_space: bool = False
    charsmap: bytes = b""  # normalizes characters
    adds_space: bool = True  # before a text
    removes_spaces: bool = True  # more than one, and those around a text
    escapes_spaces: bool = True

    @classmethod
    def read(cls, data: bytes) -> "SentencePieces":
        """Raises ModelNotFound if this is no such file."""
        made = cls()
        try:
            for number, value in _fields(data):
                if number == 1 and isinstance(value, bytes):
                    made.pieces.append(_piece(value))
                elif number == 2 and isinstance(value, bytes):
                    made._take_training(dict(_fields(value)))
                elif number == 3 and isinstance(value, bytes):
                    made._take_normalizing(dict(_fields(value)))
        except (IndexError, ValueError, struct.error) as error:
            raise ModelNotFound(
                f"it is neither SentencePiece's format nor tiktoken's: {error}"
            ) from None
        if not made.pieces:
            raise ModelNotFound("it has no pieces")
        return made

    def _take_training(self, found: "dict[int, int | bytes]") -> None:
        self.model_type = int(found.get(3, _UNIGRAM))
        self.is_suffix_space = bool(found.get(24, 0))
        self.has_byte_fallback = bool(found.get(35, 0))

    def _take_normalizing(self, found: "dict[int, int | bytes]") -> None:
        charsmap = found.get(2, b"")
        self.charsmap = charsmap if isinstance(charsmap, bytes) else b""
        self.adds_space = bool(found.get(3, 1))
        self.removes_spaces = bool(found.get(4, 1))
        self.escapes_spaces = bool(found.get(5, 1))

    @property
    def unknown_id(self) -> int:
        for index, (_, _, kind) in enumerate(self.pieces):
            if kind is PieceKind.UNKNOWN:
                return index
        raise ModelNotFound("it has no piece for unknown characters")


def _piece(data: bytes) -> tuple[str, float, PieceKind]:
    found = dict(_fields(data))
    text, score = found.get(1, b""), found.get(2, b"\0\0\0\0")
    if not isinstance(text, bytes) or not isinstance(score, bytes):
        raise ValueError("a piece has no text or score")
    kind = PieceKind(int(found.get(3, PieceKind.NORMAL)))
    return text.decode(), struct.unpack("<f", score)[0], kind


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a protobuf message: number, and a number or bytes."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        kind = key & 7
        if kind == 0:
            value, place = _varint(data, place)
            yield key >> 3, value
            continue
        if kind == 2:
            size, place = _varint(data, place)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"wire type {kind}")
        if place + size > len(data):
            raise ValueError("it ends too early")
        yield key >> 3, data[place : place + size]
        place += size


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return value, place


# --- the tokenizer ------------------------------------------------------------------------------


def sentence_piece_tokenizer(found: SentencePieces, settings: JsonView) -> Tokenizer:
    """Return a tokenizer with the same ids. `settings` are those of tokenizer_config.json:
    `add_prefix_space` overrides the file, and with `legacy: false` a space is put only before the
    whole text, not after special tokens, too."""
    _refuse_others(found)
    tokenizer = Tokenizer(_model(found))
    given = settings.get("add_prefix_space")
    adds_space = found.adds_space if given is None else bool(given)
    is_legacy = bool(settings.get("legacy", True))
    normalizing = list[normalizers.Normalizer]()
    if found.charsmap:
        normalizing.append(normalizers.Precompiled(found.charsmap))
    if found.removes_spaces:
        normalizing += [
            normalizers.Replace(Regex(r"\A +| +\z"), ""),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    if adds_space and is_legacy:
        normalizing.append(normalizers.Prepend(SPACE))
    if is_legacy or not adds_space:
        normalizing.append(normalizers.Replace(" ", SPACE))
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "first", split=False)
    if found.removes_spaces and is_legacy:  # also those that a text writes as SPACE
        normalizing.append(normalizers.Replace(Regex(rf"{SPACE}+\z"), ""))
    if normalizing:
        tokenizer.normalizer = normalizers.Sequence(normalizing)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if adds_space:
        steps.append(decoders.Strip(" ", left=1))
    tokenizer.decoder = decoders.Sequence(steps)
    by_kind = {
        wanted: [text for text, _, kind in found.pieces if kind is wanted] for wanted in PieceKind
    }
    control = [*by_kind[PieceKind.UNKNOWN], *by_kind[PieceKind.CONTROL]]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in control])
    own = [AddedToken(text, normalized=True) for text in by_kind[PieceKind.USER_DEFINED]]
    tokenizer.add_tokens(own)
    return tokenizer


def _refuse_others(found: SentencePieces) -> None:
    if found.model_type not in (_UNIGRAM, _BPE):
        raise ModelNotFound("only BPE and unigram models of SentencePiece are supported")
    if found.is_suffix_space or not found.escapes_spaces:
        raise ModelNotFound("its way to write spaces is not supported")
    for text, _, kind in found.pieces:
        if kind is PieceKind.UNUSED:
            raise ModelNotFound("it has unused pieces, which are not supported")
        is_bare = not text.startswith(SPACE) or not text.strip(SPACE)
        if kind is PieceKind.USER_DEFINED and found.adds_space and not is_bare:
            raise ModelNotFound(f"its own piece {text!r} begins with a space: not supported")


def _model(found: SentencePieces) -> models.Model:
    unknown = found.unknown_id
    if found.model_type == _UNIGRAM:
        scored = [(text, score) for text, score, _ in found.pieces]
        return models.Unigram(scored, unknown, found.has_byte_fallback)
    numbered = enumerate(found.pieces)
    normal = {text: index for index, (text, _, kind) in numbered if kind is PieceKind.NORMAL}
    return models.BPE(
        vocab={text: index for index, (text, _, _) in enumerate(found.pieces)},
        merges=merges_by_score(normal, [score for _, score, _ in found.pieces]),
        unk_token=found.pieces[unknown][0],
        fuse_unk=True,
        byte_fallback=found.has_byte_fallback,
    )


def merges_by_score(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Return all pairs of pieces that form a piece; the pair with the best score comes first."""
    found = [
        (-scores[index], index, token[:cut], token[cut:])
        for token, index in vocab.items()
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    return [(left, right) for _, _, left, right in sorted(found)]
