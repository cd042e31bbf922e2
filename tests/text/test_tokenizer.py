"""Tokenizer, chat template, incremental detokenisation and stop strings."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, processors

from mainstem.core.errors import InvalidRequest, ModelNotFound
from mainstem.core.request import SamplingParams
from mainstem.text.answer_stream import Detokenizer, TextStream
from mainstem.text.chat_template import Message
from mainstem.text.stop_strings import StopChecker
from mainstem.text.tokenizer import Tokenizer
from tests.fake_engines import a_tokenizer
from tests.work import instructions

DATA = Path(__file__).parents[1] / "data"
TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two spaces\n\n\tand a tab \n",
    "In 2024 there were 1234567 cases, 3.14159 on average (page 12:34).",
    "def f(x):\n    return {'a': [1, 22, 333]}\n",
    "Die Straße führt über die Brücke; où êtes-vous? ¿Qué pasó?",
    "Привет, как дела? Ελλάδα. שלום עולם. مرحبا بالعالم ٣٤٥",
    "今天天气很好。今日はいい天気ですね。오늘 날씨가 좋네요.",
    "नमस्ते दुनिया, สวัสดีชาวโลก",
    "🙂🚀 family: 👨‍👩‍👧‍👦 flag: 🇫🇷 skin: 👍🏽 keycap: 1️⃣",
    "e\u0301 vs \u00e9, zero\u200bwidth, nbsp\u00a0here, \ufffd replacement",
    "<|im_start|>user\nspecial<|im_end|>\n<|endoftext|>",
]
CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "What is 12 + 30?"}],
    [
        {"role": "system", "content": "Answer in French."},
        {"role": "user", "content": "Bonjour 🙂"},
        {"role": "assistant", "content": "Salut !"},
        {"role": "user", "content": "Et 42 ?"},
    ],
]


@pytest.fixture(scope="module")
def tokenizer(smollm2_folder: Path) -> Tokenizer:
    return Tokenizer.load(smollm2_folder)


@pytest.fixture(scope="module")
def hugging_face(smollm2_folder: Path) -> transformers.PreTrainedTokenizerBase:
    return transformers.AutoTokenizer.from_pretrained(smollm2_folder)


def sentencepiece_like(decoder: decoders.Decoder) -> Tokenizer:
    """A Llama-2 style vocabulary: words with a leading mark, and 256 byte tokens."""
    words = [
        "<unk>",
        "<s>",
        "</s>",
        "\u2581",
        "\u2581\u2581",
        "\u2581the",
        "\u2581cat",
        "s",
        ".",
        "a",
    ]
    vocab = {word: index for index, word in enumerate(words)}
    vocab |= {f"<0x{byte:02X}>": len(words) + byte for byte in range(256)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoder
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(backend)


LLAMA = sentencepiece_like(
    decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
)
METASPACE = sentencepiece_like(decoders.Metaspace())


def joined(tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool = True) -> str:
    stream = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    return "".join([*map(stream.push, ids), stream.finish()])


# --- tokenizer -----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
def test_encode_and_decode_equal_hugging_face(
    tokenizer: Tokenizer, hugging_face: transformers.PreTrainedTokenizerBase, text: str
) -> None:
    ids = hugging_face(text)["input_ids"]
    assert tokenizer.encode(text) == tokenizer.encode_plain(text) == ids
    assert tokenizer.encode_batch([text, text]) == [ids, ids]
    for skip in (True, False):
        expected = hugging_face.decode(ids, skip_special_tokens=skip)
        assert tokenizer.decode(ids, skip_special_tokens=skip) == expected
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_every_digit_is_a_separate_token(tokenizer: Tokenizer) -> None:
    assert [tokenizer.decode([token_id]) for token_id in tokenizer.encode("2048")] == list("2048")


def test_the_embedded_tokenizer_has_the_expected_ids_and_template(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49152
    assert tokenizer.eos_ids == {2}
    assert tokenizer.special_ids == set(range(17))
    assert tokenizer.special_tokens["bos_token"] == "<|im_start|>"
    assert tokenizer.has_chat_template


def test_token_bytes_join_to_the_text(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))).decode() == text


def test_sentencepiece_tokens_have_the_right_bytes() -> None:
    assert LLAMA.token_bytes(5) == b" the"
    assert LLAMA.token_bytes(10 + 0xE2) == b"\xe2"


def test_lone_surrogates_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="Unicode"):
        tokenizer.encode("a\ud800b")
    with pytest.raises(InvalidRequest, match=r"messages: .*Unicode"):
        tokenizer.encode_chat([{"role": "user", "content": "\udfff"}])


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that is read at once."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "tokenizer.json").write_text(a_tokenizer().to_json())
    return folder


def write_folder(folder: Path, source: Path, **files: object) -> Path:
    """A copy of a folder's tokenizer with other settings."""
    shutil.copy(source / "tokenizer.json", folder)
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config": {"eos_token_id": [0, 7]}, "config": {"eos_token_id": 5}}, {0, 7}),
        ({"generation_config": {"eos_token_id": 4}}, {4}),
        ({"generation_config": {}, "config": {"eos_token_id": 5}}, {5}),
        ({"config": {}, "tokenizer_config": {"eos_token": "<|im_end|>"}}, {2}),
        ({"config": {}, "tokenizer_config": {"eos_token": {"content": "<|im_end|>"}}}, {2}),
        ({"config": {}, "special_tokens_map": {"eos_token": "<|im_start|>"}}, {1}),
        ({"config": {"eos_token_id": 0}, "tokenizer_config": {"eos_token": "<|im_end|>"}}, {0, 2}),
        ({"config": {"eos_token_id": None}}, set()),
    ],
)
def test_eos_ids_are_found_wherever_they_are_named(
    tmp_path: Path, smollm2_folder: Path, files: dict[str, object], expected: set[int]
) -> None:
    folder = write_folder(tmp_path, smollm2_folder, **files)
    assert Tokenizer.load(folder).eos_ids == expected


