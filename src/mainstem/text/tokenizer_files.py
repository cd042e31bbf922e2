"""Finds a folder's tokenizer in any format that is read, and loads it.

tokenizer.json     the library's own format, which wins
tokenizer.model    SentencePiece's, or tiktoken's under the same name
*.tiktoken, tiktoken.model
"""

import json
from collections.abc import Mapping
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, processors

from mainstem.core.errors import ModelNotFound
from mainstem.core.json import JsonView
from mainstem.text.sentence_pieces import SentencePieces, sentence_piece_tokenizer
from mainstem.text.tiktoken_ranks import is_tiktoken, tiktoken_tokenizer

TOKENIZER_FILE = "tokenizer.json"
FLAGS = ("special", "lstrip", "rstrip", "single_word", "normalized")  # of an added token
OTHER_FILES = ("tokenizer.model", "tiktoken.model", "*.tiktoken")
CONVERT = (
    'Convert it where `transformers` is installed: python -c "from transformers import '
    "AutoTokenizer as A; A.from_pretrained('DIR').save_pretrained('DIR')\" writes tokenizer.json"
)


def has_tokenizer(folder: Path) -> bool:
    return (folder / TOKENIZER_FILE).is_file() or _other_file(folder) is not None


def load_backend(folder: Path, settings: JsonView, special: Mapping[str, str]) -> Tokenizer:
    """Load a folder's tokenizer. `settings` are those of tokenizer_config.json, `special` the
    special tokens by role. Raises ModelNotFound, which says what to do."""
    path = folder / TOKENIZER_FILE
    if path.is_file():
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # the Rust side raises plain Exception
            raise ModelNotFound(f"{path} cannot be read: {error}") from error
    other = _other_file(folder)
    if other is None:
        listed = f"neither {TOKENIZER_FILE} nor {', '.join(OTHER_FILES)}"
        raise ModelNotFound(f"{folder} has no tokenizer that is read: {listed}. {CONVERT}")
    try:
        return _converted(other, settings, special)
    except ModelNotFound as error:
        raise ModelNotFound(f"{other} cannot be converted: {error}. {CONVERT}") from None


def _other_file(folder: Path) -> Path | None:
    return next((path for name in OTHER_FILES for path in sorted(folder.glob(name))), None)


def _converted(path: Path, settings: JsonView, special: Mapping[str, str]) -> Tokenizer:
    data = path.read_bytes()
    is_ranks = is_tiktoken(data)
    if is_ranks:
        made = tiktoken_tokenizer(data)
    else:
        made = sentence_piece_tokenizer(SentencePieces.read(data), settings)
    added = _added_tokens(path.parent, settings)
    if is_ranks and not added:
        raise ModelNotFound("its special tokens are not in tokenizer_config.json")
    _add(made, added)
    # Hugging Face's classes put the begin token before a text, for SentencePiece only
    begin = special.get("bos_token") if settings.get("add_bos_token", not is_ranks) else None
    end = special.get("eos_token") if settings.get("add_eos_token", False) else None
    around = [(token, made.token_to_id(token)) for token in (begin, end) if token is not None]
    if around:
        before, after = (f"{token}:0" if token else "" for token in (begin, end))
        made.post_processor = processors.TemplateProcessing(
            single=f"{before} $A:0 {after}".strip(), special_tokens=around
        )
    return made


def _added_tokens(folder: Path, settings: JsonView) -> dict[int, AddedToken]:
    """The tokens besides those of the tokenizer's file, by id, in the order of their ids."""
    found: dict[int, AddedToken] = {}
    for text, token_id in read_json(folder / "added_tokens.json").items():
        if isinstance(token_id, int):
            found[token_id] = AddedToken(text, normalized=False, special=True)
    listed = settings.get("added_tokens_decoder")
    for name, row in listed.items() if isinstance(listed, Mapping) else ():
        flags = {flag: bool(row.get(flag, False)) for flag in FLAGS}
        found[int(name)] = AddedToken(row["content"], **flags)
    return dict(sorted(found.items()))


def _add(made: Tokenizer, added: Mapping[int, AddedToken]) -> None:
    for token_id, token in added.items():
        made.add_special_tokens([token]) if token.special else made.add_tokens([token])
        if (got := made.token_to_id(token.content)) != token_id:
            raise ModelNotFound(
                f"tokenizer_config.json gives {token.content!r} the id {token_id}, and after "
                f"conversion it has {got}"
            )


def read_json(path: Path) -> dict[str, object]:
    """Read a JSON object; an empty one if there is no file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelNotFound(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelNotFound(f"{path} does not hold a JSON object")
    return value
