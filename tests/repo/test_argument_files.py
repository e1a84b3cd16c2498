import dataclasses
import importlib.util
import subprocess
from pathlib import Path

import pytest

from fgoffload.integrations.megatron.argument_files import read_argument_file
from fgoffload.integrations.megatron.arguments import build_transformer_config, parse_arguments
from fgoffload.integrations.megatron.model_shapes import read_model_file
from fgoffload.planner.memory.saved_bytes import count_tag_bytes
from fgoffload.planner.model.model_shape import make_layer_shape
from fgoffload.planner.model.parallelism import list_chunks
from fgoffload.planner.model.parameters import count_parameters

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "arguments").glob("*.sh"))
NAMES = [path.name for path in FILES]
PRINT_ARRAYS = r"""
source "$1"
for name in $(compgen -A arrayvar); do
  case $name in BASH_* | DIRSTACK | FUNCNAME | GROUPS | PIPESTATUS) continue ;; esac
  declare -n array=$name
  printf '%s\n' "${array[@]}"
done
"""


def load_plan_models():
    path = ROOT / "examples" / "benchmarks" / "plan_models.py"
    spec = importlib.util.spec_from_file_location("plan_models", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_of_predictions_has_a_row_for_each_model_and_device_and_is_what_the_planner_says():
    script = load_plan_models()
    page = (ROOT / "arguments" / "README.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| `") and " GiB" in line]
    starts = [f"| `{model}` | {gpu.upper()} |" for model in script.MODELS for gpu in script.GPUS]
    assert [row[: len(start)] for row, start in zip(rows, starts, strict=True)] == starts
    # The quickest ones: all together take minutes.
    for model, gpu in (("llama3_8b", "h100"), ("gpt_oss_120b", "gb200")):
        assert f"| {' | '.join(script.list_cells(model, gpu))} |" in rows


def test_there_are_argument_files():
    assert "tiny_moe.sh" in NAMES


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_an_argument_file_starts_with_a_comment_that_says_what_it_is(path):
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#!")]
    assert lines[0].startswith("# ")
    assert len(lines[0]) > len("# a model")


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_bash_accepts_an_argument_file(path):
    checked = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_an_argument_file_describes_a_training(path):
    training = parse_arguments(read_argument_file(path), source=str(path))
    assert training.transformer["num_layers"] >= 1


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_bash_reads_the_same_words_from_an_argument_file_as_we_do(path):
    shown = subprocess.run(
        ["bash", "-c", PRINT_ARRAYS, "bash", str(path)],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": "/usr/bin:/bin"},
    ).stdout
    assert set(shown.splitlines()) >= set(read_argument_file(path))


@dataclasses.dataclass(frozen=True)
class Published:
    """What the maker of a model says of it, and the sizes of the run that its ranks are from."""

    parameters: float
    """Of the model, in billions, without layers of multi-token prediction."""
    gpus: int
    sizes: tuple[int, int, int, int, int]
    """Tensor, pipeline, chunks of a rank, context, expert."""
    microbatches: int
    """Of a step, on each data-parallel rank, as in sequences a step / (ranks / (tensor x pipeline x context))."""
    experts: int = 0
    """Layers that have them."""
    within: float = 0.001
    """How near the count has to come, as a part: makers round."""


PUBLISHED = {
    # 1024 / (2 x 8) = 64 copies; 8192 / 64 = 128.
    "deepseek_v3": Published(671, 1024, (2, 8, 4, 1, 64), 128, experts=58),
    "deepseek_v2_lite": Published(15.7, 8, (1, 1, 1, 1, 8), 64, experts=26),
    "qwen3_30b_a3b": Published(30.5, 32, (1, 1, 1, 1, 8), 8, experts=48, within=0.002),
    # 256 / (2 x 8) = 16 copies; 2048 / 16 = 128.
    "qwen3_235b_a22b": Published(235, 256, (2, 8, 4, 1, 32), 128, experts=94),
    # 64 / 4 = 16 copies; 256 / 16 = 16.
    "mixtral_8x7b": Published(46.7, 64, (1, 4, 8, 1, 8), 16, experts=32),
    # 1024 / (8 x 16) = 8 copies; 8192 / 8 = 1024. The report says 1.04 trillion, the files of the model have 1.026.
    "kimi_k2": Published(1040, 1024, (8, 16, 2, 1, 64), 1024, experts=60, within=0.015),
    # 64 / 4 = 16 copies; 1280 / 16 = 80.
    "gpt_oss_120b": Published(116.8, 64, (1, 4, 1, 1, 8), 80, experts=36),
    "llama3_8b": Published(8.03, 8, (1, 1, 1, 2, 1), 32),
    # 64 / (4 x 4 x 2) = 2 copies; 256 / 2 = 128.
    "llama3_70b": Published(70.6, 64, (4, 4, 5, 2, 1), 128),
}