def test_another_template_replaces_the_models_own(tmp_path: Path, smollm2_folder: Path) -> None:
    path = tmp_path / "loud.jinja"
    path.write_text("{% for m in messages %}{{ m['content'] | upper }}!{% endfor %}é")
    tokenizer = Tokenizer.load(smollm2_folder, str(path))
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "HI!é"
    path.write_bytes(b"\xff")
    with pytest.raises(ModelNotFound, match=r"chat template .*loud\.jinja cannot be read"):
        Tokenizer.load(smollm2_folder, str(path))
    with pytest.raises(ModelNotFound, match="No such file"):
        Tokenizer.load(smollm2_folder, str(tmp_path / "none.jinja"))


def test_generation_config_is_read(tmp_path: Path, smollm2_folder: Path) -> None:
    advice = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": None, "do_sample": True}
    folder = write_folder(tmp_path, smollm2_folder, generation_config=advice)
    expected = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    assert Tokenizer.load(folder).sampling_defaults == expected


@pytest.mark.parametrize(
    ("single", "flags"),
    [
        ("$A", {"add_bos_token": True}),
        ("<|im_start|> $A", {"add_bos_token": False}),
        ("<|im_start|> $A <|im_end|>", {}),
    ],
)
def test_begin_and_end_tokens_are_added_as_hugging_face_does(
    tmp_path: Path, smollm2_folder: Path, single: str, flags: dict[str, bool]
) -> None:
    named = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **flags, **named}
    folder = write_folder(tmp_path, smollm2_folder, tokenizer_config=config)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = [("<|im_start|>", 1), ("<|im_end|>", 2)]
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=tokens)
    backend.save(str(folder / "tokenizer.json"))
    expected = transformers.AutoTokenizer.from_pretrained(folder)("Hello 12")["input_ids"]
    ours = Tokenizer.load(folder)
    assert ours.encode("Hello 12") == expected
    assert len(expected) == len(ours.encode_plain("Hello 12")) + single.count("|>")


def test_truncation_and_padding_of_training_are_ignored(
    tmp_path: Path, smollm2_folder: Path
) -> None:
    backend = tokenizers.Tokenizer.from_file(str(smollm2_folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(tmp_path / "tokenizer.json"))
    text = "a text of more than four tokens"
    assert Tokenizer.load(tmp_path).encode(text) == Tokenizer.load(smollm2_folder).encode(text)


def test_a_folder_without_a_readable_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no tokenizer that is read: neither tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelNotFound, match="cannot be read"):
        Tokenizer.load(tmp_path)


