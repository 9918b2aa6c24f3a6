"""Prepares packs of images and captions on rank 0 and trains on all ranks; run it again to go on after a kill.

    torchrun --standalone --nproc-per-node 2 examples/vlm_scatter.py --out out/vlm

Batches travel through shared memory. Model and images are made here. It needs `pip install 'tundish[hf]'`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

import tundish as td

IMAGE = 250  # the token that stands for a part of an image
LENGTHS = [6 + 5 + number % 20 for number in range(1000)]


class Captions:
    """Images of 4 x 6 patches, which take 2 x 3 tokens, with captions. Your image processor works here."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        caption = torch.arange(LENGTHS[number] - 6).add(number).remainder(200)
        return {
            "input_ids": torch.cat([torch.full((6,), IMAGE), caption]),
            "mm_token_type_ids": torch.tensor([1] * 6 + [0] * len(caption)),
            "pixel_values": torch.full((24, 24), number / len(LENGTHS)),
            "image_grid_thw": torch.tensor([[1, 4, 6]]),
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("out/vlm"), help="folder of the checkpoints")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    text = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 2}
    config = Qwen2VLConfig(text_config=text, vision_config=vision, image_token_id=IMAGE)
    model = Qwen2VLForConditionalGeneration(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    parallel = DistributedDataParallel(model)

    def rope(piece: dict[str, torch.Tensor]) -> torch.Tensor:
        tokens, kinds = piece["input_ids"][None], piece["mm_token_type_ids"][None]
        return model.model.get_rope_index(tokens, kinds, image_grid_thw=piece["image_grid_thw"])[0][:, 0]

    plan = td.pack(LENGTHS, 64, mode="best_fit", seed=0)
    columns = {"columns": {"mm_token_type_ids": 0}, "sample_columns": ["pixel_values", "image_grid_thw"]}
    source = td.loader(Captions(), plan, batch_size=2, world_size=1, positions=rope, **columns)
    loader = td.DispatchLoader(source if rank == 0 else None)
    with loader, td.Checkpointer(options.out, keep_last=2) as checkpointer:
        start = checkpointer.resume(model=model, optimizer=optimizer, loader=loader)
        for step, batch in zip(range(start + 1, options.steps + 1), loader, strict=False):
            loss = parallel(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 10 == 0:
                checkpointer.save(step, model=model, optimizer=optimizer, loader=loader)
                print(f"rank {rank} after {start}: step {step}, loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
