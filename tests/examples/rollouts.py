"""Reinforcement learning with batches as remote tensors, in four processes; memory stays flat.

A long form of `examples/rl_step.py`, for tests: it reports memory and what is left.

    python tests/examples/rollouts.py --steps 20

Two rollout processes sample from a small model. A trainer with three roles (actor, critic, reference) consumes the
samples. This process, the controller, has only handles and drains all others after each step.

A sampled token is worth 1 if it is the one before plus one. The actor learns by REINFORCE with the critic's values as
the baseline, and is held near the reference by their KL divergence.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# transformers reads it when it is imported: nothing here needs the network.
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch.nn.functional import cross_entropy, log_softmax, mse_loss
from transformers import LlamaConfig, LlamaForCausalLM

import tundish as td

VOCABULARY = 32
LENGTH = 24
ROWS = 32
ROLES = ("actor", "critic", "ref")


def small_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config)


def main() -> None:
    options = read_options()
    context = multiprocessing.get_context("forkserver")
    # The fork server imports the slow modules once, for all processes.
    context.set_forkserver_preload(["transformers.models.llama.modeling_llama", "tundish.rtensor"])
    rollouts = [Process(context, rollout, number) for number in range(2)]
    trainer = Process(context, train, 0)
    workers = [td.rtensor.Worker(one.addr, "rollout", rank) for rank, one in enumerate(rollouts)]
    workers.append(td.rtensor.Worker(trainer.addr, "+".join(ROLES), 0))

    weights = trainer.ask("weights")
    first_reward, first_memory = 0.0, 1
    with td.rtensor.Controller(workers) as controller:
        begun = [one.begin("sample", weights) for one in rollouts]
        for step in range(1, options.steps + 1):
            batches = [answer() for answer in begun]
            with controller.step(claim=[weights, batches]):
                learn = trainer.begin("learn", batches)
                report = learn()
                # Made in this step, and not claimed by it: they are for the next one.
                weights = trainer.ask("weights")
            # Measured between the steps, while no process works.
            memory = sum(resident_bytes(one.pid) for one in (*rollouts, trainer))
            begun = [one.begin("sample", weights) for one in rollouts]
            if step == 1:
                first_reward = report["reward"]
            # By then the allocators have the memory that they keep.
            if step == 1 + options.steps // 2:
                first_memory = memory
            if step % options.report == 0:
                print(
                    f"step {step}: reward {report['reward']:.3f}, memory {memory / 2**20:.0f} MiB", flush=True
                )
        for answer in begun:
            controller.clear_batches(answer(), weights)
        left = [
            (stats["storage"]["num_entries"], stats["buffer"]["num_entries"])
            for stats in controller.stats().values()
            if isinstance(stats, dict)
        ]
    growth = memory / first_memory - 1
    print(
        f"reward {first_reward:.3f} -> {report['reward']:.3f}, memory {100 * growth:+.1f}%, left over: {left}"
    )
    for one in (*rollouts, trainer):
        one.end()


class Process:
    """A process that serves remote tensors and answers requests; requests and answers are handles, as bytes."""

    def __init__(self, context: Any, work: Any, number: int) -> None:
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, work, number), daemon=True)
        self._process.start()
        theirs.close()
        self.pid: int = self._process.pid
        self.addr: str = self._pipe.recv()

    def begin(self, what: str, batch: Any = None) -> Any:
        """Sends a request; returns a function that waits for the answer."""
        self._pipe.send_bytes(td.rtensor.dumps((what, batch)))
        return lambda: td.rtensor.loads(self._pipe.recv_bytes())

    def ask(self, what: str, batch: Any = None) -> Any:
        return self.begin(what, batch)()

    def end(self) -> None:
        self._pipe.close()
        self._process.join()


def serve(pipe: Connection, work: Any, number: int) -> None:
    torch.set_num_threads(1)
    answers = work(number)
    next(answers)
    pipe.send(td.rtensor.serve().addr)
    while True:
        try:
            asked = td.rtensor.loads(pipe.recv_bytes())
        except EOFError:
            return
        pipe.send_bytes(td.rtensor.dumps(answers.send(asked)))


def rollout(number: int) -> Any:
    """Answers weights with samples from the model that has them."""
    model = small_model().eval()
    generator = torch.Generator().manual_seed(number)
    answer = None
    while True:
        _, handles = yield answer
        model.load_state_dict(td.rtensor.localize(handles))
        tokens = torch.randint(VOCABULARY, (ROWS, 1), generator=generator)
        with torch.no_grad():
            for _ in range(LENGTH - 1):
                chances = model(input_ids=tokens).logits[:, -1].softmax(-1)
                tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=generator)], 1)
        # Rows end at random; columns behind the longest row are not sent.
        lengths = torch.randint(LENGTH // 2, LENGTH, (ROWS, 1), generator=generator)
        mask = (torch.arange(LENGTH) < lengths).long()
        rewards = (tokens[:, 1:] == (tokens[:, :-1] + 1) % VOCABULARY).float() * mask[:, 1:]
        answer = td.rtensor.remotize(
            {"input_ids": tokens, "attention_mask": mask, "rewards": torch.nn.functional.pad(rewards, (1, 0))}
        )


def train(_: int) -> Any:
    """Answers requests for the actor's weights, and lets the roles learn from batches."""
    roles = Roles()
    answer: Any = None
    while True:
        what, handles = yield answer
        if what == "weights":
            answer = td.rtensor.remotize(dict(roles.actor.state_dict()))
        else:
            rewards = [roles.learn(batch) for batch in handles]
            answer = {"reward": sum(rewards) / len(rewards)}


