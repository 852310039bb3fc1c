"""On a real GPU: compiled kernels, CUDA graphs, and memory that really runs out. `./run_tests.sh --gpu`"""

import copy
import dataclasses
import threading

import numpy as np
import pytest
import torch
from small_models import FAST, PAD, VOCABULARY, gradients_at_step, plain_logprobs, small_model

from rl_swarm.config.settings import Settings
from rl_swarm.learning import memory, sampler
from rl_swarm.learning.batches import TrainingGroup
from rl_swarm.learning.devices import release_memory
from rl_swarm.learning.parallel import batcher
from rl_swarm.learning.parallel.shared_device import SharedDevice, own_stream
from rl_swarm.learning.parallel.stacked import ModelStack
from rl_swarm.learning.policy import Policy, load_model
from rl_swarm.learning.sampler import SamplingParams, sample
from rl_swarm.learning.settings import LearningSettings
from rl_swarm.learning.sizes import ModelShape
from rl_swarm.learning.trainer import Trainer
from rl_swarm.protocol.questions import Question
from rl_swarm.protocol.rollouts import Group

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU here")]
PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2, 1], [11], [n % 40 + 1 for n in range(100)]]
EOS = frozenset({3, 14, 25, 36})


@pytest.fixture
def capped():
    """Limit the memory of this process, in bytes, until the test ends."""

    def cap(limit):
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)

    yield cap
    torch.cuda.set_per_process_memory_fraction(1.0)
    release_memory()


def warnings(caplog):
    return [record.message for record in caplog.records if "out of memory" in record.message]


def gentle_model(kind):
    """A model on the CPU with weights so small that bfloat16 is precise enough to compare."""
    model = small_model(kind)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(0.5)
    return model


def drawn(engine, model, params, count=4, seed=1):
    with torch.no_grad():
        return engine.sample(model, PROMPTS, count, params, seed)


def errors(model, groups, temperature=1.0):
    """The errors of all log-probabilities, against float32 in transformers."""
    found, expected = [], []
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for s in group:
            found += s.logprobs
            with torch.no_grad():
                expected += plain_logprobs(model, prompt, s.tokens, temperature).tolist()
    return np.abs(np.array(found) - np.array(expected))


@pytest.mark.parametrize("kind", FAST)
def test_a_float32_engine_computes_what_transformers_does(kind):
    from rl_swarm.learning.cuda.engine import CudaEngine

    plain = small_model(kind)
    engine, model = CudaEngine(1, torch.float32), copy.deepcopy(plain).cuda()
    for seed in range(3):  # recorded, and replayed
        groups = drawn(engine, model, SamplingParams(20, EOS, PAD), seed=seed)
        assert errors(plain, groups).max() < 1e-4
    groups = drawn(engine, model, SamplingParams(30, EOS, PAD, temperature=0.7), count=40)
    assert errors(plain, groups, 0.7).max() < 1e-4


@pytest.mark.parametrize("kind", FAST)
def test_sampling_in_bfloat16_is_near_float32_also_after_training(kind):
    plain = gentle_model(kind)
    model = copy.deepcopy(plain).cuda()
    params = SamplingParams(20, EOS, PAD)
    assert errors(plain, sample(model, PROMPTS, 8, params, 1)).mean() < 0.02
    groups = [TrainingGroup([5, 6, 7], [[8, 9], [10]], [1.0, -1.0], None)]
    trainer = Trainer(model, PAD, LearningSettings(learning_rate=0.02))
    for seed in range(2):
        trainer.update(groups)
        learned = copy.deepcopy(plain)
        learned.load_state_dict({name: value.cpu() for name, value in model.state_dict().items()})
        found = sample(model, PROMPTS, 8, params, seed)
        assert errors(learned, found).mean() < 0.02
        assert errors(plain, found).mean() > 0.04


