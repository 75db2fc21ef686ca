"""From YAML to a plan: what it becomes, and every finding with its place."""

from __future__ import annotations

import pytest

from cpgen import resources
from cpgen.diagnostics import CpgenError, Finding
from cpgen.plan import AttentionFunction, Gather, Prefix, Shard, Site, Whole
from cpgen.plan_files import read_plan
from cpgen.plan_loader import load_plan
from cpgen.plan_reader import is_name
from tests.unit.projects import plan_text

FULL = """\
model: Model
diffusers: ">=0.42,<0.43"
heads: num_heads
blocks: [blocks, more]
streams: [text, latent]
region:
  begin: {before: blocks}
  shard:
    hidden: {dim: 1, ndim: 3, stream: latent, when: ndim == 3, after: proj_in}
    rope['a.b'][-1][*]: {dim: 0, ndim: 2, stream: [text, latent], optional: true, before: more}
  prefix: {frames: latent}
  gather:
    out[0]: {after: proj_out, dim: 1, ndim: 3, stream: latent}
attention:
  One:
    - {call: 0, kind: cross}
    - {call: 1, kind: self, stream: latent, when: x is None, otherwise: text, layout: BHSD}
  Two:
    sites: [{call: 0, kind: cross, stream: latent, kv: [text]}]
    whole:
      - {variables: {n: latent, m: [text, latent]}, before: mask, until: mask}
      - {variables: {k: text}, after: k}
outside: [Refiner]
probes:
  - name: a-1.b
    config: {heads: 4, nested: {x: [1, null]}}
    inputs: {hidden: {shape: [1, 2]}}
    before: [fuse]
"""


def findings(text: str) -> list[Finding]:
    with pytest.raises(CpgenError) as error:
        load_plan(text, "made.yaml")
    assert error.value.exit_code == 2
    return list(error.value.findings)


def test_everything_a_plan_can_say() -> None:
    plan = load_plan(FULL, "plans/made.yaml")
    assert (plan.model, plan.diffusers, plan.heads, plan.begin) == ("Model", ">=0.42,<0.43", "num_heads", "blocks")
    assert (plan.blocks, plan.streams, plan.outside) == (("blocks", "more"), ("text", "latent"), ("Refiner",))
    places = [shard.location.line for shard in plan.shards if shard.location]
    assert places == [9, 10]
    assert [vars(shard) | {"location": None} for shard in plan.shards] == [
        vars(Shard("hidden", (), 1, 3, ("latent",), when="hidden.ndim == 3", after="proj_in")),
        vars(Shard("rope", ("a.b", -1, "*"), 0, 2, ("text", "latent"), optional=True, before="more")),
    ]
    assert [vars(p) | {"location": None} for p in plan.prefixes] == [vars(Prefix("frames", "latent"))]
    assert [vars(g) | {"location": None} for g in plan.gathers] == [
        vars(Gather("out", (0,), 1, 3, "latent", "proj_out")),
    ]
    one, two = plan.attention
    assert isinstance(one, AttentionFunction) and (one.owner, two.owner, one.whole) == ("One", "Two", ())
    assert [vars(site) | {"location": None} for site in (*one.sites, *two.sites)] == [
        vars(Site(0, "cross")),
        vars(Site(1, "self", ("latent",), when="x is None", otherwise=("text",), layout="BHSD")),
        vars(Site(0, "cross", ("latent",), kv=("text",))),
    ]
    assert [vars(whole) | {"location": None} for whole in two.whole] == [
        vars(Whole((("n", ("latent",)), ("m", ("text", "latent"))), None, "mask", "mask")),
        vars(Whole((("k", ("text",)),), "k", None, None)),
    ]
    (probe,) = plan.probes
    assert (probe.name, probe.before, probe.config["nested"]) == ("a-1.b", ("fuse",), {"x": [1, None]})
    assert plan.name == "plans/made.yaml" and len(plan.sha256) == 64


