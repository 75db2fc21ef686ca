"""Which exchange an attention call gets, by the module that it is for."""

from __future__ import annotations

import pytest
from torch import nn

from cpgen.runtime.attention import LOCAL_ATTENTION, AttentionSite, attention_site
from cpgen.runtime.binding import ATTRIBUTE, LIST, Axis, Binding

WITHIN = {"first": ("text",), "modes.image": ("text", "latent")}


def module_in(blocks: str | None) -> nn.Module:
    """A module of a bound model, in a list of blocks or in none."""
    module = nn.Identity()
    axis = Axis("", 2, 0)
    setattr(module, ATTRIBUTE, Binding("Model", axis, Axis("", 1, 0), axis, False, (), ()))
    if blocks is not None:
        setattr(module, LIST, blocks)
    return module


@pytest.mark.parametrize("blocks", WITHIN)
def test_streams_are_those_of_the_modules_list(blocks: str) -> None:
    site = attention_site(module_in(blocks), within=WITHIN)
    assert isinstance(site, AttentionSite) and site._streams == site._kv_streams == WITHIN[blocks]


def test_outside_of_all_lists_attention_is_local() -> None:
    assert attention_site(module_in(None), within=WITHIN) is LOCAL_ATTENTION


def test_a_list_that_the_plan_left_out_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"Model: attention in last runs a processor for those in first, modes\.image"):
        attention_site(module_in("last"), within=WITHIN)
