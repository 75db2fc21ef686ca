"""Strategies side by side on local CPU ranks, as Markdown tables: formulas beside counts, causal work, time.

    python -m benchmarks.strategies [--write docs/strategies.md]

Counts are the same on any machine, and the run fails where cpgen/costs.py says something else. Times are of gloo
between processes of one machine: they tell what exchanging and copying costs there, nothing about GPUs and networks.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

from benchmarks.strategy_cases import Counts, Times, counted, score_entries, timed
from cpgen.comparison import choices, in_words, options
from cpgen.costs import Attention, cost
from cpgen.strategy import Strategy
from cpgen.verify.pool import WorkerPool
from tools.sections import replace_section

DEGREES = (2, 4)
CALL = Attention(tokens=2048, batch=1, heads=8, kv_heads=8, head_dim=64, itemsize=4)
ROUNDS = 9
Table = list[list[str]]


def cost_table(pool: WorkerPool) -> Table:
    """For each degree and strategy, in units of N: what is sent and held by formula, and what every rank counted.

    Exits where these differ.
    """
    rows = [["cp", "strategy", "forward", "sent", "backward", "sent", "K/V held", "K/V kept"]]
    for cp in DEGREES:
        strategies = choices(cp)
        results = pool.run(counted, strategies, CALL, world_size=cp)
        for strategy, *ranks in zip(strategies, *results, strict=True):
            found = cost(strategy, CALL)
            said = Counts(
                found.forward.collectives,
                found.forward.sent,
                found.backward.collectives,
                found.backward.sent,
                found.kv_held,
                found.kv_kept,
            )
            if any(rank != said for rank in ranks):
                raise SystemExit(f"{options(strategy)}, cp {cp}: {said} by formula, but ranks counted {ranks}")
            rows.append([str(cp), f"`{options(strategy)}`", *_cells(said, ranks[0])])
    return rows


def work_table(pool: WorkerPool) -> Table:
    """For causal attention: the scores that each rank computes, of all S * S, without and with head-tail order."""
    cp = DEGREES[-1]
    ways = [
        replace(strategy, load_balance=balanced)
        for strategy in choices(cp)
        for balanced in ((False, True) if strategy.outer else (False,))
    ]
    scores = CALL.batch * CALL.heads * CALL.tokens**2
    rows = [["strategy", *(f"rank {rank}" for rank in range(cp)), "slowest / mean"]]
    for way, *entries in zip(ways, *pool.run(score_entries, ways, CALL, world_size=cp), strict=True):
        shares = [f"{each / scores:.1%}" for each in entries]
        rows.append([_name(way), *shares, f"{max(entries) * cp / sum(entries):.2f}"])
    return rows


def time_table(pool: WorkerPool) -> Table:
    """Times over those of ulysses at the same degree, by the clock and of CPU."""
    rows = [["cp", "strategy", "forward", "with backward", "forward, CPU", "with backward, CPU"]]
    for cp in DEGREES:
        strategies = choices(cp)
        best = [_best(rounds) for rounds in zip(*pool.run(timed, strategies, CALL, ROUNDS, world_size=cp), strict=True)]
        for strategy, times in zip(strategies, best, strict=True):
            ratios = [f"{ours / ulysses:.2f}" for ours, ulysses in zip(times, best[0], strict=True)]
            rows.append([str(cp), _name(strategy), *ratios])
    return rows


def _best(ranks: tuple[list[Times], ...]) -> tuple[float, ...]:
    """The best round, figure by figure: by the clock of the slowest rank, of CPU the sum over ranks."""
    rounds = list(zip(*ranks, strict=True))
    return (
        min(max(times.forward for times in each) for each in rounds),
        min(max(times.both for times in each) for each in rounds),
        min(sum(times.forward_cpu for times in each) for each in rounds),
        min(sum(times.both_cpu for times in each) for each in rounds),
    )


def _name(strategy: Strategy) -> str:
    return f"`{options(strategy)}{' --load-balance' if strategy.load_balance else ''}`"


def _cells(said: Counts, rank: Counts) -> list[str]:
    def both(of: Callable[[Counts], Fraction | int]) -> str:
        return " / ".join(f"{float(Fraction(of(each)) / CALL.size):.3g}" for each in (said, rank))

    return [
        in_words(rank.forward),
        both(lambda each: each.sent),
        in_words(rank.backward),
        both(lambda each: each.sent_back),
        both(lambda each: each.kv_held),
        both(lambda each: each.kv_kept),
    ]


def markdown(table: Table) -> str:
    head, *rows = (f"| {' | '.join(row)} |\n" for row in table)
    return head + "|" + " --- |" * len(table[0]) + "\n" + "".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the tables between its markers")
    write = parser.parse_args().write
    with WorkerPool(max(DEGREES)) as pool:
        tables = {"costs": cost_table(pool), "work": work_table(pool), "time": time_table(pool)}
    for name, table in tables.items():
        if write is None:
            print(markdown(table))
        else:
            replace_section(write, name, markdown(table))


if __name__ == "__main__":
    main()