@pytest.mark.parametrize("path", sorted(resources.folder("plans").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_plans_load(path) -> None:  # type: ignore[no-untyped-def]
    plan = read_plan(path, path.name)
    assert plan.diffusers and plan.heads and len(plan.probes) >= 3
    assert resources.shipped_plans()[plan.model] == path


@pytest.mark.parametrize(
    ("old", "new", "code", "message", "line", "column"),
    [
        ("model: Model", "model: 3", "CP105", "3 is not a name", 1, 8),
        ("model: Model", "modl: Model", "CP103", "unknown key 'modl'", 1, 1),
        ("model: Model\n", "", "CP107", "missing key 'model'", 1, 1),
        ('">=0.42,<0.43"', "newest", "CP105", "'newest' is not a version range", 2, 12),
        ('">=0.42,<0.43"', "''", "CP105", "'' is not a version range", 2, 12),
        ('">=0.42,<0.43"', "'<0.42,>=0.43'", "CP105", "no version is in the range '<0.42,>=0.43'", 2, 12),
        ('">=0.42,<0.43"', "'>=" + "1" * 5000 + "'", "CP105", "is not a version range", 2, 12),
        ('">=0.42,<0.43"', "0.42", "CP105", "0.42 is not a version range", 2, 12),
        ("heads: num_heads", "heads: __class__", "CP105", "'__class__' is not a name", 3, 8),
        ("heads: num_heads", "heads: num_heads\nrequires: [a.b]", "CP105", "'a.b' is not a name", 4, 12),
        ("[blocks, more]", "[blocks, 'a..b']", "CP105", "'a..b' is not a name", 4, 18),
        ("[blocks, more]", "[blocks, 'a.b()']", "CP105", "'a.b()' is not a name", 4, 18),
        ("[blocks, more]", "blocks", "CP105", "expected a list", 4, 9),
        ("[blocks, more]", "[]", "CP105", "an empty list of blocks", 4, 9),
        ("[blocks, more]", "[blocks, more, blocks]", "CP105", "'blocks' is named twice", 4, 24),
        ("[text, latent]\nregion", "[text, latent, 'a\"; x']\nregion", "CP105", "is not a name", 5, 25),
        ("[text, latent]\nregion", "[text, latent, b]\nregion", "CP105", "nothing in 'shard' cuts stream 'b'", 5, 25),
        ("[text, latent]\nregion", "[text, latent, lambda]\nregion", "CP105", "'lambda' is not a name", 5, 25),
        ("{before: blocks}", "{after: blocks}", "CP103", "unknown key 'after'", 7, 11),
        ("{before: blocks}", "blocks", "CP105", "expected a mapping", 7, 10),
        ("hidden: {dim: 1", "hid den: {dim: 1", "CP105", "'hid den' is not a variable", 9, 5),
        ("hidden: {dim: 1", "x;import os: {dim: 1", "CP105", "'x;import os' is not a variable", 9, 5),
        ("hidden: {dim: 1", "self: {dim: 1", "CP105", "'self' is not a variable", 9, 5),
        ("{frames: latent}", "{self: latent}", "CP105", "'self' is not a number of tokens", 11, 12),
        ("{frames: latent}", "{rope: latent}", "CP105", "'rope' is cut as a tensor", 11, 12),
        ("otherwise: text", "otherwise: [latent]", "CP105", "'otherwise' says what 'stream' does", 17, 62),
        ("when: ndim == 3", "when: 1 == 1", "CP109", "'1 == 1' reads no variable", 9, 53),
        ("[Refiner]", "[Refiner, Two]", "CP105", "Two is described under 'attention'", 23, 20),
        ("hidden: {dim: 1", "x.y: {dim: 1", "CP105", "'x.y' is not a variable", 9, 5),
        ("hidden: {dim: 1", "x[a]: {dim: 1", "CP105", "'x[a]' is not a variable", 9, 5),
        ("rope['a.b']", "rope['a\"]']", "CP105", "is not a variable", 10, 5),
        ("hidden: {dim: 1", "hidden: {dim: 3", "CP105", "dim 3 cannot be: a tensor of ndim 3 has dims 0 to 2", 9, 19),
        ("hidden: {dim: 1", "hidden: {dim: -1", "CP105", "dim -1 cannot be", 9, 19),
        ("hidden: {dim: 1", "hidden: {dim: true", "CP105", "True is not a valid dim (int)", 9, 19),
        ("hidden: {dim: 1, ndim: 3", "hidden: {dim: 1, ndim: 9", "CP105", "9 is not a valid ndim", 9, 28),
        ("hidden: {dim: 1, ndim: 3", "hidden: {dim: 1", "CP107", "missing key 'ndim'", 9, 5),
        ("stream: latent, when: n", "stream: laten, when: n", "CP105", "unknown stream 'laten'", 9, 39),
        ("stream: latent, when: n", "stream: [], when: n", "CP105", "an empty list of streams", 9, 39),
        ("stream: latent, when: n", "stream: [latent, latent], when: n", "CP105", "'latent' is named twice", 9, 48),
        ("when: ndim == 3", "when: print(1)", "CP109", "not a condition: 'print(1)' is not allowed", 9, 53),
        ("when: ndim == 3", "when: 3", "CP109", "not a condition: 3 is not text", 9, 53),
        ("when: ndim == 3, ", "before: blocks, ", "CP105", "'after' and 'before' say two places", 9, 5),
        ("after: proj_in", "after: 'x()'", "CP105", "'x()' is not a name", 9, 71),
        ("optional: true", "optional: 1", "CP105", "1 is not a valid optional (bool)", 10, 77),
        ("{frames: latent}", "{'a b': latent}", "CP105", "'a b' is not a number of tokens", 11, 12),
        ("{frames: latent}", "{frames: image}", "CP105", "unknown stream 'image'", 11, 20),
        ("{frames: latent}", "{frames: [text, latent]}", "CP105", "tokens are those of one stream", 11, 20),
        ("ndim: 3, stream: latent}\natt", "ndim: 3, stream: [text, latent]}\natt", "CP105", "one stream", 13, 56),
        ("after: proj_out, ", "after: 3, ", "CP105", "3 is not a name", 13, 21),
        ("after: proj_out, ", "cut_again: x, ", "CP105", "'x' is not a valid cut_again (bool)", 13, 25),
        ("  One:", "  'One(': ", "CP105", "'One(' is not a class name", 15, 3),
        ("{call: 0, kind: cross}\n    -", "{call: 1, kind: cross}\n    -", "CP105", "call 1 is described twice", 17, 7),
        ("{call: 0, kind: cross}\n    -", "{call: -1, kind: cross}\n    -", "CP105", "-1 is not a valid call", 16, 14),
        ("kind: self", "kind: selfish", "CP105", "'selfish' is not one of self, joint, cross, causal", 17, 23),
        ("kind: self, stream: latent", "kind: self", "CP107", "a self site names its stream", 17, 7),
        ("kind: self", "kind: joint", "CP105", "a joint site names its streams in the order", 17, 38),
        ("kind: self", "kind: cross", "CP105", "takes no stream", 17, 30),
        ("when: x is None, ", "", "CP107", "'otherwise' needs a 'when'", 17, 45),
        ("when: x is None, ", "when: x is None, kv: text, ", "CP105", "a self site takes no kv", 17, 62),
        ("stream: latent, when: x is None, otherwise: text", "stream: {}", "CP105", "an empty mapping", 17, 37),
        ("layout: BHSD", "layout: BSDH", "CP105", "'BSDH' is not one of BSHD, BHSD", 17, 87),
        ("stream: latent, kv", "kv", "CP107", "a cross site with kv names its stream", 19, 13),
        ("before: mask, ", "before: mask, after: n, ", "CP107", "one of 'after' and 'before'", 21, 9),
        ("{n: latent, m: [text, latent]}", "{}", "CP105", "an empty mapping: variable -> streams", 21, 21),
        ("{n: latent", "{n-1: latent", "CP105", "'n-1' is not a variable's name", 21, 22),
        ("[Refiner]", "[Refiner, 7]", "CP105", "7 is not a name", 23, 20),
        ("name: a-1.b", "name: '../x'", "CP105", "'../x' is not a valid name (str)", 25, 11),
        ("name: a-1.b", "name: 7", "CP105", "7 is not a valid name (str)", 25, 11),
        ("{shape: [1, 2]}", "{shape: [1, -2]}", "CP108", "a size is a whole number above 0", 27, 34),
        ("before: [fuse]", "before: ['fuse()']", "CP105", "'fuse()' is not a name", 28, 14),
        ("before: [fuse]", "after: [fuse]", "CP103", "unknown key 'after'", 28, 5),
    ],
)
def test_finding_and_its_place(old: str, new: str, code: str, message: str, line: int, column: int) -> None:
    assert FULL.count(old) == 1
    found = findings(FULL.replace(old, new))
    places = [
        (finding.location.line, finding.location.column)
        for finding in found
        if finding.code == code and message in finding.message and finding.location
    ]
    assert places == [(line, column)], "\n".join(finding.render() for finding in found)


def test_near_matches_and_known_words_are_shown() -> None:
    (unknown, missing) = sorted(findings(FULL.replace("streams:", "steams:"))[:2], key=lambda finding: finding.code)
    assert unknown.hint == "did you mean 'streams'?" and unknown.note and "keys here: model, blocks" in unknown.note
    assert missing.message == "missing key 'streams'"
    (stream,) = findings(FULL.replace("{frames: latent}", "{frames: latnt}"))
    assert stream.hint == "did you mean 'latent'?" and stream.note == "streams of this plan: text, latent"


def test_all_findings_are_collected_in_the_order_of_the_file() -> None:
    text = (
        FULL.replace("model: Model", "model: 1").replace("kind: self", "kind: x").replace("dim: 1, ndim: 3", "dim: 7")
    )
    found = findings(text)
    lines = [finding.location.line for finding in found if finding.location]
    assert len(found) == len(lines) == 4 and lines == sorted(lines)


@pytest.mark.parametrize("text", ["", "[]", "plan", "model: {}", "3"])
def test_not_a_plan_at_all(text: str) -> None:
    assert findings(text)


def test_two_probes_of_one_name() -> None:
    probe = FULL[FULL.index("  - name") :]
    (found,) = findings(FULL + probe)
    assert found.message == "two probes are called 'a-1.b'" and found.location and found.location.line == 29


def test_a_probe_adds_to_an_earlier_one() -> None:
    first, added = load_plan(
        FULL + "  - {name: more, base: a-1.b, config: {layers: 7}, inputs: {extra: {shape: [2]}}}\n", "made.yaml"
    ).probes
    assert added.config == first.config | {"layers": 7}
    assert added.inputs == first.inputs | {"extra": {"shape": [2]}}
    assert added.before == first.before


@pytest.mark.parametrize(
    ("probe", "message"),
    [
        ("{name: more, base: other}", "'other' is no earlier probe (earlier: a-1.b)"),
        ("{name: more, base: more}", "'more' is no earlier probe (earlier: a-1.b)"),
        ("{name: more, base: [1]}", "'[1]' is no earlier probe (earlier: a-1.b)"),
        ("{name: more, base: a-1.b, inputs: 3}", "expected a mapping"),
        ("{name: more, config: {}}", "missing key 'inputs'"),
    ],
)
def test_a_probe_adds_to_none(probe: str, message: str) -> None:
    (found,) = findings(FULL + f"  - {probe}\n")
    assert found.message == message


WRAPPER = FULL.replace("\nheads:", "\nwraps: {list: nets, model: Inner}\nheads:")


def test_a_model_that_holds_a_list_of_models() -> None:
    wraps = load_plan(WRAPPER, "made.yaml").wraps
    assert wraps is not None and (wraps.attribute, wraps.model) == ("nets", "Inner")
    assert wraps.location is not None and wraps.location.line == 3
    assert load_plan(FULL, "made.yaml").wraps is None


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("{list: nets, model: Inner}", "{list: nets}", "missing key 'model'"),
        ("{list: nets, model: Inner}", "nets", "expected a mapping"),
        ("list: nets", "list: 'nets[0]'", "'nets[0]' is not a name"),
        ("model: Inner", "model: 'Inner()'", "'Inner()' is not a name"),
        ("model: Inner", "model: Model", "Model cannot be in a list of its own"),
        ("outside:", "tensor_parallel: {}\noutside:", "tensor parallelism of wrapped models is not possible"),
    ],
)
def test_wrappers_that_cannot_be(old: str, new: str, message: str) -> None:
    assert message in [finding.message for finding in findings(WRAPPER.replace(old, new, 1))]


