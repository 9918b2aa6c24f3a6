"""One loop of reinforcement learning: rollouts travel as handles, and each step ends with a drain of all processes.

    python examples/rl_step.py

Two processes sample from a table of logits, and this one learns by REINFORCE. A token is worth 1 if it is the one
before plus one. Pipes carry handles alone. Tensors go directly to the process that asks for them.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

import torch

import tundish as td

VOCABULARY, LENGTH, ROWS = 32, 16, 64


def rollout(pipe: Connection, number: int) -> None:
    """Answers handles of the weights with handles of samples, until the pipe is closed."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(number)
    with td.rtensor.serve() as server, contextlib.suppress(EOFError):
        pipe.send(server.addr)
        while True:
            weights = td.rtensor.loads(pipe.recv_bytes())
            chances = td.rtensor.localize(weights)["logits"].softmax(-1)
            tokens = torch.randint(VOCABULARY, (ROWS, 1), generator=generator)
            for _ in range(LENGTH - 1):
                drawn = torch.multinomial(chances[tokens[:, -1]], 1, generator=generator)
                tokens = torch.cat([tokens, drawn], 1)
            rewards = (tokens[:, 1:] == (tokens[:, :-1] + 1) % VOCABULARY).float()
            del chances  # it belongs to this step
            pipe.send_bytes(td.rtensor.dumps(td.rtensor.remotize({"tokens": tokens, "rewards": rewards})))


def learn(logits: torch.Tensor, optimizer: torch.optim.Optimizer, batches: Any) -> float:
    """Makes one update, and returns the mean reward. Fetched tensors are freed when it returns."""
    fetched = td.rtensor.localize(batches)
    tokens = torch.cat([batch["tokens"] for batch in fetched])
    rewards = torch.cat([batch["rewards"] for batch in fetched])
    sampled = logits[tokens[:, :-1]].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    optimizer.zero_grad()
    (-sampled * (rewards - rewards.mean())).mean().backward()
    optimizer.step()
    return rewards.mean().item()


def main() -> None:
    logits = torch.zeros(VOCABULARY, VOCABULARY, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.3)

    context = multiprocessing.get_context("forkserver")
    pipes, theirs = zip(*(context.Pipe() for _ in range(2)), strict=True)
    for number, pipe in enumerate(theirs):
        context.Process(target=rollout, args=(pipe, number), daemon=True).start()
        pipe.close()
    workers = [td.rtensor.Worker(pipe.recv(), "rollout", rank) for rank, pipe in enumerate(pipes)]
    with td.rtensor.serve() as server:
        workers.append(td.rtensor.Worker(server.addr, "trainer", 0))
        with td.rtensor.Controller(workers) as controller:
            for step in range(1, 41):
                weights = td.rtensor.remotize({"logits": logits})
                for pipe in pipes:
                    pipe.send_bytes(td.rtensor.dumps(weights))
                batches = [td.rtensor.loads(pipe.recv_bytes()) for pipe in pipes]
                with controller.step(claim=[weights, batches], number=step):
                    reward = learn(logits, optimizer, batches)
                print(f"step {step}: reward {reward:.3f}", flush=True)
            left = sum(stats["storage"]["num_entries"] for stats in controller.stats().values())
    print(f"{left} tensors left on all processes")


if __name__ == "__main__":
    main()
