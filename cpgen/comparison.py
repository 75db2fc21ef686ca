"""Strategies side by side: which of them a model can have at a degree, and what each sends for an attention call."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from cpgen.constructor import whole_number_defaults
from cpgen.costs import RING_STEP, Attention, cost
from cpgen.diagnostics import CpgenError, fail
from cpgen.package import default_heads
from cpgen.plan import Plan
from cpgen.source import SourceTree
from cpgen.strategy import EXCHANGES, OUTERS, Exchange, Strategy, resolve
from cpgen.surgery.operate import operate
from cpgen.target import Target

TOKENS = 32_768  # about as many as Wan has for five seconds of 480p video
_BFLOAT16 = 2  # bytes
# What constructors call these, the usual name first.
_HEAD_DIM = ("attention_head_dim", "head_dim", "dim_head")
_KV_HEADS = ("num_key_value_heads", "num_key_value_attention_heads", "num_kv_heads", "kv_heads")


def choices(cp: int) -> list[Strategy]:
    """Every strategy of degree `cp`, hybrid with each Ulysses degree between 1 and `cp` and both outer exchanges."""
    inner = [degree for degree in range(2, cp) if cp % degree == 0]
    plain = [resolve(name, cp, None, None, False, None) for name in ("ulysses", "allgather", "ring")]
    return plain + [resolve("hybrid", cp, degree, outer, False, None) for degree in inner for outer in OUTERS]


def options(strategy: Strategy) -> str:
    """The strategy as `cpgen emit --strategy` takes it, with its other options where they are not the default."""
    if strategy.name != "hybrid":
        return strategy.name
    outer = f" --outer {strategy.outer}" if strategy.outer != OUTERS[0] else ""
    return f"hybrid --ulysses-degree {strategy.ulysses_degree}{outer}"


def in_words(collectives: dict[str, int]) -> str:
    """Numbers of collectives: 2 all-to-all, 3 ring steps."""
    return ", ".join(f"{n} {kind}{'s' if kind == RING_STEP and n > 1 else ''}" for kind, n in collectives.items())


def describe_costs(target: Target, plan: Plan, tree: SourceTree, cp: int, tokens: int, batch: int) -> str:
    """What each strategy of degree `cp` costs in an attention call of `tokens` tokens, as a table; or why it can't be.

    Raises CpgenError for sizes below 1, fewer tokens than ranks, or a plan whose heads the constructor doesn't have.
    """
    _check_sizes(cp, tokens, batch)
    heads = _Heads.of(target, plan)
    lines = [f"attention at --cp {cp}", f"  calls     {_calls(plan)}"]
    if cp == 1:
        return "\n".join([*lines, "  one rank has all tokens: nothing is sent under any strategy"]) + "\n"
    lines.append(f"  sizes     {tokens:,} tokens (--tokens), batch {batch} (--batch), {heads}, bfloat16")
    if not heads.known:
        lines.append("            N is the whole query: tokens x batch x heads x head dim x 2 bytes")
    lines += ["  below     what a rank sends for one call, and what it holds of keys and values in forward", ""]
    refused = _refused(target, plan, tree)
    rows: list[tuple[str, ...]] = [("--strategy", "sent in forward", "sent in backward", "K/V held")]
    for strategy in choices(cp):
        reason = heads.too_few(strategy) or refused.get(strategy.exchange)
        rows.append((options(strategy), *((f"no: {reason}",) if reason else _cells(strategy, heads, tokens, batch))))
    if all(strategy.name != "hybrid" for strategy in choices(cp)):
        rows.append(("hybrid", f"no: nothing between 1 and {cp} divides {cp}, for a Ulysses degree"))
    return "\n".join([*lines, *_aligned(rows), "", f"--load-balance  {_load_balance(plan)}"]) + "\n"


@dataclass(frozen=True)
class _Heads:
    """A model's attention heads, as its constructor defaults to them. None is what isn't written as a plain number."""

    count: int | None
    kv_count: int | None
    dim: int | None

    @classmethod
    def of(cls, target: Target, plan: Plan) -> _Heads:
        defaults = whole_number_defaults(target)
        count = default_heads(target, plan)
        kv_count = next((defaults[name] for name in _KV_HEADS if name in defaults), count)
        dim = next((defaults[name] for name in _HEAD_DIM if name in defaults), None)
        shared = count is not None and kv_count is not None and kv_count > 0 and count % kv_count == 0
        return cls(count, kv_count if shared else count, dim)

    @property
    def known(self) -> bool:
        return bool(self.count and self.dim)

    def __str__(self) -> str:
        if self.count is None:
            return "heads not known (ulysses needs as many as its degree)"
        groups = f" ({self.kv_count} of keys and values)" if self.kv_count != self.count else ""
        return f"{self.count} heads{groups} of {self.dim or 'unknown size'} by default"

    def too_few(self, strategy: Strategy) -> str | None:
        if self.count is None or self.count >= strategy.ulysses_degree:
            return None
        return f"{self.count} heads are fewer than {strategy.ulysses_degree} ranks"


def _cells(strategy: Strategy, heads: _Heads, tokens: int, batch: int) -> tuple[str, str, str]:
    # Where the number of heads is not known, one that divides gives the costs in N.
    count = heads.count or strategy.cp
    call = Attention(tokens, batch, count, heads.kv_count or count, heads.dim or 1, _BFLOAT16)
    found = cost(strategy, call)

    def size(value: Fraction) -> str:
        return _in_bytes(value) if heads.known else f"{float(value / call.size):.3g} N"

    forward, backward = (f"{size(each.sent)}: {in_words(each.collectives)}" for each in (found.forward, found.backward))
    return forward, backward, size(found.kv_held)


def _check_sizes(cp: int, tokens: int, batch: int) -> None:
    sizes = {"--cp": (cp, "degree"), "--tokens": (tokens, "number of tokens"), "--batch": (batch, "batch size")}
    for option, (value, what) in sizes.items():
        if value < 1:
            raise fail("CP403", f"{option} {value} is not a {what}: 1 or more")
    if tokens < cp:
        note = "every rank needs at least one token of each stream"
        raise fail("CP403", f"--tokens {tokens} is fewer than --cp {cp}", note=note)


def _calls(plan: Plan) -> str:
    sites = [site for function in plan.attention for site in function.sites]
    exchanging = [site for site in sites if site.streams]
    conditional = sum(site.when is not None and site.otherwise is None for site in exchanging)
    text = f"{len(exchanging)} exchanging tokens"
    if conditional:
        text += f" ({conditional} under its condition, else local)"
    local = len(sites) - len(exchanging)
    return f"{text}, {local} local (every rank has the keys)" if local else text


def _refused(target: Target, plan: Plan, tree: SourceTree) -> dict[Exchange, str]:
    """For each form of attention call that cannot be written into this source: why, in brief."""
    found = {}
    for exchange in EXCHANGES:
        try:
            operate(target, plan, exchange, "cpgen.runtime", tree)
        except CpgenError as error:
            others = len(error.findings) - 1
            found[exchange] = error.findings[0].message + (f" (and {others} more: cpgen plan lint)" if others else "")
    return found


def _load_balance(plan: Plan) -> str:
    sites = [site for function in plan.attention for site in function.sites if site.streams]
    causal = sum(site.kind == "causal" for site in sites)
    if not causal:
        return "no: there is no causal attention, so equal parts are equal work already"
    return (
        f"for causal calls ({causal} of {len(sites)}) under allgather, ring, hybrid: sends as much, evens out the work"
    )


def _in_bytes(count: Fraction) -> str:
    """A size in three digits: 140 MiB, 1.64 GiB."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1000:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Rows in columns; the last cell of a row with fewer cells runs on."""
    full = [row for row in rows if len(row) == len(rows[0])]
    widths = [max(len(row[i]) for row in full) for i in range(len(rows[0]))]
    widths[0] = max(len(row[0]) for row in rows)
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in rows]
