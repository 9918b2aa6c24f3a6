"""Makes the pages of the site that are not in docs/, when `make docs` builds it; a hook of mkdocs.

- README.md, CHANGELOG.md and other files of the checkout become pages, and links to them lead there.
- Each script in examples/ becomes a page: its docstring, and its code.
- The reference of the command line is the help of each command.
- `<!-- plots: PART -->` in a page becomes a plot of the rows of benches/RESULTS.md that users feel.
"""

from __future__ import annotations

import argparse
import ast
import html
import io
import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import griffe
from mkdocs.structure.files import File, Files

CHECKOUT = Path(__file__).resolve().parents[1]
RESULTS = CHECKOUT / "benches" / "RESULTS.md"
# Files of the checkout, with the pages that they become.
COPIED = {
    "README.md": "index.md",
    "benches/RESULTS.md": "results.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "LICENSE": "license.md",
}
# Folders that a page on a forge may link to.
FOLDERS = {
    "docs": "index.md",
    "docs/guides": "guides/training-on-packs.md",
    "docs/reference": "reference/packing.md",
    "examples": "recipes.md",
}
LINK = re.compile(r"\]\((?P<target>[^)#\s:]+)(?P<anchor>#[^)\s]*)?\)")
PLOTS = re.compile(r"<!-- plots: (?P<part>\w+) -->")
# A comment may hold code that only the tests run, which Markdown would show.
COMMENT = re.compile(r"^<!--.*?-->$", re.DOTALL | re.MULTILINE)
# Text, tundish ahead, tundish behind.
COLORS = {"light": ("#333333", "#00796b", "#c2410c"), "dark": ("#d6d6d6", "#4db6ac", "#ff8a50")}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages and the plots."""
    pages = dict(copies()) | dict(recipes()) | {"reference/command-line.md": command_line()}
    for part, rows in rows_of_parts(RESULTS.read_text(encoding="utf-8")).items():
        for scheme, colors in COLORS.items():
            pages[plot_path(part, scheme)] = plot(rows, *colors)
    for path, content in pages.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links out of docs/ to their pages, and put plots in their places."""
    markdown = PLOTS.sub(lambda found: plot_link(found["part"], page.file.src_uri), markdown)
    markdown = COMMENT.sub("", markdown)
    return rewrite_links(markdown, f"docs/{page.file.src_uri}", page.file.src_uri)


class ExamplesSection(griffe.Extension):
    """Shows `Example:` in a docstring as code; griffe knows the section by its plural."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the section."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)


# ---- Pages ----


def copies() -> Iterator[tuple[str, str]]:
    """The files of the checkout that are pages. A file that is not Markdown is shown as text."""
    for source, page in COPIED.items():
        # An index after another one is no link.
        text = (CHECKOUT / source).read_text(encoding="utf-8").replace("][", "]\\[")
        if source.endswith(".md"):
            yield page, rewrite_links(text, source, page)
        else:
            yield page, f"# {source.capitalize()}\n\n```text\n{text}```\n"


def recipes() -> Iterator[tuple[str, str]]:
    """A page for each script: the first line of its docstring, the others, and its code."""
    for path in sorted((CHECKOUT / "examples").glob("*.py")):
        code = path.read_text(encoding="utf-8")
        words = ast.get_docstring(ast.parse(code)) or ""
        first, _, others = words.partition("\n")
        body = code.split('"""', 2)[2].lstrip()
        text = f"# `{path.name}`\n\n{first}\n{others}\n\n```python\n{body}```\n"
        yield f"recipes/{path.stem}.md", text


def command_line() -> str:
    """The help of each command, under its name."""
    from tundish.cli import build_parser

    os.environ["COLUMNS"] = "96"
    sections = [
        f"## `{parser.prog}`\n\n```text\n{parser.format_help()}```\n" for parser in leaves(build_parser())
    ]
    return "\n".join(["# Command line\n", "What `--help` prints for each command.\n", *sections])