def test_real_prompts_tokenize_as_in_hugging_face(
    tokenizer: Tokenizer, hugging_face: transformers.PreTrainedTokenizerBase
) -> None:
    rows = [json.loads(line) for line in (DATA / "prompts50.jsonl").read_text().splitlines()]
    assert len({row["id"] for row in rows}) == 50
    for row in rows:
        if "prompt" in row:
            ids, expected = tokenizer.encode(row["prompt"]), hugging_face.encode(row["prompt"])
        else:
            ids = tokenizer.encode_chat(row["messages"])
            expected = hugging_face.apply_chat_template(
                row["messages"], add_generation_prompt=True, return_dict=False
            )
        assert ids == expected
        assert len(ids) == row["num_tokens"]
        assert joined(tokenizer, ids, skip_special_tokens=False) == hugging_face.decode(ids)


def test_long_text_is_unchanged_by_encoding_and_decoding(
    tokenizer: Tokenizer, hugging_face: transformers.PreTrainedTokenizerBase
) -> None:
    text = (DATA / "wikitext2_head.txt").read_text()
    ids = tokenizer.encode(text)
    assert ids == hugging_face.encode(text)
    assert joined(tokenizer, ids) == text


# --- chat template -------------------------------------------------------------------------------


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chat_equals_hugging_face(
    tokenizer: Tokenizer,
    hugging_face: transformers.PreTrainedTokenizerBase,
    chat: list[dict[str, str]],
    add_generation_prompt: bool,
) -> None:
    text = hugging_face.apply_chat_template(
        chat, add_generation_prompt=add_generation_prompt, tokenize=False
    )
    assert tokenizer.render_chat(chat, add_generation_prompt=add_generation_prompt) == text
    ids = hugging_face.apply_chat_template(
        chat, add_generation_prompt=add_generation_prompt, return_dict=False
    )
    assert tokenizer.encode_chat(chat, add_generation_prompt=add_generation_prompt) == ids


TEMPLATES = {
    "tools as json": "{% for t in tools %}{{ t | tojson(indent=2) }}{% endfor %}"
    "{% for m in messages %}{{ m.content | tojson }}{% endfor %}",
    "whitespace": "{% for m in messages %}\n    {% if m.role == 'user' %}\nU: {{ m.content }}\n"
    "    {% endif %}\n{% endfor %}\n",
    "loop controls": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
    "{{ m['content'] }}{% endfor %}",
    "special tokens": "{{ bos_token }}{{ messages[-1].content }}{{ eos_token }}{{ sep_token }}",
    "generation block": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% endfor %}{{ ns.n }}",
    "year": "{{ strftime_now('%Y') }}",
    "extra variable": "{{ enable_thinking is defined and enable_thinking }}{{ documents }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_in_hugging_face(
    hugging_face: transformers.PreTrainedTokenizerBase, name: str
) -> None:
    function = {"name": "f<&>'", "description": "dé"}
    tools = [{"type": "function", "function": function}]
    expected = hugging_face.apply_chat_template(
        CHATS[1],
        tools=[*tools],
        chat_template=TEMPLATES[name],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=True,
    )
    ours = with_template(TEMPLATES[name], hugging_face.special_tokens_map)
    text = ours.render_chat(CHATS[1], tools=tools, template_args={"enable_thinking": True})
    assert text == expected


def test_named_templates_and_the_template_file_are_read(
    tmp_path: Path, smollm2_folder: Path
) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    for found in (named, {"default": "plain", "tool_use": "tools"}):
        config = {"chat_template": found}
        folder = write_folder(tmp_path, smollm2_folder, tokenizer_config=config)
        assert Tokenizer.load(folder).render_chat(CHATS[0]) == "plain"
        assert Tokenizer.load(folder).render_chat(CHATS[0], tools=[{"name": "f"}]) == "tools"
    (folder / "chat_template.jinja").write_text("file")
    assert Tokenizer.load(folder).render_chat(CHATS[0]) == "file"


