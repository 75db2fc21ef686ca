"""Edits to source text. Upstream's bytes stay as they are; each edit is marked with its reason."""

from __future__ import annotations

from dataclasses import dataclass

MARK = "# cpgen:"


@dataclass(frozen=True)
class Insertion:
    """A new line ahead of `line` (from 1)."""

    line: int
    indent: str
    code: str
    reason: str
    follows: bool = False  # belongs to the statement above: goes ahead of insertions for the one below

    @property
    def text(self) -> str:
        return f"{self.indent}{self.code}  {MARK} {self.reason}\n"


@dataclass(frozen=True)
class Wrap:
    """Put `before` and `after` around an expression. Lines from 1, columns from 0, in characters."""

    start: tuple[int, int]
    end: tuple[int, int]
    before: str
    after: str
    reason: str

    @property
    def line(self) -> int:
        return self.start[0]

    @property
    def code(self) -> str:
        return f"{self.before}...{self.after}"


@dataclass(frozen=True)
class ImportRewrite:
    """Replace the lines of an import statement."""

    line: int
    last: int
    text: str


Edit = Insertion | Wrap | ImportRewrite


def apply_edits(lines: list[str], edits: list[Edit]) -> list[str]:
    """The edited text of each original line: joined, they are the new file; a slice of them is an edited definition.

    `lines` keep their line ends. Element i holds what was inserted ahead of line i + 1, then that line; one more
    element holds what was inserted at the end.
    """
    result = [*lines, ""]
    for rewrite in (edit for edit in edits if isinstance(edit, ImportRewrite)):
        for number in range(rewrite.line, rewrite.last + 1):
            result[number - 1] = rewrite.text if number == rewrite.line else ""
    wraps = [edit for edit in edits if isinstance(edit, Wrap)]
    # Right to left, so that columns stay valid; where two start together, the outer one (later end) is written last.
    points = [(wrap.end, 1, wrap.start, wrap.after) for wrap in wraps]
    points += [(wrap.start, 0, wrap.end, wrap.before) for wrap in wraps]
    for (line, column), closing, other, text in sorted(points, key=_right_to_left):
        del closing, other
        old = result[line - 1]
        result[line - 1] = old[:column] + text + old[column:]
    for line in sorted({wrap.line for wrap in wraps}):
        reasons = dict.fromkeys(wrap.reason for wrap in wraps if wrap.line == line)
        result[line - 1] = f"{result[line - 1].rstrip()}  {MARK} {', '.join(reasons)}\n"
    insertions = [edit for edit in edits if isinstance(edit, Insertion)]
    ahead: dict[int, list[str]] = {}
    for insertion in sorted(insertions, key=lambda edit: (edit.line, not edit.follows)):
        ahead.setdefault(insertion.line, []).append(insertion.text)
    for line, texts in ahead.items():
        result[line - 1] = "".join(texts) + result[line - 1]
    return result


def _right_to_left(point: tuple[tuple[int, int], int, tuple[int, int], str]) -> tuple[int, int, int, int, int]:
    (line, column), closing, other, _ = point
    return (-line, -column, closing, other[0], other[1])
