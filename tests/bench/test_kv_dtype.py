"""Perplexity with K and V in fp8: which tokens are scored, and that full pages are rounded."""

import gzip
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from mainstem.core.errors import ConfigError
from mainstem.models.cpu.decoder import load_decoder
from mainstem.models.families import read_spec
from mainstem_bench.kv_dtype import main, read_windows
from mainstem_bench.perplexity import perplexity
from tests.models.checkpoints import VOCAB, make_checkpoint

pytestmark = pytest.mark.torch


def a_tokenizer(has_first_token: bool) -> Tokenizer:
    """A word is its number; with `has_first_token`, texts begin with token 1."""
    tokenizer = Tokenizer(models.WordLevel({str(n): n for n in range(VOCAB)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if has_first_token:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="1 $A", special_tokens=[("1", 1)]
        )
    return tokenizer


def a_text(file: Path, num_tokens: int) -> list[int]:
    ids: list[int] = np.random.default_rng(0).integers(3, VOCAB, num_tokens).tolist()
    with gzip.open(file, "wt") as stream:
        stream.write(" ".join(map(str, ids)))
    return ids


def test_windows_begin_with_the_token_that_begins_a_text(tmp_path: Path) -> None:
    ids = a_text(tmp_path / "text.gz", 80)
    for has_first_token, expected in (
        (False, ids[20:60]),
        (True, [1, *ids[20:39], 1, *ids[39:58]]),
    ):
        tokenizer = a_tokenizer(has_first_token)
        assert read_windows(tokenizer, tmp_path / "text.gz", 20, 2).tolist() == expected
        with pytest.raises(ConfigError, match="4 windows"):
            read_windows(tokenizer, tmp_path / "text.gz", 20, 4)


def test_full_pages_are_rounded_and_all_else_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A window of one page reads no full page; a longer one does."""
    make_checkpoint("llama", tmp_path)
    a_tokenizer(has_first_token=False).save(str(tmp_path / "tokenizer.json"))
    ids = a_text(tmp_path / "text.gz", 400)
    decoder = load_decoder(tmp_path, read_spec(tmp_path), torch.float32)
    for window, is_rounded in ((16, False), (100, True)):
        flags = ["--window", str(window), "--windows", "2", "--json"]
        assert main(["--model", str(tmp_path), "--text", str(tmp_path / "text.gz"), *flags]) == 0
        line = json.loads(capsys.readouterr().out)
        scored = np.array(ids[100 : 100 + 2 * window], np.int32)
        expected = perplexity(decoder, scored, window, window)
        assert line["scored_tokens"] == 2 * (window - 1)
        assert math.isclose(line["perplexity"], expected, abs_tol=1e-4)
        assert (line["change"] != 0) == is_rounded
        assert (line["standard_error"] > 0) == is_rounded
        ratio = line["perplexity_fp8"] / line["perplexity"]
        assert math.isclose(ratio, 1 + line["change"], abs_tol=1e-4)
