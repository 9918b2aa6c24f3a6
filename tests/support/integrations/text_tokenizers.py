"""Tokenizers of bytes and words that are trained in milliseconds, with chat templates, and texts to tokenize."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"]
SENTENCES = [
    "The sky is blue, and the sea is blue too.",
    "What color is the sky? It is blue.",
    "How much is seven times six? Forty-two.",
    "You are a helpful assistant.",
]

_TURN = "message['content'] + '<|im_end|>'"
_CHAT = (
    "{{ bos_token }}{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% if style %}<|im_start|>style\n{{ style }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ TURN }}{% endgeneration %}"
    "{% else %}{{ TURN }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
).replace("TURN", _TURN)
CHAT_TEMPLATES = {
    "marked": _CHAT,
    "unmarked": _CHAT.replace("{% generation %}", "").replace("{% endgeneration %}", ""),
}


def text_tokenizer(template: str | None = "marked", **options: Any) -> PreTrainedTokenizerFast:
    """A tokenizer with the chat template of a name; `options` may be `add_bos_token` and `add_eos_token`."""
    model = Tokenizer(BPE())
    model.pre_tokenizer = ByteLevel(add_prefix_space=False)
    model.decoder = ByteDecoder()
    trainer = BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    model.train_from_iterator(SENTENCES, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=model,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=None if template is None else CHAT_TEMPLATES[template],
        **options,
    )


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def draw_texts(count: int) -> list[dict[str, Any]]:
    return [{"text": " ".join(SENTENCES[: 1 + number % 4]) * (1 + number % 3)} for number in range(count)]


def draw_pairs(count: int) -> list[dict[str, Any]]:
    return [
        {"prompt": f"{SENTENCES[number % 4]} {number}?", "completion": f" {SENTENCES[(number + 1) % 4]}"}
        for number in range(count)
    ]


def draw_messages(count: int) -> list[dict[str, Any]]:
    """Chats of one to three turns, some of which begin with a system message."""
    rows = []
    for number in range(count):
        chat = [message("system", SENTENCES[3])] if number % 2 else []
        for turn in range(1 + number % 3):
            chat.append(message("user", f"{SENTENCES[turn]} {number}"))
            chat.append(message("assistant", SENTENCES[(number + turn) % 3]))
        rows.append({"messages": chat})
    return rows


def draw_chat_pairs(count: int) -> list[dict[str, Any]]:
    return [
        {"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in draw_messages(count)
    ]