BY_LIST = FULL.replace("blocks: [blocks, more]", "blocks: [blocks, more.image]").replace(
    "stream: latent, when: x is None, otherwise: text", "stream: {blocks: latent, more.image: [text, latent]}"
)


def test_a_joint_site_that_is_one_in_no_list() -> None:
    text = BY_LIST.replace("kind: self", "kind: joint").replace("more.image: [text, latent]", "more.image: text")
    (found,) = findings(text)
    assert found.message.startswith("a joint site names its streams in the order")


def test_places_of_a_probes_arguments() -> None:
    plan = load_plan(FULL + "  - {name: more, base: a-1.b, config: {layers: 1}}\n", "made.yaml")
    first, added = ({key: place.line for key, place in probe.places.items() if len(key) > 1} for probe in plan.probes)
    assert first == {
        ("config", "heads"): 26,
        ("config", "nested"): 26,
        ("config", "nested", "x"): 26,
        ("inputs", "hidden"): 27,
        ("inputs", "hidden", "shape"): 27,
    }
    assert added == first | {("config", "layers"): 29}


def test_streams_by_the_list_of_blocks() -> None:
    plan = load_plan(BY_LIST.replace("kind: self", "kind: joint"), "made.yaml")
    site = plan.attention[0].sites[1]
    assert plan.blocks == ("blocks", "more.image")
    assert site.within == (("blocks", ("latent",)), ("more.image", ("text", "latent")))
    assert site.streams == ("latent", "text")  # all of them, for what only asks which are exchanged


