"""What each feature of a plan's region writes into the model's forward: small pairs of before and after."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.unit.before_and_after import IN, OUT, check_forward, findings
from tests.unit.projects import FORWARD, function_in, module_text, operated, plan_text


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


def test_blocks_that_are_no_list(tmp_path: Path) -> None:
    plan = plan_text().replace("blocks: [blocks]", "blocks: [blocks, proj_out]")
    assert findings(tmp_path, module_text(), plan) == ["CP104 Model's 'proj_out' is no list of modules"]
    for made in ("make_blocks(4)", "torch.nn.ModuleList()", "nn.Sequential()", "[]"):
        operated(tmp_path, module_text().replace("nn.Linear(1, 1)", made), plan)