def test_the_template_of_a_processor_is_read_last(tmp_path: Path, smollm2_folder: Path) -> None:
    folder = write_folder(tmp_path, smollm2_folder, chat_template={"chat_template": "processor"})
    assert Tokenizer.load(folder).render_chat(CHATS[0]) == "processor"
    write_folder(folder, smollm2_folder, tokenizer_config={"chat_template": None})
    assert Tokenizer.load(folder).render_chat(CHATS[0]) == "processor"
    write_folder(folder, smollm2_folder, tokenizer_config={"chat_template": "config"})
    assert Tokenizer.load(folder).render_chat(CHATS[0]) == "config"
    (folder / "chat_template.jinja").write_text("file")
    assert Tokenizer.load(folder).render_chat(CHATS[0]) == "file"


@pytest.mark.parametrize("default", ["chat_template.jinja", "tokenizer_config.json"])
def test_additional_templates_are_read(tmp_path: Path, smollm2_folder: Path, default: str) -> None:
    folder = write_folder(tmp_path, smollm2_folder)
    is_file = default == "chat_template.jinja"
    (folder / default).write_text("plain" if is_file else '{"chat_template": "plain"}')
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    (folder / "additional_chat_templates" / "rag.jinja").write_text("documents")
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.render_chat(CHATS[0]) == "plain"
    assert tokenizer.render_chat(CHATS[0], tools=[{"name": "f"}]) == "tools"
    own = tmp_path / "own.jinja"
    own.write_text("own")
    assert Tokenizer.load(folder, str(own)).render_chat(CHATS[0], tools=[{"name": "f"}]) == "own"


@pytest.mark.parametrize("name", ["tokenizer_config", "chat_template"])
@pytest.mark.parametrize(
    ("value", "field"),
    [
        ([{"name": "default"}], r"chat_template\[0\]"),
        ([{"name": "default", "template": "x"}, {"template": "x"}], r"chat_template\[1\]"),
        ([{"name": "default", "template": ["x"]}], r"chat_template\[0\]"),
        ([{"name": 1, "template": "x"}], r"chat_template\[0\]"),
        (["x"], r"chat_template\[0\]"),
        ({"default": ["x"]}, r"chat_template\[0\]"),
        (7, "chat_template"),
    ],
)
def test_the_error_for_a_malformed_template_names_file_and_field(
    tmp_path: Path, tiny_folder: Path, name: str, value: object, field: str
) -> None:
    folder = write_folder(tmp_path, tiny_folder, **{name: {"chat_template": value}})
    with pytest.raises(ModelNotFound, match=rf"/{name}\.json: {field} must be .*--chat-template"):
        Tokenizer.load(folder)
    own = folder / "own.jinja"
    own.write_text("own")
    assert Tokenizer.load(folder, str(own)).render_chat(CHATS[0]) == "own"


def with_template(source: str, special_tokens: dict[str, str] | None = None) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    return Tokenizer(backend, special_tokens=special_tokens, templates={"default": source})


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].nothing.at_all }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[9].content }}",
        "{{ 1 // 0 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10000000) %}x{% endfor %}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{% for i in range(90000) %}{{ messages[0].content }}{% endfor %}",
    ],
)
def test_the_error_of_a_failing_template_names_messages(source: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        with_template(source).render_chat([{"role": "user", "content": "x" * 1000}])
    assert caught.value.field == "messages"


@pytest.mark.parametrize("messages", [[], "hi", None, [1], [{"content": "x"}], [{"role": 1}]])
def test_messages_of_the_wrong_shape_are_refused(messages: list[Message]) -> None:
    with pytest.raises(InvalidRequest, match="messages"):
        with_template("x").render_chat(messages)


def test_chats_need_a_template_that_is_not_broken() -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        LLAMA.render_chat(CHATS[0])
    with pytest.raises(ModelNotFound, match="template"):
        with_template("{% for %}")


@pytest.mark.parametrize(
    "attack",
    [
        "{{ 7 * 7 }}",
        "{% for i in range(9) %}x{% endfor %}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{# gone #}",
        "{% raw %}",
        "<script>&amp;'\"",
    ],
)
def test_template_code_in_messages_is_not_executed(tokenizer: Tokenizer, attack: str) -> None:
    text = tokenizer.render_chat([{"role": "user", "content": attack}])
    assert f"<|im_start|>user\n{attack}<|im_end|>" in text


# --- incremental detokenisation ------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert joined(tokenizer, ids, skip_special_tokens=False) == text
    assert joined(tokenizer, ids) == tokenizer.decode(ids)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 49151) | st.integers(0, 300), max_size=40), skip=st.booleans())
