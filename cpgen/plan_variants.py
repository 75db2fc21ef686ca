"""The ranges of versions in a plan, and its variants: what it says on some of them only."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from cpgen.plan import in_range
from cpgen.plan_reader import Reader
from cpgen.yamldoc import Path

REPLACEABLE = ("heads", "blocks", "streams", "region", "attention", "outside", "tensor_parallel", "probes")
_ANY_PATCH = 99999  # a release number that none reaches
_MAX_LENGTH = 200


class VariantReader(Reader):
    """Reads where variants are and what they replace; what they say is read as that of a plan is."""

    def variants(self) -> list[tuple[Path, str, tuple[str, ...]]]:
        """Of each variant: where it is, its range of diffusers, and the keys that it replaces."""
        found = []
        root = self._document.value
        listed = root.get("variants", []) if isinstance(root, dict) else []
        for i in self._indices(listed, ("variants",)):
            path: Path = ("variants", i)
            entry = self._mapping(path, required=("diffusers",), optional=REPLACEABLE)
            keys = tuple(key for key in entry if key in REPLACEABLE)
            if not keys:
                self._find("CP107", "a variant replaces nothing", path, note=f"it may: {', '.join(REPLACEABLE)}")
            found.append((path, self._specifier(entry, (*path, "diffusers")) or "", keys))
        self._check_ranges([(path, specifier) for path, specifier, _ in found if specifier])
        return found

    def _check_ranges(self, variants: list[tuple[Path, str]]) -> None:
        """Each variant counts on some version that the plan is for."""
        own = self._value(("diffusers",))
        own = own if _is_range(own) else ">=0"
        versions = [v for v in _versions_about([own, *(text for _, text in variants)]) if in_range(v, own)]
        taken: set[str] = set()
        for path, text in variants:
            having = {version for version in versions if in_range(version, text)}
            where = (*path, "diffusers")
            if not having:
                self._find("CP105", f"no version in {text!r} is in the plan's range {own!r}", where)
            elif having <= taken:
                self._find("CP105", f"earlier variants have every version in {text!r}: this one never counts", where)
            taken |= having

    def _specifier(self, parent: dict[str, Any], path: Path) -> str | None:
        if path[-1] not in parent:
            return None
        value = parent[str(path[-1])]
        if not _is_range(value):
            self._find("CP105", f"{value!r} is not a version range such as '>=0.42,<0.43'", path)
            return None
        if not has_version(value):
            self._find("CP105", f"no version is in the range {value!r}", path)
            return None
        return str(value)


def _is_range(value: Any) -> bool:
    try:
        return isinstance(value, str) and 0 < len(value.strip()) <= _MAX_LENGTH and SpecifierSet(value) is not None
    except InvalidSpecifier:
        return False


def has_version(range_: str) -> bool:
    """Whether some version is in a range. Of ranges joined by a comma: in all of them."""
    return any(in_range(version, range_) for version in _versions_about([range_]))


def _versions_about(ranges: Iterable[str]) -> list[str]:
    """Versions that tell ranges of versions apart: each bound in them, and some right below and above it."""
    found = []
    for part in (part for text in ranges for part in SpecifierSet(text)):
        match = re.match(r"[0-9]+(\.[0-9]+)*", part.version)
        release = [int(number) for number in match[0].split(".")] if match else []
        found += [part.version.removesuffix(".*"), ".".join(map(str, [*release, 0, 1]))]
        for length in range(1, len(release) + 1):
            *head, last = release[:length]
            found.append(".".join(map(str, [*head, last + 1])))
            found += [".".join(map(str, [*head, last - 1, _ANY_PATCH]))] if last else []
    return found or ["0"]
