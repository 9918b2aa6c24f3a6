"""What plans, mixes and packs look like: previews, notebooks, reprs, log lines."""

from __future__ import annotations

import logging
import pickle
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch

import tundish as td
from tundish.errors import InvalidInputError, InvalidTypeError, format_share


class Words:
    """A tokenizer with a word for each id."""

    def decode(self, ids: list[int]) -> str:
        assert all(type(number) is int for number in ids)
        return " ".join(f"w{number}" for number in ids)


CHATS = [
    {"input_ids": [1, 2, 3, 4], "loss_mask": [0, 0, 1, 1]},
    {"input_ids": [5, 6, 7], "loss_mask": [1, 0, 1]},
    {"input_ids": [8, 9], "loss_mask": [1, 1]},
]


def test_a_preview_shows_what_is_learned(capsys: pytest.CaptureFixture[str]) -> None:
    plan = td.pack([4, 3, 2], 8, mode="sequential")
    td.PackedDataset(CHATS, plan).preview(5, Words())
    said = capsys.readouterr().out
    assert said.splitlines() == [
        "pack 0: 7 tokens in 2 pieces",
        "  piece 0: tokens 0:4 of sample 0, 2 learned",
        "    masked  'w1 w2'",
        "    learned 'w3 w4'",
        "  piece 1: tokens 0:3 of sample 1, 1 learned",
        # Its mask is 1, and the collator masks the first token of each piece.
        "    masked  'w5 w6'",
        "    learned 'w7'",
        "pack 1: 2 tokens in 1 piece",
        "  piece 0: tokens 0:2 of sample 2, 1 learned",
        "    masked  'w8'",
        "    learned 'w9'",
    ]
    plan.preview(5, Words(), samples=CHATS)
    assert capsys.readouterr().out == said


def test_a_preview_agrees_with_the_batch(capsys: pytest.CaptureFixture[str]) -> None:
    samples = [[number] * length for number, length in enumerate([3, 0, 9, 5, 1, 0], 1)]
    for options in (
        {},
        {"mode": "best_fit", "align": 4},
        {"mode": "best_fit", "overlong": "split", "align": 2},
    ):
        plan = td.pack(list(map(len, samples)), 8 if options.get("overlong") == "split" else 12, **options)
        dataset = td.PackedDataset(samples, plan)
        dataset.preview(len(plan))
        said = capsys.readouterr().out
        batch = td.PackedCollator()(list(dataset))
        learned = [int(line.split(", ")[1].split()[0]) for line in said.splitlines() if " of sample " in line]
        assert sum(learned) == int((batch["labels"] != -100).sum())
        padding = sum(len(item["input_ids"]) for item in dataset) - sum(
            piece.stop - piece.start for pack in plan for piece in pack.pieces if piece.stop is not None
        )
        said_padding = sum(
            int(line.split("and ")[1].split()[0]) for line in said.splitlines() if "of padding" in line
        )
        assert said_padding == padding


def test_a_preview_names_datasets_and_plans(capsys: pytest.CaptureFixture[str]) -> None:
    several = td.pack_datasets([[2], [3]], 4, mode="sequential")
    mix = td.mix({"web": td.pack([2], 2), "chats": several}, [0, 1])
    td.PackedDataset({"web": [[1, 2]], "chats": [[[3, 4]], [[5, 6, 7]]]}, mix).preview()
    said = capsys.readouterr().out
    assert "pack 0, pack " in said and " of chats: " in said and "of sample 0 of dataset 1, 2 learned" in said
    td.PackedDataset([[[3, 4]], [[5, 6, 7]]], several).preview(1)
    assert capsys.readouterr().out.splitlines()[-2:] == ["    masked  3", "    learned 4"]


def test_long_texts_and_control_characters_do_not_spoil_a_preview(capsys: pytest.CaptureFixture[str]) -> None:
    class Loud:
        def decode(self, ids: list[int]) -> str:
            return "\x1b[2J\n\x9bh" * len(ids)

    learned = [number % 2 for number in range(100)]
    samples = [{"input_ids": list(range(500))}, {"input_ids": list(range(100)), "loss_mask": learned}]
    dataset = td.PackedDataset(samples, td.pack([500, 100], 1000, drop_last=False))
    dataset.preview(1, Loud())
    said = capsys.readouterr().out
    assert all(line.isprintable() for line in said.splitlines())
    assert max(map(len, said.splitlines())) < 250 and len(said.splitlines()) < 30
    assert "more parts" in said
    dataset.preview(1)
    assert "… 483 more" in capsys.readouterr().out


def test_a_plan_alone_shows_its_bounds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    td.pack([5, 3, 9, 2], 8, out=tmp_path / "plan").preview(2)
    assert capsys.readouterr().out.splitlines() == [
        "pack 0: 8 tokens in 2 pieces",
        "  piece 0: tokens 0:5 of sample 0",
        "  piece 1: tokens 0:3 of sample 1",
        "pack 1: 8 tokens in 1 piece",
        "  piece 0: tokens 0:8 of sample 2",
    ]
    td.PackPlan.load(tmp_path / "plan").preview(1)
    assert "tokens 0: of sample 0\n" in capsys.readouterr().out
    td.pack_datasets([[4], [4]], 4).preview()
    assert "tokens 0:4 of sample 0 of dataset 1" in capsys.readouterr().out