def test_pieces_of_any_ids_join_to_their_decoding(
    tokenizer: Tokenizer, ids: list[int], skip: bool
) -> None:
    """Random ids are mostly broken UTF-8: both sides must replace the same bytes."""
    expected = tokenizer.decode(ids, skip_special_tokens=skip)
    assert joined(tokenizer, ids, skip_special_tokens=skip) == expected


@pytest.mark.parametrize("sentencepiece", [LLAMA, METASPACE], ids=["llama", "metaspace"])
@settings(max_examples=200, deadline=None)
@given(
    ids=st.lists(st.integers(0, 9) | st.sampled_from([10 + byte for byte in b"\xe2\x82\xac\xff@"])),
    skip=st.booleans(),
)
def test_pieces_of_sentencepiece_ids_join_to_their_decoding(
    sentencepiece: Tokenizer, ids: list[int], skip: bool
) -> None:
    expected = sentencepiece.decode(ids, skip_special_tokens=skip)
    assert joined(sentencepiece, ids, skip_special_tokens=skip) == expected


@pytest.mark.parametrize("text", ["🙂🚀", "今天天气", "a👨‍👩‍👧é"])
def test_no_piece_ends_inside_a_character(tokenizer: Tokenizer, text: str) -> None:
    stream = Detokenizer(tokenizer)
    pieces = [stream.push(token_id) for token_id in tokenizer.encode(text)]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert "" in pieces  # some characters span tokens


def test_an_incomplete_character_at_the_end_is_replaced(tokenizer: Tokenizer) -> None:
    stream = Detokenizer(tokenizer)
    first = tokenizer.encode("🙂")[0]
    assert (stream.push(first), stream.finish()) == ("", "\ufffd")


def test_the_first_word_keeps_its_space_after_a_prompt() -> None:
    the, cat = 5, 6
    assert Detokenizer(LLAMA).push(cat) == "cat"
    assert Detokenizer(LLAMA, context=[1, the]).push(cat) == " cat"


@pytest.mark.serial
@pytest.mark.parametrize("name", ["byte level", "sentencepiece"])
def test_the_time_of_a_long_answer_is_not_quadratic(tokenizer: Tokenizer, name: str) -> None:
    """Eight times as many tokens may take at most 40 times as long; quadratic work would take 64
    times as long."""
    subject, token_id = (tokenizer, 300) if name == "byte level" else (LLAMA, 5)

    def seconds(count: int) -> float:
        start = time.process_time()
        joined(subject, [token_id] * count)
        return time.process_time() - start

    seconds(1000)
    few = min(seconds(2000) for _ in range(3))
    assert min(seconds(16000) for _ in range(2)) < 40 * few


# --- stop strings --------------------------------------------------------------------------------


