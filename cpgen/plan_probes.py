"""The probes of a plan, or of a file that has nothing else."""

from __future__ import annotations

import re
from typing import Any

from cpgen.plan import Probe
from cpgen.plan_reader import Reader
from cpgen.probes import validate_probe
from cpgen.yamldoc import Path


class ProbeReader(Reader):
    """Reads the section. That its names are arguments of the class is found when it is checked against the source."""

    def _probes(self, root: dict[str, Any]) -> tuple[Probe, ...]:
        probes: list[Probe] = []
        for i in self._indices(root.get("probes", []), ("probes",)):
            path: Path = ("probes", i)
            value = self._value(path)
            if isinstance(value, dict) and "base" in value:
                entry = self._mapping(path, required=("name", "base"), optional=("config", "inputs", "before"))
                base = next((probe for probe in probes if probe.name == value["base"]), None)
                if base is None:
                    earlier = ", ".join(probe.name for probe in probes) or "none"
                    self._find("CP105", f"'{value['base']}' is no earlier probe (earlier: {earlier})", (*path, "base"))
            else:
                entry = self._mapping(path, required=("name", "config", "inputs"), optional=("before",))
                base = Probe("", {}, {}) if "config" in entry and "inputs" in entry else None
            name = self._typed(
                entry, (*path, "name"), str, "", lambda v: re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", v)
            )
            if name in [probe.name for probe in probes]:
                self._find("CP105", f"two probes are called '{name}'", (*path, "name"))
            config, inputs = (
                self._mapping((*path, key), any_key=True) if key in entry else {} for key in ("config", "inputs")
            )
            before = self._names(entry, (*path, "before")) if "before" in entry else None
            if base is None:
                continue
            before = base.before if before is None else before
            places = base.places | self._document.keys_below(path)
            probe = Probe(name, base.config | config, base.inputs | inputs, before, places)
            for where, message in validate_probe(probe):
                self._find("CP108", message, (*path, *where))
            probes.append(probe)
        return tuple(probes)
