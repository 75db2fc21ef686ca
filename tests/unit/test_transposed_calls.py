"""Attention calls whose query, key and value are transposed in the call itself, as Cosmos has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.before_and_after import code, findings
from tests.unit.projects import function_in, module_text, operated, plan_text

CALL = """
def __call__(self, attn, query, key, value):
    out = dispatch_attention_fn(query.transpose(1, 2), key.transpose(1, 2), value.transpose(2, 1))
    return out.type_as(query)
"""
SITE = 'cp = attention_site(attn, "latent", transposed=True)  # cpgen: self attention'
TRADE = "query, key, value = cp.seq_to_heads(query, key, value)  # cpgen: all tokens"
BACK = "out = cp.heads_to_seq(out)  # cpgen: this rank's tokens, all heads"
ATTEND = "out = dispatch_attention_fn(query.transpose(1, 2), key.transpose(1, 2), value.transpose(2, 1))"
RING = ATTEND.replace("dispatch_attention_fn(", "cp.ring_attention(dispatch_attention_fn)(")
REASON = "  # cpgen: keys and values of all tokens"


@pytest.mark.parametrize(
    ("strategy", "lines"),
    [
        ("ulysses", [SITE, f"{TRADE}, this rank's heads", ATTEND, BACK]),
        ("allgather", [SITE, f"key, value = cp.gather_kv(query, key, value){REASON}", ATTEND]),
        ("ring", [SITE.replace(", transposed=True", ""), f"{RING}{REASON}, in turn"]),  # inside the call alone
    ],
)
def test_exchanged_ahead_of_the_call_in_the_other_layout(tmp_path: Path, strategy: str, lines: list[str]) -> None:
    text = operated(tmp_path, module_text(call=code(CALL)), plan_text(), strategy)
    body = [line.strip() for line in function_in(text, "def __call__").splitlines()[1:]]
    assert body == [*lines, "return out.type_as(query)"]


@pytest.mark.parametrize(
    "query",
    [
        "query.transpose(1, 3)",
        "query.transpose(1, dim1=2)",
        "query.permute(0, 2, 1, 3)",
        "query",
        "f(query).transpose(1, 2)",
    ],
)
def test_anything_else_is_refused(tmp_path: Path, query: str) -> None:
    call = code(CALL).replace("query.transpose(1, 2)", query)
    (found,) = findings(tmp_path, module_text(call=call), plan_text())
    assert found == "CP502 query, key and value of the call must be variables, or all three NAME.transpose(1, 2)"


def test_a_mask_from_a_length_is_still_refused(tmp_path: Path) -> None:
    call = code(CALL).replace("value.transpose(2, 1))", "value.transpose(2, 1), attn_mask=make(query.shape[2]))")
    (found,) = findings(tmp_path, module_text(call=call), plan_text())
    assert found.startswith("CP502 'query' in the call would be of this rank's tokens")
