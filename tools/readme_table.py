"""Puts the table of `cpgen verify --json` into README.md, between its two markers."""

from __future__ import annotations

import sys
from pathlib import Path

from cpgen.verify.report import from_json, markdown_table
from tools.sections import replace_section

README = Path(__file__).parent.parent / "README.md"


def main(results: str) -> None:
    replace_section(README, "verify", markdown_table(from_json(Path(results).read_text("utf-8"))))


if __name__ == "__main__":
    main(sys.argv[1])
