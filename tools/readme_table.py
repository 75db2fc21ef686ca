"""Puts the table of `cpgen verify --json` into README.md, between its two markers."""

from __future__ import annotations

import sys
from pathlib import Path

from cpgen.verify.report import from_json, markdown_table

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- verify: begin (make table) -->\n", "<!-- verify: end -->\n"


def main(results: str) -> None:
    table = markdown_table(from_json(Path(results).read_text("utf-8")))
    before, begin, rest = README.read_text("utf-8").partition(BEGIN)
    old, end, after = rest.partition(END)
    del old
    if not begin or not end:
        sys.exit(f"README.md has no {BEGIN.strip()} ... {END.strip()}")
    README.write_text(f"{before}{begin}{table}{end}{after}", "utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
