"""`tokenize`: texts, prompts with completions, and chats as token ids, ready for packing.

The token ids are those that TRL's `SFTTrainer` makes of the same rows, but for a beginning or an end of a text that TRL
would write twice. Batches are tokenized by `datasets.map`, which caches them.

Invariants: `_Tokenization` pickles as all that its result depends on, because the cache of `datasets` finds a result by
the pickle.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tundish.errors import InvalidInputError, InvalidTypeError, TundishError, format_type, missing_extra
from tundish.version import __version__

if TYPE_CHECKING:
    import datasets

__all__ = ["tokenize"]

_logger = logging.getLogger("tundish.hf")

# What the columns of a dataset may be tokenized from.
_FORMS = (("prompt", "completion"), ("messages",), ("text",))
# Columns that would change what is trained on, each with what to do about it.
_REFUSED = {
    "input_ids": "the samples are tokenized already: give them to td.hf.pack_dataset",
    "conversations": "convert them to messages with 'role' and 'content', for example with trl.maybe_convert_to_chatml",
    "documents": "chats with documents are not supported: remove the column, or put them into the messages",
    "functions": "rename the column to tools, or remove it",
}
_GENERATION_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


def tokenize(
    dataset: Any, tokenizer: Any, *, max_length: int | None = None, num_proc: int | None = None
) -> Any:
    """Return the samples of a Hugging Face dataset as token ids, ready for `pack_dataset` and `td.PackedDataset`.

    | columns of the dataset | columns of the result | tokens that are learned |
    |---|---|---|
    | `prompt` and `completion` | `input_ids`, `completion_mask` | those of the completion |
    | `messages` | `input_ids`, `assistant_masks` | those that the chat template marks |
    | `text` | `input_ids` | all |

    A prompt and its completion are two texts, or two lists of messages. Messages are mappings with `role` and
    `content`, which the tokenizer's chat template writes as one text. If the template has no `{% generation %}`
    markers, `assistant_masks` is missing, all tokens are learned, and a warning says so.

    The columns `tools`, as a list or as JSON, and `chat_template_kwargs` go to the chat template. All other columns are
    removed. A text, and a completion that is one, ends with the tokenizer's `eos_token`. A beginning-of-text token that
    the text has already is not added again.

    Where a completion begins is found as TRL does: the prompt is tokenized with and without it, and the completion
    begins with the first token that differs. If that is before the end of the prompt, because tokens merge across the
    border, a warning names the row.

    The result is cached by `datasets.map`. With several ranks, let one go first, which fills the cache for the others.

    Args:
        dataset: A `datasets.Dataset` or `IterableDataset`, or a `DatasetDict` or `IterableDatasetDict` of them.
        tokenizer: A tokenizer of transformers.
        max_length: Tokens of a sample, at least 1: only the first ones are kept. None keeps all.
        num_proc: Processes that tokenize, as in `datasets.map`. Not of a stream.

    Returns:
        A dataset of the same type, `input_ids` as int32 and masks as int8 lists. A stream is tokenized as it is read.

    Raises:
        InvalidInputError: The dataset has `input_ids`, columns of none or of several rows of the table, or a column
            that is not supported. Or a row holds something else than its columns should, or no message of an
            assistant; or the tokenizer lacks an `eos_token` or a chat template.
        InvalidTypeError: An argument is of the wrong type.
        MissingExtraError: transformers or datasets is not installed.

    Example:
        >>> import datasets, tokenizers, transformers, tundish as td
        >>> words = {"<end>": 0, "2": 1, "+": 2, "=": 3, "4": 4}
        >>> model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "<end>"))
        >>> model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        >>> tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<end>")
        >>> rows = datasets.Dataset.from_dict({"prompt": ["2 + 2 ="], "completion": [" 4"]})
        >>> samples = td.hf.tokenize(rows, tokenizer)
        >>> samples[0]
        {'input_ids': [1, 2, 1, 3, 4, 0], 'completion_mask': [0, 0, 0, 0, 1, 1]}
        >>> packs = td.hf.pack_dataset(samples, 4096, overlong="truncate")
    """
    try:
        import datasets
        from transformers.tokenization_utils_base import PreTrainedTokenizerBase
    except ImportError as error:
        missing_extra("hf", (error.name or "transformers").partition(".")[0], "tokenize")
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        has_one = isinstance(getattr(tokenizer, "tokenizer", None), PreTrainedTokenizerBase)
        hint = "give its .tokenizer" if has_one else "give a tokenizer of transformers"
        raise InvalidTypeError(f"tokenizer is {format_type(tokenizer)}: {hint}")
    if max_length is not None and (type(max_length) is not int or max_length < 1):
        raise InvalidInputError(f"max_length is {max_length!r}: give an integer of at least 1, or None")
    if isinstance(dataset, datasets.DatasetDict | datasets.IterableDatasetDict):
        made = {
            name: _Tokenization(tokenizer, _choose_form(_columns_of(split, num_proc)), max_length)
            for name, split in dataset.items()
        }
        _warn_of_chats_without_masks(made.values())
        return type(dataset)({name: made[name].of(split, num_proc) for name, split in dataset.items()})
    tokenization = _Tokenization(tokenizer, _choose_form(_columns_of(dataset, num_proc)), max_length)
    _warn_of_chats_without_masks([tokenization])
    return tokenization.of(dataset, num_proc)


def _columns_of(dataset: Any, num_proc: int | None) -> list[str]:
    """The names of the columns of a dataset that its rows show. A stream may tell them by its first row only.

    Raises:
        InvalidTypeError: It is no dataset.
        InvalidInputError: It computes its rows when they are read, or is a stream beside `num_proc`.
    """
    import datasets

    if isinstance(dataset, datasets.IterableDataset):
        if num_proc is not None:
            raise InvalidInputError(
                f"num_proc is {num_proc!r}, and a stream is tokenized by the process that reads it: leave num_proc out"
            )
        told: list[str] | None = dataset.column_names
        return list(next(iter(dataset), {})) if told is None else told
    if not isinstance(dataset, datasets.Dataset):
        raise InvalidTypeError(
            f"dataset is {format_type(dataset)}: give a datasets.Dataset; datasets.Dataset.from_list makes one of rows"
        )
    shown = dataset.format
    if shown["type"] == "custom":
        raise InvalidInputError(
            "dataset computes its rows when they are read (set_transform or with_transform): store them with "
            "Dataset.map, and tokenize those"
        )
    names: list[str] = dataset.column_names if shown["output_all_columns"] else list(shown["columns"])
    return names


def _warn_of_chats_without_masks(tokenizations: Iterable[_Tokenization]) -> None:
    if any(one.learns_whole_chats for one in tokenizations):
        _logger.warning(
            "the chat template has no {% generation %} markers, so that all tokens of the messages are learned, those "
            "of users too: to learn what assistants say, use a template with markers, or prompt and completion"
        )


def _choose_form(columns: Sequence[str]) -> tuple[str, ...]:
    """Return the columns that are tokenized.

    Raises:
        InvalidInputError: There are none, or it is not clear which; or a column is not supported.
    """
    for name, advice in _REFUSED.items():
        if name in columns:
            raise InvalidInputError(f"dataset has a column {name!r}: {advice}")
    found = [form for form in _FORMS if set(form) <= set(columns)]
    if len(found) == 1:
        return found[0]
    forms = [" and ".join(form) for form in found or _FORMS]
    if found:
        raise InvalidInputError(
            f"dataset has {', and '.join(forms)}, and one of these is tokenized: remove the other columns with "
            "remove_columns"
        )
    raise InvalidInputError(
        f"dataset has none of {', '.join(forms)}; its columns are {list(columns)}: rename those with the text with "
        "rename_columns"
    )


class _Tokenization:
    """Tokenizes batches of rows, for `datasets.map`.

    Args:
        tokenizer: The tokenizer.
        form: The columns that are tokenized, one of `_FORMS`.
        max_length: As in `tokenize`.

    Raises:
        InvalidInputError: There are messages, and the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any, form: tuple[str, ...], max_length: int | None) -> None:
        self._tokenizer = tokenizer
        self._form = form
        self._max_length = max_length
        # Another version may tokenize otherwise.
        self._version = __version__
        self._masks_assistants = (
            form == ("messages",) and _GENERATION_MARKER.search(self._chat_template()) is not None
        )
        self._has_warned = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_has_warned": False}

    @property
    def learns_whole_chats(self) -> bool:
        """Whether the tokens of users are learned too."""
        return self._form == ("messages",) and not self._masks_assistants

    def of(self, dataset: Any, num_proc: int | None) -> Any:
        """Return a dataset with the tokens of `dataset`."""
        import datasets

        features = self._features()
        is_stream = isinstance(dataset, datasets.IterableDataset)
        if not is_stream and not len(dataset):
            # `map` would return the columns as they are.
            return datasets.Dataset.from_dict({name: [] for name in features}, features=features)
        options: dict[str, Any] = {} if is_stream else {"num_proc": num_proc, "desc": "Tokenizing"}
        return dataset.with_format(None).map(
            self,
            batched=True,
            with_indices=True,
            remove_columns=_columns_of(dataset, None) if is_stream else dataset.column_names,
            features=features,
            **options,
        )

    def _features(self) -> datasets.Features:
        """The columns of the result."""
        import datasets

        types = {"input_ids": "int32"}
        if len(self._form) == 2:
            types["completion_mask"] = "int8"
        elif self._masks_assistants:
            types["assistant_masks"] = "int8"
        return datasets.Features(
            {name: datasets.Sequence(datasets.Value(kind)) for name, kind in types.items()}
        )

    def __call__(self, batch: Mapping[str, Sequence[Any]], rows: Sequence[int]) -> dict[str, list[list[int]]]:
        """Tokenize a batch; `rows` numbers its rows.

        Raises:
            InvalidInputError: A row cannot be tokenized.
        """
        columns = [batch[name] for name in self._form]
        are_texts = self._are_texts(columns, rows)
        settings = _chat_settings(batch, rows)
        if are_texts and any(any(own.values()) for own in settings):
            raise InvalidInputError(
                f"the rows are texts, and some have {' and '.join(next(filter(None, settings)))}, which only a chat "
                "template takes: remove the columns"
            )
        try:
            if self._form == ("text",):
                made = {"input_ids": self._encode_texts(columns[0], are_complete=True)}
            elif self._form == ("messages",):
                made = self._encode_chats(
                    columns[0], settings, return_assistant_tokens_mask=self._masks_assistants
                )
                self._check_masks(made.get("assistant_masks", ()), rows)
            else:
                made = self._encode_pairs(columns[0], columns[1], settings, rows, are_texts=are_texts)
        except Exception as error:
            if not isinstance(error, TundishError):
                # A template raises errors for chats that it does not allow.
                error.add_note(f"raised for one of the rows {rows[0]} to {rows[-1]} of the dataset")
            raise
        if self._max_length is None:
            return made
        return {name: [values[: self._max_length] for values in lists] for name, lists in made.items()}

    def _are_texts(self, columns: Sequence[Sequence[Any]], rows: Sequence[int]) -> bool:
        """Whether the rows hold texts, and not lists of messages.

        Raises:
            InvalidInputError: A row holds something else, or not the same as the row before.
        """
        expected: bool | None = None if len(self._form) == 2 else self._form == ("text",)
        for row, values in zip(rows, zip(*columns, strict=True), strict=True):
            for name, value in zip(self._form, values, strict=True):
                is_text = isinstance(value, str)
                if (is_text or _is_chat(value)) and expected in (None, is_text):
                    expected = is_text
                    continue
                chat = "a list of messages with a role"
                wanted = {True: "a text", False: chat, None: f"a text or {chat}"}
                raise InvalidInputError(
                    f"{name} of row {row} is {format_type(value)}, and {wanted[expected]} is expected"
                    + ("" if expected is None or len(self._form) == 1 else ", as before")
                )
        return bool(expected)

    def _encode_texts(self, texts: Sequence[str], *, are_complete: bool) -> list[list[int]]:
        """Token ids of texts that begin as the tokenizer has them begin, each with an end if it is complete."""
        tokenizer = self._tokenizer
        begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
        if end is None:
            raise InvalidInputError("the tokenizer has no eos_token, which ends each text: set it")
        if are_complete:
            texts = [
                text if text.endswith(tokenizer.eos_token) else text + tokenizer.eos_token for text in texts
            ]
        # A tokenizer that adds a beginning or an end does so also where the text has it, and to prompts.
        plain = tokenizer("a", add_special_tokens=False)["input_ids"]
        special = tokenizer("a")["input_ids"]
        adds_begin = begin is not None and special == [begin, *plain, *special[len(plain) + 1 :]]
        adds_end = special == [*special[: -len(plain) - 1], *plain, end]
        return [
            ids[adds_begin and text.startswith(tokenizer.bos_token) : len(ids) - adds_end]
            for text, ids in zip(texts, tokenizer(texts)["input_ids"], strict=True)
        ]

    def _encode_chats(
        self, chats: Sequence[Any], settings: Sequence[dict[str, Any]], **options: Any
    ) -> dict[str, list[list[int]]]:
        """Token ids of chats, and the masks if they are asked for, as the chat template writes them."""
        self._chat_template()
        found: dict[str, list[list[int]]] = {}
        remaining = iter(chats)
        # One call for all chats that follow each other with the same settings.
        for own, run in itertools.groupby(settings):
            part = list(itertools.islice(remaining, sum(1 for _ in run)))
            encoded = self._tokenizer.apply_chat_template(
                part, tokenize=True, return_dict=True, **options, **own
            )
            for name in ("input_ids", "assistant_masks"):
                if name in encoded:
                    found.setdefault(name, []).extend(encoded[name])
        return found

    def _encode_pairs(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        settings: Sequence[dict[str, Any]],
        rows: Sequence[int],
        *,
        are_texts: bool,
    ) -> dict[str, list[list[int]]]:
        """Token ids of prompts with their completions, and masks of the completions."""
        if are_texts:
            end = self._tokenizer.eos_token or ""
            whole_texts = [
                prompt + (completion if completion.endswith(end) else completion + end)
                for prompt, completion in zip(prompts, completions, strict=True)
            ]
            whole = self._encode_texts(whole_texts, are_complete=True)
            begun = self._encode_texts(prompts, are_complete=False)
        else:
            chats = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
            whole = self._encode_chats(chats, settings)["input_ids"]
            begun = self._encode_chats(prompts, settings, add_generation_prompt=True)["input_ids"]
        masks = []
        for row, prompt_ids, ids in zip(rows, begun, whole, strict=True):
            common = _common_beginning(prompt_ids, ids)
            if common < len(prompt_ids):
                self._warn_of_border(row, prompt_ids[common:])
            masks.append([0] * common + [1] * (len(ids) - common))
        return {"input_ids": whole, "completion_mask": masks}

    def _warn_of_border(self, row: int, lost: list[int]) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        _logger.warning(
            "the tokens of prompt and completion together do not begin with those of the prompt (row %d): the "
            "completion begins where they differ, and the end %r of the prompt is tokenized with it. When the model is "
            "used, it sees a prompt that it did not learn from: end prompts at the end of a word, or use a chat "
            "template that writes a prompt alike in both cases. Other rows may be like this one",
            row,
            self._tokenizer.decode(lost),
        )

    def _check_masks(self, masks: Sequence[Sequence[int]], rows: Sequence[int]) -> None:
        for row, mask in zip(rows, masks, strict=False):
            if 1 not in mask:
                raise InvalidInputError(
                    f"row {row} has no token that the chat template marks as an assistant's, and nothing would be "
                    "learned: remove the row, or correct the markers of the template"
                )

    def _chat_template(self) -> str:
        try:
            template: str = self._tokenizer.get_chat_template()
        except ValueError as error:
            raise InvalidInputError(
                f"the tokenizer has no chat template to write messages with: set tokenizer.chat_template ({error})"
            ) from error
        return template


def _is_chat(value: Any) -> bool:
    """Whether a value is a list of messages."""
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(message, Mapping) and "role" in message for message in value)
    )


def _chat_settings(batch: Mapping[str, Sequence[Any]], rows: Sequence[int]) -> list[dict[str, Any]]:
    """The arguments of the chat template that each row has beside its messages."""
    found: list[dict[str, Any]] = []
    nothing = [None] * len(rows)
    columns = (batch.get(name, nothing) for name in ("tools", "chat_template_kwargs"))
    for row, tools, more in zip(rows, *columns, strict=True):
        try:
            tools = json.loads(tools) if isinstance(tools, str) else tools
        except ValueError as error:
            raise InvalidInputError(f"tools of row {row} is no JSON: {error}") from error
        found.append(({} if tools is None else {"tools": tools}) | (more or {}))
    return found


def _common_beginning(ids: list[int], others: list[int]) -> int:
    """The number of tokens at the beginning of both."""
    if others[: len(ids)] == ids:
        return len(ids)
    pairs = zip(ids, others, strict=False)
    return next(
        (place for place, (one, other) in enumerate(pairs) if one != other), min(len(ids), len(others))
    )
