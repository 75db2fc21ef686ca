"""What each feature of a plan writes into the source: small pairs of before and after."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from cpgen.diagnostics import CpgenError
from tests.unit.projects import CALL, FORWARD, function_in, module_text, operated, operation, plan_text

IN = 'cp.shard(hidden_states, "hidden_states", dim=1, ndim=3, stream="latent")  # cpgen: cut latent'
OUT = 'cp.gather(hidden_states, "hidden_states", dim=1, ndim=3, stream="latent")  # cpgen: region ends'


def code(text: str) -> str:
    """An indented literal as code; IN and OUT stand for the usual cut and gather of hidden_states."""
    return textwrap.dedent(text).lstrip("\n").replace("<IN>", IN).replace("<OUT>", OUT)


def check_forward(folder: Path, before: str, after: str, **plan: str) -> None:
    text = operated(folder, module_text(forward=code(before)), plan_text(**plan))
    assert function_in(text, "def forward") == code(after)


def check_call(folder: Path, before: str, sites: str, ulysses: str, allgather: str, **plan: str) -> None:
    for strategy, after in (("ulysses", ulysses), ("allgather", allgather)):
        text = operated(folder, module_text(call=code(before)), plan_text(sites=sites, **plan), strategy)
        assert function_in(text, "def __call__") == code(after), strategy


def findings(folder: Path, source: str, plan: str, strategy: str = "ulysses") -> list[str]:
    with pytest.raises(CpgenError) as error:
        operated(folder, source, plan, strategy)
    return [f"{finding.code} {finding.message}" for finding in error.value.findings]


# The region


def test_region_begins_ahead_of_the_loop_and_the_comments_above_it(tmp_path: Path) -> None:
    check_forward(
        tmp_path,
        """
        def forward(self, hidden_states):
            hidden_states = hidden_states * 2

            # All blocks,
            # one by one.
            for index, block in enumerate(self.blocks):
                hidden_states = block(hidden_states)
            hidden_states = self.proj_out(hidden_states)
            return hidden_states
        """,
        """
        def forward(self, hidden_states):
            hidden_states = hidden_states * 2

            cp = begin_region(self)  # cpgen: region begins
            hidden_states = <IN>
            # All blocks,
            # one by one.
            for index, block in enumerate(self.blocks):
                hidden_states = block(hidden_states)
            hidden_states = self.proj_out(hidden_states)
            hidden_states = <OUT>
            return hidden_states
        """,
    )


def test_region_begins_ahead_of_the_condition_that_holds_the_loop(tmp_path: Path) -> None:
    check_forward(
        tmp_path,
        """
        def forward(self, hidden_states):
            if self.training:
                for block in self.blocks:
                    hidden_states = block(hidden_states)
            else:
                for block in self.blocks:
                    hidden_states = block(hidden_states)
            hidden_states = self.proj_out(hidden_states)
            return hidden_states
        """,
        """
        def forward(self, hidden_states):
            cp = begin_region(self)  # cpgen: region begins
            hidden_states = <IN>
            if self.training:
                for block in self.blocks:
                    hidden_states = block(hidden_states)
            else:
                for block in self.blocks:
                    hidden_states = block(hidden_states)
            hidden_states = self.proj_out(hidden_states)
            hidden_states = <OUT>
            return hidden_states
        """,
    )


@pytest.mark.parametrize(
    ("key", "entry", "written"),
    [
        ("temb", "when: ndim == 3", '"temb", dim=1, ndim=3, stream="latent", when=temb.ndim == 3'),
        (
            "temb",
            '"when": "shape[1] != 1 and hidden_states is not None"',
            '"temb", dim=1, ndim=3, stream="latent", when=temb.shape[1] != 1 and hidden_states is not None',
        ),
        ("temb", "optional: true", '"temb", dim=1, ndim=3, stream="latent", optional=True'),
        ("temb", "optional: false", '"temb", dim=1, ndim=3, stream="latent"'),
        ("temb[0]", "optional: false", '"temb", 0, dim=1, ndim=3, stream="latent"'),
        ("temb[-1][*]", "optional: false", '"temb", -1, "*", dim=1, ndim=3, stream="latent"'),
        ("temb['cos'][*]", "optional: false", '"temb", "cos", "*", dim=1, ndim=3, stream="latent"'),
    ],
)
def test_shard_options_and_paths(tmp_path: Path, key: str, entry: str, written: str) -> None:
    source = module_text(forward=FORWARD.replace("hidden_states)", "hidden_states, temb)", 1))
    shard = f'{{"{key}": {{dim: 1, ndim: 3, stream: latent, {entry}}}}}'
    text = operated(tmp_path, source, plan_text(shard=shard))
    assert f"        temb = cp.shard(temb, {written})  # cpgen: cut latent\n" in text


def test_value_that_holds_several_streams_after_one_another(tmp_path: Path) -> None:
    source = module_text(forward=FORWARD.replace("hidden_states)", "hidden_states, rope)", 1))
    shard = "{'rope[*]': {dim: 0, ndim: 2, stream: [text, latent]}}"
    text = operated(tmp_path, source, plan_text(shard=shard, streams="[text, latent]"))
    assert 'rope = cp.shard(rope, "rope", "*", dim=0, ndim=2, stream=("text", "latent"))  # cpgen: cut text, la' in text


def test_shard_behind_a_module_and_ahead_of_another_loop(tmp_path: Path) -> None:
    check_forward(
        tmp_path,
        """
        def forward(self, hidden_states, control):
            hidden_states = self.blocks(hidden_states)
            for block in self.blocks:
                hidden_states = block(hidden_states)
            hidden_states = self.proj_out(
                hidden_states
            )
            # Then control.
            for block in self.blocks:
                control = block(control)
            return hidden_states
        """,
        """
        def forward(self, hidden_states, control):
            hidden_states = self.blocks(hidden_states)
            cp = begin_region(self)  # cpgen: region begins
            control = cp.shard(control, "control", dim=1, ndim=3, stream="latent")  # cpgen: cut latent
            for block in self.blocks:
                hidden_states = block(hidden_states)
            hidden_states = self.proj_out(
                hidden_states
            )
            hidden_states = <IN>
            hidden_states = <OUT>
            # Then control.
            for block in self.blocks:
                control = block(control)
            return hidden_states
        """,
        shard="{hidden_states: {dim: 1, ndim: 3, stream: latent, after: proj_out},"
        " control: {dim: 1, ndim: 3, stream: latent, before: blocks}}",
    )


def test_prefix_counts_this_ranks_leading_tokens(tmp_path: Path) -> None:
    source = module_text(forward=FORWARD.replace("hidden_states)", "hidden_states, frames)", 1))
    text = operated(tmp_path, source, plan_text(prefix="{frames: latent}"))
    assert '        frames = cp.local_prefix(frames, "latent")  # cpgen: those in this rank\'s latent\n' in text


def test_forwards_that_would_be_wrong_are_refused_where_the_region_begins(tmp_path: Path) -> None:
    source = module_text(forward=FORWARD.replace("hidden_states)", "hidden_states, mode=None)", 1))
    text = operated(tmp_path, source, plan_text(refuse="[{when: mode is not None}]"))
    lines = [line.strip() for line in text.splitlines()]
    begin = next(i for i, line in enumerate(lines) if line.startswith("cp = begin_region(self)"))
    assert lines[begin + 1] == (
        'cp.refuse("mode is not None", mode is not None)  # cpgen: would be wrong on parts of a sequence'
    )


def test_region_is_in_the_class_that_a_model_holds_a_list_of(tmp_path: Path) -> None:
    source = module_text().replace("class Model(", "class Inner(") + textwrap.dedent("""
        class Model(nn.Module):
            def __init__(self, nets):
                super().__init__()
                self.nets = nn.ModuleList(nets)

            def forward(self, hidden_states):
                return [net(hidden_states) for net in self.nets]
        """)
    plan = plan_text().replace("heads:", "wraps: {list: nets, model: Inner}\nheads:")
    text = operated(tmp_path, source, plan)
    inner, outer = text.split("class Model(")
    assert inner.count("begin_region(self)") == 1 and "cp." not in outer
    for wraps, found in (
        ("{list: nets, model: Iner}", "CP104 transformer_made.py defines no class 'Iner'"),
        ("{list: net, model: Inner}", "CP104 Model has no list 'net'"),
    ):
        assert findings(tmp_path, source, plan.replace("{list: nets, model: Inner}", wraps)) == [found]


def test_streams_by_the_list_of_blocks(tmp_path: Path) -> None:
    source = module_text().replace(
        "self.proj_out = nn", 'self.kinds = {}\n        self.kinds["a"] = 1\n        self.proj_out = nn'
    )
    plan = plan_text(
        streams="[text, latent]", sites="[{call: 0, kind: joint, stream: {blocks: latent, kinds.a: [text, latent]}}]"
    ).replace("blocks: [blocks]", "blocks: [blocks, kinds.a]")
    text = operated(tmp_path, source, plan)
    assert 'cp = attention_site(attn, within={"blocks": ("latent",), "kinds.a": ("text", "latent")})  # cpgen:' in text
    plan = plan.replace("kinds.a", "kinds.b")
    assert findings(tmp_path, source, plan) == ["CP104 Model nowhere reads self.kinds['b']"]


def test_gather_of_one_of_several_results(tmp_path: Path) -> None:
    forward = FORWARD.replace("hidden_states = self.proj_out(", "hidden_states, rest = self.proj_out(")
    text = function_in(operated(tmp_path, module_text(forward=forward), plan_text()), "def forward")
    assert f"    hidden_states, rest = self.proj_out(hidden_states)\n    hidden_states = {OUT}\n" in text


def test_gather_of_what_another_model_cuts_again(tmp_path: Path) -> None:
    gather = "{'hidden_states[*]': {after: proj_out, dim: 1, ndim: 3, stream: latent, optional: true, cut_again: true}}"
    text = operated(tmp_path, module_text(), plan_text(gather=gather))
    call = (
        'cp.gather(hidden_states, "hidden_states", "*", dim=1, ndim=3, stream="latent", optional=True, cut_again=True)'
    )
    assert call in text


def test_gather_into_a_path_of_the_result(tmp_path: Path) -> None:
    gather = "{'hidden_states[0]': {after: proj_out, dim: 1, ndim: 3, stream: latent}}"
    text = operated(tmp_path, module_text(), plan_text(gather=gather))
    assert 'cp.gather(hidden_states, "hidden_states", 0, dim=1, ndim=3, stream="latent")' in text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "out = self.norm(self.proj_out(hidden_states))[0]",
            'out = self.norm(cp.gather(self.proj_out(hidden_states), "out", dim=1, ndim=3, stream="latent"))[0]',
        ),
        (
            "return self.proj_out(hidden_states), None",
            'return cp.gather(self.proj_out(hidden_states), "out", dim=1, ndim=3, stream="latent"), None',
        ),
        (
            "out: Tensor = self.proj_out(hidden_states)  # why",
            'out: Tensor = cp.gather(self.proj_out(hidden_states), "out", dim=1, ndim=3, stream="latent")  # why',
        ),
        (
            "out = torch.gather(self.proj_out(hidden_states), 1, 0)",
            'out = torch.gather(cp.gather(self.proj_out(hidden_states), "out", dim=1, ndim=3, stream="latent"), 1, 0)',
        ),
        (
            'x = "größer", self.proj_out("é" * 2), "ü"',
            'x = "größer", cp.gather(self.proj_out("é" * 2), "out", dim=1, ndim=3, stream="latent"), "ü"',
        ),
    ],
)
def test_gather_inside_an_expression(tmp_path: Path, before: str, after: str) -> None:
    forward = FORWARD.replace("hidden_states = self.proj_out(hidden_states)", before)
    gather = "{out: {after: proj_out, dim: 1, ndim: 3, stream: latent}}"
    text = operated(tmp_path, module_text(forward=forward), plan_text(gather=gather))
    assert f"        {after}  # cpgen: region ends\n" in text


def test_gather_around_a_call_of_several_lines(tmp_path: Path) -> None:
    check_forward(
        tmp_path,
        """
        def forward(self, hidden_states):
            for block in self.blocks:
                hidden_states = block(hidden_states)
            return self.proj_out(
                hidden_states,
            )[0]
        """,
        """
        def forward(self, hidden_states):
            cp = begin_region(self)  # cpgen: region begins
            hidden_states = <IN>
            for block in self.blocks:
                hidden_states = block(hidden_states)
            return cp.gather(self.proj_out(  # cpgen: region ends
                hidden_states,
            ), "hidden_states", dim=1, ndim=3, stream="latent")[0]
        """,
    )


def test_gather_behind_every_call_in_the_region(tmp_path: Path) -> None:
    check_forward(
        tmp_path,
        """
        def forward(self, hidden_states):
            hidden_states = self.proj_out(hidden_states)
            for block in self.blocks:
                hidden_states = block(hidden_states)
            if self.training:
                hidden_states = self.proj_out(hidden_states)
            else:
                hidden_states = self.proj_out(hidden_states)
            return hidden_states
        """,
        """
        def forward(self, hidden_states):
            hidden_states = self.proj_out(hidden_states)
            cp = begin_region(self)  # cpgen: region begins
            hidden_states = <IN>
            for block in self.blocks:
                hidden_states = block(hidden_states)
            if self.training:
                hidden_states = self.proj_out(hidden_states)
                hidden_states = <OUT>
            else:
                hidden_states = self.proj_out(hidden_states)
                hidden_states = <OUT>
            return hidden_states
        """,
    )


def test_blocks_under_checkpointing_are_pinned(tmp_path: Path) -> None:
    check_forward(
        tmp_path,
        """
        def forward(self, hidden_states):
            hidden_states = self._gradient_checkpointing_func(self.first, hidden_states)
            for block in self.blocks:
                hidden_states = self._gradient_checkpointing_func(block, hidden_states)
                hidden_states = torch.utils.checkpoint.checkpoint(
                    block.half, hidden_states, use_reentrant=False
                )
            hidden_states = self.proj_out(hidden_states)
            return hidden_states
        """,
        """
        def forward(self, hidden_states):
            hidden_states = self._gradient_checkpointing_func(self.first, hidden_states)
            cp = begin_region(self)  # cpgen: region begins
            hidden_states = <IN>
            for block in self.blocks:
                hidden_states = self._gradient_checkpointing_func(cp.pin(block), hidden_states)  # cpgen: recompute with this forward's lengths
                hidden_states = torch.utils.checkpoint.checkpoint(
                    cp.pin(block.half), hidden_states, use_reentrant=False  # cpgen: recompute with this forward's lengths
                )
            hidden_states = self.proj_out(hidden_states)
            hidden_states = <OUT>
            return hidden_states
        """,  # noqa: E501
    )


@pytest.mark.parametrize(
    "statement",
    [
        "cp = hidden_states",
        "from somewhere import cp",
        "import cp.inner",
        "use = lambda cp: cp.gather",
        "use = [cp for cp in hidden_states]",
        "with open('x') as cp: pass",
        "try: pass\n    except ValueError as cp: pass",
        "def cp(): pass",
    ],
)
def test_region_takes_another_name_where_cp_is_taken(tmp_path: Path, statement: str) -> None:
    forward = FORWARD.replace("    for", f"    {statement}\n    for", 1)
    text = function_in(operated(tmp_path, module_text(forward=forward), plan_text()), "def forward")
    assert text == FORWARD.replace(
        "    for block",
        f"    {statement}\n    cp_1 = begin_region(self)  # cpgen: region begins\n"
        f"    hidden_states = {IN.replace('cp.', 'cp_1.')}\n    for block",
    ).replace("    return", f"    hidden_states = {OUT.replace('cp.', 'cp_1.')}\n    return")


def test_region_takes_another_name_where_a_module_is_called_cp(tmp_path: Path) -> None:
    text = operated(tmp_path, "import cupy as cp\n" + module_text(), plan_text())
    assert "cp_1 = begin_region(self)" in text and "cp_1 = attention_site(attn" in text
    assert text.startswith("import cupy as cp\n")


# Attention sites


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


def test_processors_are_listed(tmp_path: Path) -> None:
    (processor,) = operation(tmp_path, module_text(), plan_text()).processors
    assert (processor.module, processor.name) == ("transformer_made", "Processor")


def test_edits_are_listed_in_source_order_with_upstreams_lines(tmp_path: Path) -> None:
    source = module_text()
    edits = operation(tmp_path, source, plan_text()).files[0].edits
    lines = source.splitlines()
    assert [edit.line for edit in edits] == sorted(edit.line for edit in edits)
    begin = next(edit for edit in edits if edit.code == "cp = begin_region(self)")
    assert lines[begin.line - 1] == "        for block in self.blocks:"


def test_class_of_diffusers_refuses_hooks(tmp_path: Path) -> None:
    source = module_text().replace(
        "class Model(nn.Module):\n", 'class Model(ModelMixin):\n    """Doc."""\n\n    # Why.\n'
    )
    text = operated(tmp_path, source, plan_text())
    refusal = "    enable_parallelism = refuse_enable_parallelism  # cpgen: diffusers' hooks would cut a second time\n"
    assert f'    """Doc."""\n\n{refusal}    # Why.\n    def __init__' in text


# What cannot be done is said


@pytest.mark.parametrize(
    ("forward", "plan", "found"),
    [
        ("", {"shard": "{hidden_state: {dim: 1, ndim: 3, stream: latent}}"}, "CP104 'hidden_state' has no value there"),
        (
            "",
            {"shard": "{hidden_states: {dim: 1, ndim: 3, stream: latent, when: temb is None}}"},
            "CP104 'temb' has no value there in Model.forward",
        ),
        (
            "",
            {"shard": "{hidden_states: {dim: 1, ndim: 3, stream: latent, after: proj}}"},
            "CP104 forward does not call self.proj",
        ),
        (
            "",
            {"shard": "{hidden_states: {dim: 1, ndim: 3, stream: latent, before: bloks}}"},
            "CP104 forward neither loops over self.bloks nor calls it",
        ),
        ("", {"refuse": "[{when: mode is not None}]"}, "CP104 'mode' has no value there in Model.forward"),
        ("", {"prefix": "{frames: latent}"}, "CP104 'frames' has no value there in Model.forward"),
        (
            "",
            {"gather": "{hidden_states: {after: norm_out, dim: 1, ndim: 3, stream: latent}}"},
            "CP104 forward neither calls self.norm_out in the region nor loops over it",
        ),
        (
            "",
            {"gather": "{out: {after: proj_out, dim: 1, ndim: 3, stream: latent}}"},
            "CP104 the result of self.proj_out is not called 'out'",
        ),
        ("", {"owner": "Procesor"}, "CP104 transformer_made.py neither defines nor imports a class 'Procesor'"),
        ("", {"sites": "[{call: 1, kind: cross}]"}, "CP501 call 0 of Processor attends"),
        (
            "",
            {"sites": "[{call: 0, kind: self, stream: latent, when: x is None}]"},
            "CP104 'x' is not a parameter of Processor.__call__",
        ),
        (
            "",
            {"sites": "{sites: [{call: 0, kind: cross}], whole: [{variables: {n: latent}, after: n}]}"},
            "CP105 Processor has no site that exchanges tokens",
        ),
        (
            "",
            {
                "sites": "{sites: [{call: 0, kind: self, stream: latent}],"
                " whole: [{variables: {query: latent}, after: n}]}"
            },
            "CP104 Processor.__call__ does not assign 'n'",
        ),
        (
            "",
            {
                "sites": "{sites: [{call: 0, kind: self, stream: latent}],"
                " whole: [{variables: {query: latent}, after: out, until: out}]}"
            },
            "CP502 'out' is assigned last at line 7, where the lengths are not whole yet",
        ),
        ("", {"outside": "[Nothing]"}, "CP104 'outside' names 'Nothing'"),
        (
            FORWARD.replace("(hidden_states)\n    return", "(hidden_states); print()\n    return"),
            {},
            "CP503 a statement in transformer_made.py shares its line",
        ),
        (
            FORWARD.replace("    hidden_states = self.proj", "    if True: hidden_states = self.proj"),
            {},
            "CP503 a statement in transformer_made.py shares its line",
        ),
        (
            FORWARD.replace("self.proj_out(hidden_states)\n", "1 + self.proj_out(hidden_states) \\\n        + 1\n"),
            {},
            "CP503 no comment can stand at the end of this line",
        ),
        (
            FORWARD.replace("self.proj_out(hidden_states)\n", '1, self.proj_out("""\n    """)\n'),
            {},
            "CP503 no comment can stand at the end of this line",
        ),
    ],
)
def test_plan_that_does_not_fit_the_source(tmp_path: Path, forward: str, plan: dict[str, str], found: str) -> None:
    assert any(
        line.startswith(found) for line in findings(tmp_path, module_text(forward or FORWARD), plan_text(**plan))
    )


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


def test_attention_that_the_plan_forgot(tmp_path: Path) -> None:
    source = module_text() + "\n\nclass Pooling(nn.Module):\n    def forward(self, q):\n"
    source += "        return dispatch_attention_fn(q, q, q)\n"
    (message,) = findings(tmp_path, source, plan_text())
    assert message == "CP501 Pooling.forward attends, but the plan does not describe it"
    assert "class Pooling" in operated(tmp_path, source, plan_text(outside="[Pooling]"))


def test_inherited_forward_is_an_error(tmp_path: Path) -> None:
    source = module_text().replace("def forward", "def backward")
    assert findings(tmp_path, source, plan_text()) == ["CP504 Model defines no forward of its own"]


def test_all_findings_come_at_once(tmp_path: Path) -> None:
    plan = plan_text(
        shard="{x: {dim: 1, ndim: 3, stream: latent}, y: {dim: 1, ndim: 3, stream: latent}}",
        gather="{hidden_states: {after: norm, dim: 1, ndim: 3, stream: latent}}",
        owner="Other",
    ).replace("blocks: [blocks]", "blocks: [blocks, more]")
    assert len(findings(tmp_path, module_text(), plan)) == 5
