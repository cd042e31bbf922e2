"""SentencePiece's and tiktoken's files give the same ids as their own libraries.

tests/data/tokenizers has small vocabularies trained by SentencePiece 0.2.3, the byte pairs of a
small encoding, and, in expected.json, what SentencePiece and tiktoken 0.14 make of some texts.
"""

import json
import shutil
from pathlib import Path

import pytest

from mainstem.core.errors import ModelNotFound
from mainstem.text.sentence_pieces import PieceKind, SentencePieces, sentence_piece_tokenizer
from mainstem.text.tiktoken_ranks import PATTERNS, is_tiktoken, tiktoken_tokenizer
from mainstem.text.tokenizer import Tokenizer

DATA = Path(__file__).parents[1] / "data" / "tokenizers"
EXPECTED = json.loads((DATA / "expected.json").read_text(encoding="utf-8"))
SPECIAL = ("<s>", "</s>", "<unk>")  # these become their ids here, and text in SentencePiece


@pytest.mark.parametrize("name", sorted(EXPECTED["ids"]))
def test_ids_and_texts_are_those_of_sentencepiece(name: str) -> None:
    data = (DATA / f"{name}.model").read_bytes()
    tokenizer = sentence_piece_tokenizer(SentencePieces.read(data), {})
    num_checked = 0
    for text, ids, decoded in zip(
        EXPECTED["texts"], EXPECTED["ids"][name], EXPECTED["decoded"][name], strict=True
    ):
        if any(token in text for token in SPECIAL):
            continue
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids, repr(text)
        if 0 not in ids and "\u2581" not in text:
            assert tokenizer.decode(ids) == decoded
        num_checked += 1
    assert num_checked > 50


@pytest.mark.parametrize("size", PATTERNS)
def test_ids_are_those_of_tiktoken(size: int) -> None:
    data = (DATA / "small.tiktoken").read_bytes()
    assert is_tiktoken(data)
    tokenizer = tiktoken_tokenizer(data, {600: PATTERNS[size]})
    for text, ids in zip(EXPECTED["texts"], EXPECTED["ids_tiktoken"][str(size)], strict=True):
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids, repr(text)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(DATA / "bpe.model", tmp_path / "tokenizer.model")
    settings = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "added_tokens_decoder": {
            "2": {"content": "</s>", "special": True},
            "700": {"content": "<|im_start|>", "special": True},
            "701": {"content": "<note>", "special": False},
        },
        "chat_template": "{{ messages[0].content }}",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def change(folder: Path, **settings: object) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def test_a_folder_with_only_a_file_of_sentencepiece_is_loaded(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    plain = tokenizer.encode_plain("Hello, world!")
    assert plain == EXPECTED["ids"]["bpe"][0]
    assert tokenizer.encode("Hello, world!") == [1, *plain]
    assert tokenizer.encode_plain("<|im_start|>") == [700]
    assert tokenizer.encode_plain("<note>") == [701]
    assert tokenizer.special_ids >= {1, 2, 700}
    assert 701 not in tokenizer.special_ids
    assert tokenizer.eos_ids == {2}
    assert tokenizer.has_chat_template
    change(folder, add_bos_token=False, add_eos_token=True)
    assert Tokenizer.load(folder).encode("Hello, world!") == [*plain, 2]


def test_without_legacy_a_space_is_put_only_before_the_whole_text(folder: Path) -> None:
    old = Tokenizer.load(folder).encode_plain("<|im_start|>of")
    change(folder, legacy=False)
    new = Tokenizer.load(folder)
    assert new.encode_plain("Hello, world!") == EXPECTED["ids"]["bpe"][0]
    assert len(old) == 2
    assert new.encode_plain("<|im_start|>of")[0] == 700
    assert new.encode_plain("<|im_start|>of") != old


def test_added_tokens_with_other_ids_are_refused(folder: Path) -> None:
    change(folder, added_tokens_decoder={"900": {"content": "<late>"}})
    with pytest.raises(ModelNotFound, match="'<late>' the id 900, and after conversion it has 700"):
        Tokenizer.load(folder)


def test_a_folder_with_only_a_file_of_tiktoken_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(DATA / "small.tiktoken", folder / "tokenizer.model")
    with pytest.raises(ModelNotFound, match=r"600 ranks is not known.* Convert it where"):
        Tokenizer.load(folder)
    monkeypatch.setitem(PATTERNS, 600, PATTERNS[151_643])
    change(folder, added_tokens_decoder={"600": {"content": "<|end|>", "special": True}})
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("a<|end|>") == [97, 600]  # no begin token
    change(folder, added_tokens_decoder={})
    with pytest.raises(ModelNotFound, match="special tokens are not in tokenizer_config"):
        Tokenizer.load(folder)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "it has no pieces"),
        (b"\x0a\x05abc", "neither SentencePiece's format nor tiktoken's: it ends too early"),
        (b"version https://git-lfs.github.com/spec/v1", "neither SentencePiece's"),
        (b"AAAA 1\n!!!\n", "line 2 is not a token in base64 and a rank"),
        (b"\xff" * 40, "neither SentencePiece's"),
    ],
)
def test_a_damaged_file_is_refused(data: bytes, reason: str, folder: Path) -> None:
    (folder / "tokenizer.model").write_bytes(data)
    with pytest.raises(ModelNotFound, match=f"cannot be converted: .*{reason}.* Convert it where"):
        Tokenizer.load(folder)


@pytest.mark.parametrize("change_to", ["model_type", "is_suffix_space", "unused", "own"])
def test_models_that_would_give_other_ids_are_refused(change_to: str) -> None:
    found = SentencePieces.read((DATA / "bpe.model").read_bytes())
    if change_to == "model_type":
        found.model_type = 3
    elif change_to == "is_suffix_space":
        found.is_suffix_space = True
    else:
        kind = PieceKind.UNUSED if change_to == "unused" else PieceKind.USER_DEFINED
        found.pieces.append(("\u2581<tool>", 0.0, kind))
    with pytest.raises(ModelNotFound, match="supported"):
        sentence_piece_tokenizer(found, {})


def test_tokenizer_json_wins(folder: Path) -> None:
    made = sentence_piece_tokenizer(SentencePieces.read((DATA / "unigram.model").read_bytes()), {})
    made.save(str(folder / "tokenizer.json"))
    change(folder, added_tokens_decoder={})
    assert Tokenizer.load(folder).encode_plain("Hello, world!") == EXPECTED["ids"]["unigram"][0]
