"""The corpus of `train_packed.py`: the source files of the Python standard library.

Every machine has these thousands of documents, so the example needs no network. To train on your own data, replace this
module: packing needs the token count of each document and a way to read document *i*.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import tundish as td

METADATA = "corpus.json"
END_OF_DOCUMENT = "<|end|>"


@dataclass
class Corpus:
    """Tokenised documents, concatenated in one array; document *i* is `corpus[i]`.

    All ranks of a node and the workers of their loaders share the memory of the tokens.
    """

    folder: Path
    vocabulary: int
    text_bytes: int
    tokens: np.ndarray
    bounds: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each document, shape (documents,)."""
        return np.diff(self.bounds)

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        return self.tokens[self.bounds[index] : self.bounds[index + 1]]


def open_corpus(folder: Path) -> Corpus:
    """Open what `prepare_corpus` wrote. Collective: one rank of a node reads the tokens and shares them."""
    metadata = json.loads((folder / METADATA).read_text())
    return Corpus(
        folder=folder,
        vocabulary=metadata["vocabulary"],
        text_bytes=metadata["text_bytes"],
        tokens=td.shm.node_shared(lambda: np.load(folder / "tokens.npy"), key=f"tokens of {folder.name}"),
        bounds=np.load(folder / "bounds.npy", mmap_mode="r"),
    )


def corpus_folder(out: Path, limit: int | None, vocabulary: int) -> Path:
    """Return the folder under `out` for a corpus of at most `limit` documents. Its name depends on the contents."""
    key = hashlib.sha256(f"{vocabulary} {END_OF_DOCUMENT}".encode())
    for path in source_files(limit):
        status = path.stat()
        key.update(f"{path} {status.st_size} {status.st_mtime_ns}\n".encode())
    return out / f"corpus-{key.hexdigest()[:12]}"


def prepare_corpus(folder: Path, limit: int | None, vocabulary: int) -> None:
    """Train a tokenizer, tokenise the documents and write both to `folder`, unless they exist."""
    if (folder / METADATA).exists():
        return
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in source_files(limit)]
    tokenizer = train_tokenizer(texts, vocabulary)
    tokens, bounds = tokenise(tokenizer, texts)
    metadata = {
        "vocabulary": tokenizer.get_vocab_size(),
        "text_bytes": sum(len(text.encode()) for text in texts),
    }
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / "tokens.npy", as_npy(tokens))
    replace_file(folder / "bounds.npy", as_npy(bounds))
    replace_file(folder / "tokenizer.json", tokenizer.to_str(pretty=True).encode())
    # This file is written last: if it exists, all files do.
    replace_file(folder / METADATA, json.dumps(metadata).encode())


def replace_file(path: Path, contents: bytes) -> None:
    """Write `contents` to `path` atomically and durably."""
    with tempfile.TemporaryDirectory(dir=path.parent) as unfinished:
        whole = Path(unfinished) / path.name
        with whole.open("wb") as file:
            file.write(contents)
            file.flush()
            os.fsync(file.fileno())
        whole.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    # The rename is durable after an fsync of the folder.
    os.fsync(folder)
    os.close(folder)


def as_npy(array: np.ndarray) -> bytes:
    """Return the bytes that `numpy.save` writes for an array."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def source_files(limit: int | None) -> list[Path]:
    """Return the files of the standard library, sorted; with a `limit`, an even selection of them."""
    library = Path(sysconfig.get_path("stdlib"))
    installed = {"site-packages", "dist-packages"}
    files = sorted(path for path in library.rglob("*.py") if installed.isdisjoint(path.parts))
    if limit is None or limit >= len(files):
        return files
    return [files[number * len(files) // limit] for number in range(limit)]


def train_tokenizer(texts: list[str], vocabulary: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer, which can encode any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # A quarter of the text is enough to find the frequent words.
    tokenizer.train_from_iterator(texts[::4] if len(texts) > 1000 else texts, trainer)
    return tokenizer


def tokenise(tokenizer: Tokenizer, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return all tokens, concatenated, and the bounds of the documents, shape (documents + 1,)."""
    bound = {"tokenizer": tokenizer, "texts": texts, "end": tokenizer.token_to_id(END_OF_DOCUMENT)}
    # The workers have the texts: each task is the number of a document, and its result the tokens.
    with td.shm.SharedPool(encode, bound) as pool:
        parts = list(pool.map(range(len(texts))))
    return np.concatenate(parts), np.cumsum([0, *(len(part) for part in parts)])


def encode(number: int, tokenizer: Tokenizer, texts: list[str], end: int) -> np.ndarray:
    """Return the tokens of one document."""
    return np.array([*tokenizer.encode(texts[number]).ids, end], dtype=np.int32)