def test_arguments_of_previews_are_checked() -> None:
    plan = td.pack([4, 3, 2], 8)
    with pytest.raises(InvalidInputError, match=r"a plan holds no tokens .* samples=samples"):
        plan.preview(3, Words())
    for preview in (plan.preview, td.PackedDataset(CHATS, plan).preview):
        with pytest.raises(InvalidInputError, match="n is 0"):
            preview(0)
        with pytest.raises(InvalidTypeError, match="n must be an integer"):
            preview("3")  # type: ignore[arg-type]
    with pytest.raises(InvalidTypeError, match="tokenizer is an int: give one whose decode"):
        td.PackedDataset(CHATS, plan).preview(1, 5)


def test_notebooks_show_small_tables_of_escaped_text(tmp_path: Path) -> None:
    plan = td.pack([5, 3, 9], 8, out=tmp_path / "a<b&c")
    shown = plan._repr_html_()
    assert "a&lt;b&amp;c" in shown and "a<b" not in shown
    assert plan.fingerprint in shown and "<td>hard</td>" in shown and len(shown) < 2000
    mix = td.mix({"<script>": plan, "code": plan}, [3, 1], num_packs=40)
    shown = mix._repr_html_()
    assert "&lt;script&gt;" in shown and "<script>" not in shown and "<td>75.0 %</td>" in shown
    changed = mix.resume(weights=[1, 1], after=8)._repr_html_()
    assert "from pack 8 on" in changed and "<td>50.0 %</td>" in changed


def classes() -> list[type]:
    found = []
    for part in (td.packing, td.scatter, td.tree):
        values = (getattr(part, name) for name in part.__all__)
        found += [value for value in values if isinstance(value, type)]
    return [one for one in found if not issubclass(one, Exception | Enum)]


@pytest.mark.parametrize("kind", classes(), ids=lambda kind: kind.__name__)
def test_every_public_class_has_a_repr(kind: type) -> None:
    assert kind.__repr__ is not object.__repr__


def test_reprs_say_what_matters() -> None:
    plan = td.pack([4, 3, 2], 8, mode="sequential")
    assert repr(plan).startswith(
        "PackPlan(2 packs of up to 8 tokens, 3 pieces, mode='sequential', fingerprint="
    )
    assert repr(td.pack([1], 1)).startswith("PackPlan(1 pack of 1 token, 1 piece")
    assert repr(td.PackedDataset(CHATS, plan)) == f"PackedDataset(1 dataset, {plan!r})"
    sampler = td.PackedBatchSampler(plan, 2, rank=0, world_size=1, seed=3)
    assert repr(sampler).startswith("PackedBatchSampler(1 step of PackPlan(") and "seed=3" in repr(sampler)
    assert repr(td.PackedCollator()) == "PackedCollator()"
    assert repr(td.PackedCollator(pad_to=8, attention="mask")) == "PackedCollator(attention='mask', pad_to=8)"
    assert repr(td.PackedStream([[1]], 4)).startswith("PackedStream(list, mode='ordered', max_length=4")
    mix = td.mix({"web": plan, "code": plan}, [0.7, 0.3])
    assert "2 plans, weights={web: 0.7, code: 0.3}" in repr(mix)
    loader = td.DispatchLoader(torch.arange(6).split(2))
    assert repr(loader) == "DispatchLoader(tuple, 1 rank, epoch=0, tail='drop')"
    loader.close()
    assert repr(loader) == "DispatchLoader(closed)"


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (1.0, "100.0 %"),
        (0.99997, "99.997 %"),
        (0.9995, "99.95 %"),
        (0.999, "99.9 %"),
        (1 - 1e-15, "99.9999999999999 %"),
        (0.5, "50.0 %"),
        (0.0004, "< 0.1 %"),
        (0.0, "0.0 %"),
    ],
)
def test_a_share_has_as_many_digits_as_tell_it_from_all(share: float, text: str) -> None:
    assert format_share(share) == text


def test_a_plan_is_logged_once_and_on_rank_0_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lines(call: Any) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="tundish.packing"):
            call()
        assert all(record.name == "tundish.packing" for record in caplog.records)
        return [record.getMessage() for record in caplog.records]

    lengths = [4] * 1000
    (made,) = lines(lambda: td.pack(lengths, 8))
    assert "500 packs of 8 tokens, 100.0 % full, of 1000 samples and 4000 tokens, in " in made
    (cached,) = lines(lambda: td.pack(lengths, 8, cache_dir=tmp_path))
    assert cached.startswith(f"plan {tmp_path}/plan-")
    (folder,) = tmp_path.iterdir()
    (loaded,) = lines(lambda: td.PackPlan.load(folder))
    assert loaded.startswith(f"loaded {folder}: 500 packs")
    plan = td.PackPlan.load(folder)
    # A worker process that gets a plan has nothing to say.
    assert lines(lambda: pickle.loads(pickle.dumps(plan))) == []
    monkeypatch.setenv("RANK", "1")
    assert lines(lambda: td.pack(lengths, 8)) == []