@pytest.mark.parametrize(
    ("old", "new", "code", "message", "column"),
    [
        ("{blocks: latent, more", "{block: latent, more", "CP105", "'block' is none of the plan's blocks", 38),
        ("{blocks: latent, more", "{blocks: laten, more", "CP105", "unknown stream 'laten'", 46),
        ("{blocks: latent, more", "{blocks: [], more", "CP105", "an empty list of streams", 46),
        ("{blocks: latent, more.image: [text, latent]}", "{}", "CP105", "an empty mapping: list of blocks", 37),
        ("layout: BHSD}\n  Two", "when: x is None}\n  Two", "CP105", "take neither 'when' nor 'kv'", 29),
        ("kind: self", "kind: cross", "CP105", "takes no stream", 30),
    ],
)
def test_streams_by_list_that_cannot_be(old: str, new: str, code: str, message: str, column: int) -> None:
    found = findings(BY_LIST.replace(old, new))
    assert any(
        finding.code == code
        and message in finding.message
        and finding.location is not None
        and (finding.location.line, finding.location.column) == (17, column)
        for finding in found
    ), "\n".join(finding.render() for finding in found)


REFUSES = FULL.replace("  prefix:", "  refuse: [{when: mode is not None}, {when: count > 0 and x is None}]\n  prefix:")


