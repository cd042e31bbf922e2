"""BatchLLM (large batched inference with global prefix sharing): its figures and tables."""

from mainstem_bench.paper import batchllm_jobs as jobs
from mainstem_bench.paper import batchllm_kernel as kernel
from mainstem_bench.paper import batchllm_plans as plans
from mainstem_bench.paper import batchllm_steps as steps
from mainstem_bench.paper import projections
from mainstem_bench.paper.item import Item, Where

ON_H200 = "an H200 instead of an A100 and an MI200 (no AMD card here); "
RANDOM = "random weights (the time is the same); "

BATCHING = (
    ON_H200
    + RANDOM
    + "the stored lines have 600 requests instead of 3,000; lengths are drawn with "
    "the averages of the industry workload (Fig. 7), answers as long as ShareGPT's; without the "
    "paper's token batching means `--max-seqs 256 --no-reorder` in our engine, not vLLM. What "
    "reordering alone gains was only simulated, with 2,001 requests: 55.9 requests/s become 56.0 "
    "(`mainstem bench valleys`)"
)

ITEMS: tuple[Item, ...] = (
    Item(
        name="batch-fig2",
        title="BatchLLM Fig. 2: tokens in each step of a baseline",
        claim="vLLM's chunked prefill has valleys: many steps with few tokens",
        differs=BATCHING,
        full_s=1300,
        quick_s=6,
        run=steps.run_baseline,
        verdict=steps.judge_baseline,
        point="Qwen2.5-7B, 600 requests",
        num_lines=1,
        plot=steps.plot_baseline,
    ),
    Item(
        name="batch-fig5",
        title="BatchLLM Fig. 5: throughput of three mixes, 4 and 16 prompts per prefix (the "
        "degree), 8B",
        claim="1.4 to 3 times vLLM (prefix caching, chunked prefill) and 1.2 to 2.5 times SGLang "
        "on an A100; 1.8 to 4.1 and 1.3 to 2.8 times on an MI200",
        differs=ON_H200
        + RANDOM
        + "vLLM and SGLang ran two of the six mixes, with 1,600 and 1,000 requests. 8 % of the "
        "paper's job (of the 6,400 requests of its Fig. 6, and of about 450,000 tokens of KV) is "
        "to be compared with our own engine with `--share storage --no-plan`, but was not yet run, "
        "as little as the other mixes. The stored lines are of `mainstem bench offline`",
        full_s=150,
        quick_s=4,
        run=jobs.run_mixes,
        verdict=jobs.judge_mixes,
        point="8B, prefixes of 2,000 tokens, 1,600 requests with 200 own tokens and degree 16, "
        "1,000 requests with 1,000 own tokens and degree 4",
        num_lines=4,
        plot=jobs.plot_mixes,
    ),
    Item(
        name="batch-fig5-large",
        title="BatchLLM Fig. 5: throughput of three mixes, 4 and 16 prompts per prefix (the "
        "degree), 14B and 70B",
        claim="1.4 to 3 times vLLM (prefix caching, chunked prefill) on an A100; the gain is the "
        "same from 7B to 70B",
        differs=ON_H200 + RANDOM + "64 to 320 requests, so an LRU cache never misses; no other "
        "engine ran these jobs: the baseline is our own engine with `--share storage --no-plan`",
        full_s=240,
        quick_s=4,
        run=jobs.run_large,
        verdict=jobs.judge_large,
        point="14B and 70B in 4 bits, 64 to 320 requests, all of which fit the KV memory",
        num_lines=12,
        plot=jobs.plot_large,
    ),
    Item(
        name="batch-fig6",
        title="BatchLLM Fig. 6: throughput by degree and prefix",
        claim="1.7 times vLLM at degree 2 and prefix 2,000, up to 10.8 times at degree 16 and "
        "prefix 16,000",
        differs=ON_H200
        + RANDOM
        + "vLLM ran 240 requests at 16,000 tokens and degree 4, and 1,600 at 2,000 and degree 16. "
        "The stored lines are of `mainstem bench offline`; points without a rival, where the "
        "baseline is our own engine with an LRU cache (512 requests, 36,000 tokens of KV), were "
        "not yet run",
        full_s=190,
        quick_s=4,
        run=jobs.run_grid,
        verdict=jobs.judge_grid,
        point="8B, 1,600 requests with prefixes of 2,000 tokens and degree 16, 240 requests with "
        "16,000 and 4",
        num_lines=6,
        plot=jobs.plot_grid,
    ),
    Item(
        name="batch-fig7",
        title="BatchLLM Fig. 7: lengths in the industry workload",
        claim="prefixes have about 1,570 tokens, the rest of a prompt about 30; 3 prompts per "
        "prefix",
        differs="the authors' data is not public: lengths are drawn with the averages they give",
        where=Where.CPU,
        full_s=15,
        quick_s=1,
        run=plans.run_lengths,
        verdict=plans.judge_lengths,
        point="8,000 drawn requests",
        num_lines=3,
        plot=plans.plot_lengths,
    ),
    Item(
        name="batch-fig8",
        title="BatchLLM Fig. 8: prompt tokens saved, by degree and prefix",
        claim="85.2 % saved at degree 16 and prefix 2,000 (vLLM 40.1 %); 92.6 % at prefix 16,000 "
        "(vLLM 6.3 %, SGLang 5.2 %)",
        differs="nothing is run: what the plan saves is counted in the prompts, and the LRU cache "
        "is modelled, one prompt at a time in 450,000 tokens of KV. Real engines run many prompts "
        "at once",
        where=Where.CPU,
        full_s=120,
        quick_s=2,
        run=plans.run_saving,
        verdict=plans.judge_saving,
        point="8B, 6,400 requests, degree 16, prefixes of 2,000 and 16,000",
        is_papers_point=True,
        num_lines=20,
        is_simulated=True,
        plot=plans.plot_saving,
    ),
    Item(
        name="batch-fig9",
        title="BatchLLM Fig. 9: tokens in each step, token batching on",
        claim="with token batching, there are fewer valleys than in Fig. 2 (nothing is shared in "
        "either)",
        differs=BATCHING,
        full_s=1300,
        quick_s=6,
        run=steps.run_both,
        verdict=steps.judge_both,
        point="Qwen2.5-7B, 600 requests",
        num_lines=2,
        plot=steps.plot_both,
    ),
    Item(
        name="batch-fig10",
        title="BatchLLM Fig. 10: attention over shared prefixes",
        claim="similar to FlashInfer's cascade or faster on an A100, in decode steps and steps "
        "with chunks, apart from some bad cases where the shared part is long",
        differs=ON_H200
        + "8B's heads; newer rivals (FlashInfer 0.6.12, FlashAttention-3), which were "
        "timed on decodes only. The paper fuses shared and own parts into one launch; on this card "
        "large units, small units and merging are up to three launches that overlap",
        full_s=15,
        quick_s=1,
        run=kernel.run_cases,
        verdict=kernel.judge_cases,
        point="256 decodes, 32 query heads over 8 KV heads, four shapes",
        num_lines=15,
        plot=kernel.plot_cases,
    ),
    Item(
        name="batch-tab1",
        title="BatchLLM Table 1: the industry workload",
        claim="8.67 requests/s, 1.30 times vLLM's best (A100); 4.24, 1.26 times (MI200)",
        differs=ON_H200
        + RANDOM
        + "600 requests instead of 8,000, with 135,000 tokens of KV; lengths "
        "are drawn (Fig. 7); the baseline is our own engine with an LRU cache, not vLLM",
        full_s=180,
        quick_s=3,
        run=jobs.run_industry,
        verdict=jobs.judge_industry,
        point="Qwen2.5-7B, 600 requests, 135,000 tokens of KV",
        num_lines=3,
        plot=jobs.plot_industry,
    ),
    Item(
        name="batch-tab2",
        title="BatchLLM Table 2: token batching off and on",
        claim="token batching raises 5.79 requests/s to 5.94 without shared prefixes, and 8.16 to "
        "8.47 with them (A100)",
        differs=BATCHING,
        full_s=1300,
        quick_s=6,
        run=steps.run_table,
        verdict=steps.judge_table,
        point="Qwen2.5-7B, 600 requests",
        num_lines=4,
        plot=steps.plot_table,
    ),
    Item(
        name="batch-amd",
        title="BatchLLM Fig. 5 and Table 1 on an AMD card",
        claim="1.8 to 4.1 times vLLM and 1.3 to 2.8 times SGLang on an MI200",
        differs="we have no AMD card; the numbers are projected from its data sheet",
        where=Where.CPU,
        full_s=1,
        quick_s=1,
        run=projections.run_batch,
        verdict=projections.judge_batch,
        point="8B on one die of an MI200",
        num_lines=4,
    ),
    Item(
        name="batch-levels",
        title="BatchLLM 6.2.2: many levels of prefixes against one enlarged level",
        claim="56 % saved with many levels, 55 % with one enlarged level",
        differs="drawn lengths (Fig. 7); with 3 prompts per prefix, as the paper states, up to two "
        "thirds can be saved; the paper gives 58 % as the most that its workload allows",
        where=Where.CPU,
        full_s=10,
        quick_s=1,
        run=plans.run_levels,
        verdict=plans.judge_levels,
        point="8,000 drawn requests",
        num_lines=1,
        plot=plans.plot_levels,
    ),
    Item(
        name="batch-overhead",
        title="BatchLLM 6.3.4: seconds of planning",
        claim="planning 8,000 requests takes 1.51 s, and running them 919.54 s",
        differs="one core of another processor; numpy arrays instead of Python objects; drawn "
        "lengths (Fig. 7)",
        where=Where.CPU,
        full_s=30,
        quick_s=1,
        run=plans.run_overhead,
        verdict=plans.judge_overhead,
        point="8,000 drawn requests",
        num_lines=5,
        plot=plans.plot_overhead,
    ),
)