class Roles:
    """The three roles. Each localizes its input: the second and the third find it in the fetch buffer."""

    def __init__(self) -> None:
        self.actor, self.reference = small_model(), small_model().eval()
        self.critic = torch.nn.Sequential(
            torch.nn.Embedding(VOCABULARY, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)
        )
        learning = [*self.actor.parameters(), *self.critic.parameters()]
        self.optimizer = torch.optim.AdamW(learning, lr=3e-3)

    def learn(self, batch: Any) -> float:
        """Makes one update; returns the mean reward of a token."""
        reference_log_probs = self.refer(batch)
        values = self.value(batch)
        # These tensors are freed when this returns: none outlives the step.
        fetched = td.rtensor.localize(batch)
        tokens, mask, rewards = (fetched[name] for name in ("input_ids", "attention_mask", "rewards"))
        mask, rewards = mask[:, 1:], rewards[:, 1:]
        logits = self.actor(input_ids=tokens).logits[:, :-1]
        sampled_log_probs = -cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
        log_probs = log_softmax(logits, -1)
        kl = (log_probs.exp() * (log_probs - reference_log_probs)).sum(-1)
        policy_loss = 0.01 * kl - sampled_log_probs * (rewards - values.detach())
        loss = (policy_loss * mask).sum() / mask.sum() + mse_loss(values * mask, rewards)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(rewards.sum() / mask.sum())

    def refer(self, batch: Any) -> torch.Tensor:
        """Returns the log probabilities of the reference, shape (rows, length - 1, vocabulary)."""
        with torch.no_grad():
            tokens = td.rtensor.localize(batch["input_ids"])
            return log_softmax(self.reference(input_ids=tokens).logits[:, :-1], -1)

    def value(self, batch: Any) -> torch.Tensor:
        """Returns the critic's values, shape (rows, length - 1)."""
        values: torch.Tensor = self.critic(td.rtensor.localize(batch["input_ids"]))[:, :-1, 0]
        return values


def resident_bytes(process: int) -> int:
    """Memory of a process: its own, and its part of shared memory. Not files, which other programs map too."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Reinforcement with remote tensors, drained each step.")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--report", type=int, default=5, help="steps between two lines of output")
    options = parser.parse_args()
    for name in ("steps", "report"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    return options


if __name__ == "__main__":
    main()