def test_forwards_that_are_refused() -> None:
    plan = load_plan(REFUSES, "made.yaml")
    assert [refusal.when for refusal in plan.refusals] == ["mode is not None", "count > 0 and x is None"]
    assert [(r.location.line, r.location.column) for r in plan.refusals if r.location] == [(11, 12), (11, 38)]


@pytest.mark.parametrize(
    ("old", "new", "code", "message", "column"),
    [
        ("{when: mode is not None}", "{if: mode}", "CP103", "unknown key 'if'", 13),
        ("{when: mode is not None}", "{}", "CP107", "missing key 'when'", 12),
        ("mode is not None", "print(mode)", "CP109", "not a condition: 'print(mode)' is not allowed", 19),
        ("mode is not None", "mode == 'a'", "CP109", "is not allowed in a condition", 19),
        ("mode is not None", "3", "CP109", "not a condition: 3 is not text", 19),
    ],
)
def test_refusals_that_are_none(old: str, new: str, code: str, message: str, column: int) -> None:
    found = findings(REFUSES.replace(old, new))
    assert any(
        finding.code == code
        and message in finding.message
        and finding.location is not None
        and (finding.location.line, finding.location.column) == (11, column)
        for finding in found
    ), "\n".join(finding.render() for finding in found)


@pytest.mark.parametrize(
    ("shards", "met"),
    [
        ("x: {AS}, 'x[0]': {AS}", ["x[0] is cut there by 'x' already"]),
        ("'x[0]': {AS}, x: {AS}", ["x is cut there by 'x[0]' already"]),
        ("'x[*]': {AS}, 'x[0]': {AS}", ["x[0] is cut there by 'x[*]' already"]),
        ("'x[0][1]': {AS}, 'x[*]': {AS}", ["x[*] is cut there by 'x[0][1]' already"]),
        ("'x[*]': {AS}, \"x['a']\": {AS}", ["x['a'] is cut there by 'x[*]' already"]),
        ("'x[1]': {AS}, 'x[01]': {AS}", ["x[1] is cut there by 'x[1]' already"]),
        ("x: {AS}, 'x[0]': {AS, before: blocks}", ["x[0] is cut there by 'x' already"]),  # where the region begins
        ("x: {AS, after: m}, 'x[0]': {AS, after: m}", ["x[0] is cut there by 'x' already"]),
        ("x: {AS}, 'x[0]': {AS, when: n == 1}", ["x[0] is cut there by 'x' already"]),
        ("'x[0]': {AS, when: n == 1}, 'x[*]': {AS, when: n == 1}", ["x[*] is cut there by 'x[0]' already"]),
        ("'x[0]': {AS, when: n == 1}, 'x[*]': {AS, when: n == 2}", []),
        ("'x[0]': {AS}, 'x[1]': {AS}, 'x[-1]': {AS}, x_: {AS}", []),
        ("x: {AS}, 'x[0]': {AS, before: more}, 'x[1]': {AS, after: m}", []),
    ],
)
def test_a_value_is_cut_once_at_a_place(shards: str, met: list[str]) -> None:
    text = plan_text(shard="{" + shards.replace("AS", "dim: 1, ndim: 3, stream: latent") + "}")
    assert [finding.message for finding in (findings(text) if met else [])] == met
    if not met:
        load_plan(text, "made.yaml")


