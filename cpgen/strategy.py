"""Strategies: how an attention call sees the whole sequence, and which of them a request can have."""

from __future__ import annotations

from dataclasses import dataclass

from cpgen.diagnostics import did_you_mean, fail

STRATEGIES = ("ulysses", "allgather", "ring", "hybrid")
OUTERS = ("allgather", "ring")


@dataclass(frozen=True)
class Exchange:
    """What is written around each attention call: Ulysses, an outer exchange, or Ulysses inside an outer one."""

    ulysses: bool
    outer: str | None  # "allgather" or "ring"
    balanced: bool = False  # streams are cut in head-tail order

    @property
    def before_the_call(self) -> bool:
        """Whether query, key and value are exchanged ahead of the call, not only inside of it."""
        return self.ulysses or self.outer == "allgather"


# Every form that the emitted code of an attention call can take.
EXCHANGES = (Exchange(True, None), *(Exchange(ulysses, outer) for ulysses in (False, True) for outer in OUTERS))


@dataclass(frozen=True)
class Strategy:
    """A strategy with its degrees: `ulysses_degree` ranks trade tokens for heads, `outer` connects those groups."""

    name: str
    cp: int
    ulysses_degree: int
    outer: str | None
    load_balance: bool = False

    @property
    def exchange(self) -> Exchange:
        """What is emitted: hybrid with a Ulysses degree of 1 or of cp is the strategy that it amounts to."""
        if self.outer is None or (self.ulysses_degree == self.cp and self.cp > 1):
            return Exchange(True, None)
        return Exchange(self.ulysses_degree > 1, self.outer, self.load_balance)


def resolve(
    name: str, cp: int, ulysses_degree: int | None, outer: str | None, load_balance: bool, heads: int | None
) -> Strategy:
    """The strategy that options ask for. `heads` is the number of attention heads, where it is known.

    Raises CpgenError for an unknown strategy, options of another one, or a degree that does not fit.
    """
    if name not in STRATEGIES:
        note = did_you_mean(name, STRATEGIES) or f"strategies: {', '.join(STRATEGIES)}"
        raise fail("CP403", f"unknown strategy '{name}'", note=note)
    if outer is not None and outer not in OUTERS:
        note = did_you_mean(outer, OUTERS) or f"outer exchanges: {', '.join(OUTERS)}"
        raise fail("CP403", f"unknown outer exchange '{outer}'", note=note)
    if name != "hybrid":
        for given, option in ((ulysses_degree, "--ulysses-degree"), (outer, "--outer")):
            if given is not None:
                raise fail(
                    "CP403", f"{option} belongs to the hybrid strategy, not to {name}", help="add --strategy hybrid"
                )
        chosen = Strategy(name, cp, cp if name == "ulysses" else 1, None if name == "ulysses" else name, load_balance)
    else:
        degree = _default_degree(cp, heads) if ulysses_degree is None else ulysses_degree
        if degree < 1 or cp % degree:
            divisors = [n for n in range(1, cp + 1) if cp % n == 0]
            raise fail(
                "CP403",
                f"--ulysses-degree {degree} does not divide --cp {cp}",
                note=f"its divisors: {', '.join(map(str, divisors))}",
            )
        chosen = Strategy(name, cp, degree, outer or "allgather", load_balance)
    if load_balance and chosen.exchange.outer is None:
        raise fail(
            "CP403",
            "--load-balance has nothing to balance under ulysses",
            note="every rank has all tokens of its heads there, so causal work is even already",
            help="leave it out, or use it with allgather, ring, or hybrid with a Ulysses degree below cp",
        )
    return chosen


def _default_degree(cp: int, heads: int | None) -> int:
    """As much Ulysses as there are heads for, with at least two groups of it where cp allows that."""
    return max(n for n in range(1, max(cp, 2)) if cp % n == 0 and (heads is None or n <= heads))
