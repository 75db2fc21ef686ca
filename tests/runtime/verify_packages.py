"""Packages as cpgen would emit them, made by patching a model's text here: right ones, and ones broken on purpose."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import jinja2

from cpgen.plan import Plan, Probe
from cpgen.verify.case import Reference
from cpgen.verify.run import PackageToVerify

TEMPLATES = Path(__file__).parents[2] / "templates"
MASKED_FILE = Path(__file__).with_name("masked_model.py")
Edits = tuple[tuple[str, str], ...]

RUNTIME = "from cpgen.runtime import attention_site, begin_region\n"
WAN_REFERENCE = Reference("diffusers.models.transformers.transformer_wan", "WanTransformer3DModel")
WAN_CONFIG = {
    "num_attention_heads": 4,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 32,
    "ffn_dim": 64,
    "num_layers": 2,
    "rope_max_seq_len": 32,
}
WAN_PROBE = Probe(
    "uneven",
    WAN_CONFIG,
    {
        "hidden_states": {"shape": [2, 4, 3, 6, 10]},  # 45 tokens
        "timestep": {"shape": [2], "dtype": "int64"},
        "encoder_hidden_states": {"shape": [2, 7, 16]},
    },
)
WAN_PER_TOKEN = Probe("per-token", {**WAN_CONFIG, "num_layers": 1}, {
    "hidden_states": {"shape": [1, 4, 1, 6, 10]},
    "timestep": {"shape": [1, 15], "high": 1000},
    "encoder_hidden_states": {"shape": [1, 7, 16]},
})  # fmt: skip
SHARD_HIDDEN = 'hidden_states = cp.shard(hidden_states, "hidden_states", dim=1, ndim=3, stream="latent")\n'
SHARD_ROPE = 'rotary_emb = cp.shard(rotary_emb, "rotary_emb", "*", dim=1, ndim=4, stream="latent")\n'
GATHER = 'hidden_states = cp.gather(hidden_states, "hidden_states", dim=1, ndim=3, stream="latent")\n'
WAN_BEGIN = (
    "cp = begin_region(self)\n"
    f"        {SHARD_HIDDEN}"
    f"        {SHARD_ROPE}"
    '        timestep_proj = cp.shard(timestep_proj, "timestep_proj", dim=1, ndim=4, stream="latent", '
    "when=timestep_proj.ndim == 4)\n"
    '        temb = cp.shard(temb, "temb", dim=1, ndim=3, stream="latent", when=temb.ndim == 3)\n'
)
_WAN_DISPATCH = (
    "        hidden_states = dispatch_attention_fn(\n            query,\n            key,\n            value,\n"
)
_WAN_DISPATCH_END = "None),\n        )\n        hidden_states = hidden_states.flatten(2, 3)\n"
WAN_EXCHANGES: dict[str, Edits] = {
    "ulysses": (
        (_WAN_DISPATCH, "        query, key, value = cp.seq_to_heads(query, key, value)\n" + _WAN_DISPATCH),
        (
            _WAN_DISPATCH_END,
            _WAN_DISPATCH_END.replace(
                ")\n        hidden", ")\n        hidden_states = cp.heads_to_seq(hidden_states)\n        hidden"
            ),
        ),
    ),
    "allgather": ((_WAN_DISPATCH, "        key, value = cp.gather_kv(query, key, value)\n" + _WAN_DISPATCH),),
}
WAN_EDITS: Edits = (
    ("\nlogger = ", f"\n{RUNTIME}\nlogger = "),
    ("        # 4. Transformer blocks\n", f"        {WAN_BEGIN}        # 4. Transformer blocks\n"),
    ("                    block, hidden_states", "                    cp.pin(block), hidden_states"),
    (
        "        hidden_states = self.proj_out(hidden_states)\n",
        f"        hidden_states = self.proj_out(hidden_states)\n        {GATHER}",
    ),
    (
        "        encoder_hidden_states_img = None\n",
        '        cp = attention_site(attn, "latent", when=encoder_hidden_states is None)\n'
        "        encoder_hidden_states_img = None\n",
    ),
)

MASKED_REFERENCE = Reference(str(MASKED_FILE), "MaskedTransformer")
MASKED_PROBE = Probe(
    "holes",
    {},
    {
        "hidden_states": {"shape": [2, 13, 4]},
        "text": {"shape": [2, 7, 4]},
        "text_mask": {"mask": {"shape": [2, 7], "keep": 0.6}},
    },
)
MASKED_EDITS: Edits = (
    ("import checkpoint\n", f"import checkpoint\n\n{RUNTIME}"),
    ("checkpoint(block,", "checkpoint(cp.pin(block),"),
    (
        "        for block in self.blocks:\n",
        f"        cp = begin_region(self)\n        {SHARD_HIDDEN}"
        '        text = cp.shard(text, "text", dim=1, ndim=3, stream="text")\n'
        "        for block in self.blocks:\n",
    ),
    (
        "        if not return_dict:\n",
        f'        {GATHER}        text = cp.gather(text, "text", dim=1, ndim=3, stream="text")\n'
        "        if not return_dict:\n",
    ),
    (
        "        out = F.scaled",
        '        cp = attention_site(self, "text", "latent", layout="BHSD")\n'
        "        query, key, value = cp.seq_to_heads(query, key, value)\n"
        "        mask = cp.mask_heads(mask)\n"
        "        out = F.scaled",
    ),
    ("attn_mask=mask)\n", "attn_mask=mask)\n        out = cp.heads_to_seq(out)\n"),
)


@dataclass(frozen=True)
class _Stub:
    name: str
    module: str
    reference: Reference
    processors: tuple[str, ...]
    heads: str | None


_WAN = _Stub("wan_stub", "transformer_wan", WAN_REFERENCE, ("WanAttnProcessor",), "num_attention_heads")
_MASKED = _Stub("masked_stub", "masked_model", MASKED_REFERENCE, (), None)


def wan(
    root: Path,
    cp: int,
    *,
    strategy: str = "ulysses",
    probes: tuple[Probe, ...] = (WAN_PROBE,),
    broken: Edits = (),
    broken_glue: Edits = (),
) -> PackageToVerify:
    """A package for Wan under `root`. `broken` and `broken_glue` are further edits of model and parallelize.py."""
    spec = find_spec("diffusers")
    assert spec is not None and spec.origin is not None
    text = Path(spec.origin).with_name("models").joinpath("transformers/transformer_wan.py").read_text()
    text = text.replace("from ...", "from diffusers.").replace("from ..", "from diffusers.models.")
    text = patch(text, WAN_EDITS + WAN_EXCHANGES[strategy] + broken)
    return _write(_WAN, root, cp, strategy, text, broken_glue, probes)


def masked(root: Path, cp: int, *, broken: Edits = ()) -> PackageToVerify:
    """The same for the masked model, under ulysses."""
    text = patch(MASKED_FILE.read_text(), MASKED_EDITS + broken)
    return _write(_MASKED, root, cp, "ulysses", text, (), (MASKED_PROBE,))


def patch(text: str, edits: Edits) -> str:
    for old, new in edits:
        assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times"
        text = text.replace(old, new)
    return text


def _write(
    stub: _Stub, root: Path, cp: int, strategy: str, text: str, broken_glue: Edits, probes: tuple[Probe, ...]
) -> PackageToVerify:
    model_class = stub.reference.class_name
    package = PackageToVerify(stub.name, root, make_plan(model_class, probes), stub.reference)
    directory = package.variant(cp, strategy) / stub.name
    directory.mkdir(parents=True)
    directory.joinpath(f"{stub.module}.py").write_text(text)
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    glue = environment.from_string(TEMPLATES.joinpath("parallelize.py.j2").read_text()).render(
        header="",
        runtime="cpgen.runtime",
        model_class=model_class,
        module=stub.module,
        cp=cp,
        tp=1,
        strategy=strategy,
        ulysses_degree=1,
        load_balance=False,
        heads=stub.heads,
        blocks=("blocks",),
        called_alone=[],
        wraps=None,
        wrapped_class=None,
        processors=[{"module": stub.module, "name": name} for name in stub.processors],
    )
    directory.joinpath("parallelize.py").write_text(patch(glue, broken_glue))
    directory.joinpath("__init__.py").write_text(
        f"from .parallelize import CP_DEGREE, TP_DEGREE, build_mesh, parallelize\n"
        f"from .{stub.module} import {model_class}\n"
    )
    return package


def make_plan(model: str, probes: tuple[Probe, ...]) -> Plan:
    """A plan with nothing in it but probes: all that `verify` reads."""
    return Plan(
        model=model,
        diffusers=None,
        heads=None,
        blocks=("blocks",),
        streams=("latent",),
        begin="blocks",
        shards=(),
        prefixes=(),
        gathers=(),
        attention=(),
        probes=probes,
    )