def test_a_value_is_gathered_once_at_a_place() -> None:
    gather = "{x: {after: m, AS}, 'x[0]': {after: m, AS}, 'x[1]': {AS}}"
    (found,) = findings(plan_text(gather=gather.replace("AS", "dim: 1, ndim: 3, stream: latent")))
    assert found.message == "x[0] is gathered there by 'x' already" and found.note
    assert found.location and (found.location.line, found.location.column) == (8, 60)


LEADS = FULL.replace("stream: latent, when: ndim == 3,", "stream: latent, start: self.config.lead,").replace(
    "{frames: latent}", "{frames: latent, self.config.lead: latent}"
)


def test_counts_of_leading_tokens() -> None:
    plan = load_plan(LEADS, "made.yaml")
    assert plan.shards[0].start == "self.config.lead" and plan.shards[1].start is None
    assert [(prefix.variable, prefix.stream) for prefix in plan.prefixes] == [
        ("frames", "latent"),
        ("self.config.lead", "latent"),
    ]
    assert load_plan(LEADS.replace("start: self.config.lead", "start: n"), "made.yaml").shards[0].start == "n"


@pytest.mark.parametrize(
    ("old", "new", "message", "line", "column"),
    [
        ("start: self.config.lead", "start: 3", "3 is not a number of tokens", 9, 54),
        ("start: self.config.lead", "start: n + 1", "'n + 1' is not a number of tokens", 9, 54),
        ("start: self.config.lead", "start: self.lead", "'self.lead' is not a number of tokens", 9, 54),
        ("latent, start", "[text, latent], start", "'start' counts tokens of one stream", 9, 55),
        (" self.config.lead: l", " self.config.lead(): l", "'self.config.lead()' is not a number of tokens", 11, 28),
        (" self.config.lead: l", " self.config.__class__: l", "'self.config.__class__' is not a number", 11, 28),
        (" self.config.lead: l", " a b: l", "'a b' is not a number of tokens", 11, 28),
    ],
)
def test_counts_that_are_none(old: str, new: str, message: str, line: int, column: int) -> None:
    (found,) = findings(LEADS.replace(old, new))
    assert found.code == "CP105" and message in found.message
    assert found.location and (found.location.line, found.location.column) == (line, column)