def cut_by_hand(text: str, stops: list[str], include_stop: bool) -> tuple[str, str | None]:
    """The definition, character by character: the stop that ends first wins; on a tie, the
    longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include_stop else end - len(stop)], stop
    return text, None


@settings(max_examples=300, deadline=None)
@given(
    chunks=st.lists(st.text("abc", max_size=6), max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
    include_stop=st.booleans(),
)
def test_stopping_does_not_depend_on_how_the_text_is_cut(
    chunks: list[str], stops: list[str], include_stop: bool
) -> None:
    checker = StopChecker(stops, include_stop)
    expected, stop = cut_by_hand("".join(chunks), stops, include_stop)
    released = ""
    for chunk in chunks:
        released += checker.push(chunk)
        assert expected.startswith(released)
    assert (released + checker.finish(), checker.found) == (expected, stop)


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["</s>"], "a</s", "a</s"),
        (["END"], "aENEND b", "aEN"),
        (["abcd", "bc"], "xabcd", "xa"),
        (["b", "ab"], "xab", "x"),
        (["aab"], "aaab", "a"),
        (["\n\n"], "one\n\ntwo", "one"),
        (["🙂"], "a🙂b", "a"),
    ],
)
def test_stop_strings_cut_the_text_in_examples(stops: list[str], text: str, expected: str) -> None:
    checker = StopChecker(stops)
    assert "".join(map(checker.push, text)) + checker.finish() == expected


def test_only_a_possible_beginning_of_a_stop_string_is_held_back() -> None:
    checker = StopChecker(["###"])
    assert [checker.push(text) for text in ("a#", "#b", "##")] == ["a", "##b", ""]
    assert checker.finish() == "##"


def test_many_long_stop_strings_are_cheap() -> None:
    """A text that is ten times as long takes ten times the work, not a hundred times."""
    stops = ["a" * 2000 + str(index) for index in range(64)]

    def work(length: int) -> int:
        checker, text = StopChecker(stops), "a" * length
        return instructions(lambda: checker.push(text))

    assert len(StopChecker(stops).push("a" * 20000)) == 18000
    assert work(40000) < 20 * work(4000)


# --- one answer ----------------------------------------------------------------------------------


def stream_of(tokenizer: Tokenizer, text: str, **params: object) -> tuple[str, str | None]:
    """The text of an answer, and the stop string."""
    build: Callable[..., SamplingParams] = SamplingParams
    stream = TextStream(tokenizer, build(**params))
    pieces = [stream.push(token_id) for token_id in tokenizer.encode(text)] + [stream.finish()]
    return "".join(pieces), stream.stop


@pytest.mark.parametrize("text", TEXTS)
def test_an_answer_without_stop_is_the_text_of_its_tokens(tokenizer: Tokenizer, text: str) -> None:
    assert stream_of(tokenizer, text) == (tokenizer.decode(tokenizer.encode(text)), None)


def test_a_stop_string_may_span_tokens(tokenizer: Tokenizer) -> None:
    text = "The answer is 42.\n\nQuestion: what next?"
    kept = "The answer is 42."
    expected = (kept, "\n\nQuestion:")
    assert stream_of(tokenizer, text, stop=["\n\nQuestion:", "zzz"]) == expected
    whole = stream_of(tokenizer, text, stop="\n\nQuestion:", include_stop_str_in_output=True)
    assert whole[0] == kept + "\n\nQuestion:"


def test_a_stop_string_inside_a_token_keeps_the_text_before_it(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(" answer")
    assert len(ids) == 1
    assert stream_of(tokenizer, " answer", stop="swer") == (" an", "swer")
    assert stream_of(tokenizer, " answer", stop=" ans") == ("", " ans")


def test_text_that_may_begin_a_stop_string_is_held_back(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, SamplingParams(stop="##!"))
    first, second, *_, last = [stream.push(token_id) for token_id in tokenizer.encode("a#🙂")]
    assert (first, second, last) == ("a", "", "#🙂")


def test_stop_strings_are_not_searched_in_the_first_min_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two one two")
    assert len(ids) == 4
    text, stop = stream_of(tokenizer, "one two one two", stop="one", min_tokens=2)
    assert (text, stop) == ("one two ", "one")


def test_tokens_after_the_stop_change_nothing(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, SamplingParams(stop="."))
    pieces = [stream.push(token_id) for token_id in tokenizer.encode("a. b. c")]
    assert [*pieces, stream.finish()] == ["a", "", "", "", "", ""]
    assert stream.stop == "."


@settings(max_examples=100, deadline=None)
@given(
    words=st.lists(st.sampled_from(["the", " 12", "é", "🙂", "\n", " ab", "c"]), max_size=12),
    stops=st.lists(st.sampled_from(["e", "🙂", "2é", "\n\n", "abc", " a"]), max_size=3),
    include_stop=st.booleans(),
)
def test_an_answer_is_its_text_cut_at_the_first_stop(
    tokenizer: Tokenizer, words: list[str], stops: list[str], include_stop: bool
) -> None:
    text = "".join(words)
    expected, stop = cut_by_hand(text, stops, include_stop)
    answer = stream_of(tokenizer, text, stop=stops, include_stop_str_in_output=include_stop)
    assert answer == (expected, stop)
