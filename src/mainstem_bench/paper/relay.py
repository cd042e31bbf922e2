"""RelayAttention (long system prompts read once per step): its figures and tables."""

from functools import partial

from mainstem_bench.paper import quality
from mainstem_bench.paper import relay_attention as attention
from mainstem_bench.paper import relay_data as data
from mainstem_bench.paper import relay_jobs as jobs
from mainstem_bench.paper import relay_serving as serving
from mainstem_bench.paper import relay_tables as tables
from mainstem_bench.paper.item import Item, Where

ON_H200 = "an H200 instead of an A40 and A100s; "
RANDOM = "random weights (the time is the same); "
CUT = "answers have at most 256 tokens, so that a run does not wait for one long answer; "

DATA = (
    "the first 5,671 conversations of ShareGPT; other tokenizers (Qwen 2.5 for ShareGPT, SmolLM2 "
    "for MMLU) than Llama's"
)

ANSWERS = Item(
    name="relay-answers",
    title="RelayAttention Table 3: few-shot MMLU, accuracy",
    claim="accuracy is the same in all systems: 37.6, 41.3 and 43.2 % with 1, 3 and 5 examples "
    "(Llama2-7B)",
    differs="SmolLM2-135M on a CPU; 100 questions of 12 subjects; the answer is the likeliest "
    "of the four letters",
    where=Where.CPU,
    full_s=410,
    quick_s=20,
    run=partial(quality.run_answers, quality.SMOLLM2),
    verdict=quality.judge_answers,
    point="SmolLM2-135M, 100 questions of 12 subjects",
    num_lines=9,
    plot=quality.plot_answers,
)
ITEMS: tuple[Item, ...] = (
    Item(
        name="relay-fig1",
        title="RelayAttention Fig. 1: attention time against the system prompt",
        claim="PagedAttention's time grows with the system prompt, RelayAttention's hardly grows "
        "(Llama-30B, batch 32, context 128)",
        differs=ON_H200
        + "up to three launches, which overlap; the baseline has a copy of the system "
        "prompt for each sequence, so the card's cache cannot help it",
        full_s=8,
        quick_s=2,
        run=attention.run_time,
        verdict=attention.judge_time,
        point="Llama-30B's heads, 32 sequences, 128 own tokens, system prompts of 64 to 4,096",
        is_papers_point=True,
        num_lines=len(attention.SYSTEM_TOKENS),
        plot=attention.plot_time,
    ),
    Item(
        name="relay-fig6",
        title="RelayAttention Fig. 6: speed-up of attention, measured and by Eq. 10",
        claim="measured speed-ups are close to Eq. 10 at batches of 4 to 32, contexts 128 and 256",
        differs=ON_H200
        + "an H200 reads so fast that at small batches the launch takes a larger part of the time; "
        "the baseline has a copy of the system prompt for each sequence",
        full_s=30,
        quick_s=4,
        run=attention.run_speedup,
        verdict=attention.judge_speedup,
        point="Llama-30B's heads, 4 to 32 sequences, 128 and 256 own tokens",
        is_papers_point=True,
        num_lines=56,
        plot=attention.plot_speedup,
    ),
    Item(
        name="relay-fig7",
        title="RelayAttention Fig. 7: batch throughput on ShareGPT",
        claim="with system prompts of 64 to 2,048 tokens RelayAttention has 1.06 to 4.36 times "
        "vLLM's throughput; storing the prompt once (vLLM-PS) gains at most 108 %",
        differs=ON_H200 + RANDOM + CUT + "the three systems are `--share none|storage|reads`; 400 "
        "requests instead of the whole data set",
        full_s=400,
        quick_s=6,
        run=jobs.run_sharegpt,
        verdict=jobs.judge_sharegpt,
        point="Llama2-7B, system prompts of 64 and 2,048 tokens, answers of at most 256 tokens",
        num_lines=12,
        plot=jobs.plot_sharegpt,
    ),
    Item(
        name="relay-fig8",
        title="RelayAttention Fig. 8: latency against the rate of requests",
        claim="at about 0.5 s per token, higher request rates than vLLM and vLLM-PS, up to about "
        "2.2 times with a system prompt of 2,048 (over which of the two it does not say)",
        differs=ON_H200 + RANDOM + CUT + "the limit is 15 ms per token, three times the time of an "
        "idle engine here",
        full_s=450,
        quick_s=4,
        run=serving.run_rates,
        verdict=serving.judge_rates,
        point="Llama2-7B, system prompt of 2,048 tokens, at most 15 ms per token",
        num_lines=serving.NUM_RATES,
        plot=serving.plot_rates,
    ),
    Item(
        name="relay-fig9",
        title="RelayAttention Fig. 9: distributions of lengths in ShareGPT and MMLU",
        claim="most user prompts of ShareGPT are short, answers have up to some hundred tokens",
        differs=DATA,
        where=Where.CPU,
        full_s=2,
        quick_s=1,
        run=data.run_lengths,
        verdict=data.judge_shapes,
        point="5,671 conversations, 57 subjects with 5 examples, 14,042 questions",
        num_lines=4,
        plot=data.plot_lengths,
    ),
    Item(
        name="relay-fig10",
        title="RelayAttention Fig. 10: throughput with equal lengths",
        claim="RelayAttention is up to 2.2 times as fast, with 256 user and 512 answer tokens "
        "after a system prompt of 2,048",
        differs=ON_H200
        + RANDOM
        + "150 requests; the paper does not say over which system its 2.2 is, "
        "here it is over storing once. vLLM 0.24 is also measured on 64+128, with 1,000 requests; "
        "vLLM 0.32 has no attention over shared prefixes any more",
        full_s=500,
        quick_s=5,
        run=jobs.run_synthetic,
        verdict=jobs.judge_synthetic,
        point="Llama2-7B, system prompt of 2,048 tokens, 256 user and 512 answer tokens",
        is_papers_point=True,
        num_lines=20,
        plot=jobs.plot_synthetic,
    ),
    Item(
        name="relay-tab1",
        title="RelayAttention Table 1: ranges of lengths in the benchmark's data",
        claim="ShareGPT: system prompts of 64 to 2,048 tokens, user prompts of 4 to 1,024, "
        "answers of 4 to 2,013; MMLU: system prompts of 379 to 2,895, questions of 55 to 1,219, "
        "answers of 32",
        differs=DATA,
        where=Where.CPU,
        full_s=2,
        quick_s=1,
        run=data.run_lengths,
        verdict=data.judge_lengths,
        point="5,671 conversations, 57 subjects with 5 examples, 14,042 questions",
        num_lines=4,
    ),
    Item(
        name="relay-tab2",
        title="RelayAttention Table 2: the cards",
        claim="A40 (696 GB/s), A100-PCIE (1,555 GB/s), A100-SXM4 (2,039 GB/s)",
        differs="the rates of our card are measured (`mainstem calibrate`), not from a data sheet",
        where=Where.CPU,
        full_s=1,
        quick_s=1,
        run=data.run_card,
        verdict=data.judge_card,
        point="the cards",
        num_lines=3,
        plot=data.plot_card,
    ),
    Item(
        name="relay-tab3",
        title="RelayAttention Table 3: few-shot MMLU, time",
        claim="RelayAttention takes 39 %, 63 % and 76 % less time with 1, 3 and 5 examples "
        "(A100-80G)",
        differs=ON_H200
        + RANDOM
        + "500 questions of 41 subjects instead of 14,042 of 57 (today's code draws 500 of all), "
        "with the lengths of real ones, which are shorter than the paper's (Table 1); "
        "those of a subject run together if prefixes are shared; accuracy is in relay-answers",
        full_s=110,
        quick_s=6,
        run=tables.run_mmlu,
        verdict=tables.judge_mmlu,
        point="Llama2-7B, 500 questions of 41 subjects, prefixes of 139, 324 and 590 tokens on "
        "average",
        num_lines=9,
        plot=tables.plot_mmlu,
    ),
    ANSWERS,
    quality.on_qwen(
        ANSWERS,
        quality.run_answers,
        title="RelayAttention Table 3: few-shot MMLU, accuracy of Qwen2.5-Coder-1.5B",
        differs="300 questions of 12 subjects; the answer is the likeliest of the four letters. "
        "Sums in 16 bits depend on the batch, so accuracy counts as equal within one point, if at "
        "least 98 % of questions get the same choice. With one example, prefixes are too short for "
        "shared reads to pay",
        full_s=50,
        point="300 questions of 12 subjects",
    ),
    Item(
        name="relay-tab4",
        title="RelayAttention Table 4: throughput of other models on ShareGPT",
        claim="with 1,024 tokens, 2.6 times vLLM's throughput for Llama2-13B, 2.4 for Llama-30B, "
        "2.5 for Phi-2, 2.2 for Mistral-7B",
        differs=ON_H200 + RANDOM + CUT + "KV memory as on the paper's cards; Llama-30B on one card "
        "instead of two; jobs of 1 to 21 s",
        full_s=480,
        quick_s=8,
        run=tables.run_models,
        verdict=tables.judge_models,
        point="system prompt of 1,024 tokens, answers of at most 256 tokens, 60 to 100 requests",
        num_lines=24,
        plot=tables.plot_models,
    ),
)
