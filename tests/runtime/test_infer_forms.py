"""`plan infer`: the forms of the plan language that it finds, each in a model that has it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cpgen.infer.draft import differences, plan_text
from cpgen.infer.inference import Inferred, infer_plan
from cpgen.plan import Plan, Prefix, Probe, Whole, Wraps
from cpgen.plan_loader import load_plan
from cpgen.source import SourceTree
from cpgen.target import find_target

from .test_infer import PLAN, SMALL, TINY

TWO = replace(SMALL, config={"num_layers": 2})
END = TINY.index("        hidden_states = self.proj_out(")


def found_in(tmp_path: Path, text: str, *probes: Probe, name: str = "TinyTransformer2DModel") -> Plan:
    """The plan, as its text says it."""
    found = inferred(tmp_path, text, *probes, name=name)
    assert found.problems == []
    return load_plan(plan_text(found.plan, "found"), "found")


def inferred(tmp_path: Path, text: str, *probes: Probe, name: str = "TinyTransformer2DModel") -> Inferred:
    file = tmp_path / "transformer_made.py"
    file.write_text(text, "utf-8")
    tree = SourceTree()
    return infer_plan(find_target(f"{file}:{name}", tree), probes, tree)


def changed(text: str, *pairs: tuple[str, str]) -> str:
    for old, new in pairs:
        assert old in text, old
        text = text.replace(old, new)
    return text


def test_a_value_that_has_one_row_for_all_tokens_in_some_probe(tmp_path: Path) -> None:
    text = changed(
        TINY,
        ("timestep.to(hidden_states.dtype)[:, None]", "timestep.to(hidden_states.dtype)[..., None]"),
        ("self.modulation(temb)[:, None]", "self.modulation(temb)"),
        ("self.text_norm(text) + shift", "self.text_norm(text)"),
        ("self.gate(temb)[:, None]", "self.gate(temb)"),
    )
    probes = [
        replace(SMALL, name=f"rows-{rows}", inputs={**SMALL.inputs, "timestep": {"shape": [1, rows]}})
        for rows in (1, 9)
    ]
    plan = found_in(tmp_path, text, *probes)
    assert {shard.variable: shard.when for shard in plan.shards}["temb"] == "temb.shape[1] != 1"


def test_a_number_of_leading_tokens_by_what_one_less_changes(tmp_path: Path) -> None:
    text = changed(
        TINY,
        ("        for block in self.joint_blocks:", "        count = 4\n        for block in self.joint_blocks:"),
        (
            "                hidden_states = block(hidden_states, context, temb, rope)\n",
            "                hidden_states = block(hidden_states, context, temb, rope)\n"
            "            hidden_states = torch.cat([hidden_states[:, :count] * 2, hidden_states[:, count:]], dim=1)\n",
        ),
    )
    assert [replace(each, location=None) for each in found_in(tmp_path, text, TWO).prefixes] == [
        Prefix("count", "latent")
    ]


def test_a_sequence_that_is_cut_short_behind_the_blocks(tmp_path: Path) -> None:
    end = "        hidden_states = self.proj_out(self.norm_out(hidden_states[:, 1:]))\n        return hidden_states\n"
    (gather,) = found_in(tmp_path, TINY[:END] + end, SMALL).gathers
    assert (gather.variable, gather.after, gather.dim) == ("hidden_states", "blocks", 1)


def test_a_length_that_only_the_branch_with_a_mask_knows(tmp_path: Path) -> None:
    text = changed(
        TINY,
        ("text_length, latent_length = text.shape[1], hidden_states.shape[1]", "text_length = text.shape[1]"),
        (
            "        if text_mask is not None:\n",
            "        if text_mask is not None:\n            latent_length = hidden_states.shape[1]\n",
        ),
    )
    inputs = {name: each for name, each in SMALL.inputs.items() if name != "encoder_attention_mask"}
    plan = found_in(tmp_path, text, SMALL, replace(SMALL, name="no-mask", inputs=inputs))
    (whole,) = (each for function in plan.attention for each in function.whole)
    assert replace(whole, location=None) == Whole((("latent_length", ("latent",)),), "latent_length", None, "mask")


def test_a_processor_that_runs_ahead_of_the_region_as_well(tmp_path: Path) -> None:
    text = changed(
        TINY,
        (
            "        self.norm_out = ",
            "        self.refiner = TinyAttention(dim, 4, TinyAttnProcessor())\n        self.norm_out = ",
        ),
        (
            "        context = self.context_proj(context)\n",
            "        context = self.context_proj(context)\n        context = context + self.refiner(context)\n",
        ),
    )
    plan = found_in(tmp_path, text, SMALL)
    assert [site.when for each in plan.attention for site in each.sites] == ["rope is not None", None]


def test_a_processor_that_lists_of_blocks_share(tmp_path: Path) -> None:
    text = changed(
        TINY,
        ("        hidden_states = hidden_states + self.attn2(self.norm2(hidden_states), context)\n", ""),
        (
            "        self.norm_out = ",
            "        self.text_blocks = nn.ModuleList([TinyBlock(dim, num_attention_heads)])\n        self.norm_out = ",
        ),
        (
            "        for block in self.blocks:\n",
            "        for block in self.text_blocks:\n            text = block(text, context, temb, text_rope)\n\n"
            "        for block in self.blocks:\n",
        ),
        (
            "        for block in self.joint_blocks:\n",
            "        text_rope = self.positions(text.shape[1], text.device)\n        for block in self.joint_blocks:\n",
        ),
    )
    plan = found_in(tmp_path, text, SMALL)
    within = [site.within for each in plan.attention for site in each.sites if site.within]
    assert within == [(("text_blocks", ("text",)), ("blocks", ("latent",)))]


def test_a_list_of_models_is_found_as_one_of_them(tmp_path: Path) -> None:
    several = (
        "\n\nclass Several(nn.Module):\n    def __init__(self, nets):\n        super().__init__()\n"
        "        self.nets = nn.ModuleList(nets)\n\n    def forward(self, **inputs):\n"
        "        return sum(net(**inputs).sample for net in self.nets)\n"
    )
    nets = [{"model": "TinyTransformer2DModel", "config": {"num_attention_heads": heads}} for heads in (4, 5)]
    plan = found_in(tmp_path, TINY + several, replace(SMALL, config={"nets": nets}), name="Several")
    assert plan.wraps is not None and replace(plan.wraps, location=None) == Wraps("nets", "TinyTransformer2DModel")
    assert differences(plan, PLAN) == {"model", "wraps"}


def test_several_calls_in_one_statement(tmp_path: Path) -> None:
    call = "dispatch_attention_fn(query, key, value, attn_mask=mask, backend=self._attention_backend)"
    plan = found_in(tmp_path, changed(TINY, (call, f"{call} - 0.5 * {call}")), SMALL)
    joint = [[site.call for site in each.sites] for each in plan.attention if each.sites[0].kind == "joint"]
    assert joint == [[0, 1]]


def test_calls_that_only_an_argument_of_the_exchanging_ones_tells_apart_are_warned_of(tmp_path: Path) -> None:
    """Another setting might leave that argument out: here, layers without rotary positions."""
    text = changed(
        TINY,
        ("hidden_states, context=None, rope=None):", "hidden_states, context, rope=None):"),
        (
            "self.attn1(self.norm1(hidden_states), rope=rope)",
            "self.attn1(self.norm1(hidden_states), self.norm1(hidden_states), rope=rope)",
        ),
    )
    found = inferred(tmp_path, text, TWO)
    assert [site.when for each in found.plan.attention for site in each.sites] == [None, "rope is not None"]
    guess, batch = found.warnings
    assert guess.code == "CP607" and "is told from others by 'rope' alone" in guess.message
    assert guess.location is not None and "dispatch_attention_fn(" in (guess.location.text or "")
    assert batch.message == "no probe has a batch of more than one"


def test_a_batch_of_more_than_one_is_nothing_to_warn_of(tmp_path: Path) -> None:
    inputs = {
        name: {**each, "shape": [2, *each["shape"][1:]]} for name, each in SMALL.inputs.items() if "shape" in each
    }
    assert inferred(tmp_path, TINY, SMALL, replace(SMALL, name="two", inputs=inputs)).warnings == []
