"""Tests when a trainer captures CUDA graphs and what it releases on close. Megatron's captures need a GPU."""

import pytest
from support.trainings import DENSE, make_trainer, train
from support.versions import is_installed

from fgoffload.cli.measurement import load_training, measure_training
from fgoffload.errors import ConfigError, IntegrationError
from fgoffload.integrations.megatron.patching.imports import load_module
from fgoffload.trainer import limits
from fgoffload.trainer.arguments import parse_arguments
from fgoffload.trainer.data import TextData
from fgoffload.trainer.profile_training import profile_training
from fgoffload.trainer.trainer import Trainer
from fgoffload.trainer.training_graphs import choose_graphs

pytestmark = pytest.mark.usefixtures("parallel", "_gpu")

LAYER_GRAPHS = "megatron.core.transformer.cuda_graphs"
TE = f"{DENSE} --cuda-graph-impl transformer_engine --cuda-graph-warmup-steps 2"
FULL = f"{DENSE} --cuda-graph-impl full_iteration --cuda-graph-warmup-steps 9"

_NEEDS_0_17 = pytest.mark.skipif(
    not is_installed("0.17"), reason="megatron-core 0.16 needs GPU random states to build layers for a full-iteration graph"
)


@pytest.fixture
def seeds():
    return []


@pytest.fixture
def _gpu(monkeypatch, seeds):
    """Make the trainer behave as on a GPU, but seed and record only CPU random states."""
    monkeypatch.setattr(limits, "needs_cpu_support", lambda: False)
    monkeypatch.setattr(limits, "has_transformer_engine", lambda: True)
    random = load_module("megatron.core.tensor_parallel.random")
    original = random.model_parallel_cuda_manual_seed

    def seed(value, *, te_rng_tracker, use_cudagraphable_rng, force_reset_rng):
        seeds.append((te_rng_tracker, use_cudagraphable_rng))
        original(value, force_reset_rng=force_reset_rng)

    monkeypatch.setattr(random, "model_parallel_cuda_manual_seed", seed)


@pytest.fixture
def calls(monkeypatch):
    """Record the trainer's calls to a fake helper that captures nothing."""
    found = []
    calculator = load_module("megatron.core.num_microbatches_calculator")

    class Helper:
        captures = True

        def __init__(self, *, model, config, seq_length, micro_batch_size, optimizers):
            assert all(chunk.training for chunk in model)
            assert (seq_length, micro_batch_size, optimizers) == (32, 2, [])
            self._has_graphs = False

        def create_cudagraphs(self):
            found.append(f"capture for {calculator.get_num_microbatches()} microbatches")
            self._has_graphs = Helper.captures

        def graphs_created(self):
            return self._has_graphs

        def delete_cuda_graphs(self):
            found.append("delete")
            self._has_graphs = False

    monkeypatch.setattr(load_module(LAYER_GRAPHS), "TECudaGraphHelper", Helper)
    found.append(Helper)
    yield found
    assert calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR is None


def test_each_trainer_captures_its_layers_once_before_the_first_replay(calls, seeds):
    helper = calls.pop()
    for _ in range(2):
        with make_trainer(TE, None) as trainer:
            for step in range(4):
                assert trainer.graphs.is_captured is (step > 2)
                trainer.evaluate()  # which leaves the model in eval mode
                trainer.run_step(with_digests=False)
                assert len(calls) == (1 if step >= 2 else 0)
        assert calls == ["capture for 2 microbatches", "delete"]
        calls.clear()
    assert helper.captures
    assert seeds == [(True, True)] * 2


def test_eager_training_does_not_use_the_graph_rng_tracker(seeds):
    train(DENSE, steps=1)
    assert seeds == [(False, False)]


def test_training_fails_before_the_first_replay_if_no_layer_was_captured(calls):
    calls.pop().captures = False
    with make_trainer(TE, None) as trainer:
        for _ in range(3):
            trainer.run_step(with_digests=False)
        with pytest.raises(IntegrationError, match="captured no CUDA graph in the first 3 steps"):
            trainer.run_step(with_digests=False)
    assert calls == ["capture for 2 microbatches"]


