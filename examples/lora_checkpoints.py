"""Fine-tunes LoRA adapters, and exports them with each save; run it again to go on after a kill.

    python examples/lora_checkpoints.py --out out/lora

Each `hf-<step>` holds the adapters alone, as PEFT loads them. Each `dcp-<step>` holds what resuming needs. The base
model is a small Llama with random weights, the data Python's own modules. It needs `pip install 'tundish[examples]'`
and no network.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import numpy as np
import peft
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tundish as td


def base_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, **shape))


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune adapters, and export them with each save.")
    parser.add_argument("--out", type=Path, default=Path("out/lora"), help="folder of the checkpoints")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)

    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:20]
    documents = [np.frombuffer(module.read_bytes(), np.uint8) for module in modules]
    plan = td.pack([len(document) for document in documents], 128, seed=0)
    loader = td.loader(documents, plan, batch_size=2, seed=0)

    adapters = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=8, lora_dropout=0.0)
    model = peft.get_peft_model(base_model(), adapters)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    state = {"model": model, "optimizer": optimizer, "loader": loader}

    with td.Checkpointer(options.out, keep_last=2) as checkpointer:
        start = checkpointer.resume(**state)
        for step, batch in zip(range(start + 1, options.steps + 1), loader, strict=False):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 10 == 0 or step == options.steps:
                checkpointer.save(step, **state, hf=True)
                print(f"after {start}: step {step}, loss {loss.item():.4f}", flush=True)

    # What a server does: the base model, and the newest adapters.
    export = (options.out / "hf-latest").resolve()
    served = peft.PeftModel.from_pretrained(base_model(), export)
    assert all(torch.equal(a, b) for a, b in zip(served.parameters(), model.parameters(), strict=True))
    size = sum(path.stat().st_size for path in export.iterdir())
    print(f"{export.name} has {size / 1e3:.0f} kB; the model has {model.num_parameters() * 4 / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
