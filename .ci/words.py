"""Fails if the pages have too many words: README.md and docs/, without code and without the reference.

Words are counted outside of fenced blocks and HTML comments. A page has at most 2,200, all together 22,000.

Run: python .ci/words.py [--list] [CHECKOUT]; `--list` prints the words of each page.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

MOST_OF_ALL = 22_000
MOST_OF_A_PAGE = 2_200
LEFT_OUT = re.compile(r"^ *```.*?^ *```$|<!--.*?-->", re.DOTALL | re.MULTILINE)
WORD = re.compile(r"[\w'’-]*\w[\w'’-]*")


def pages(checkout: Path) -> list[Path]:
    """The pages that people write."""
    docs = checkout / "docs"
    written = [path for path in sorted(docs.rglob("*.md")) if docs / "reference" not in path.parents]
    return [checkout / "README.md", *written]


def words(path: Path) -> int:
    """The words of a page that are not code."""
    return len(WORD.findall(LEFT_OUT.sub(" ", path.read_text(encoding="utf-8"))))


def problems(checkout: Path) -> Iterator[str]:
    """One line for each page that is too long, and one if all together are."""
    counts = {path: words(path) for path in pages(checkout)}
    for path, count in counts.items():
        if count > MOST_OF_A_PAGE:
            yield f"{path}: has {count} words, and at most {MOST_OF_A_PAGE} are allowed: cut it, or split it by tasks"
    if sum(counts.values()) > MOST_OF_ALL:
        yield f"all pages have {sum(counts.values())} words, and at most {MOST_OF_ALL} are allowed: cut some"


if __name__ == "__main__":
    folder = Path(*[word for word in sys.argv[1:] if word != "--list"] or ["."])
    if "--list" in sys.argv:
        for page in pages(folder):
            print(f"{words(page):6} {page.relative_to(folder)}")  # noqa: T201 (a command)
        print(f"{sum(map(words, pages(folder))):6} in all")  # noqa: T201
    sys.exit("\n".join(problems(folder)) or None)
