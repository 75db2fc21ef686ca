"""Findings: what is wrong, where, and what to do. Stages collect them; the command line prints them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

_SHOWN = 200  # characters of a line


@dataclass(frozen=True)
class Location:
    """A span in a text file. `line` and `column` count from 1; `text` is the whole line."""

    file: str
    line: int
    column: int = 1
    width: int = 1
    text: str | None = None


@dataclass(frozen=True)
class Finding:
    """One error. Codes: CP1xx plan, CP2xx packages, CP3xx source, CP4xx usage, CP5xx surgery, CP6xx inference."""

    code: str
    message: str
    location: Location | None = None
    hint: str | None = None  # beside the caret
    note: str | None = None  # what to know
    help: str | None = None  # what to do

    def render(self, kind: str = "error") -> str:
        lines = [f"{kind}[{self.code}]: {self.message}"]
        gutter = ""
        if self.location is not None:
            place = self.location
            gutter = " " * len(str(place.line))
            lines.append(f"{gutter} --> {place.file}:{place.line}:{place.column}")
            if place.text is not None:
                # A tab before the caret would shift it: show each as one space.
                text = place.text.replace("\t", " ").rstrip()
                start = max(0, place.column - 1 - _SHOWN // 2) if len(text) > _SHOWN else 0
                text, column = text[start : start + _SHOWN], place.column - start
                caret = " " * (column - 1) + "^" * max(1, min(place.width, len(text) - column + 1))
                lines += [f"{gutter} |", f"{place.line} | {text}", f"{gutter} | {caret} {self.hint or ''}".rstrip()]
            elif self.hint:
                lines.append(f"{gutter} = {self.hint}")
        if self.note:
            lines.append(f"{gutter} = note: {self.note}")
        if self.help:
            lines.append(f"{gutter} = help: {self.help}")
        return "\n".join(lines)


class CpgenError(Exception):
    """Bad input or a failed check, as findings. `exit_code` is 2 for input, 1 for drift."""

    def __init__(self, findings: Iterable[Finding], *, exit_code: int = 2) -> None:
        self.findings = tuple(dict.fromkeys(findings))
        self.exit_code = exit_code
        super().__init__("\n\n".join(finding.render() for finding in self.findings))


def fail(
    code: str, message: str, location: Location | None = None, *, exit_code: int = 2, **parts: str | None
) -> CpgenError:
    """A `CpgenError` with one finding, to raise."""
    return CpgenError([Finding(code, message, location, **parts)], exit_code=exit_code)


def did_you_mean(word: str, choices: Iterable[str]) -> str | None:
    """'did you mean X?' for the nearest of `choices` other than itself, or None if none is near."""
    near = difflib.get_close_matches(word, sorted(set(choices) - {word}), n=3, cutoff=0.6)
    if not near:
        return None
    return "did you mean " + " or ".join(f"'{choice}'" for choice in near) + "?"
