"""Small workloads that share a lot, for hypothesis."""

from hypothesis import strategies as st

PromptLists = list[list[int]]


@st.composite
def prompt_lists(draw: st.DrawFn, max_prompts: int = 12) -> PromptLists:
    """Prompts of few different tokens, many made from earlier ones: prefixes, copies, empty
    ones."""
    token = st.integers(0, 2)
    prompts: PromptLists = []
    for _ in range(draw(st.integers(0, max_prompts))):
        head: list[int] = []
        if len(prompts) > 0 and draw(st.booleans()):
            parent = draw(st.sampled_from(prompts))
            head = parent[: draw(st.integers(0, len(parent)))]
        prompts.append(head + draw(st.lists(token, max_size=6)))
    return prompts