@_NEEDS_0_17
def test_full_iteration_training_is_bitwise_identical_to_eager():
    expected, _ = train(DENSE, steps=3)
    found, _ = train(FULL, steps=3)
    assert found == expected
    second, _ = train(FULL, steps=3)
    assert second == expected


@_NEEDS_0_17
def test_close_clears_the_state_of_a_full_iteration_graph(monkeypatch):
    module = load_module("megatron.core.full_cuda_graph")
    monkeypatch.setattr(module, "_shared_graph_pool", "a pool", raising=False)
    with make_trainer(FULL, None) as trainer:
        trainer.run_step(with_digests=False)
        assert module.FullCudaGraphWrapper.curr_iteration["training"] == 1
        assert len(module.StaticBufferLoader.static_buffers["training"]) == 2
        module.FullCudaGraphWrapper.cuda_graph["training"] = "a graph"
        assert trainer.graphs.is_captured
    wrapper = module.FullCudaGraphWrapper
    stages = ("training", "validation")
    for kept, empty in ((wrapper.cuda_graph, None), (wrapper.result, None), (wrapper.curr_iteration, 0)):
        assert kept == dict.fromkeys(stages, empty)
    assert module.StaticBufferLoader.static_buffers == {stage: [] for stage in stages}
    assert module._shared_graph_pool is None


def test_close_deletes_megatrons_local_layer_graphs(monkeypatch):
    # Without a trainer: Megatron's graph recorders in the layers cannot run on a CPU.
    record = load_module(LAYER_GRAPHS)._CudagraphGlobalRecord
    monkeypatch.setattr(record, "cudagraph_created", True)
    graphs = choose_graphs(parse_arguments(f"{DENSE} --cuda-graph-impl local".split(), source="test"))
    assert graphs.is_captured
    graphs.close()
    assert not record.cudagraph_created
    with pytest.raises(IntegrationError, match="no CUDA graph in the first 4 steps"):
        graphs.prepare_step(4)


@pytest.fixture
def load(tmp_path):
    """Return a function that loads a training with graphs from a file."""
    path = tmp_path / "x.sh"
    path.write_text(f"ARGS=({TE})\n", encoding="utf-8")
    return lambda steps: load_training(path, steps=steps)


def test_activation_bytes_are_counted_in_the_last_eager_step(calls, load, monkeypatch):
    calls.clear()
    observe = Trainer.observe

    def record_call(self, ledger):
        calls.append("count")
        return observe(self, ledger)

    monkeypatch.setattr(Trainer, "observe", record_call)
    record = measure_training(load(steps=5), None, on_step=lambda loss: calls.append("step"))
    assert calls == ["step", "count", "step", "capture for 2 microbatches", "step", "step", "step", "delete"]
    assert record.activation_peak_bytes > 0


def test_training_that_ends_before_the_first_replay_warns(load, caplog):
    load(steps=4)
    assert caplog.messages == []
    load(steps=3)
    assert caplog.messages == [
        "--cuda-graph-impl transformer_engine: none of the 3 steps replays graphs, since the first 3 run eagerly or "
        "capture graphs. Train for more steps."
    ]


def test_a_megatron_error_during_capture_becomes_a_config_error(calls, load, monkeypatch):
    helper = calls.pop()

    def fail(self):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(helper, "create_cudagraphs", fail)
    with pytest.raises(ConfigError, match="in step 3, before CUDA graphs are replayed: RuntimeError: operation not permitted"):
        measure_training(load(steps=5), None, on_step=lambda loss: None)


def test_profiling_runs_without_graphs_and_warns(calls, caplog):
    calls.clear()
    arguments = parse_arguments(TE.split(), source="test")
    profile = profile_training(arguments, TextData.load())
    assert calls == []
    assert caplog.messages[0] == (
        "profiling ignores --cuda-graph-impl transformer_engine, because replayed graphs cannot be measured."
    )
    assert profile.plain_step_s < 1000  # of eager steps
