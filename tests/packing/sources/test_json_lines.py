"""Token counts and samples of JSON Lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.packing.sources import assert_packs_alike, draw_rows

import tundish as td
from tundish.errors import InvalidInputError, InvalidTypeError
from tundish.packing.sources import json_lines
from tundish.packing.sources import source as shared

ROWS = draw_rows(40)


def write(path: Path, rows: list[object], ends: str = "\n") -> Path:
    path.write_text("".join(json.dumps(row) + ends for row in rows), encoding="utf-8")
    return path


def test_numbers_and_lists(tmp_path: Path) -> None:
    rows = [
        {"text": f"line\u2028 {number}", "length": number, "turns": 2 * number, "tokens": [0] * 3}
        for number in range(9)
    ]
    path = write(tmp_path / "a.jsonl", [*rows])
    assert td.packing.lengths(path).tolist() == list(range(9))
    assert td.packing.lengths(path, "turns").tolist() == list(range(0, 18, 2))
    assert td.packing.lengths(path, "tokens").tolist() == [3] * 9
    assert_packs_alike(write(tmp_path / "b.jsonl", [*ROWS]), ROWS)
    assert_packs_alike(write(tmp_path / "c.ndjson", [*ROWS], "\r\n \n\n"), ROWS)
    assert_packs_alike([tmp_path / "b.jsonl", tmp_path / "c.ndjson"], ROWS + ROWS)
    (tmp_path / "d.jsonl").write_text(
        '{"input_ids": [1, 2], "labels": [3, 4]}\n{"input_ids": [5], "labels": [6]}'
    )
    assert_packs_alike(
        tmp_path / "d.jsonl", [{"input_ids": [1, 2], "labels": [3, 4]}, {"input_ids": [5], "labels": [6]}]
    )
    # Windows writes a mark at the beginning, and files are joined.
    text = (tmp_path / "b.jsonl").read_text()
    for marked in (
        f"\ufeff{text}",
        f"\ufeff\n{text}",
        f"\ufeff{text}\ufeff\n \n\ufeff",
        f"\ufeff \r\n{text}",
    ):
        (tmp_path / "marked.jsonl").write_text(marked, encoding="utf-8")
        assert_packs_alike(tmp_path / "marked.jsonl", ROWS)
    (tmp_path / "e.jsonl").touch()
    assert_packs_alike(tmp_path / "e.jsonl", [])


def test_samples_have_their_tokens_and_other_lists_of_numbers(tmp_path: Path) -> None:
    row = {
        "tokens": [1, 2],
        "input_ids": [9],
        "loss_weight": [0.5, 1.0],
        "text": "a",
        "names": ["b"],
        "length": 2,
    }
    path = write(tmp_path / "a.jsonl", [row])
    found = td.packing.open_samples(path, "tokens")[0]
    assert (found["input_ids"].tolist(), found["loss_weight"], len(found)) == ([1, 2], [0.5, 1.0], 2)
    named = td.packing.open_samples(path, "tokens", columns=["names"])[0]
    assert (named["input_ids"].tolist(), named["names"], len(named)) == ([1, 2], ["b"], 2)
    with pytest.raises(
        InvalidInputError, match=r"sample 0 of .*a\.jsonl has no column 'ids': its columns are 'tokens'"
    ):
        td.packing.open_samples(path, "ids")[0]


@pytest.mark.parametrize(
    ("line", "kind", "message"),
    [
        ('{"length": 3', InvalidInputError, "line 4 of .* is no JSON object: Expecting"),
        ("\udcff", InvalidInputError, "line 4 of .* is no JSON object: 'utf-8' codec"),
        ("[" * 100_000, InvalidInputError, "line 4 of .* is no JSON object: maximum recursion"),
        ('{"length": 3}, {"length": 4}', InvalidInputError, "line 4 of .* is no JSON object: Extra data"),
        ("[3]", InvalidTypeError, "line 4 of .* is a list, and a sample is a JSON object"),
        ("{}", InvalidInputError, "line 4 of .* has no column 'length': it has no columns"),
        ('{"size": 3}', InvalidInputError, "line 4 of .* has no column 'length': its only column is 'size'"),
        ('{"length": null}', InvalidInputError, "length of line 4 of .* is null"),
        ('{"length": 3.0}', InvalidTypeError, "length of line 4 of .* is a float"),
        ('{"length": true}', InvalidTypeError, "length of line 4 of .* is a bool"),
        ('{"length": "3"}', InvalidTypeError, "length of line 4 of .* is a str"),
        ('{"length": {"a": 1}}', InvalidTypeError, "length of line 4 of .* is a dict"),
        ('{"length": -3}', InvalidInputError, "length of line 4 of .* is -3"),
        ('{"length": 1e400}', InvalidTypeError, "length of line 4 of .* is a float"),
        (f'{{"length": {2**63}}}', InvalidInputError, "length of line 4 of .* is 9223372036854775808"),
        ('{"length": [[1], [2]]}', InvalidTypeError, "length of line 4 of .* is nested"),
    ],
)  # fmt: skip
def test_a_bad_line_is_named(line: str, kind: type[Exception], message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    text = '{"length": 1}\n\n{"length": 2}\n' + line + '\n{"length": 3}\n'
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(kind, match=message):
        td.packing.lengths(path)


def test_lines_are_counted_through_all_parts_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_lines, "_READ_BYTES", 50)
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"length": {number}}}\n\n' for number in range(30)))
    assert td.packing.lengths(path).tolist() == list(range(30))
    path.write_text(path.read_text().replace("20}", "2.0}"))
    with pytest.raises(InvalidTypeError, match=r"length of line 41 of .*a\.jsonl is a float"):
        td.packing.lengths(path)


@pytest.mark.parametrize(("values", "kind"), [(["[1, 2]", "4"], "an int"), (["4", "[1, 2]"], "a list")])
def test_counts_among_tokens_are_refused(tmp_path: Path, values: list[str], kind: str) -> None:
    path = tmp_path / "mixed.jsonl"
    path.write_text("".join(f'{{"input_ids": {value}}}\n' for value in values))
    with pytest.raises(InvalidInputError, match=rf"^input_ids of line 2 of .*mixed\.jsonl is {kind}, unlike"):
        td.packing.lengths(path)


@pytest.mark.parametrize(
    "lines",
    [
        # As many objects as lines, but not one on each.
        '{"input_ids":[1]},{"input_ids":[2]}\n{"input_ids":[3]\n"labels":[3]}',
        '{"input_ids":[1]},{"input_ids":[2]}\n{"input_ids":\n[3]}',
        '{"input_ids":[1]},{"input_ids":[2]}\n{"input_ids":[3],"of":[{"a":1}\n{"b":1}]}',
        '{"input_ids":[1]},0,{"input_ids":[2]}\n{"input_ids":[3]\n"labels":[3]}',
    ],
)
def test_lines_that_are_no_objects_of_their_own_are_refused(lines: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(lines + "\n")
    with pytest.raises(InvalidInputError, match=r"line 1 of .*a\.jsonl is no JSON object: Extra data"):
        td.packing.lengths(path)


def test_a_null_among_tokens_is_refused_when_it_is_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"input_ids": [1, 2]}, {"input_ids": [1, None]}])
    with pytest.raises(InvalidInputError, match=r"input_ids of line 2 of .*a\.jsonl holds a null"):
        td.packing.lengths(path)


def test_a_line_is_parsed_once_for_all_its_packs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"input_ids": list(range(1000)), "labels": list(range(1000))}, {"input_ids": [7] * 10}]
    path = write(tmp_path / "a.jsonl", [*rows])
    plan = td.pack(td.packing.lengths(path), 10, seed=0)
    samples = td.packing.open_samples(path)
    parsed: list[str] = []
    own = json_lines._parse

    def counted(line: bytes, where: str) -> Any:
        parsed.append(where)
        return own(line, where)

    monkeypatch.setattr(json_lines, "_parse", counted)
    items = list(td.PackedDataset(samples, plan))
    assert len(items) == 101 and len(parsed) == 2
    for item, expected in zip(items, td.PackedDataset(rows, plan), strict=True):
        assert item["input_ids"].equal(expected["input_ids"]) and item["labels"].equal(expected["labels"])
    # Lines beyond the limit are parsed again.
    monkeypatch.setattr(shared, "_KEPT_BYTES", 1)
    samples = td.packing.open_samples(path)
    for number in (0, 0, 1, 0):
        assert samples[number]["input_ids"].tolist() == rows[number]["input_ids"]
    assert len(parsed) == 2 + 3


def test_a_sample_that_is_changed_changes_no_other(tmp_path: Path) -> None:
    samples = td.packing.open_samples(write(tmp_path / "a.jsonl", [{"input_ids": [1, 2]}]))
    samples[0]["input_ids"] = [3]
    with pytest.raises(ValueError, match="read-only"):
        samples[0]["input_ids"][0] = 3
    assert samples[0]["input_ids"].tolist() == [1, 2]


def test_columns_are_chosen_for_all_lines_alike(tmp_path: Path) -> None:
    """A list that is empty says nothing of its column."""
    images = [["a.png"], [], None, ["b.png"]]
    weights: list[Any] = [[], [0.5], None, [1]]
    rows = [
        {"input_ids": [1] if number else [], "images": image, "weight": weight}
        for number, (image, weight) in enumerate(zip(images, weights, strict=True))
    ]
    path = write(tmp_path / "a.jsonl", [*rows])
    assert [sorted(sample) for sample in td.packing.open_samples(path)] == [["input_ids", "weight"]] * 4
    kept = [row | {"weight": row["weight"] or []} for row in rows if row["weight"] is not None]
    path = write(tmp_path / "b.jsonl", [*kept])
    lengths = td.packing.lengths(path)
    packs = td.PackedDataset(td.packing.open_samples(path), td.pack(lengths, 2), columns={"weight": 0.0})
    assert packs[0]["weight"].tolist() == [0.5, 1.0]


def test_a_column_of_numbers_that_begins_late_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_lines, "_READ_BYTES", 1)
    path = write(tmp_path / "a.jsonl", [{"input_ids": [1]}, {"input_ids": [2], "weight": [0.5]}])
    samples = td.packing.open_samples(path)
    with pytest.raises(
        InvalidInputError, match=r"weight of sample 1 of .*a\.jsonl is a list with numbers.* columns="
    ):
        samples[1]
    assert td.packing.open_samples(path, columns=[])[1].keys() == {"input_ids"}


@pytest.mark.parametrize(
    "rows",
    [
        [{"w": [None, 0.5]}, {"w": [0.1, 0.9]}],
        [{"w": "n/a"}, {"w": [0.1, 0.9]}],
        [{"w": 0}, {"w": [0.1, 0.9]}],
        [{"w": [None, None]}, {"w": [None, 0.5]}],
        [{"w": ["n/a", 0.5]}, {"w": [0.5, "n/a"]}],
        [{"w": {}}, {"w": [0.1, 0.9]}],
    ],
)
@pytest.mark.parametrize("files", [1, 2])
def test_a_column_with_numbers_anywhere_is_read_or_refused(
    rows: list[dict[str, Any]], files: int, tmp_path: Path
) -> None:
    lines = [{"input_ids": [5, 6]} | row for row in rows]
    if files == 1:
        source: Any = write(tmp_path / "a.jsonl", [*lines])
    else:
        source = [write(tmp_path / f"{number}.jsonl", [line]) for number, line in enumerate(lines)]
    samples = td.packing.open_samples(source)
    for number, row in enumerate(rows):
        holds_numbers = isinstance(row["w"], list) and any(
            isinstance(entry, int | float) for entry in row["w"]
        )
        try:
            found = "w" in samples[number]
        except InvalidInputError:
            found = True
        assert found or not holds_numbers
