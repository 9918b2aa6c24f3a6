"""Hard packing by its definition, slowly; imports nothing from tundish."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate

FIELDS = ("dataset_id", "indices", "indices_cu_len", "start_offset", "end_offset", "longest")


def hard_pack(
    datasets: list[list[int]], orders: list[list[int]], max_length: int, drop_last: bool = True
) -> dict[str, list[int]]:
    """The six columns, by the definition over cumulative lengths."""
    columns: dict[str, list[int]] = {name: [] for name in FIELDS}
    for number, (lengths, order) in enumerate(zip(datasets, orders, strict=True)):
        cu = [0, *accumulate(lengths[sample] for sample in order)]
        total = cu[-1]
        packs = total // max_length if drop_last else -(-total // max_length)
        for pack in range(packs):
            begin, end = pack * max_length, min((pack + 1) * max_length, total)
            first = bisect_right(cu, begin) - 1
            last = bisect_left(cu, end) - 1
            columns["dataset_id"].append(number)
            columns["indices"].extend(order[first : last + 1])
            columns["indices_cu_len"].append(len(columns["indices"]))
            columns["start_offset"].append(begin - cu[first])
            columns["end_offset"].append(end - cu[last])
            columns["longest"].append(
                max(min(cu[s + 1], end) - max(cu[s], begin) for s in range(first, last + 1))
            )
    return columns


def pieces(columns: dict[str, list[int]], lengths: list[list[int]], pack: int) -> list[tuple[int, int, int]]:
    """Sample, start and stop of each piece of a pack."""
    begin = columns["indices_cu_len"][pack - 1] if pack else 0
    samples = columns["indices"][begin : columns["indices_cu_len"][pack]]
    own = lengths[columns["dataset_id"][pack]]
    found = [[sample, 0, own[sample]] for sample in samples]
    found[0][1] = columns["start_offset"][pack]
    found[-1][2] = columns["end_offset"][pack]
    return [(sample, start, stop) for sample, start, stop in found]