CUTS = FULL.replace(
    "after: k}\noutside", "after: k}\n    shard: {mask: {dim: 1, ndim: 2, stream: latent, optional: true}}\noutside"
)


def test_cuts_in_an_attention_function() -> None:
    one, two = load_plan(CUTS, "made.yaml").attention
    assert one.shards == ()
    assert [vars(shard) | {"location": None} for shard in two.shards] == [
        vars(Shard("mask", (), 1, 2, ("latent",), optional=True))
    ]


@pytest.mark.parametrize(
    ("old", "new", "code", "message", "column"),
    [
        ("{mask: {", "{'mask[0]': {", "CP105", "'mask[0]' is not a variable's name", 13),
        ("stream: latent, optional: true}}", "stream: [text, latent]}}", "CP105", "along one stream", 45),
        ("latent, optional: true}}", "latent, when: x is None}}", "CP103", "unknown key 'when'", 53),
        ("dim: 1, ndim: 2", "dim: 2, ndim: 2", "CP105", "dim 2 cannot be", 25),
        ("ndim: 2, stream: latent", "ndim: 2", "CP107", "missing key 'stream'", 13),
    ],
)
def test_cuts_that_cannot_be(old: str, new: str, code: str, message: str, column: int) -> None:
    (found,) = findings(CUTS.replace(old, new))
    assert (found.code, found.location and (found.location.line, found.location.column)) == (code, (23, column))
    assert message in found.message


def test_helper_plan_is_a_plan() -> None:
    assert load_plan(plan_text(), "made.yaml").streams == ("latent",)


@pytest.mark.parametrize(
    "text", ["", "1a", "a b", "a-b", "class", "None", "__x", "é", "a.b", "a\n", "a()", None, 3, "match\x00"]
)
def test_not_names(text: object) -> None:
    assert not is_name(text)


@pytest.mark.parametrize("text", ["a", "_a", "A1", "match", "type"])
def test_names(text: str) -> None:
    assert is_name(text)
