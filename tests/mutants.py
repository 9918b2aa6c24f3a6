"""Puts faults into a copy of the checkout, one at a time: some test of rtensor has to fail for each.

`make mutants` runs it on the built module. A fault that cannot be put in, or does not compile, is an error; the
checkout is not changed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
STORE = ("cargo", "nextest", "run", "--package", "tundish-store")
# Exit codes of the test runners when a test failed.
FAILED = {"cargo": 100, "pytest": 1}


@dataclass(frozen=True)
class Mutant:
    """A fault.

    Attributes:
        fault: its description.
        file: the file to change.
        old: the text to replace, which the file has once.
        new: the faulty text.
        tests: the pytest files that see it; none for the Rust tests.
    """

    fault: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = ()


MUTANTS = [
    Mutant(
        "a delete that does nothing",
        "rust/store/src/entries/storage.rs",
        "taken.extend(chunk.iter().filter_map(|id| state.remove(id)));",
        "taken.extend(chunk.iter().filter_map(|_| None::<StoredShard<P>>));",
    ),
    Mutant(
        "a clear_node that forgets what was fetched",
        "rust/store/src/process_store.rs",
        "        self.clear_buffer(None);\n",
        "",
    ),
    Mutant(
        "a missing lock",
        "rust/store/src/entries/storage.rs",
        "        state.insert(id, StoredShard { payload, bytes, since:",
        "        drop(state);\n        let mut state = self.lock();\n"
        "        state.insert(id, StoredShard { payload, bytes, since:",
    ),
    Mutant(
        "a wrong count",
        "rust/store/src/entries/by_step.rs",
        "        self.num_entries -= 1;",
        "        self.num_entries -= u64::from(self.num_entries > 1);",
    ),
    Mutant(
        "a late insert",
        "rust/store/src/entries/fetch_buffer.rs",
        "let Some(step_entries) = state.by_step.with_token_mut(in_flight.token).filter(|_| is_wanted) else {",
        "let Some(step_entries) = Some(state.by_step.unclaimed())"
        ".filter(|_| is_wanted || in_flight.step.is_some()) else {",
    ),
    Mutant(
        "no retry of a request",
        "rust/store/src/http/client/fetch.rs",
        "if failures == MAX_FAILURES ||",
        "if failures > 0 ||",
    ),
    Mutant(
        "a cast dtype",
        "python/tundish/rtensor/dense_tensors.py",
        "return values.resolve_conj().resolve_neg().cpu().contiguous()",
        "return values.resolve_conj().resolve_neg().cpu().contiguous().float()",
        ("tests/rtensor/transfer/test_remotize.py",),
    ),
    Mutant(
        "no retry of a drain",
        "python/tundish/rtensor/controller.py",
        "            self._failed.append(failed)",
        "            failed.clear()",
        ("tests/rtensor/controller/test_failing_workers.py",),
    ),
    Mutant(
        "a drain that skips one rank",
        "python/tundish/rtensor/controller.py",
        "for worker in self._workers.values() if worker.addr not in ending]",
        "for worker in self.workers[:-1] if worker.addr not in ending]",
        ("tests/rtensor/controller/test_steps.py",),
    ),
    Mutant(
        "a step that leaves the shards of an owner that lost its connection",
        "python/tundish/rtensor/controller.py",
        "            or self._was_lost(step, removal.worker)\n",
        "",
        ("tests/rtensor/controller/test_claims.py",),
    ),
]


def copy(folder: Path) -> None:
    """Copies the files that git tracks, and the built module."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=CHECKOUT, stdout=subprocess.PIPE, check=True, text=True
    )
    built = [str(path.relative_to(CHECKOUT)) for path in CHECKOUT.glob("python/tundish/_native*.so")]
    for name in [*filter(None, listed.stdout.split("\0")), *built]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(CHECKOUT / name, folder / name)


def seen(mutant: Mutant, folder: Path) -> bool:
    """Whether a test fails. Raises `RuntimeError` if the tests cannot run."""
    environment = {**os.environ, "CARGO_TARGET_DIR": str(CHECKOUT / "target" / "mutants")}
    if mutant.tests:
        environment["PYTHONPATH"] = str(folder / "python")
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *mutant.tests]
    else:
        command = [*STORE, "--fail-fast"]
        built = subprocess.run(
            [*STORE, "--no-run"], cwd=folder, env=environment, capture_output=True, text=True
        )
        if built.returncode:
            raise RuntimeError(f"{mutant.fault}: it does not build:\n{built.stderr}")
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if ran.returncode not in (0, FAILED["pytest" if mutant.tests else "cargo"]):
        raise RuntimeError(
            f"{mutant.fault}: {command} ended with {ran.returncode}:\n{ran.stdout}{ran.stderr}"
        )
    return ran.returncode != 0


def main() -> int:
    unseen = []
    with tempfile.TemporaryDirectory(prefix="tundish-mutants-") as made:
        folder = Path(made)
        copy(folder)
        for mutant in MUTANTS:
            file = folder / mutant.file
            text = file.read_text(encoding="utf-8")
            if text.count(mutant.old) != 1:
                raise RuntimeError(f"{mutant.fault}: {mutant.file} has not once {mutant.old!r}")
            file.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
            is_seen = seen(mutant, folder)
            # Its new modification time makes cargo build it again.
            file.write_text(text, encoding="utf-8")
            print(f"{'seen' if is_seen else 'NOT SEEN'}: {mutant.fault}", flush=True)
            unseen += [] if is_seen else [mutant.fault]
    return 1 if unseen else 0


if __name__ == "__main__":
    sys.exit(main())
