"""BatchLLM (large batched inference with global prefix sharing): its figures and tables."""

from mainstem_bench.paper import batchllm_plans as plans
from mainstem_bench.paper.item import Item, Where

ITEMS: tuple[Item, ...] = (
    Item(
        name="batch-fig7",
        title="BatchLLM Fig. 7: lengths in the industry workload",
        claim="prefixes of about 1,570 tokens, own contexts of about 30, 3 prompts to a prefix",
        differs="the authors' data is not public: lengths are drawn with the averages they give",
        where=Where.CPU,
        full_s=15,
        quick_s=1,
        run=plans.run_lengths,
        verdict=plans.judge_lengths,
        plot=plans.plot_lengths,
    ),
    Item(
        name="batch-fig8",
        title="BatchLLM Fig. 8: prompt tokens saved, by degree and prefix",
        claim="85.2 % saved at degree 16 and prefix 2,000 (vLLM 40.1 %); 92.6 % at prefix 16,000 "
        "(vLLM 6.3 %, SGLang 5.2 %)",
        differs="the LRU cache is modelled: one prompt at a time in 450,000 tokens of KV. Real "
        "engines run many prompts at once and find less",
        where=Where.CPU,
        full_s=120,
        quick_s=2,
        run=plans.run_saving,
        verdict=plans.judge_saving,
        plot=plans.plot_saving,
    ),
    Item(
        name="batch-levels",
        title="BatchLLM 6.2.2: many levels of prefixes against one enlarged level",
        claim="56 % saved with many levels, 55 % with one enlarged level",
        differs="lengths are drawn; with the stated degree of 3 the limit is 64 %, not 58 %",
        where=Where.CPU,
        full_s=10,
        quick_s=1,
        run=plans.run_levels,
        verdict=plans.judge_levels,
        plot=plans.plot_levels,
    ),
    Item(
        name="batch-overhead",
        title="BatchLLM 6.3.4: seconds of planning",
        claim="1.51 s for 8,000 requests, against 919.54 s of running them",
        differs="a slower processor (one Neoverse-N1 core); numpy instead of Python objects",
        where=Where.CPU,
        full_s=30,
        quick_s=1,
        run=plans.run_overhead,
        verdict=plans.judge_overhead,
        plot=plans.plot_overhead,
    ),
)
