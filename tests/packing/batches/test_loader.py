"""`td.loader` over plans and mixes: its batches, its state in the middle of an epoch, and evaluation."""

from __future__ import annotations

import itertools
import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.packing.loaders import (
    CODE,
    MIX,
    PLAN,
    SAMPLES,
    SOURCES,
    all_tokens,
    assert_same_batches,
    stored,
    tokens_of,
)
from support.packing.samplers import global_batches
from support.packing.small_llama import loss_apart, small_llama
from torch.utils.data import DataLoader

import tundish as td
from tundish.errors import (
    InvalidInputError,
    InvalidTypeError,
    LoaderHasNoDatasetError,
    PlanMismatchError,
    StateMismatchError,
)


def make(source: str = "plan", batch_size: int = 4, **options: Any) -> td.packing.PackLoader:
    samples, plan = SOURCES[source]
    return td.loader(samples, plan, batch_size=batch_size, **options)


def two_epochs(loader: td.packing.PackLoader) -> list[dict[str, Any]]:
    return [*loader, *loader]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("source", SOURCES)
def test_batches_are_those_of_the_parts_put_together(source: str, workers: int) -> None:
    samples, plan = SOURCES[source]
    sampler = td.PackedBatchSampler(plan, 4, seed=7)
    collator = td.PackedCollator(return_seq_idx=True)
    parts: DataLoader[Any] = DataLoader(
        td.PackedDataset(samples, plan, mask_first_token=True), batch_sampler=sampler, collate_fn=collator
    )
    expected = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        expected += list(parts)
    loader = make(source, seed=7, collator=collator, num_workers=workers, mask_first_token=True)
    assert len(loader) == len(sampler)
    # Without set_epoch.
    assert_same_batches(two_epochs(loader), expected)
    ready = td.loader(
        td.PackedDataset(samples, plan, mask_first_token=True), batch_size=4, seed=7, collator=collator
    )
    assert_same_batches(list(ready), expected[: len(sampler)])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("taken", [0, 1, 5, 12, 15])
def test_a_state_leads_to_the_batch_after_the_last_one_given(source: str, workers: int, taken: int) -> None:
    expected = all_tokens(two_epochs(make(source, num_workers=0)))
    assert len(expected) == 2 * 12
    loader = make(source, num_workers=workers)
    given: list[list[int]] = []
    while len(given) < taken:
        for batch in itertools.islice(loader, min(taken - len(given), 12)):
            given.append(tokens_of(batch))
            state = loader.state_dict()
    state = stored(loader.state_dict())
    assert given == expected[:taken]
    resumed = make(source, num_workers=workers)
    resumed.load_state_dict(state)
    assert (resumed.epoch, resumed.step) == (0 if taken <= 12 else 1, taken - (0 if taken <= 12 else 12))
    # A loop may name the epoch.
    resumed.set_epoch(resumed.epoch)
    rest: list[list[int]] = []
    for _ in range(resumed.epoch, 2):
        rest += all_tokens(resumed)
    assert rest == expected[taken:]
    assert resumed.epoch == 2


