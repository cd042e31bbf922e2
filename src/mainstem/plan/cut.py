"""A plan cut into bundles for many workers.

Members are in the plan's order, so neighbours share prefixes. The cost of a range is the prefix of
its first member, plus what each member adds to the one before it:

    members   | group | group |      group      | group | ...
    new_s       9 1 1   7 1 1   8 1 1 1 1 1 1 1   5 1         what a member adds to the one before
    path_s      0 8 8   0 6 6   0 7 7 7 7 7 7 7   0 4         what it shares with the one before
    range                             [---------]             7 + 1 + 1 + 1 + 1

A range that begins within a group pays for the group's prefix again. Ranges are assigned longest
first (longest-processing-time-first), each to the worker with the least to do; only a range that
exceeds the average share is split. If shares are still uneven, ranges that do not fit under a
common limit are split too, and the lowest such limit is searched for. Last, each worker's share is
cut into bundles, small enough that other workers can take the last ones of a slow worker.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from itertools import pairwise

import numpy as np

from mainstem.core.errors import ConfigError
from mainstem.core.plan import Float64s, Int64s, Plan
from mainstem.plan.cost import TokenCosts, token_costs
from mainstem.plan.order import shared_with_next

BUNDLES_PER_SHARE = 16
# pairs of numbers, tried in this order. First: a range may begin with a group if what the group
# shares with the one before costs at most this part of the group. Second: the last part of a range
# that is searched for the cheapest place to split it
WAYS_TO_CUT = ((0.05, 0.03), (0.5, 0.03), (0.5, 0.2), (1.0, 0.03))
BUNDLE_LEEWAY = 0.5  # the second number for bundles
BALANCE = 1.05  # if the longest share / mean is at most this, no more groups are split
LIMITS_TRIED = 8
MOST_EXCHANGED = 64  # ranges; if there are more, shares are balanced without exchanges

Range = tuple[int, int]
Dealt = Int64s  # [ranges, 3] worker, begin and end, sorted by begin


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """Bundles of a plan, by worker and then in the plan's order; each member is in one of them.

    Seconds are estimates. The seconds of a bundle are what it adds to the bundles before it in its
    share.
    """

    begins: Int64s  # [bundles] first member, a place in `Plan.members`
    ends: Int64s  # [bundles] one past the last
    workers: Int64s  # [bundles] the worker whose share it is in
    seconds: Float64s  # [bundles]
    share_s: Float64s  # [workers]
    whole_s: float  # seconds of the uncut plan
    dearest_s: float  # seconds of the most expensive row alone
    prompt_tokens: int
    computed_tokens: int  # prompt tokens that the plan computes
    repeated_tokens: int  # prompt tokens that are computed again because of the cut

    @property
    def num_workers(self) -> int:
        return len(self.share_s)

    @property
    def balance(self) -> float:
        """The longest share / the mean share."""
        mean_s = float(self.share_s.mean())
        return float(self.share_s.max()) / mean_s if mean_s else 1.0

    @property
    def saving(self) -> float:
        """The share of prompt tokens that the plan does not compute."""
        return 1 - self.computed_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def lost_saving(self) -> float:
        """The part of `saving` that the cut loses."""
        return self.repeated_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def check(self, plan: Plan) -> None:
        """Raise if a member is missing or occurs twice."""
        by_place = np.argsort(self.begins, kind="stable")
        begins, ends = self.begins[by_place], self.ends[by_place]
        assert np.all(begins < ends), "a bundle is empty"
        assert np.array_equal(begins[1:], ends[:-1]), "a member is missing or occurs twice"
        if len(plan.members):
            assert begins[0] == 0, "the first member is missing"
            assert ends[-1] == len(plan.members), "the last member is missing"


def cut_plan(
    plan: Plan,
    prompt_tokens: Int64s,
    expected_tokens: Float64s,
    num_workers: int,
    costs: TokenCosts | None = None,
) -> Cut:
    """Cut a plan for `num_workers` workers; token counts are by prompt index."""
    if num_workers < 1:
        raise ConfigError(f"a plan is cut for at least one worker, got {num_workers}")
    line = _Line(plan, prompt_tokens, expected_tokens, costs or token_costs())
    dealt = _deal_all(line, plan, num_workers)
    return _bundled(line, dealt, num_workers)


# --- costs of ranges -----------------------------------------------------------------------------


class _Line:
    """Seconds of any range of members."""

    def __init__(
        self, plan: Plan, prompt_tokens: Int64s, expected_tokens: Float64s, costs: TokenCosts
    ) -> None:
        lengths = prompt_tokens[plan.members].astype(np.float64)
        outputs = expected_tokens[plan.members]
        self.shared = shared_with_next(plan)
        before = np.zeros(len(lengths) + 1, dtype=np.float64)
        before[1:] = self.shared
        own = lengths - plan.node_tokens[plan.member_nodes]
        decode_s = outputs * (costs.output_s + costs.key_s * (own + outputs / 2))
        alone_s = _prefill_s(costs, lengths) + decode_s
        self.path_s = _prefill_s(costs, before)  # [members + 1]
        self.sums = np.zeros(len(lengths) + 1)  # [members + 1] sums of what members add
        np.cumsum(alone_s - self.path_s[:-1], out=self.sums[1:])
        self.costs = costs
        self.dearest_s = float(alone_s.max(initial=0.0))
        self.prompt_tokens = int(lengths.sum())
        self.computed_tokens = self.prompt_tokens - int(before.sum())

    def __len__(self) -> int:
        return len(self.shared)

    def seconds(self, begin: int, end: int) -> float:
        """Seconds of a range if nothing of it is cached."""
        return float(self.sums[end] - self.sums[begin] + self.path_s[begin])

    def fit(self, begin: int, end: int, room_s: float, leeway: float) -> int:
        """Return where to cut a range so that its first part takes at most `room_s`; `begin` if not
        even one row fits.

        Among the last cuts that fit, it takes the cut with the smallest prefix to compute again.
        """
        limit = self.sums[begin] - self.path_s[begin] + room_s
        last = min(end, int(np.searchsorted(self.sums, limit, side="right")) - 1)
        if last <= begin:
            return begin
        least = self.sums[begin] + (1 - leeway) * (self.sums[last] - self.sums[begin])
        first = max(begin + 1, int(np.searchsorted(self.sums, least)))
        cuts = self.path_s[first : last + 1][::-1]
        return last - int(np.argmin(cuts)) if len(cuts) else last


def _prefill_s(costs: TokenCosts, tokens: Float64s) -> Float64s:
    """Seconds to compute the first tokens of a prompt."""
    return tokens * (costs.prompt_s + costs.pair_s / 2 * tokens)


# --- dealing -------------------------------------------------------------------------------------


def _deal_all(line: _Line, plan: Plan, num_workers: int) -> Dealt:
    """Return the first assignment that is balanced, or else the one whose longest share is the
    shortest."""
    mean_s = line.seconds(0, len(line)) / num_workers
    least_s = max(mean_s, line.dearest_s)
    best, longest_s = None, math.inf
    for cheap_cut, leeway in WAYS_TO_CUT:
        ranges = _whole_groups(line, plan, mean_s / BUNDLES_PER_SHARE, cheap_cut)
        for found in _deals(line, ranges, num_workers, least_s, leeway):
            shares = _share_s(line, found, num_workers)
            if shares.max() < longest_s:
                best, longest_s = found, float(shares.max())
            if shares.max() <= BALANCE * max(float(shares.mean()), line.dearest_s):
                return found
    assert best is not None, "without a limit everything fits"
    return best


def _deals(
    line: _Line, ranges: list[Range], num_workers: int, least_s: float, leeway: float
) -> Iterator[Dealt]:
    """Yield assignments to try: first only ranges that exceed a share are split; then ranges are
    exchanged for balance; then ranges are split under lower and lower limits."""
    parts = _parted(line, ranges, least_s)
    found = _deal_under(math.inf, line, parts, num_workers, leeway)
    assert found is not None, "without a limit everything fits"
    yield found
    if len(found) <= MOST_EXCHANGED:
        yield _evened(line, found, num_workers)
    low_s, high_s = least_s, float(_share_s(line, found, num_workers).max())
    for _ in range(LIMITS_TRIED):
        limit_s = (low_s + high_s) / 2
        found = _deal_under(limit_s, line, ranges, num_workers, leeway)
        if found is None:
            low_s = limit_s
            continue
        high_s = limit_s
        yield found
        if len(found) <= MOST_EXCHANGED:
            yield _evened(line, found, num_workers)


def _evened(line: _Line, dealt: Dealt, num_workers: int) -> Dealt:
    """Move a range of the longest share to another, or exchange two, as long as that makes the
    longest share shorter."""
    shares = _share_s(line, dealt, num_workers)
    while True:
        longest = int(shares.argmax())
        mine = np.flatnonzero(dealt[:, 0] == longest).tolist()
        others = np.flatnonzero(dealt[:, 0] != longest).tolist()
        best, best_shares = dealt, shares
        for given in mine:
            for place in range(num_workers + len(others)):
                tried = dealt.copy()
                if place < num_workers:
                    tried[given, 0] = place
                else:
                    taken = others[place - num_workers]
                    tried[[given, taken], 0] = tried[[taken, given], 0]
                found = _share_s(line, tried, num_workers)
                if found.max() < best_shares.max():
                    best, best_shares = tried, found
        if best is dealt:
            return dealt
        dealt, shares = best, best_shares


def _whole_groups(line: _Line, plan: Plan, grain_s: float, cheap_cut: float) -> list[Range]:
    """Return ranges of whole groups. Neighbours are joined up to `grain_s`; a larger group is a
    range of its own. Ranges begin where little is shared with the range before, so that any worker
    can take them.
    """
    starts, ends = plan.group_starts[:-1], plan.group_starts[1:]
    least_s = np.maximum(grain_s, line.sums[ends] - line.sums[starts])
    is_free = line.path_s[starts] <= cheap_cut * least_s
    places = np.append(starts[is_free], len(line))
    sums = line.sums[places]
    found: list[Range] = []
    here = 0
    while here < len(places) - 1:
        after = int(np.searchsorted(sums, sums[here] + grain_s, side="right")) - 1
        after = max(after, here + 1)
        found.append((int(places[here]), int(places[after])))
        here = after
    return found


def _parted(line: _Line, ranges: list[Range], most_s: float) -> list[Range]:
    """Return the same ranges, but ranges that exceed `most_s` are split into equal parts."""
    found: list[Range] = []
    for begin, end in ranges:
        seconds = line.seconds(begin, end)
        if seconds > most_s and end - begin > 1:
            num_parts = min(end - begin, math.ceil(seconds / most_s))
            aims = np.linspace(line.sums[begin], line.sums[end], num_parts + 1)[1:-1]
            inner = np.clip(np.searchsorted(line.sums, aims), begin + 1, end - 1)
            cuts = [begin, *np.unique(inner).tolist(), end]
            found += pairwise(cuts)
        else:
            found.append((begin, end))
    return found


def _deal_under(
    limit_s: float, line: _Line, ranges: list[Range], num_workers: int, leeway: float
) -> Dealt | None:
    """Assign ranges, longest first, each to the worker with the least work. The part that exceeds
    the limit goes back to the queue. Returns None if a row does not fit.
    """
    queue = [(-line.seconds(begin, end), begin, end) for begin, end in ranges]
    heapify(queue)
    loads = [(0.0, worker) for worker in range(num_workers)]
    found: list[tuple[int, int, int]] = []
    while queue:
        minus_s, begin, end = heappop(queue)
        load_s, worker = loads[0]
        if load_s - minus_s > limit_s:
            cut = line.fit(begin, end, limit_s - load_s, leeway)
            if cut == begin:
                return None
            if cut < end:
                heappush(queue, (-line.seconds(cut, end), cut, end))
                minus_s, end = -line.seconds(begin, cut), cut
        found.append((worker, begin, end))
        heapreplace(loads, (load_s - minus_s, worker))
    return _sorted(found)


def _sorted(ranges: list[tuple[int, int, int]]) -> Dealt:
    table = np.array(ranges, dtype=np.int64).reshape(-1, 3)
    return table[np.argsort(table[:, 1], kind="stable")]


# --- bundles -------------------------------------------------------------------------------------


def _bundled(line: _Line, dealt: Dealt, num_workers: int) -> Cut:
    """Cut the shares into bundles."""
    grain_s = float(_share_s(line, dealt, num_workers).mean()) / BUNDLES_PER_SHARE
    rows: list[tuple[int, int, int]] = []
    for worker, begin, end in dealt.tolist():
        here = begin
        while here < end:
            after = line.fit(here, end, float(line.path_s[here]) + grain_s, BUNDLE_LEEWAY)
            after = max(after, here + 1)
            rows.append((worker, here, after))
            here = after
    table = _sorted(rows)
    seconds, repeated = _costs(line, table)
    by_worker = np.argsort(table[:, 0], kind="stable")
    workers, begins, ends = table[by_worker].T
    return Cut(
        begins=begins,
        ends=ends,
        workers=workers,
        seconds=seconds[by_worker],
        share_s=np.bincount(workers, seconds[by_worker], num_workers).astype(np.float64),
        whole_s=line.seconds(0, len(line)),
        dearest_s=line.dearest_s,
        prompt_tokens=line.prompt_tokens,
        computed_tokens=line.computed_tokens,
        repeated_tokens=repeated,
    )


def _share_s(line: _Line, dealt: Dealt, num_workers: int) -> Float64s:
    seconds, _ = _costs(line, dealt)
    return np.bincount(dealt[:, 0], seconds, num_workers).astype(np.float64)


def _costs(line: _Line, dealt: Dealt) -> tuple[Float64s, int]:
    """Return [ranges] the seconds that each range adds to the ranges before it in its share, and
    the number of tokens that are computed again."""
    workers, begins, ends = dealt.T
    known = _known_tokens(line, workers, begins, ends)
    path = np.zeros(len(begins))
    path[begins > 0] = line.shared[begins[begins > 0] - 1]
    repeated_s = _prefill_s(line.costs, path) - _prefill_s(line.costs, known)
    seconds: Float64s = line.sums[ends] - line.sums[begins] + repeated_s
    return seconds, int((path - known).sum())


def _known_tokens(line: _Line, workers: Int64s, begins: Int64s, ends: Int64s) -> Float64s:
    """Return [ranges] how many leading tokens the worker has from the previous range of its share.

    Ranges are sorted and cover all members. Two ranges share the minimum of what neighbouring
    members share, from the end of the first range to the beginning of the second.
    """
    count = len(begins)
    known = np.zeros(count)
    if not count:
        return known
    # least[0][k]: the least that neighbours share within range k, and between it and the next range
    least = [np.minimum.reduceat(line.shared, begins)]
    while 2 << (len(least) - 1) <= count:  # least[j][k]: over 2**j ranges
        half = 1 << (len(least) - 1)
        least.append(np.minimum(least[-1][:-half], least[-1][half:]))
    by_worker = np.argsort(workers, kind="stable")
    is_after = np.diff(workers[by_worker]) == 0
    earlier, later = by_worker[:-1][is_after], by_worker[1:][is_after]
    common = line.shared[ends[earlier] - 1].astype(np.float64)
    first, sizes = earlier + 1, later - earlier - 1
    levels = np.frexp(np.maximum(sizes, 1))[1] - 1
    for level, minima in enumerate(least):
        chosen = (sizes > 0) & (levels == level)
        begin, end = first[chosen], first[chosen] + sizes[chosen] - (1 << level)
        common[chosen] = np.minimum(common[chosen], np.minimum(minima[begin], minima[end]))
    known[later] = common
    return known
