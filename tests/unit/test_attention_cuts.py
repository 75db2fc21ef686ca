"""Two forms in attention functions: several calls in one statement, and cuts behind the calls. Before and after."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.before_and_after import code, findings
from tests.unit.projects import function_in, module_text, operated, plan_text

DIFFERENCE = """
def __call__(self, attn, q1, q2, k1, k2, v, mask):
    out = dispatch_attention_fn(q1, k1, v, mask) - dispatch_attention_fn(
        q2, k2, v, attn_mask=mask, is_causal=False
    )
    return out
"""
BOTH = "[{call: 0, kind: self, stream: latent}, {call: 1, kind: self, stream: latent}]"


@pytest.mark.parametrize(
    ("strategy", "inside"),
    [
        ("ulysses", "trading_heads(dispatch_attention_fn)"),
        ("allgather", "gathering_kv(dispatch_attention_fn)"),
        ("ring", "ring_attention(dispatch_attention_fn)"),
        ("ulysses in allgather", "trading_heads(cp_0.gathering_kv(dispatch_attention_fn))"),
        ("ulysses in ring", "trading_heads(cp_0.ring_attention(dispatch_attention_fn))"),
    ],
)
def test_calls_in_one_statement_exchange_inside(tmp_path: Path, strategy: str, inside: str) -> None:
    """They read the same values, which must not be exchanged twice over; masks go with the call."""
    text = operated(tmp_path, module_text(call=code(DIFFERENCE)), plan_text(sites=BOTH), strategy)
    reason = "  # cpgen: all tokens, by an exchange inside of the call"
    assert function_in(text, "def __call__") == code(
        """
        def __call__(self, attn, q1, q2, k1, k2, v, mask):
            cp_0 = attention_site(attn, "latent")  # cpgen: self attention
            cp_1 = attention_site(attn, "latent")  # cpgen: self attention
            out = <0>(q1, k1, v, mask) - <1>(<REASON>
                q2, k2, v, attn_mask=mask, is_causal=False
            )
            return out
        """
    ).replace("<0>", f"cp_0.{inside}").replace("<1>", f"cp_1.{inside}".replace("cp_0", "cp_1")).replace(
        "<REASON>", reason
    )


def test_one_of_two_calls_in_a_statement_may_be_local(tmp_path: Path) -> None:
    sites = "[{call: 0, kind: cross}, {call: 1, kind: self, stream: latent}]"
    text = function_in(operated(tmp_path, module_text(call=code(DIFFERENCE)), plan_text(sites=sites)), "def __call__")
    assert "out = dispatch_attention_fn(q1, k1, v, mask) - cp.trading_heads(dispatch_attention_fn)(  #" in text


def test_a_transposed_call_exchanges_inside_in_its_own_layout(tmp_path: Path) -> None:
    forward = DIFFERENCE.replace("q1, k1, v, mask)", "*)").replace("q2, k2, v,", "*,")
    swapped = ["".join(f"{n}.transpose(1, 2), " for n in (f"q{i}", f"k{i}", "v"))[:-2] for i in (1, 2)]
    call = forward.replace("*)", f"{swapped[0]})").replace("*,", f"{swapped[1]},")
    text = operated(tmp_path, module_text(call=code(call)), plan_text(sites=BOTH))
    assert text.count("transposed") == 0 and text.count("trading_heads") == 2


def test_several_calls_that_are_causal_must_be_said_to_be(tmp_path: Path) -> None:
    call = DIFFERENCE.replace("is_causal=False", "is_causal=True")
    found = findings(tmp_path, module_text(call=code(call)), plan_text(sites=BOTH))
    assert found == ["CP502 the call may be causal, but the plan says self"]


MASKED = """
def __call__(self, attn, query, key, value, q, k, v, mask=None):
    if mask is None:
        out = dispatch_attention_fn(q, k, v)
    else:
        out = dispatch_attention_fn(query, key, value, attn_mask=mask)
    if mask is not None:
        out = out * mask[:, :, None, None]
    return out
"""
CUT = "shard: {mask: {dim: 1, ndim: 2, stream: latent, optional: true}}"
LINE = '    mask = <CP>.shard(mask, "mask", dim=1, ndim=2, stream="latent", optional=True)  # cpgen: cut latent\n'


@pytest.mark.parametrize(
    ("sites", "cp", "own"),
    [
        (BOTH, "cp_0", False),
        ("[{call: 0, kind: cross}, {call: 1, kind: self, stream: latent}]", "cp", False),
        ("[{call: 0, kind: cross}, {call: 1, kind: self, stream: latent, when: mask is None}]", "cp_1", True),
        ("[{call: 0, kind: cross}, {call: 1, kind: cross}]", "cp", True),
    ],
)
def test_cut_behind_the_calls(tmp_path: Path, sites: str, cp: str, own: bool) -> None:
    """By a site that always exchanges; else by one of its own, since a local one cuts nothing."""
    plan = plan_text(sites=f"{{sites: {sites}, {CUT}}}")
    text = function_in(operated(tmp_path, module_text(call=code(MASKED)), plan), "def __call__")
    line = LINE.replace("<CP>", cp)
    assert f"{line}    if mask is not None:\n" in text
    site = f'    {cp} = attention_site(attn, "latent")  # cpgen: to cut by this rank\'s tokens\n'
    assert (site in text) == own


def test_cut_follows_the_way_back_of_the_output(tmp_path: Path) -> None:
    call = code(
        """
        def __call__(self, attn, query, key, value, mask):
            out = dispatch_attention_fn(query, key, value, attn_mask=mask)
            return out * mask[:, :, None, None]
        """
    )
    plan = plan_text(sites=f"{{sites: [{{call: 0, kind: self, stream: latent}}], {CUT}}}")
    lines = function_in(operated(tmp_path, module_text(call=call), plan), "def __call__").splitlines(keepends=True)
    assert [line.split("  #")[0].strip() for line in lines[4:6]] == [
        "out = cp.heads_to_seq(out)",
        LINE.replace("<CP>", "cp").split("  #")[0].strip(),
    ]


def test_cut_is_behind_the_last_of_several_statements(tmp_path: Path) -> None:
    call = code(
        """
        def __call__(self, attn, query, key, value, q, k, v, mask):
            one = dispatch_attention_fn(query, key, value, attn_mask=mask)
            two = dispatch_attention_fn(q, k, v, attn_mask=mask)
            return (one + two) * mask[:, :, None, None]
        """
    )
    plan = plan_text(sites=f"{{sites: {BOTH}, {CUT}}}")
    lines = function_in(operated(tmp_path, module_text(call=call), plan), "def __call__").splitlines()
    assert [line.split("(")[0].strip() for line in lines[-3:]] == [
        "two = cp_1.heads_to_seq",
        "mask = cp_0.shard",
        "return",
    ]


def test_cut_of_no_variable(tmp_path: Path) -> None:
    plan = plan_text(sites=f"{{sites: {BOTH}, {CUT.replace('mask', 'msk')}}}")
    found = findings(tmp_path, module_text(call=code(MASKED)), plan)
    assert found == ["CP104 'msk' has no value behind the calls of Processor"]
