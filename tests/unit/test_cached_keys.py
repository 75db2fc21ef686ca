"""Sites with a KV cache: the exchange stands ahead of the cache, and nothing else may see the exchanged tensors."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpgen.catalog import describe
from cpgen.diagnostics import CpgenError
from cpgen.plan_loader import load_plan
from tests.unit.before_and_after import code, findings
from tests.unit.projects import function_in, module_text, operated, plan_text

SITES = "[{call: 0, kind: self, stream: latent, cache: cache}]"
CALL = """
def __call__(self, attn, query, key, value, cache=None, mask=None):
    query = attn.norm(query)
    if cache is not None:
        if cache.mode == "write":
            cache.store(key, value)
        else:
            key, value = cache.get(key, value)
    mask = mask.to(query.dtype)
    out = dispatch_attention_fn(query, key, value, attn_mask=mask)
    return out
"""
TRADE = "query, key, value = cp.seq_to_heads(query, key, value)  # cpgen: all tokens"
GATHER = "key, value = cp.gather_kv(query, key, value)  # cpgen: keys and values of all tokens"


@pytest.mark.parametrize(
    ("strategy", "lines"),
    [
        ("ulysses", [f"{TRADE}, this rank's heads"]),
        ("allgather", [GATHER]),
        ("ulysses in allgather", [f"{TRADE} of the inner ranks, this rank's heads", GATHER]),
        ("ring", []),
    ],
)
def test_exchanged_ahead_of_the_cache(tmp_path: Path, strategy: str, lines: list[str]) -> None:
    text = operated(tmp_path, module_text(call=code(CALL)), plan_text(sites=SITES), strategy)
    body = [line.strip() for line in function_in(text, "def __call__").splitlines()]
    at = body.index("if cache is not None:")
    assert body[at - len(lines) - 1 : at] == ["query = attn.norm(query)", *lines]
    assert text.count("cp.seq_to_heads(") + text.count("cp.gather_kv(") == len(lines)


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        (
            "mask = mask.to(query.dtype)",
            "mask = make(key.shape[1])",
            "'key' at line 13, where 'cache' is not used, would be the exchanged one",
        ),
        (
            "mask = mask.to(query.dtype)",
            "query = attn.rotate(query)",
            "'query' at line 13, where 'cache' is not used, would be the exchanged one",
        ),
        (
            'if cache.mode == "write":',
            "if key.shape[1] > cache.size:",
            "'key' at line 9, where 'cache' is not used, would be the exchanged one",
        ),
        (
            "    out = dispatch_attention_fn(query, key, value, attn_mask=mask)",
            "    if mask is None:\n        out = dispatch_attention_fn(query, key, value)",
            "the call is in a branch, but its exchange, ahead of the cache, would always run",
        ),
    ],
)
def test_what_would_see_exchanged_tensors(tmp_path: Path, old: str, new: str, found: str) -> None:
    call = code(CALL)
    assert old in call
    assert findings(tmp_path, module_text(call=call.replace(old, new)), plan_text(sites=SITES)) == [f"CP502 {found}"]


def test_calls_in_one_statement(tmp_path: Path) -> None:
    call = code(CALL).replace(
        "out = dispatch_attention_fn(query, key, value, attn_mask=mask)",
        "out = dispatch_attention_fn(query, key, value) - dispatch_attention_fn(query, key, value)",
    )
    sites = "[{call: 0, kind: self, stream: latent, cache: cache}, {call: 1, kind: self, stream: latent}]"
    message = "CP502 calls that stand in one statement exchange inside of it, and not ahead of a cache"
    assert findings(tmp_path, module_text(call=call), plan_text(sites=sites)) == [message]


def test_plan_in_words() -> None:
    words = describe(load_plan(plan_text(sites=SITES), "made.yaml"))
    assert "call 0    self over latent, exchanged ahead of cache\n" in words


def test_no_such_cache(tmp_path: Path) -> None:
    plan = plan_text(sites=SITES.replace("cache: cache", "cache: caches"))
    message = "CP502 'caches' is not used ahead of the call, as a cache would be"
    assert findings(tmp_path, module_text(call=code(CALL)), plan) == [message]


@pytest.mark.parametrize(
    ("site", "message"),
    [
        ("kind: causal, stream: latent, cache: cache", "a causal site takes no cache: self and joint ones do"),
        ("kind: cross, cache: cache", "a cross site takes no cache: self and joint ones do"),
        ("kind: self, stream: latent, cache: 'cache; import os'", "'cache; import os' is not a name"),
    ],
)
def test_plan_with_a_cache_that_cannot_be(site: str, message: str) -> None:
    with pytest.raises(CpgenError) as error:
        load_plan(plan_text(sites=f"[{{call: 0, {site}}}]"), "made.yaml")
    assert [finding.message for finding in error.value.findings] == [message]
