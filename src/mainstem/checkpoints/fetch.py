"""Model settings -> folder and tokenizer. A model that cannot be loaded is refused before its
weights are fetched."""

from pathlib import Path

from mainstem.checkpoints.hub import resolve_model, tokenizer_folder
from mainstem.checkpoints.progress import Progress, unseen
from mainstem.core.config import ModelConfig
from mainstem.models.families import read_spec
from mainstem.text.tokenizer import Tokenizer


def fetch_model(model: ModelConfig, progress: Progress = unseen) -> tuple[Path, Tokenizer]:
    """The folder of a model, fetched first if necessary, and its tokenizer.

    Raises ModelNotFound or, only if weights had to be fetched, UnsupportedModel.
    """

    def preflight(folder: Path) -> None:
        _load_tokenizer(folder, model)
        read_spec(folder, model.ignore_config_fields or ())

    folder = resolve_model(model.model, progress, preflight=preflight)
    return folder, _load_tokenizer(folder, model)


def fetch_tokenizer(model: ModelConfig) -> Tokenizer:
    """The tokenizer of a model, without its weights."""
    return _load_tokenizer(tokenizer_folder(model.model), model)


def _load_tokenizer(folder: Path, model: ModelConfig) -> Tokenizer:
    return Tokenizer.load(folder, model.chat_template, model.allow_special_tokens)