def leaves(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parsers of the commands that do something."""
    verbs = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not verbs:
        yield parser
    for action in verbs:
        for child in action.choices.values():
            yield from leaves(child)


def rewrite_links(markdown: str, source: str, page: str) -> str:
    """Lead the relative links of a file of the checkout to pages, as seen from the page that it becomes."""

    def link(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), found["target"]))
        if path.startswith("docs/") and path not in FOLDERS:
            target = path.removeprefix("docs/")
        elif path.startswith("examples/"):
            target = f"recipes/{posixpath.basename(path).removesuffix('.py')}.md"
        else:
            # A broken link stays as it is, and the strict build refuses it.
            target = {**FOLDERS, **COPIED}.get(path, "")
        target = posixpath.relpath(target, posixpath.dirname(page) or ".") if target else found["target"]
        return f"]({target}{found['anchor'] or ''})"

    return LINK.sub(link, markdown)


# ---- Plots ----


class Row(NamedTuple):
    """A comparison: tundish's time, that of the other, and the quotient, above 1 where tundish is faster."""

    measure: str
    case: str
    ours: str
    against: str
    theirs: str
    times: float


def rows_of_parts(results: str) -> dict[str, list[Row]]:
    """The rows that users feel, by the part in whose section they are measured."""
    part_of, part = {}, ""
    for level, title in re.findall(r"^(##?) (.+)$", results, re.MULTILINE):
        if level == "#":
            part = title.split(",")[0].lower()
        else:
            part_of[title] = part
    table = results.split("<!-- rows that users feel: end -->")[0]
    parts: dict[str, list[Row]] = {}
    for line in re.findall(r"^\| (.+) \|$", table, re.MULTILINE):
        cells = line.split(" | ")
        if cells[0] in part_of:
            row = Row(*cells[:5], float(cells[5].removesuffix("×")))
            parts.setdefault(part_of[row.measure], []).append(row)
    return parts


def plot(rows: list[Row], text: str, ahead: str, behind: str) -> bytes:
    """A bar for each row on a logarithmic axis, as SVG."""
    import matplotlib

    matplotlib.use("agg")
    # The same bytes from the same rows.
    matplotlib.rcParams |= {"svg.hashsalt": "tundish", "svg.fonttype": "none", "font.size": 10}
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5.6, 0.62 * len(rows) + 0.6), layout="constrained")
    for place, row in enumerate(rows):
        color = ahead if row.times >= 1 else behind
        axes.barh(-place - 0.3, row.times - 1, left=1, height=0.2, color=color)
        axes.vlines(1, -place - 0.45, -place - 0.15, color=text, linewidth=0.8)
        words = f"{row.times:.3g}×  {row.against} ({row.theirs}; tundish {row.ours.split(' (')[0]})"
        for line, height in ((f"{row.measure}: {row.case}", 0.25), (words, -0.08)):
            axes.text(0, height - place, line, color=text, fontsize=8, transform=axes.get_yaxis_transform())
    axes.set(xscale="log", yticks=[], xlabel="times as fast as the other (logarithmic)")
    axes.spines[:].set_visible(False)
    axes.tick_params(colors=text)
    axes.xaxis.label.set_color(text)
    file = io.BytesIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    pyplot.close(figure)
    return file.getvalue()


def plot_path(part: str, scheme: str) -> str:
    """Where a plot lies in the site."""
    return f"plots/{part}-{scheme}.svg"


def plot_link(part: str, page: str) -> str:
    """The two images of a plot; the theme shows the one that fits its colours."""
    rows = rows_of_parts(RESULTS.read_text(encoding="utf-8"))[part]
    words = html.escape(
        "; ".join(f"{row.measure}, {row.case}: {row.times:.3g} times {row.against}" for row in rows)
    )
    up = posixpath.relpath(".", posixpath.dirname(page) or ".")
    images = [f"![{words}]({up}/{plot_path(part, scheme)}#only-{scheme})" for scheme in COLORS]
    return "\n".join(images)
