"""Measures what sharing and truncation do to answers, on real weights: SmolLM2-135M on a CPU and
Qwen2.5-Coder-1.5B on a GPU.

RelayAttention's Table 3 (few-shot MMLU, the accuracy), AttentionStore's Tables 1 and 2.

When a claim counts as reproduced:

    accuracy     sharing moves it by at most `most_points`, and at least `least_same` percent of
                 the questions get the same choice, for every number of examples. On a CPU choices
                 must be equal. On a GPU 16-bit sums depend on the batch, so letters with almost
                 equal logprobs may change places. Reads must have been shared for some number of
                 examples.
    perplexity   with moved KV within 0.5 % of computing again (0.02 of 5.47 in the paper), and more
                 than doubled with wrong positions; partly, if it is within 5 %
    questions    moved KV minus computing again is within its 95 % interval, or within one point;
                 the interval is within 5 points; wrong positions answer fewer questions. Partly, if
                 the interval is wider, or wrong positions were not measured
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial

from mainstem.checkpoints.hub import resolve_model
from mainstem.core.config import (
    CacheConfig,
    Device,
    DType,
    EngineConfig,
    ModelConfig,
    SchedConfig,
    Share,
)
from mainstem.core.errors import ConfigError
from mainstem.models.families import read_spec
from mainstem.text.tokenizer import Tokenizer
from mainstem_bench import fewshot
from mainstem_bench.kept import KeptModel
from mainstem_bench.paper import style
from mainstem_bench.paper.item import Item, Line, Outcome, Settings, Verdict, Where
from mainstem_bench.paper.lengths import SHOTS, shipped
from mainstem_bench.paper.results import one
from mainstem_bench.paper.style import Figure
from mainstem_bench.truncated_questions import QuestionSet, ask, compare, read_documents
from mainstem_bench.truncation import read_on, read_text, read_whole
from mainstem_bench.ways import WAYS

CUT_WAYS = {"recompute": "TT", "kv": "AS", "important": "AS, by attention", "naive": "NKVT"}
CLOSE, NEAR = 0.005, 0.05  # by how much perplexity with kv may differ from that with recompute
MOST_POINTS = 5.0  # of correct answers, by which kv and recompute may differ with any likelihood
FAR = 2.0  # naive must be above this many times the perplexity with recompute


@dataclass(frozen=True, slots=True)
class RealModel:
    """A model, what it is asked, and how equal its answers must be."""

    name: str  # `smollm2` or a hub id; `bench paper --model` replaces it
    label: str  # in lines and plots
    device: Device
    layers: int  # of the model
    hidden_size: int  # a folder with another size is another model
    questions: int  # of MMLU
    going_on: tuple[int, int]  # questions after which text is generated, and its tokens
    text_window: int
    text_tokens: int
    turn_tokens: int
    document_window: int
    answer_tokens: int  # to a question about a document, the most
    least_same: float  # percent of choices
    most_points: float  # of accuracy
    dtype: DType = DType.AUTO
    kv_tokens: int | None = None  # for the questions of MMLU


SMOLLM2 = RealModel(
    name="smollm2",
    label="smollm2",
    device=Device.CPU,
    layers=30,
    hidden_size=576,
    questions=100,
    going_on=(100, 8),
    text_window=512,
    text_tokens=3072,
    turn_tokens=64,
    document_window=512,
    answer_tokens=16,
    least_same=100.0,
    most_points=0.0,
)
QWEN = RealModel(
    name="Qwen/Qwen2.5-Coder-1.5B-Instruct",
    label="Qwen2.5-Coder-1.5B",
    device=Device.CUDA,
    layers=28,
    hidden_size=1536,
    questions=300,
    going_on=(300, 32),  # 25 of a subject: enough for reads to be shared
    text_window=2048,
    text_tokens=16_384,
    turn_tokens=64,
    document_window=1024,
    answer_tokens=32,  # it answers in sentences
    least_same=98.0,
    most_points=1.0,
    dtype=DType.BF16,
    kv_tokens=262_144,
)
ABOUT_QWEN = (
    "Qwen2.5-Coder-1.5B on an H200, in 16 bits (the weights of the measured lines are those of its "
    "4-bit GGUF file, Q4_K_M); "
)
QUICK = replace(
    SMOLLM2, questions=4, going_on=(4, 8), text_window=64, text_tokens=140, turn_tokens=16
)
MODELS = {model.label: model for model in (SMOLLM2, QWEN)}


def on_qwen(
    item: Item,
    run: Callable[[RealModel, Settings], Iterator[Line]],
    *,
    title: str,
    differs: str,
    full_s: float,
    point: str,
) -> Item:
    """An item on SmolLM2, on the larger model and a card."""
    return replace(
        item,
        name=f"{item.name}-1.5b",
        title=title,
        differs=ABOUT_QWEN + differs,
        where=Where.GPU,
        full_s=full_s,
        run=partial(run, QWEN),
        point=f"{QWEN.label}, {point}",
        model=QWEN.name,
    )


def a_config(model: RealModel, name: str, window: int | None = None) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=name, device=model.device, dtype=model.dtype),
        sched=SchedConfig(max_model_len=window),
    )


def find_model(model: RealModel, settings: Settings) -> KeptModel:
    """Find the model's folder, which --model may name. Raises ConfigError if the folder holds
    another model: lines would have the wrong label."""
    folder = resolve_model(settings.model or model.name)
    spec = read_spec(folder)
    if (spec.num_layers, spec.hidden_size) != (model.layers, model.hidden_size):
        raise ConfigError(
            f"--model must be a folder of {model.label}, which has {model.layers} layers of "
            f"{model.hidden_size}; the model there has {spec.num_layers} of {spec.hidden_size}"
        )
    return KeptModel(folder)


# --- RelayAttention, Table 3 ----------------------------------------------------------------------


def run_answers(model: RealModel, settings: Settings) -> Iterator[Line]:
    """Ask few-shot questions with and without sharing."""
    shots: tuple[int, ...] = SHOTS
    shares = [Share.NONE, Share.STORAGE, Share.READS]
    if settings.is_quick:
        model, shots, shares = QUICK, (1,), [Share.NONE, Share.READS]
    config = a_config(model, str(find_model(model, settings).folder))
    config = replace(config, cache=CacheConfig(kv_tokens=model.kv_tokens))
    num_going_on, num_tokens = model.going_on
    found = fewshot.measure(
        config,
        fewshot.read_questions(None, shots, model.questions),
        shots,
        shares,
        num_going_on=num_going_on,
        num_tokens=num_tokens,
    )
    for quality in found:
        yield {"model": model.label, **asdict(quality)}


def plot_answers(lines: Sequence[Line], figure: Figure) -> None:
    axes, tokens = figure.subplots(1, 2)
    names = [f"{shots} shot{'s' if shots > 1 else ''}" for shots in SHOTS]
    looks = {"none": style.NOTHING, "storage": style.STORED, "reads": style.OURS}
    series = {
        share: ([one(lines, shots=shots, share=share)["accuracy"] for shots in SHOTS], look)
        for share, look in looks.items()
    }
    style.bars(axes, names, series, "{:.0f}")
    axes.axhline(100 * fewshot.CHANCE, label="chance", **style.LIMIT)
    style.finish(axes, f"{lines[0]['model']}: accuracy by what is shared", "", "% of questions")
    series = {
        share: ([one(lines, shots=shots, share=share)["same_tokens"] for shots in SHOTS], look)
        for share, look in looks.items()
    }
    style.bars(tokens, names, series, "{:.0f}")
    style.finish(tokens, "generated tokens as without sharing", "", "% of tokens")


def judge_answers(lines: Sequence[Line]) -> Verdict:
    model = MODELS[lines[0]["model"]]
    shared = [line for line in lines if line["share"] != "none"]
    points = max(
        abs(line["accuracy"] - one(lines, shots=line["shots"], share="none")["accuracy"])
        for line in shared
    )
    tokens, choices = (
        min(line[name] for line in shared) for name in ("same_tokens", "same_choices")
    )
    worst = max(line["logprob_difference"] for line in shared)
    saved = [one(lines, shots=shots, share="reads")["reads_saved"] for shots in SHOTS]
    is_equal = choices >= model.least_same and points <= model.most_points
    if points == 0:
        accuracy = f"{_accuracies(lines, 'reads')}, with and without sharing"
    else:
        accuracy = (
            f"{_accuracies(lines, 'reads')} with shared reads, {_accuracies(lines, 'storage')} "
            f"with shared storage and {_accuracies(lines, 'none')} without sharing"
        )
    by_shots = [one(lines, shots=shots, share="none")["accuracy"] for shots in SHOTS]
    is_rising = by_shots == sorted(set(by_shots))
    flat = "" if is_rising else ". In the paper accuracy rises with every example; here it does not"
    at_chance = [str(line["shots"]) for line in lines if line["is_at_chance"]]
    doubt = ""
    if at_chance:
        doubt = (
            f". With {', '.join(dict.fromkeys(at_chance))} examples the model only guesses (25 %), "
            f"so equal accuracy proves little; but logprobs of the letters differ by {worst:.1g} "
            "at most"
        )
    elif choices < 100 or tokens < 100:
        doubt = f". Logprobs of the letters differ by {worst:.1g} at most"
    if not is_equal or not any(saved):
        outcome = Outcome.NOT
    else:
        outcome = Outcome.PARTLY if at_chance else Outcome.REPRODUCED
    return Verdict(
        outcome,
        f"accuracy with 1, 3 and 5 examples is {accuracy}. "
        f"{_percent(choices)} of questions get the same choice, and {_percent(tokens)} of "
        f"generated tokens are the same{doubt}. With shared reads, "
        f"{', '.join(_percent(each) for each in saved)} of the keys were not read again{flat}",
    )


def _accuracies(lines: Sequence[Line], share: str) -> str:
    found = [one(lines, shots=shots, share=share)["accuracy"] for shots in SHOTS]
    return ", ".join(_percent(each) for each in found)


def _percent(value: float) -> str:
    """Write all digits of a stored value: 99.97 must not become 100."""
    return f"{value:.4g} %"


# --- AttentionStore, Table 1 ----------------------------------------------------------------------


def run_perplexity(model: RealModel, settings: Settings) -> Iterator[Line]:
    """Measure one long text, during which the window is cut many times."""
    ways = list(CUT_WAYS)
    if settings.is_quick:
        model, ways = QUICK, ["kv"]
    window = model.text_window
    with closing(find_model(model, settings)) as kept:
        config = a_config(model, model.label, window)
        ids = _text_ids(kept)[: model.text_tokens]
        whole = read_whole(kept, config, ids)
        assert whole is not None
        about = {"model": model.label, "window": window, "text": "WikiText-2"}
        yield {**asdict(whole.reading(window)), **about, "like": "nothing dropped"}
        for way in ways:
            reading = read_on(kept, config, WAYS[way], ids, model.turn_tokens, whole)
            yield {**asdict(reading), **about, "like": CUT_WAYS[way]}


def plot_perplexity(lines: Sequence[Line], figure: Figure) -> None:
    perplexity, agreement = figure.subplots(1, 2)
    names = ["whole", *CUT_WAYS]
    found = [one(lines, way=way) for way in names]
    series = {"": ([line["perplexity"] for line in found], style.OURS)}
    style.bars(perplexity, names, series, "{:.1f}")
    title = f"{lines[0]['model']}, window of {lines[0]['window']}"
    style.finish(perplexity, title, "", "perplexity", legend=False)
    series = {"": ([100 * line["agreement"] for line in found[1:]], style.OURS)}
    style.bars(agreement, names[1:], series, "{:.0f}")
    style.finish(
        agreement, "likeliest token as with nothing dropped", "", "% of tokens", legend=False
    )


def judge_perplexity(lines: Sequence[Line]) -> Verdict:
    found = {way: one(lines, way=way) for way in ("whole", *CUT_WAYS)}
    recompute, kv, naive = (found[way]["perplexity"] for way in ("recompute", "kv", "naive"))
    told = ", ".join(f"{way} {line['perplexity']:.2f}" for way, line in found.items())
    same = ", ".join(f"{way} {found[way]['agreement']:.0%}" for way in CUT_WAYS)
    apart, has_failed = abs(kv / recompute - 1), naive > FAR * recompute
    fate = "naive fails" if has_failed else "naive does not fail"
    near = Outcome.REPRODUCED if apart <= CLOSE else Outcome.PARTLY
    return Verdict(
        near if apart <= NEAR and has_failed else Outcome.NOT,
        f"perplexity: {told}; kv differs from recompute by {kv - recompute:+.2f} "
        f"({kv / recompute - 1:+.1%}; paper 0.02 at most, 0.4 %), and {fate} (paper: more than "
        f"1,000). "
        f"How often the likeliest token is the same as with the whole text: {same}",
    )


# --- AttentionStore, Table 2 ----------------------------------------------------------------------


def run_questions(model: RealModel, settings: Settings) -> Iterator[Line]:
    """Ask questions about documents after a cut that dropped older text, or the documents
    themselves."""
    ways, places = ["recompute", "kv", "important", "naive"], ["last", "first"]
    with shipped("xquad_few.jsonl.gz") as path:
        documents = read_documents(path)
    if settings.is_quick:
        model, ways, places = QUICK, ["kv"], ["last"]
        documents = [min(documents, key=lambda document: len(document.text))]
    with closing(find_model(model, settings)) as kept:
        config = a_config(model, model.label, model.document_window)
        for place in places:
            questions = QuestionSet(
                tuple(documents), _text_ids(kept), place == "first", model.answer_tokens
            )
            first = None
            for way in ways:
                score = ask(kept, config, WAYS[way], questions)
                first = first or score
                found = compare(first.answers, score.answers, "right")
                line = {name: value for name, value in asdict(score).items() if name != "answers"}
                yield {
                    **line,
                    "model": model.label,
                    "window": model.document_window,
                    "document": place,
                    "like": CUT_WAYS[way],
                    "against": first.way,
                    "right_difference": round(found.mean, 2),
                    "right_margin": round(found.margin, 2),
                }


def plot_questions(lines: Sequence[Line], figure: Figure) -> None:
    axes = figure.subplots()
    ways = ("recompute", "kv", "important")
    looks = (style.NOTHING, style.STORED, style.OURS)
    places = {"last": "the other text is older", "first": "the document is older"}
    series = {
        way: ([one(lines, way=way, document=place)["accuracy"] for place in places], look)
        for way, look in zip(ways, looks, strict=True)
    }
    style.bars(axes, list(places.values()), series, "{:.1f}")
    title = f"{lines[0]['model']}: questions on a document after a cut"
    style.finish(axes, title, "", "% of answers right")


def judge_questions(lines: Sequence[Line]) -> Verdict:
    told = []
    for place, meant in (("last", "after other text"), ("first", "before other text")):
        found = {
            way: one(lines, way=way, document=place) for way in ("recompute", "kv", "important")
        }
        shown = ", ".join(f"{way} {line['accuracy']:.1f} %" for way, line in found.items())
        told.append(f"documents {meant}: {shown}")
    kv = one(lines, way="kv", document="last")
    difference, margin = abs(kv["right_difference"]), kv["right_margin"]
    naive = [line for line in lines if line["way"] == "naive" and line["document"] == "last"]
    is_worse = all(line["right_difference"] < -line["right_margin"] for line in naive)
    if difference > max(margin, 1.0) or not is_worse:
        outcome = Outcome.NOT
    else:
        is_sure = bool(naive) and difference + margin <= MOST_POINTS
        outcome = Outcome.REPRODUCED if is_sure else Outcome.PARTLY
    wrong = (
        f"KV with wrong positions answers {naive[-1]['accuracy']:.1f} %"
        if naive
        else "KV with wrong positions, the other half of the claim, was not asked"
    )
    return Verdict(
        outcome,
        f"correct answers with {'; '.join(told)} ({kv['questions']} questions; kv minus recompute "
        f"is {kv['right_difference']:+.1f} +- {margin:.1f} points, so few questions cannot exclude "
        f"a difference of some points). {wrong}",
    )


def _text_ids(model: KeptModel) -> list[int]:
    with shipped("wikitext2_head.txt.gz") as path:
        return Tokenizer.load(model.folder).encode(read_text(path))
