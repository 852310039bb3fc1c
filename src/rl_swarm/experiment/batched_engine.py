"""Samples and trains for all nodes of a run at once, on one GPU.

One engine samples from all models in the same kernels. Small models of one shape are trained in the same kernels
too; larger ones, which keep the GPU busy, one after the other.
"""

import time
from collections import defaultdict
from collections.abc import Hashable, Sequence

from rl_swarm.learning import sampler
from rl_swarm.learning.devices import out_of_memory
from rl_swarm.learning.parallel.stacked import ModelStack, stacking_key
from rl_swarm.learning.policy import Policy, SampleRequest, TrainRequest
from rl_swarm.learning.sampler import Request
from rl_swarm.protocol.rollouts import Completion
from rl_swarm.telemetry.journal import Stopwatch


class BatchedEngine:
    def __init__(self, policies: Sequence[Policy]) -> None:
        kinds = defaultdict[Hashable, list[Policy]](list)
        for policy in policies:
            kinds[stacking_key(policy.trainer)].append(policy)
        self.batches = [(alike, ModelStack([p.trainer for p in alike])) for kind, alike in kinds.items()
                        if kind is not None and len(alike) > 1]  # fmt: skip

    def sample(self, work: Sequence[SampleRequest]) -> None:
        batches = defaultdict[Hashable, list[SampleRequest]](list)
        for one in work:
            engine = sampler.engine_of(one.policy.model)
            if engine is None or one.greedy or len(one.questions) * one.count > one.policy.batch:
                one.run()
            else:
                batches[engine, one.policy.sampling_params()].append(one)
        for batch in batches.values():
            started = time.perf_counter()
            try:
                found = sample(batch)
            except (RuntimeError, MemoryError) as error:  # alone, a node retries in smaller batches
                if not out_of_memory(error):
                    raise
                for one in batch:
                    one.run()
                continue
            for one, completions in zip(batch, found, strict=True):
                one.completions = completions
            share([one.watch for one in batch], "generate", started)

    def learn(self, work: Sequence[TrainRequest]) -> None:
        waiting = {one.policy: one for one in work}
        for policies, stack in self.batches:
            batch = [waiting.pop(policy, None) for policy in policies]
            started = time.perf_counter()
            training_groups = [[] if one is None else one.policy.training_groups(one.groups) for one in batch]
            if not any(training_groups):
                continue
            for one, update in zip(batch, stack.update(training_groups), strict=True):
                if one is not None and update.tokens:
                    one.update = update
                    one.policy.version += 1
            share([one.watch for one in batch if one is not None], "train", started)
        for one in waiting.values():
            one.run()


def sample(batch: Sequence[SampleRequest]) -> list[list[list[Completion]]]:
    """Sample the answers to all questions of several nodes in one pass of the engine that serves their models."""
    engine = sampler.engine_of(batch[0].policy.model)
    assert engine is not None
    requests = []
    for one in batch:
        if one.policy.model.training:
            one.policy.model.eval()
        prompts = [one.policy.prompt_ids(prompt) for prompt in one.prompts]
        requests.append(Request(one.policy.model, prompts, one.count, one.seed))
    found = engine.sample_all(requests, batch[0].policy.sampling_params())
    return [one.policy.completions(samples) for one, samples in zip(batch, found, strict=True)]


def share(watches: Sequence[Stopwatch], phase: str, started: float) -> None:
    """Add the time since `started` to every stopwatch, in equal parts."""
    for watch in watches:
        watch.add(phase, started, time.perf_counter(), 1 / len(watches))