@pytest.mark.parametrize("kind", FAST)
def test_greedy_on_a_gpu_equals_transformers_generate(kind):
    from rl_swarm.learning.cuda.engine import CudaEngine

    plain = small_model(kind, seed=3)
    engine, model = CudaEngine(1, torch.float32), copy.deepcopy(plain).cuda()
    groups = drawn(engine, model, SamplingParams(20, EOS, PAD, greedy=True), count=1)
    for prompt, (found,) in zip(PROMPTS, groups, strict=True):
        expected = plain.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=20,
            eos_token_id=sorted(EOS),
            pad_token_id=PAD,
        )
        assert list(found.tokens) == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("temperature", [0.3, 0.7, 0.9, 1.0, 1.7])
def test_the_likeliest_word_stays_when_all_others_are_cut(temperature):
    from rl_swarm.learning.cuda.engine import CudaEngine

    engine, model = CudaEngine(1, torch.float32), small_model().cuda()
    greedy = drawn(engine, model, SamplingParams(20, EOS, PAD, temperature, greedy=True))
    for cut in ({"top_k": 1}, {"top_p": 1e-6}):
        found = drawn(engine, model, SamplingParams(20, EOS, PAD, temperature, **cut))
        assert [[s.tokens for s in group] for group in found] == [[s.tokens for s in group] for group in greedy]


def random_groups(seed, model, count):
    """Groups of a model on the CPU, with the log-probabilities of a sampler that is a little off."""
    rng = np.random.default_rng(seed)
    groups = []
    for _ in range(count):
        prompt = rng.integers(1, VOCABULARY, rng.integers(1, 90)).tolist()
        completions = [rng.integers(1, VOCABULARY, rng.integers(1, 80)).tolist() for _ in range(4)]
        with torch.no_grad():
            exact = [plain_logprobs(model, prompt, ids).numpy() for ids in completions]
        logprobs = [(row + rng.normal(0, 0.02, len(row))).tolist() for row in exact]
        groups.append(TrainingGroup(prompt, completions, rng.normal(0, 1, 4).tolist(), logprobs))
    return groups


def difference(found, expected):
    """The difference of two gradients, relative to their norm."""
    square = sum(float(((a.cpu() - b.cpu()) ** 2).sum()) for a, b in zip(found, expected, strict=True))
    return (square / sum(float((b.cpu() ** 2).sum()) for b in expected)) ** 0.5


@pytest.mark.parametrize("kind", FAST)
def test_captured_updates_equal_eager_updates(kind):
    plain = gentle_model(kind)
    rounds = [random_groups(seed, plain, count) for seed, count in ((0, 6), (1, 11), (2, 6), (0, 6))]
    made = []
    for device, recorded in (("cuda", True), ("cuda", False), ("cpu", False)):
        settings = Settings.of(learning_rate=1e-6, max_grad_norm=1e9, kl_weight=0.1)
        trainer = Trainer(copy.deepcopy(plain).to(device), PAD, settings.learning)
        assert (trainer.graphs is not None) == (device == "cuda")
        if not recorded:
            trainer.graphs = None
        gradients = gradients_at_step(trainer)
        made.append(([trainer.update(groups) for groups in rounds], gradients))
    (recorded, gradients), *others = made
    for (updates, expected), most in zip(others, (0.03, 0.06), strict=True):
        for number, update in enumerate(updates):
            assert recorded[number].tokens == update.tokens
            assert recorded[number].loss == pytest.approx(update.loss, abs=5e-3)
            assert recorded[number].grad_norm == pytest.approx(update.grad_norm, rel=most)
            assert recorded[number].entropy == pytest.approx(update.entropy, rel=1e-2)
            assert difference(gradients[number], expected[number]) < most


def tiny_trainer():
    """The bundled model after an update, with everything that stays in memory."""
    model, _ = load_model("tiny")
    trainer = Trainer(model.cuda(), 0, LearningSettings(learning_rate=1e-5, batch_tokens=1 << 15))
    trainer.update([TrainingGroup([5, 6, 7], [[8, 9], [10]], [1.0, -1.0], None)])
    release_memory()
    return trainer


