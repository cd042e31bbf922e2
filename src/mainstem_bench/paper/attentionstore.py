"""AttentionStore (KV kept between the turns of conversations): its figures and tables."""

from dataclasses import replace
from functools import partial

from mainstem_bench.paper import quality
from mainstem_bench.paper import store_data as data
from mainstem_bench.paper import store_engine as engine
from mainstem_bench.paper import store_pictures as pictures
from mainstem_bench.paper import store_simulated as simulated
from mainstem_bench.paper import store_simulated_pictures as drawn
from mainstem_bench.paper.item import Item, Where

ON_H200 = "one H200 instead of A100s; random weights (the time is the same); "
SMALL = "SmolLM2-135M on a CPU with a window of 512; "
A100S = (
    "simulated at the speed of the paper's A100s (data sheet), because we have no A100s, and "
    "LLaMA-65B in 16 bits leaves no room for KV on one H200. At most 24 requests run at once; "
    "loads take the time of one link of 26 GB/s and a disk of 5 GB/s and overlap only the steps of "
    "other requests; the policy knows the requests that wait, and no turn that has not come. "
    "Saving is free. "
)
CHAT = "the time between turns is that of people in a chat, which the paper does not give"
SIMULATED = (
    A100S + "With an H200's measured speeds the same simulation agrees with the engine on that "
    "card (`mainstem bench agree`, `benchmarks/results/agree-h200.jsonl`: 500 turns of "
    "LLaMA-13B's shape over host memory and disk); at the speeds and sizes of this figure it was "
    "not compared. 9,000 conversations are drawn from 5,671, with lengths times 2.1, so that as "
    "many are long as in the paper (49 % above 2,048 tokens, 30 % above 4,096); answers are longer "
    "by that, too, which the paper may not have; " + CHAT
)
CAPACITY = (
    "simulated by `mainstem capacity`, which finds for each capacity which pages a store would "
    "still have: one request after another, no times, and the policy knows turns that have not "
    "come yet. 9,000 conversations are drawn from 5,671, with lengths times 2.1; " + CHAT
)
AGREEMENT = "agree-h200"
ONE_SESSION = (
    "one new session a second, 128 GB of DRAM, 10 TB of disk, 9,000 sessions with lengths times 2.1"
)


def _compared(number: int, title: str, claim: str, compared: drawn.Compared) -> Item:
    """Make an item for a figure whose numbers come from the simulation of Fig. 13 to 17."""
    return Item(
        name=f"store-fig{number}",
        title=f"AttentionStore Fig. {number}: {title}",
        claim=claim,
        differs=SIMULATED,
        where=Where.CPU,
        full_s=260,
        quick_s=2,
        run=simulated.run_models,
        verdict=compared.judge,
        point=ONE_SESSION,
        num_lines=8,
        is_simulated=True,
        agreement=AGREEMENT,
        plot=compared.plot,
    )


