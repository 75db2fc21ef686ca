"""Plans of models that hold a list of models: what such a plan leaves out is taken from the wrapped class's plan."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from cpgen.diagnostics import fail
from cpgen.plan_reader import is_name
from cpgen.plan_variants import has_version
from cpgen.yamldoc import YamlDocument, parse_yaml

_NEEDED = ("blocks", "streams", "region", "attention")
_TAKEN = ("heads", *_NEEDED, "outside", "requires")

PlansOf = Callable[[str], list[tuple[str, str]]]  # class -> text and name of each plan for it


@dataclass(frozen=True)
class Said:
    """All that a plan says on some versions of diffusers; `replaces` are the keys in which it differs there."""

    diffusers: str | None  # None: on all others
    replaces: tuple[str, ...]
    document: YamlDocument


def find_wrapped(document: YamlDocument, plans_of: PlansOf) -> tuple[str, YamlDocument] | None:
    """The plan of the class that `wraps` names, and its text. None if there is none, and the document needs none.

    Raises CpgenError if it needs one, for several, and for one that wraps models itself.
    """
    root = document.value if isinstance(document.value, dict) else {}
    wraps = root.get("wraps")
    model = wraps.get("model") if isinstance(wraps, dict) else None
    if not isinstance(model, str) or not is_name(model) or model == root.get("model"):
        return None
    found = plans_of(model)
    missing = [key for key in _NEEDED if key not in root]
    place = document.at(("wraps", "model"))
    if not found and missing:
        message = f"no plan for {model}, from which {', '.join(missing)} would be taken"
        note = f"looked beside {document.name}, and among the shipped plans"
        raise fail("CP110", message, place, note=note, help=f"write one beside it, or say {', '.join(missing)} here")
    if not found:
        return None
    if len(found) > 1:
        message = f"{len(found)} plans for {model}: {', '.join(name for _, name in found)}"
        note = "what this plan leaves out is taken from it"
        raise fail("CP110", message, place, note=note, help="keep one there")
    text, name = found[0]
    wrapped = parse_yaml(text, name)
    if isinstance(wrapped.value, dict) and "wraps" in wrapped.value:
        message = f"{model} wraps models itself, as {name} says"
        raise fail("CP105", message, place, note="a plan takes from one about the blocks themselves")
    return text, wrapped


def completed(own: Sequence[Said], wrapped: Sequence[Said]) -> Iterator[Said]:
    """What a plan says, completed by what the wrapped class's plan says on the same versions."""
    for ours, theirs in itertools.product(own, wrapped):
        keys = tuple(k for k in _TAKEN if k in theirs.document.value and k not in ours.document.value)
        replaced = tuple(key for key in theirs.replaces if key in keys)
        both = ",".join(text for text in (ours.diffusers, theirs.diffusers) if text) or None
        if (theirs.diffusers and not replaced) or (both and not has_version(both)):
            continue
        yield Said(both, ours.replaces + replaced, ours.document.completed(theirs.document, keys))
