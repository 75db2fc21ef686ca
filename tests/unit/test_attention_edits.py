"""What each feature of a plan's sites writes around attention calls: small pairs of before and after."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.unit.before_and_after import check_call, code, findings
from tests.unit.projects import CALL, function_in, module_text, operated, operation, plan_text


def test_self_attention(tmp_path: Path) -> None:
    check_call(
        tmp_path,
        CALL,
        "[{call: 0, kind: self, stream: latent}]",
        """
        def __call__(self, attn, query, key, value):
            cp = attention_site(attn, "latent")  # cpgen: self attention
            query, key, value = cp.seq_to_heads(query, key, value)  # cpgen: all tokens, this rank's heads
            out = dispatch_attention_fn(query, key, value)
            out = cp.heads_to_seq(out)  # cpgen: this rank's tokens, all heads
            return out
        """,
        """
        def __call__(self, attn, query, key, value):
            cp = attention_site(attn, "latent")  # cpgen: self attention
            key, value = cp.gather_kv(query, key, value)  # cpgen: keys and values of all tokens
            out = dispatch_attention_fn(query, key, value)
            return out
        """,
    )


@pytest.mark.parametrize(
    ("site", "arguments", "reason"),
    [
        ("kind: joint, stream: [text, latent]", 'attn, "text", "latent"', "joint attention"),
        ("kind: joint, stream: [latent, text]", 'attn, "latent", "text"', "joint attention"),
        (
            "kind: self, stream: latent, when: key is None and not query.ndim > 3",
            'attn, "latent", when=key is None and (not query.ndim > 3)',
            "self attention, else local: every rank has all keys",
        ),
        ("kind: self, stream: latent, layout: BHSD", 'attn, "latent", layout="BHSD"', "self attention"),
        ("kind: self, stream: latent, layout: BSHD", 'attn, "latent"', "self attention"),
        ("kind: cross, stream: latent, kv: text", 'attn, "latent", kv=("text",)', "cross attention"),
        ("kind: cross, stream: latent, kv: [text, latent]", 'attn, "latent", kv=("text", "latent")', "cross attention"),
    ],
)
def test_site_arguments(tmp_path: Path, site: str, arguments: str, reason: str) -> None:
    text = operated(tmp_path, module_text(), plan_text(sites=f"[{{call: 0, {site}}}]", streams="[text, latent]"))
    assert f"        cp = attention_site({arguments})  # cpgen: {reason}\n" in text


def test_site_with_other_streams_otherwise(tmp_path: Path) -> None:
    site = "{call: 0, kind: joint, stream: [latent, text], when: key is not None, otherwise: latent}"
    text = operated(tmp_path, module_text(), plan_text(sites=f"[{site}]", streams="[text, latent]"))
    joint = 'attention_site(attn, "latent", "text")'
    line = f'cp = {joint} if key is not None else attention_site(attn, "latent")'
    assert f"        {line}  # cpgen: joint attention\n" in text


def test_replicated_cross_attention_is_left_alone(tmp_path: Path) -> None:
    text = operated(tmp_path, module_text(), plan_text(sites="[{call: 0, kind: cross}]"))
    assert function_in(text, "def __call__") == CALL
    assert "import begin_region  # cpgen" in text


def test_layout_follows_the_function_called(tmp_path: Path) -> None:
    call = CALL.replace("dispatch_attention_fn", "F.scaled_dot_product_attention")
    text = operated(tmp_path, module_text(call=call), plan_text())
    assert 'cp = attention_site(attn, "latent", layout="BHSD")' in text


@pytest.mark.parametrize(
    "arguments", ["query=q, key=k, value=v", "q, k, value=v", "q, value=v, key=k", "scale=1, value=v, query=q, key=k"]
)
def test_query_key_value_by_position_and_by_keyword(tmp_path: Path, arguments: str) -> None:
    call = f"def __call__(self, attn, q, k, v):\n    return dispatch_attention_fn({arguments})\n"
    check_call(
        tmp_path,
        call,
        "[{call: 0, kind: self, stream: latent}]",
        f"""
        def __call__(self, attn, q, k, v):
            cp = attention_site(attn, "latent")  # cpgen: self attention
            q, k, v = cp.seq_to_heads(q, k, v)  # cpgen: all tokens, this rank's heads
            return cp.heads_to_seq(dispatch_attention_fn({arguments}))  # cpgen: this rank's tokens, all heads
        """,
        f"""
        def __call__(self, attn, q, k, v):
            cp = attention_site(attn, "latent")  # cpgen: self attention
            k, v = cp.gather_kv(q, k, v)  # cpgen: keys and values of all tokens
            return dispatch_attention_fn({arguments})
        """,
    )


def test_call_that_returns_a_tuple(tmp_path: Path) -> None:
    text = operated(tmp_path, module_text(call=CALL.replace("out = ", "out, _ = ")), plan_text())
    after = "        out, _ = dispatch_attention_fn(query, key, value)\n        out = cp.heads_to_seq(out)"
    assert after in text


def test_call_nested_in_a_return_with_a_mask(tmp_path: Path) -> None:
    check_call(
        tmp_path,
        """
        def __call__(self, attn, query, key, value, mask=None):
            '''Attend.'''
            return attn.to_out(
                dispatch_attention_fn(query, key, value, attn_mask=mask[:, None]).flatten(2)
            )
        """,
        "[{call: 0, kind: self, stream: latent}]",
        """
        def __call__(self, attn, query, key, value, mask=None):
            '''Attend.'''
            cp = attention_site(attn, "latent")  # cpgen: self attention
            query, key, value = cp.seq_to_heads(query, key, value)  # cpgen: all tokens, this rank's heads
            return attn.to_out(
                cp.heads_to_seq(dispatch_attention_fn(query, key, value, attn_mask=cp.mask_heads(mask[:, None]))).flatten(2)  # cpgen: this rank's tokens, all heads, this rank's heads
            )
        """,  # noqa: E501
        """
        def __call__(self, attn, query, key, value, mask=None):
            '''Attend.'''
            cp = attention_site(attn, "latent")  # cpgen: self attention
            key, value = cp.gather_kv(query, key, value)  # cpgen: keys and values of all tokens
            return attn.to_out(
                dispatch_attention_fn(query, key, value, attn_mask=cp.mask_rows(mask[:, None])).flatten(2)  # cpgen: this rank's rows
            )
        """,  # noqa: E501
    )


@pytest.mark.parametrize("mask", ["attn_mask=None", "None", "dropout_p=0.0"])
def test_no_mask_is_not_wrapped(tmp_path: Path, mask: str) -> None:
    text = operated(
        tmp_path, module_text(call=CALL.replace("value)\n    return", f"value, {mask})\n    return")), plan_text()
    )
    assert f"out = dispatch_attention_fn(query, key, value, {mask})\n" in text


def test_positional_mask_is_wrapped(tmp_path: Path) -> None:
    call = CALL.replace("value):", "value, mask):").replace("value)\n    return", "value, mask, 0.0)\n    return")
    assert "dispatch_attention_fn(query, key, value, cp.mask_heads(mask), 0.0)" in operated(
        tmp_path, module_text(call=call), plan_text()
    )


def test_two_sites_get_a_name_each(tmp_path: Path) -> None:
    call = """
        def __call__(self, attn, query, key, value):
            first = dispatch_attention_fn(query, key, value)
            query, key, value = attn.again(first)
            out = dispatch_attention_fn(query, key, value)
            return out
        """
    sites = "[{call: 1, kind: self, stream: latent}, {call: 0, kind: joint, stream: [text, latent]}]"
    text = operated(tmp_path, module_text(call=code(call)), plan_text(sites=sites, streams="[text, latent]"))
    assert function_in(text, "def __call__") == code(
        """
        def __call__(self, attn, query, key, value):
            cp_0 = attention_site(attn, "latent")  # cpgen: self attention
            cp_1 = attention_site(attn, "text", "latent")  # cpgen: joint attention
            query, key, value = cp_1.seq_to_heads(query, key, value)  # cpgen: all tokens, this rank's heads
            first = dispatch_attention_fn(query, key, value)
            first = cp_1.heads_to_seq(first)  # cpgen: this rank's tokens, all heads
            query, key, value = attn.again(first)
            query, key, value = cp_0.seq_to_heads(query, key, value)  # cpgen: all tokens, this rank's heads
            out = dispatch_attention_fn(query, key, value)
            out = cp_0.heads_to_seq(out)  # cpgen: this rank's tokens, all heads
            return out
        """
    )


def test_lengths_that_are_whole_for_a_while(tmp_path: Path) -> None:
    check_call(
        tmp_path,
        """
        def __call__(self, attn, query, key, value, mask):
            length, other = query.shape[1], key.shape[1]
            ones = mask.new_ones(1, length)
            mask = cat(mask, ones)
            if other:
                mask = mask[:, None]
            out = dispatch_attention_fn(query, key, value, mask)
            return out
        """,
        "{sites: [{call: 0, kind: self, stream: latent}],"
        " whole: [{variables: {length: latent, other: [latent, latent]}, before: ones, until: mask}]}",
        """
        def __call__(self, attn, query, key, value, mask):
            cp = attention_site(attn, "latent")  # cpgen: self attention
            length, other = query.shape[1], key.shape[1]
            length = cp.whole_length(length, "latent")  # cpgen: the length of all of latent
            other = cp.whole_length(other, "latent", "latent")  # cpgen: the length of all of latent, latent
            ones = mask.new_ones(1, length)
            mask = cat(mask, ones)
            if other:
                mask = mask[:, None]
                length = cp.local_length(length, "latent")  # cpgen: this rank's again
                other = cp.local_length(other, "latent", "latent")  # cpgen: this rank's again
            query, key, value = cp.seq_to_heads(query, key, value)  # cpgen: all tokens, this rank's heads
            out = dispatch_attention_fn(query, key, value, cp.mask_heads(mask))  # cpgen: this rank's heads
            out = cp.heads_to_seq(out)  # cpgen: this rank's tokens, all heads
            return out
        """,
        """
        def __call__(self, attn, query, key, value, mask):
            cp = attention_site(attn, "latent")  # cpgen: self attention
            length, other = query.shape[1], key.shape[1]
            length = cp.whole_length(length, "latent")  # cpgen: the length of all of latent
            other = cp.whole_length(other, "latent", "latent")  # cpgen: the length of all of latent, latent
            ones = mask.new_ones(1, length)
            mask = cat(mask, ones)
            if other:
                mask = mask[:, None]
                length = cp.local_length(length, "latent")  # cpgen: this rank's again
                other = cp.local_length(other, "latent", "latent")  # cpgen: this rank's again
            key, value = cp.gather_kv(query, key, value)  # cpgen: keys and values of all tokens
            out = dispatch_attention_fn(query, key, value, cp.mask_rows(mask))  # cpgen: this rank's rows
            return out
        """,
    )


def test_length_that_is_whole_from_its_assignment_on(tmp_path: Path) -> None:
    call = CALL.replace("    out =", "    n = (\n        query.shape[1]\n    )\n    out =", 1)
    sites = "{sites: [{call: 0, kind: self, stream: latent}], whole: [{variables: {n: latent}, after: n}]}"
    text = operated(tmp_path, module_text(call=call), plan_text(sites=sites))
    assert '        )\n        n = cp.whole_length(n, "latent")  # cpgen: the length of all of latent\n' in text
    assert "local_length" not in text


def test_module_whose_own_forward_attends(tmp_path: Path) -> None:
    call = CALL.replace("__call__(self, attn,", "forward(self,")
    made = operation(tmp_path, module_text(call=call, owner="Attention"), plan_text(owner="Attention"))
    assert 'cp = attention_site(self, "latent")  # cpgen: self attention' in made.files[0].text
    assert made.processors == ()


@pytest.mark.parametrize(
    ("call", "strategy", "found"),
    [
        (CALL.replace("attn, ", ""), "ulysses", "has no parameter 'attn'"),
        (CALL.replace("fn(query", "fn(attn.to_q(query)"), "ulysses", "must be variables"),
        (CALL.replace("fn(query, key, value", "fn(*attn.qkv"), "ulysses", "takes * or ** arguments"),
        (CALL.replace("value)\n    r", "value, **attn.options)\n    r"), "allgather", "takes * or ** arguments"),
        (CALL.replace("value)\n    r", "value) * query.mean()\n    r"), "ulysses", "'query' is used again"),
        (CALL.replace("value)\n    r", "value) if attn.on else key\n    r"), "ulysses", "a statement of its own"),
        (CALL.replace("return out", "return out + query"), "ulysses", "'query' is used again at line 8"),
        (
            CALL.replace("value)\n    r", "value, is_causal=attn.c)\n    r"),
            "ulysses",
            "may be causal, but the plan says",
        ),
        (CALL.replace("out = ", "out, lse = ").replace("return out", "return out, lse"), "ulysses", "'lse', which the"),
        (CALL.replace("out = ", "out, _ = "), "ring", "returns the output alone"),
        (
            CALL.replace("value)\n    r", "value, scale=1 / key.shape[1])\n    r"),
            "ring",
            "'key' in the call would be of",
        ),
        (CALL.replace("value)\n    r", "value, attn_mask=mask(query))\n    r"), "ulysses", "'query' in the call would"),
        (
            CALL.replace("fn(query, key, value", "fn(query, query, value"),
            "allgather",
            "is the query as well as the key",
        ),
    ],
)
def test_call_that_cannot_exchange(tmp_path: Path, call: str, strategy: str, found: str) -> None:
    (message,) = findings(tmp_path, module_text(call=call), plan_text(), strategy)
    assert message.startswith("CP502") and found in message


@pytest.mark.parametrize(
    ("ending", "strategy"),
    [
        ("return out.to(query.dtype)", "ulysses"),
        ("return out.type_as(query)", "ulysses"),
        ("query = out\n    return query", "ulysses"),
        ("return out + query", "allgather"),
    ],
)
def test_harmless_uses_behind_the_call(tmp_path: Path, ending: str, strategy: str) -> None:
    assert ending in textwrap.dedent(
        operated(tmp_path, module_text(call=CALL.replace("return out", ending)), plan_text(), strategy)
    ).replace("\n        ", "\n    ")


@pytest.mark.parametrize(
    ("form", "called"),
    [
        ("ulysses", "dispatch_attention_fn(query, key, value, is_causal=True)"),
        ("allgather", "cp.own_queries(dispatch_attention_fn)(query, key, value, is_causal=True)"),
        ("ring", "cp.ring_attention(dispatch_attention_fn)(query, key, value, is_causal=True)"),
        ("ulysses in allgather", "cp.own_queries(dispatch_attention_fn)(query, key, value, is_causal=True)"),
        ("ulysses in ring", "cp.ring_attention(dispatch_attention_fn)(query, key, value, is_causal=True)"),
    ],
)
def test_causal_call(tmp_path: Path, form: str, called: str) -> None:
    call = CALL.replace("value)\n    r", "value, is_causal=True)\n    r")
    text = operated(
        tmp_path, module_text(call=call), plan_text(sites="[{call: 0, kind: causal, stream: latent}]"), form
    )
    assert f"out = {called}" in text
    assert text.count("cp.seq_to_heads(") == text.count("cp.heads_to_seq(") == ("ulysses" in form)
    assert text.count("cp.gather_kv(") == ("allgather" in form)


def test_causal_flag_from_a_length(tmp_path: Path) -> None:
    """As many tokens as ranks: the local length is 1, and the flag would be false."""
    call = CALL.replace("value)\n    r", "value, is_causal=attn.norm(key).shape[1] > 1)\n    r")
    messages = findings(tmp_path, module_text(call=call), plan_text(sites="[{call: 0, kind: causal, stream: latent}]"))
    assert any("would be of this rank's tokens" in message for message in messages)


@pytest.mark.parametrize("scale", ["key.shape[-1] ** -0.5", "1 / query.size(-1)"])
def test_channels_may_be_read_in_the_call(tmp_path: Path, scale: str) -> None:
    call = CALL.replace("value)\n    r", f"value, scale={scale})\n    r")
    assert f"scale={scale})" in operated(tmp_path, module_text(call=call), plan_text(), "ring")


@pytest.mark.parametrize(
    ("form", "mask"),
    [
        ("ulysses", "cp.mask_heads(mask)"),
        ("allgather", "cp.mask_rows(mask)"),
        ("ring", "mask"),
        ("ulysses in allgather", "cp.mask_rows(cp.mask_heads(mask))"),
        ("ulysses in ring", "cp.mask_heads(mask)"),
    ],
)
def test_mask(tmp_path: Path, form: str, mask: str) -> None:
    call = CALL.replace("value)\n    r", "value, attn_mask=mask)\n    r").replace("value):", "value, mask):")
    assert f"value, attn_mask={mask})" in operated(tmp_path, module_text(call=call), plan_text(), form)