def count_by_hand(model):
    """Return the parameters of `model`: matrices and norms, as the papers of the models have them."""
    hidden, heads = model.hidden_size, model.num_attention_heads
    if model.latent is None:
        width = (heads + 2 * model.num_query_groups) * model.kv_channels
        attention = hidden * width + heads * model.kv_channels * hidden
        norms = 2 * model.kv_channels if model.has_qk_norm else 0
        biases = width + hidden + heads if model.has_linear_bias else 0  # the last: one sink for each head
    else:
        latent, queries = model.latent, heads * (model.latent.qk_head_dim + model.latent.qk_pos_emb_head_dim)
        low = latent.q_lora_rank
        attention = hidden * queries if low is None else hidden * low + low * queries
        attention += hidden * (latent.kv_lora_rank + latent.qk_pos_emb_head_dim)
        attention += latent.kv_lora_rank * heads * (latent.qk_head_dim + latent.v_head_dim)
        attention += heads * latent.v_head_dim * hidden
        norms, biases = (low or 0) + latent.kv_lora_rank, 0
    count = 2 * model.vocab_size * hidden + hidden
    for number in range(model.num_layers):
        count += attention + norms + biases + 2 * hidden
        if model.has_experts(number):
            experts = model.experts
            count += experts.num_experts * 3 * hidden * experts.ffn_hidden_size + experts.num_experts * hidden
            count += 3 * hidden * experts.shared_ffn_hidden_size
            if model.has_linear_bias:
                count += experts.num_experts * (2 * experts.ffn_hidden_size + hidden + 1)
        else:
            count += 3 * hidden * model.ffn_hidden_size
    return count


def test_there_is_a_file_for_each_model_whose_figures_are_known():
    assert {f"{name}.sh" for name in PUBLISHED} <= set(NAMES)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_has_the_parameters_that_its_maker_says(name):
    model, _ = read_model_file(ROOT / "arguments" / f"{name}.sh")
    assert count_by_hand(model) / 1e9 == pytest.approx(PUBLISHED[name].parameters, rel=PUBLISHED[name].within)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_planner_counts_the_same_parameters(name):
    model, _ = read_model_file(ROOT / "arguments" / f"{name}.sh")
    # Its count has the layers of multi-token prediction too.
    assert count_parameters(dataclasses.replace(model, mtp_num_layers=0)) == pytest.approx(count_by_hand(model), rel=1e-4)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_ranks_are_those_of_the_run_that_the_file_names(name):
    expected = PUBLISHED[name]
    model, parallelism = read_model_file(ROOT / "arguments" / f"{name}.sh")
    found = (
        parallelism.tensor_parallel_size,
        parallelism.pipeline_parallel_size,
        parallelism.chunks,
        parallelism.context_parallel_size,
        parallelism.expert_parallel_size,
    )
    assert (parallelism.world_size, found, parallelism.microbatches) == (expected.gpus, expected.sizes, expected.microbatches)
    assert sum(model.has_experts(number) for number in range(model.num_layers)) == expected.experts
    layers = [number for rank in list_chunks(model, parallelism) for chunk in rank for number in chunk.layers]
    assert sorted(layers) == list(model.numbers)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_plan_knows_every_flag_of_a_file_and_what_each_of_its_layers_saves(name, caplog):
    model, parallelism = read_model_file(ROOT / "arguments" / f"{name}.sh")
    assert caplog.records == []
    for number in (0, model.num_layers - 1, model.numbers[-1]):
        tags = count_tag_bytes(make_layer_shape(model, parallelism, number))
        assert tags["core_attn"] > 0


@pytest.mark.filterwarnings("ignore:Using a large number of experts")  # to those who choose a router's type
@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_megatrons_config_takes_a_file(path):
    flags = [*read_argument_file(path), "--no-moe-permute-fusion"]  # which Megatron takes where Transformer Engine is installed
    training = parse_arguments(flags, source=str(path))
    config = build_transformer_config(training, offload=training.offload)
    assert config.num_layers == training.transformer["num_layers"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_table_of_files_has_the_sizes_of_each(name):
    expected = PUBLISHED[name]
    rows = [row.split("|") for row in (ROOT / "arguments" / "README.md").read_text(encoding="utf-8").splitlines()]
    (row,) = [row for row in rows if len(row) > 1 and f"({name}.sh)" in row[1]]
    cells = [cell.strip() for cell in row[1:-1]]
    assert cells[3] == str(expected.gpus)
    assert cells[4] == "/".join(map(str, expected.sizes))
    assert cells[6] == f"1 x {expected.microbatches}"
