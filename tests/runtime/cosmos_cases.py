"""A case of `verify` with a stand-in for torchvision, on the workers."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
from diffusers.utils import import_utils
from torch import Tensor
from torch.nn.functional import interpolate

from cpgen.verify.case import Case, RankReport, run_case


def run_with_stand_in(case: Case) -> RankReport:
    reference = importlib.import_module(
        case.reference.source
    )  # and what it imports: before any of it sees the stand-in
    torchvision = ModuleType("torchvision")
    torchvision.__spec__ = ModuleSpec("torchvision", None)
    torchvision.transforms = SimpleNamespace(  # type: ignore[attr-defined]
        functional=SimpleNamespace(resize=_resize), InterpolationMode=SimpleNamespace(NEAREST="nearest")
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "transforms", torchvision.transforms, raising=False)
        patch.setattr(import_utils, "_torchvision_available", True)
        patch.setitem(sys.modules, "torchvision", torchvision)
        return run_case(case)


def _resize(image: Tensor, size: list[int], interpolation: str) -> Tensor:
    return interpolate(image, size=size, mode=interpolation)
