"""The tokenizer in a GGUF file -> tokenizer.json and tokenizer_config.json."""

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from mainstem.checkpoints.gguf_fields import Fields
from mainstem.core.errors import ModelNotFound
from mainstem.text.sentence_pieces import SPACE, merges_by_score

# llama.cpp's token types; 1 is an ordinary token
_CONTROL, _USER_DEFINED = 3, 4
_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def tokenizer_files(fields: Fields) -> tuple[str, dict[str, object]]:
    """The text of tokenizer.json, and the fields of tokenizer_config.json."""
    kind = (fields.text("tokenizer.ggml.model"), fields.text("tokenizer.ggml.pre"))
    tokens = [str(token) for token in fields.items("tokenizer.ggml.tokens")]
    if kind == ("gpt2", "smollm"):
        # split digits one by one, then words as GPT-2 does
        tokenizer = _byte_level(fields, tokens)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    elif kind == ("gpt2", "qwen2"):
        tokenizer = _byte_level(fields, tokens)
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_QWEN2_WORDS), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    elif kind == ("llama", "default"):
        tokenizer = _sentence_pieces(fields, tokens)
    else:
        raise ModelNotFound(f"the tokenizer {kind} of the GGUF file is not supported")
    types = fields.items("tokenizer.ggml.token_type")
    by_type = {
        wanted: [token for token, found in zip(tokens, types, strict=True) if found == wanted]
        for wanted in (_CONTROL, _USER_DEFINED)
    }
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in by_type[_CONTROL]]
    )
    tokenizer.add_tokens(
        [AddedToken(token, normalized=True, special=False) for token in by_type[_USER_DEFINED]]
    )
    return tokenizer.to_str(), _settings(fields, tokens)


def _byte_level(fields: Fields, tokens: list[str]) -> Tokenizer:
    pairs = [str(merge).split(" ") for merge in fields.items("tokenizer.ggml.merges")]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[(left, right) for left, right in pairs]))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_pieces(fields: Fields, tokens: list[str]) -> Tokenizer:
    """Return SentencePiece's BPE, which has scores instead of merges. No space is put before the
    text."""
    if fields.text("tokenizer.ggml.add_space_prefix") != "False":
        raise ModelNotFound("the GGUF's tokenizer adds a space before texts: not supported yet")
    vocab = {token: index for index, token in enumerate(tokens)}
    scores = [float(str(score)) for score in fields.items("tokenizer.ggml.scores")]
    unknown = tokens[fields.whole("tokenizer.ggml.unknown_token_id")]
    model = models.BPE(
        vocab=vocab,
        merges=merges_by_score(vocab, scores),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    if fields.text("tokenizer.ggml.add_bos_token") == "True":
        bos_id = fields.whole("tokenizer.ggml.bos_token_id")
        bos = tokens[bos_id]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos}:0 $A:0",
            pair=f"{bos}:0 $A:0 {bos}:1 $B:1",
            special_tokens=[(bos, bos_id)],
        )
    return tokenizer


def _settings(fields: Fields, tokens: list[str]) -> dict[str, object]:
    architecture = fields.text("general.architecture")

    def named(role: str) -> str | None:
        field = f"tokenizer.ggml.{role}_token_id"
        return tokens[fields.whole(field)] if fields.has(field) else None

    settings: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # reads tokenizer.json unchanged
        "add_bos_token": fields.text("tokenizer.ggml.add_bos_token") == "True",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "bos_token": named("bos"),
        "eos_token": named("eos"),
        "unk_token": named("unknown"),
        "pad_token": named("padding"),
        "model_max_length": fields.whole(f"{architecture}.context_length"),
    }
    if fields.has("tokenizer.chat_template"):
        settings["chat_template"] = fields.text("tokenizer.chat_template")
    return settings