def test_an_update_that_does_not_fit_is_done_in_pieces_that_do(capped, caplog):
    generator = torch.Generator().manual_seed(0)

    def tokens(length):
        return torch.randint(1, 300, (length,), generator=generator).tolist()

    groups = [TrainingGroup(tokens(32), [tokens(60) for _ in range(8)], [1.0, -1.0] * 4, None) for _ in range(64)]
    trainer = tiny_trainer()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    whole = trainer.update(groups)
    peak = torch.cuda.max_memory_reserved()
    assert trainer.batch_tokens == 1 << 15 and not warnings(caplog)
    trainer.release()
    del trainer
    release_memory()

    trainer = tiny_trainer()
    capped((before + peak) // 2)
    update = trainer.update(groups)
    remembered = trainer.batch_tokens
    assert warnings(caplog)
    assert remembered < 1 << 15
    assert update.tokens == whole.tokens == 64 * 8 * 60
    assert update.grad_norm == pytest.approx(whole.grad_norm, rel=0.02)
    assert update.nll == pytest.approx(whole.nll, rel=1e-3)
    caplog.clear()
    trainer.update(groups)
    assert trainer.batch_tokens == remembered and not warnings(caplog)


@pytest.fixture
def policy():
    """Makes policies of the bundled model, and frees their memory after the test."""
    made = []

    def make(**changes):
        settings = Settings.of(model="tiny", device="cuda", learning_rate=1e-5, **changes)
        made.append(Policy.load(settings, "Answer well."))
        return made[-1]

    yield make
    for one in made:
        sampler.release(one.model)
    made.clear()
    release_memory()


def test_samples_that_do_not_fit_at_once_are_drawn_in_turns(policy, capped, caplog):
    prompts = [f"What is {n} plus {n + 3}?" for n in range(64)]
    one = policy(max_new_tokens=1024)
    one.batch, one.eos = 512, frozenset()  # nobody ends early
    one.sample(prompts[:1], 8, 0)
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    one.sample(prompts, 8, 0)
    peak = torch.cuda.max_memory_reserved()
    assert one.batch == 512 and not warnings(caplog)
    sampler.release(one.model)
    release_memory()

    capped((before + peak) // 2)
    groups = one.sample(prompts, 8, 0)
    remembered = one.batch
    assert warnings(caplog)
    assert 8 <= remembered < 512
    assert [len(group) for group in groups] == [8] * 64
    for completion in (c for group in groups for c in group):
        assert len(completion.tokens) == 1024 and np.isfinite(completion.logprobs).all()
    caplog.clear()
    one.sample(prompts, 8, 1)
    assert one.batch == remembered and not warnings(caplog)


def test_memory_does_not_grow_from_round_to_round(policy):
    one = policy(max_new_tokens=32)
    one.eos = frozenset()  # all completions have one length, so that rounds repeat their shapes
    reserved = []
    for number in range(60):
        prompts = [f"What is {n} plus {n + 2}?" for n in range(4 + 3 * (number % 2))]
        groups = [
            Group("me", Question("chain_sum", n, n, prompts[n], "4"), tuple(found), (1.0, 0.0) * 4, False)
            for n, found in enumerate(one.sample(prompts, 8, number))
        ]
        assert one.learn(groups).grad_norm > 0
        reserved.append(torch.cuda.memory_reserved())
    assert len(set(reserved[10:])) == 1, reserved


def test_nodes_that_share_a_gpu_sample_and_learn_as_if_alone():
    settings = Settings.of(learning_rate=0.02)
    plain = [small_model(seed=seed) for seed in range(6)]
    alone = [copy.deepcopy(model).cuda() for model in plain]
    together = [copy.deepcopy(model).cuda() for model in plain]
    params = SamplingParams(20, EOS, PAD)
    groups = [random_groups(seed, model, 3) for seed, model in enumerate(plain)]
    sharing = SharedDevice(len(plain))
    free = memory.available(alone[0].device)
    room = memory.plan(ModelShape.of(plain[0].config), free, settings, "cuda", len(plain))
    room = dataclasses.replace(room, training_slots=2)
    found = {}

    def live(number, model, trainer):
        texts = []
        for turn in range(3):
            texts.append([[s.tokens for s in group] for group in sample(model, PROMPTS, 4, params, turn)])
            trainer.update(groups[number])
        found[number] = texts

    def in_a_thread(number):
        with own_stream():
            model = together[number]
            live(number, model, sharing.make_trainer(model, PAD, settings.learning, room))

    threads = [threading.Thread(target=in_a_thread, args=(number,)) for number in range(len(plain))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    shared = dict(found)
    (engine,) = sharing.engines.values()
    assert all(engine.copies)
    for number, model in enumerate(alone):
        live(number, model, Trainer(model, PAD, settings.learning))
        assert shared[number][0] == found[number][0]
        moved = difference(model.parameters(), [p.detach() for p in plain[number].parameters()])
        apart = difference(model.parameters(), [p.detach() for p in together[number].parameters()])
        # Adam makes much of small differences: 0.2 has been seen. Of another node's gradients it would be 1.4.
        assert apart < 0.5 * moved


@pytest.mark.parametrize("kind", FAST)
def test_eight_models_sampled_in_one_batch_give_the_same_as_alone(kind, monkeypatch):
    from rl_swarm.learning.cuda.engine import CudaEngine

    monkeypatch.setattr(batcher, "MIN_PAUSE", 60)
    monkeypatch.setattr(batcher, "MAX_PAUSE", 60)
    models = [small_model(kind, seed=seed).cuda() for seed in range(8)]
    engine, passes = CudaEngine(8, torch.float32), []
    real = engine._sample
    monkeypatch.setattr(engine, "_sample", lambda given, how: (passes.append(len(given)), real(given, how))[1])
    for model in models:
        sampler.use_engine(model, engine)
    engine.batcher.members.update(models)
    params, found = SamplingParams(30, EOS, PAD), {}

    def work(number):
        with own_stream():
            for turn in range(3):  # recorded, and replayed; one node has more to do than the others
                count = 20 if turn == 2 and number == 5 else 3
                groups = sample(models[number], PROMPTS[number % 3 :], count, params, turn)
                found[number, turn] = [[s.tokens for s in group] for group in groups]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert passes == [8, 8, 8]
    together = dict(found)
    for number, model in enumerate(models):
        sampler.release(model)
        sampler.use_engine(model, CudaEngine(1, torch.float32))
        work(number)
        sampler.release(model)
    assert found == together
    assert len({len(tokens) for groups in found.values() for group in groups for tokens in group}) > 5


@pytest.mark.parametrize("kind", ("llama", "qwen2", "qwen3", "gpt2"))
def test_captured_gradients_of_a_stack_equal_those_of_each_model_alone(kind, monkeypatch):
    monkeypatch.setattr("rl_swarm.learning.devices.prefers_bfloat16", lambda model: False)
    plain = [small_model(kind, seed=seed) for seed in range(4)]
    stacked = [Trainer(copy.deepcopy(model).cuda(), PAD, LearningSettings()) for model in plain]
    stack = ModelStack(stacked)
    stack._step = lambda active_Z: torch.zeros(4, device="cuda")
    for turn in range(3):  # recorded, replayed, and of another size
        given = [random_groups(number + turn, model, 2 + turn) for number, model in enumerate(plain)]
        given[turn] = []
        stack.update(given)
        for place, (model, groups) in enumerate(zip(plain, given, strict=True)):
            alone = Trainer(model, PAD, LearningSettings())
            tokens = sum(len(ids) for group in groups for ids in group.completions)
            alone.optimizer.zero_grad()
            alone._gradients(groups, tokens)
            for parameter, leaf in zip(alone.parameters(), stack.decoder.weights.values(), strict=True):
                expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                assert torch.allclose(leaf.grad[place].cpu(), expected, atol=1e-4)