TABLE_1 = Item(
    name="store-tab1",
    title="AttentionStore Table 1: perplexity after the window overflowed",
    claim="perplexity with moved KV is within 0.02 of computing again (5.48 and 5.47 for "
    "LLaMA-7B on WikiText-2); KV with wrong positions gives more than 1,000",
    differs=SMALL + "3,072 tokens of WikiText-2; also measured: a cut that "
    "keeps the pages with the most attention, and how often the likeliest token is the same as "
    "with the whole text",
    where=Where.CPU,
    full_s=420,
    quick_s=15,
    run=partial(quality.run_perplexity, quality.SMOLLM2),
    verdict=quality.judge_perplexity,
    point="SmolLM2-135M, window of 512, 3,072 tokens of WikiText-2",
    num_lines=5,
    plot=quality.plot_perplexity,
)
TABLE_2 = Item(
    name="store-tab2",
    title="AttentionStore Table 2: accuracy after the window overflowed",
    claim="moved KV answers as well as computing again (MMLU 43.7 and 43.4 %, LongEval 66.0 "
    "and 65.9 %, PIQA 77.1 and 77.2 % for LLaMA-7B); KV with wrong positions is far worse",
    differs=SMALL + "on MMLU and LongEval this small model only guesses, so it is asked "
    "about 24 paragraphs of XQuAD instead. Other text, before or after the paragraph, fills "
    "the window",
    where=Where.CPU,
    full_s=1200,
    quick_s=20,
    run=partial(quality.run_questions, quality.SMOLLM2),
    verdict=quality.judge_questions,
    point="SmolLM2-135M, 95 questions about paragraphs of XQuAD",
    num_lines=8,
    plot=quality.plot_questions,
)
LONG_DOCUMENTS = Item(
    name="store-fig25",
    title="AttentionStore Fig. 25: first token and prefill throughput with long documents",
    claim="95 % less time to the first token and 22 times the throughput at 28K tokens "
    "(Mistral-7B, batch 1)",
    differs=ON_H200 + "medians of 4 tasks after the first",
    full_s=30,
    quick_s=2,
    run=engine.run_documents,
    verdict=pictures.judge_ttft,
    point="Mistral-7B's layers, one sequence, a document of 28,000 tokens",
    is_papers_point=True,
    num_lines=8,
    plot=pictures.plot_ttft,
)
ITEMS: tuple[Item, ...] = (
    Item(
        name="store-fig1",
        title="AttentionStore Fig. 1: time of prefill and of a decode step",
        claim="prefill grows with the prompt, a decode step stays about the same (LLaMA-70B, "
        "batch 8, 4 A100s)",
        differs=ON_H200 + "8B instead of 70B, which one card cannot hold in 16 bits",
        full_s=25,
        quick_s=2,
        run=engine.run_phases,
        verdict=pictures.judge_phases,
        point="8B instead of 70B, 8 sequences, prompts of 256 to 4,096 tokens",
        num_lines=10,
        plot=pictures.plot_phases,
    ),
    Item(
        name="store-fig2",
        title="AttentionStore Fig. 2: turns and lengths of ShareGPT's conversations",
        claim="73 % have more than one turn; 47 % are longer than 2K tokens, 30 % longer than 4K",
        differs="the first 5,671 of about 90,000 conversations; another tokenizer (Qwen 2.5)",
        where=Where.CPU,
        full_s=2,
        quick_s=1,
        run=data.run_sessions,
        verdict=data.judge_sessions,
        point="the first 5,671 conversations",
        num_lines=2,
        plot=data.plot_sessions,
    ),
    Item(
        name="store-fig4",
        title="AttentionStore Fig. 4: history in a prompt, and the time to compute it again",
        claim="in late turns more than 99 % of the prompt is history, which takes 99 % of the "
        "prefill time (Mistral-7B, one A100)",
        differs=ON_H200 + "prompts have the mean lengths of each turn",
        full_s=25,
        quick_s=2,
        run=engine.run_turns,
        verdict=pictures.judge_turns,
        point="Mistral-7B's layers, one sequence, turn 32",
        is_papers_point=True,
        num_lines=8,
        plot=pictures.plot_turns,
    ),
    _compared(
        13,
        "hit rate of the store",
        "86 %, 71 %, 89 % and 90 % for LLaMA-13B, LLaMA-65B, LLaMA-70B and Falcon-40B",
        drawn.HITS,
    ),
    _compared(
        14,
        "time to the first token",
        "85 %, 61 %, 87 % and 86 % less time than computing the history again",
        drawn.TTFT,
    ),
    _compared(
        15,
        "prefill throughput",
        "6.8, 2.6, 7.8 and 7.2 times the prefill throughput",
        drawn.PREFILL,
    ),
    _compared(
        16,
        "GPU time of the whole workload",
        "GPU time falls by factors of 4.0, 1.9, 3.3 and 3.4",
        drawn.GPU_TIME,
    ),
    _compared(
        17, "cost of the whole workload", "the cost falls by 70 %, 43 %, 66 % and 68 %", drawn.COST
    ),
    Item(
        name="store-fig18",
        title="AttentionStore Fig. 18: loading history against computing it",
        claim="loading is faster than computing for histories of 500 to 900 of 1,000 tokens "
        "(LLaMA-13B, batch 16, one A100)",
        differs=ON_H200 + "PCIe 5 instead of 4",
        full_s=40,
        quick_s=3,
        run=engine.run_loading,
        verdict=pictures.judge_loading,
        point="LLaMA-13B's shape, 16 sequences of 1,000 tokens",
        is_papers_point=True,
        num_lines=15,
        plot=pictures.plot_loading,
    ),
    Item(
        name="store-fig19",
        title="AttentionStore Fig. 19: loading by layers, and the read buffer",
        claim="loading by layers takes 35 % less time than loading everything first; with a "
        "buffer of 15 layers it takes 61 % less (LLaMA-13B, batch 16, 1K tokens of history, 100 "
        "new)",
        differs=ON_H200 + "the batch is timed alone, not after another job",
        full_s=30,
        quick_s=2,
        run=engine.run_buffers,
        verdict=pictures.judge_buffers,
        point="LLaMA-13B's shape, 16 sequences, 1,000 tokens loaded, 100 new",
        is_papers_point=True,
        num_lines=6,
        plot=pictures.plot_buffers,
    ),
    Item(
        name="store-fig20",
        title="AttentionStore Fig. 20: saving KV beside the computation",
        claim="saving during the computation takes 13 to 15 % less time than saving "
        "synchronously, with prompts of 1,000 to 1,600 tokens and 20 decode steps (LLaMA-13B, "
        "batch 16)",
        differs=ON_H200
        + "`--store-save decoding` against `sync`; the time ends when everything is saved",
        full_s=60,
        quick_s=3,
        run=engine.run_saving,
        verdict=pictures.judge_saving,
        point="LLaMA-13B's shape, 16 sequences of 1,000 to 1,600 tokens, 20 decode steps",
        is_papers_point=True,
        num_lines=8,
        plot=pictures.plot_saving,
    ),
    Item(
        name="store-fig21",
        title="AttentionStore Fig. 21: look-ahead against LRU and FIFO",
        claim="with 128 GB and 10 TB, look-ahead has a hit rate of 86 % (99.6 % of it in DRAM), "
        "LRU 58 %, FIFO 48 %; with 2 TB it is 27 and 31 points above LRU and FIFO",
        differs=SIMULATED,
        where=Where.CPU,
        full_s=670,
        quick_s=2,
        run=simulated.run_policies,
        verdict=drawn.judge_policies,
        point="LLaMA-13B, one new session a second, 128 GB of DRAM and 2 or 10 TB of disk, 9,000 "
        "sessions with lengths times 2.1",
        num_lines=15,
        is_simulated=True,
        agreement=AGREEMENT,
        plot=drawn.plot_policies,
    ),
    Item(
        name="store-policies",
        title="AttentionStore Fig. 21, in the engine: look-ahead against LRU and FIFO",
        claim="look-ahead finds more than LRU and FIFO, and nearly all of it in DRAM",
        differs=ON_H200 + "not simulated, but run by the engine: turns of 32 conversations in "
        "random order, 40 a second, so that some always wait; room for 6 conversations on the "
        "device, 12 in DRAM and all on disk; every policy has the same arrivals",
        full_s=160,
        quick_s=2,
        run=engine.run_policies,
        verdict=pictures.judge_policies,
        point="8B, 96 requests of 32 conversations, tiers for 6, 12 and 40 conversations",
        num_lines=9,
        plot=pictures.plot_policies,
    ),
    Item(
        name="store-fig22",
        title="AttentionStore Fig. 22: KV kept or invalidated when the window overflows",
        claim="hit rates fall by 17.6, 41.5, 18.1 and 18.4 points for LLaMA-13B, LLaMA-65B, "
        "LLaMA-70B and Falcon-40B if the KV contains positions",
        differs=SIMULATED,
        where=Where.CPU,
        full_s=480,
        quick_s=2,
        run=simulated.run_overflow,
        verdict=drawn.judge_overflow,
        point=ONE_SESSION,
        num_lines=8,
        is_simulated=True,
        agreement=AGREEMENT,
        plot=drawn.plot_overflow,
    ),
    Item(
        name="store-fig23",
        title="AttentionStore Fig. 23: how much storage a hit rate takes",
        claim="the hit rate is 51 % with a tenth of CCpUT (the storage for all sessions of one "
        "TTL) and 98 % with a quarter",
        differs=CAPACITY,
        where=Where.CPU,
        full_s=120,
        quick_s=2,
        run=simulated.run_capacity,
        verdict=drawn.judge_capacity,
        point="LLaMA-13B, TTL of one hour, 9,000 sessions with lengths times 2.1",
        num_lines=11,
        is_simulated=True,
        plot=drawn.plot_capacity,
    ),
    Item(
        name="store-fig24",
        title="AttentionStore Fig. 24: HBM alone, with DRAM, with SSDs",
        claim="hit rates of nearly 0 % on 10 GB of HBM, 1.7 to 19.1 % with 128 GB of DRAM, 71 to "
        "90 % with 10 TB of SSDs",
        differs=SIMULATED,
        where=Where.CPU,
        full_s=660,
        quick_s=2,
        run=simulated.run_media,
        verdict=drawn.judge_media,
        point=f"10 GB of HBM, {ONE_SESSION}",
        num_lines=12,
        is_simulated=True,
        agreement=AGREEMENT,
        plot=drawn.plot_media,
    ),
    LONG_DOCUMENTS,
    replace(
        LONG_DOCUMENTS,
        name="store-fig26",
        title="AttentionStore Fig. 26: time of a task, and answer throughput with long documents",
        claim="prefill falls from 41 % of a task to 1.2 %; up to 67 % more answer tokens a second",
        verdict=pictures.judge_tasks,
        plot=pictures.plot_tasks,
    ),
    TABLE_1,
    quality.on_qwen(
        TABLE_1,
        quality.run_perplexity,
        title=f"{TABLE_1.title}, Qwen2.5-Coder-1.5B",
        differs="16,384 tokens of WikiText-2 and a window of 2,048; also measured: a cut that "
        "keeps the pages with the most attention, and how often the likeliest token is the same as "
        "with the whole text",
        full_s=25,
        point="window of 2,048, 16,384 tokens of WikiText-2",
    ),
    TABLE_2,
    quality.on_qwen(
        TABLE_2,
        quality.run_questions,
        title=f"{TABLE_2.title}, Qwen2.5-Coder-1.5B",
        differs="questions about 24 paragraphs of XQuAD instead of MMLU, LongEval and PIQA, as for "
        "the smaller model. Other text, before or after the paragraph, fills the window of 1,024",
        full_s=45,
        point="154 questions about paragraphs of XQuAD",
    ),
)