@pytest.mark.parametrize(("before", "after"), [(1, 2), (4, 2), (2, 4), (3, 1)])
def test_a_state_resumes_on_any_number_of_ranks(before: int, after: int) -> None:
    size = 12

    def ranks(count: int) -> list[td.packing.PackLoader]:
        return [
            make(batch_size=size // count, rank=rank, world_size=count, seed=3, group_by_longest=True)
            for rank in range(count)
        ]

    expected = [list(itertools.chain(*step)) for step in zip(*map(all_tokens, ranks(1)), strict=True)]
    first = ranks(before)
    steps = zip(*map(iter, first), strict=True)
    for number in range(2):
        assert list(itertools.chain(*map(tokens_of, next(steps)))) == expected[number]
    states = [loader.state_dict() for loader in first]
    assert all(state == states[0] for state in states)
    second = ranks(after)
    for loader in second:
        assert loader.resumes_on_any_ranks
        loader.load_state_dict(stored(states[0]))
    found = [list(itertools.chain(*step)) for step in zip(*map(all_tokens, second), strict=True)]
    assert found == expected[2:]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(("ranks", "size"), [(1, 5), (2, 3), (3, 7), (5, 11), (4, 16)])
def test_evaluation_gives_every_pack_once_in_as_many_steps_on_all_ranks(
    source: str, ranks: int, size: int
) -> None:
    samples, plan = SOURCES[source]
    dataset = td.PackedDataset(samples, plan)
    loaders = [
        td.loader(dataset, batch_size=size, rank=rank, world_size=ranks, shuffle=False, collator=list)
        for rank in range(ranks)
    ]
    found = []
    for loader in loaders:
        steps = 0
        for items in loader:
            steps += 1
            if loader.is_padding:
                assert all((item["labels"] == -100).all() for item in items) and len(items) == 1
            else:
                assert any((item["labels"] != -100).any() for item in items)
                found += [tuple(item["input_ids"].tolist()) for item in items]
        assert steps == len(loader) == -(-len(plan) // (ranks * size))
    assert Counter(found) == Counter(tuple(item["input_ids"].tolist()) for item in dataset)
    # The filled form of the same order repeats packs.
    assert sum(map(len, global_batches([td.PackedBatchSampler(plan, size, 0, 1, shuffle=False)]))) >= len(
        plan
    )


def test_evaluation_resumes_too() -> None:
    expected = all_tokens(make(batch_size=7, shuffle=False))
    loader = make(batch_size=7, shuffle=False)
    for _ in itertools.islice(loader, 3):
        pass
    resumed = make(batch_size=7, shuffle=False)
    resumed.load_state_dict(loader.state_dict())
    assert all_tokens(resumed) == expected[3:]


def test_the_loss_over_an_evaluation_is_that_of_all_pieces_apart() -> None:
    """Also where the last step has a padded batch: its loss is 0, and all ranks call the model as often."""
    model = small_llama(max(map(max, SAMPLES)) + 1)
    dataset = td.PackedDataset(SAMPLES, PLAN)
    apart = loss_apart(model, list(dataset))
    total, learned, padded = torch.zeros(()), 0, 0
    for rank in range(3):
        loader = td.loader(dataset, batch_size=5, rank=rank, world_size=3, shuffle=False)
        for batch in loader:
            count = int((batch["labels"] != -100).sum())
            padded += loader.is_padding
            total = total + model(**batch, num_items_in_batch=1).loss.detach()
            learned += count
    assert padded and abs((total / learned).item() - apart.item()) < 1e-5


def test_each_iteration_to_the_end_goes_to_the_next_epoch() -> None:
    loader = make()
    epochs = [all_tokens(loader) for _ in range(3)]
    assert loader.epoch == 3 and loader.step == 0
    assert len({tuple(map(tuple, epoch)) for epoch in epochs}) == 3
    loader.set_epoch(1)
    assert all_tokens(loader) == epochs[1]
    # The last epoch once more.
    loader.set_epoch(1)
    assert loader.state_dict()["sampler"]["step"] == 0
    first = iter(loader)
    assert [tokens_of(next(first)) for _ in range(2)] == epochs[1][:2]
    # A loop that was left begins anew.
    assert all_tokens(loader) == epochs[1]
    # A loop that took every batch, and did not ask for more.
    assert all_tokens(itertools.islice(loader, len(loader))) == epochs[2]
    assert loader.state_dict()["sampler"]["epoch"] == 2
    later = all_tokens(loader)
    assert later not in epochs and loader.epoch == 4
    # An older iterator counts no more.
    older = iter(loader)
    next(older)
    newer = iter(loader)
    next(newer)
    list(older)
    assert loader.step == 1


def test_it_takes_nothing_from_torchs_global_generator() -> None:
    before = torch.random.get_rng_state()
    for workers in (0, 2):
        list(make(num_workers=workers))
    assert torch.equal(torch.random.get_rng_state(), before)


def seeded(items: list[Any]) -> int:
    return torch.initial_seed()


def test_workers_of_an_epoch_have_the_same_seeds_after_a_resume() -> None:
    loader = make(collator=seeded, num_workers=1)
    first, second = set(loader), set(loader)
    assert len(first) == len(second) == 1 and first != second
    again = make(collator=seeded, num_workers=1)
    again.set_epoch(1)
    assert set(again) == second


@pytest.mark.parametrize("weights", [None, "samples"])
def test_the_denominator_of_a_step_comes_with_its_batches(weights: Any) -> None:
    collator = td.PackedCollator(loss_weights=weights)
    plain = list(make(collator=collator, batch_size=5))
    loader = make(collator=collator, batch_size=5, num_items_in_batch=3)
    batches = list(loader)
    assert len(plain) % 3 == 1
    for first in range(0, len(plain), 3):
        step = plain[first : first + 3]
        items = td.packing.num_items_in_batch(step).item()
        assert items == (
            sum(int((batch["labels"] != -100).sum()) for batch in step) if weights is None else items
        )
        for batch, own in zip(batches[first : first + 3], step, strict=True):
            assert batch.pop("num_items_in_batch") == items
            assert_same_batches([batch], [own])
    # The batches of a step that are ready do not count as given.
    again = make(collator=collator, batch_size=5, num_items_in_batch=3)
    next(iter(again))
    assert again.step == 1 and again.stats()["batches"] == 1
    one = next(iter(make(num_items_in_batch=True)))
    assert one["num_items_in_batch"] == int((one["labels"] != -100).sum())
    model = small_llama(max(map(max, SAMPLES)) + 1)
    alone = model(**{key: value for key, value in one.items() if key != "num_items_in_batch"}).loss
    assert abs(model(**one).loss.item() - alone.item()) < 1e-5


TRAINING = """
import json, os, sys
import tundish as td
from support.packing.loaders import PLAN, SAMPLES, tokens_of

file = sys.argv[1]
loader = td.loader(SAMPLES, PLAN, batch_size=2, num_workers=2, seed=4)
if os.path.exists(file):
    with open(file) as saved:
        loader.load_state_dict(json.load(saved))
for epoch in range(loader.epoch, 2):
    for batch in loader:
        # Trained on, and saved with a rename, as checkpoints are.
        with open(file + ".new", "w") as saved:
            json.dump(loader.state_dict(), saved)
        os.replace(file + ".new", file)
        print(json.dumps(tokens_of(batch)), flush=True)
"""


def test_a_run_that_is_killed_between_batches_goes_on_with_the_next(tmp_path: Path) -> None:
    expected = all_tokens(two_epochs(make(batch_size=2, seed=4)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-c", TRAINING, str(tmp_path / "state.json")]
    given: list[list[int]] = []
    for lines in (5, 30, None):
        state = tmp_path / "state.json"
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as program:
            assert program.stdout is not None
            printed = [json.loads(line) for line in itertools.islice(program.stdout, lines)]
            if lines is not None:
                os.kill(program.pid, signal.SIGKILL)
            printed += [json.loads(line) for line in program.stdout if line.endswith("\n")]
        assert program.returncode == (0 if lines is None else -signal.SIGKILL)
        given += printed
        # The last batch that was saved may not have been printed.
        position = json.loads(state.read_text())["sampler"]
        saved = position["epoch"] * (len(expected) // 2) + position["step"]
        assert saved - len(given) in (0, 1)
        given = expected[:saved] if given == expected[: len(given)] else given
    assert given == expected


def test_workers_end_with_a_loop_that_is_left() -> None:
    before = set(multiprocessing.active_children())
    for _ in make(num_workers=2):
        workers = set(multiprocessing.active_children()) - before
        assert len(workers) == 2
        break
    assert not any(worker.is_alive() for worker in workers)


class Broken(list[Any]):
    def __getitem__(self, index: Any) -> Any:
        if index == 50:
            raise ConnectionError("the bucket does not answer")
        return super().__getitem__(index)


def test_an_error_in_a_batch_leaves_the_state_of_the_batch_before() -> None:
    loader = td.loader(Broken(SAMPLES), PLAN, batch_size=2, shuffle=False)
    given: list[list[int]] = []
    iterator = iter(loader)
    with pytest.raises(ConnectionError):
        given.extend(map(tokens_of, iterator))
    # The end of the iteration is not that of the epoch.
    assert list(iterator) == [] and loader.epoch == 0
    assert 0 < loader.step == len(given) < len(loader)
    cured = td.loader(SAMPLES, PLAN, batch_size=2, shuffle=False)
    cured.load_state_dict(loader.state_dict())
    assert given + all_tokens(cured) == all_tokens(td.loader(SAMPLES, PLAN, batch_size=2, shuffle=False))


def test_it_counts_and_logs_on_rank_0(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tundish.packing")
    loaders = [make(rank=rank, world_size=2) for rank in range(2)]
    for loader in loaders:
        list(loader)
        assert loader.stats()["batches"] == len(loader) and loader.stats()["next_seconds"] > 0
    assert [record.getMessage().partition(" in ")[0] for record in caplog.records] == ["epoch 0: 6 batches"]
    loaders[0].load_state_dict(loaders[1].state_dict())
    assert caplog.messages[1:] == ["resuming epoch 0 after 6 batches"]
    text = repr(make("mix", rank=1, world_size=2))
    assert text == (
        "PackLoader(a mix of 46 packs, rank 1 of 2, batch_size=4, num_workers=0, epoch=0, step=0 of 6)"
    )


@pytest.mark.parametrize(
    ("arguments", "kind", "says"),
    [
        ({"plan": None}, InvalidTypeError, r"samples is a list, and no plan is given: make one, .*td.pack"),
        ({"samples": PLAN, "plan": None}, InvalidTypeError, r"td.loader\(samples, plan, batch_size"),
        (
            {"samples": iter(SAMPLES), "plan": None},
            InvalidTypeError,
            r"td.PackedStream\(samples, max_length\)",
        ),
        ({"samples": td.PackedDataset(SAMPLES, PLAN), "plan": MIX}, PlanMismatchError, "leave the plan out"),
        (
            {"samples": td.PackedDataset(SAMPLES, PLAN), "columns": {"w": 0.0}},
            InvalidInputError,
            "options of its own: give columns where it is made",
        ),
        ({"samples": SAMPLES[:-1]}, PlanMismatchError, "89 samples"),
        ({"samples": [SAMPLES, CODE], "plan": "mix"}, InvalidTypeError, "plan is a str"),
        ({"batch_size": 0}, InvalidInputError, "batch_size is 0"),
        ({"batch_size": 2.0}, InvalidTypeError, "batch_size must be an integer"),
        ({"num_workers": -1}, InvalidInputError, "num_workers is -1"),
        ({"collator": td.PackedCollator}, InvalidTypeError, "collator is the class PackedCollator"),
        ({"collator": "flat"}, InvalidTypeError, "collator is a str"),
        ({"shuffle": 1}, InvalidTypeError, "shuffle must be True or False"),
        ({"rank": 1}, InvalidInputError, "give both, or neither"),
        ({"world_size": 2}, InvalidInputError, "give both, or neither"),
        ({"num_items_in_batch": 0}, InvalidInputError, "num_items_in_batch is 0"),
        (
            {"num_items_in_batch": True, "rank": 0, "world_size": 2},
            InvalidInputError,
            "num_items_in_batch counts over all 1 ranks",
        ),
        ({"group_by_longest": True, "shuffle": False}, InvalidInputError, "needs shuffle=True"),
        ({"prefetch_factor": 2}, InvalidInputError, "num_workers > 0"),
        ({"bath_size": 2}, InvalidTypeError, "td.loader has no argument 'bath_size'"),
        # A loop over no batch would train nothing.
        (
            {"samples": [], "plan": td.pack([], 16)},
            InvalidInputError,
            "an epoch has no batch: the plan has 0 packs",
        ),
        ({"batch_size": 1000, "drop_last": True}, InvalidInputError, "has no batch.* leave out drop_last"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], kind: type[Exception], says: str) -> None:
    given = {"samples": SAMPLES, "plan": PLAN, "batch_size": 4} | arguments
    with pytest.raises(kind, match=says):
        td.loader(**given)


def test_values_of_real_users() -> None:
    rows = [{"input_ids": sample, "source": "web", "text": "a text"} for sample in SAMPLES]
    with pytest.raises(InvalidInputError, match="source"):
        next(iter(td.loader(rows, PLAN, batch_size=2, collator=None)))
    batch = next(iter(td.loader(rows, PLAN, batch_size=2, sample_columns=["source"])))
    assert set(batch["source"]) == {"web"}
    # More packs than there are: the epoch fills one batch, as the sampler does.
    assert len(td.loader(SAMPLES, PLAN, batch_size=1000)) == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kind": "PackedBatchSampler"}, "not the state of a PackLoader: its 'kind' is 'PackedBatchSampler'"),
        ({"version": 2}, "has version 2"),
        ({"of": "a stream"}, "loader over 'a stream', and this one is over 'packs of a plan'"),
        ({"sampler": {}}, "not the state of a PackedBatchSampler"),
        ({"sampler": None}, "not the state of a PackedBatchSampler"),
    ],
)
def test_other_states_are_refused(change: dict[str, Any], says: str) -> None:
    loader = make()
    next(iter(loader))
    before = loader.state_dict()
    with pytest.raises(StateMismatchError, match=says):
        loader.load_state_dict(before | change)
    assert loader.state_dict() == before
    with pytest.raises(StateMismatchError, match="seed"):
        make(seed=1).load_state_dict(before)
    with pytest.raises(StateMismatchError, match="lacks sampler"):
        loader.load_state_dict({key: value for key, value in before.items() if key != "sampler"})


def test_it_has_no_dataset_to_split_again() -> None:
    with pytest.raises(LoaderHasNoDatasetError, match="each rank its own batches already"):
        make().dataset  # noqa: B018
    assert not hasattr(make(), "dataset")
