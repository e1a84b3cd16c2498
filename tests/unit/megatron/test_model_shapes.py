"""From Megatron's flags to the model and the ranks of a plan."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from fgoffload.errors import ConfigError
from fgoffload.integrations.megatron.model_flags import OWN_FLAGS, build_model_parser
from fgoffload.integrations.megatron.model_shapes import read_model, read_model_file, read_parallelism
from fgoffload.planner.model.layer_shape import DEFAULT_IMBALANCE, ExpertsShape, RouterShape
from fgoffload.planner.model.model_shape import LatentAttention, ModelShape
from fgoffload.planner.model.parallelism import Parallelism
from fgoffload.planner.ranks.schedule import count_in_flight, list_passes

LEAST = "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --micro-batch-size 2"
DENSE = f"{LEAST} --ffn-hidden-size 256 --vocab-size 1000 --swiglu --position-embedding-type rope --bf16"
MIXTURE = f"{DENSE} --num-experts 8 --moe-ffn-hidden-size 96"
LATENT = f"{DENSE} --multi-latent-attention --kv-lora-rank 32"


def read(flags="", *, base=DENSE, **options):
    return read_model(f"{base} {flags}".split(), source="file.sh", **options)


def read_shape(flags="", *, base=DENSE):
    return read(flags, base=base)[0]


def read_ranks(flags="", *, base=DENSE, **options):
    return read(flags, base=base, **options)[1]


def leave_out(flag, base=DENSE):
    before, after = base.split(f"{flag} ")
    return before + after.partition(" ")[2]


def test_a_dense_model_has_megatrons_defaults_where_no_flag_says_otherwise():
    assert read_shape() == ModelShape(
        name="file",
        num_layers=8,
        hidden_size=64,
        ffn_hidden_size=256,
        num_attention_heads=4,
        num_query_groups=4,
        kv_channels=16,
        vocab_size=1024,  # 1000, up to a multiple of 128
        seq_length=128,
        normalization="LayerNorm",
        has_tied_embeddings=True,
        has_linear_bias=True,
        has_hidden_dropout=True,
    )
    assert read_ranks() == Parallelism(micro_batch_size=2, has_sequence_parallel=False)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--normalization RMSNorm", {"normalization": "RMSNorm"}),
        ("--untie-embeddings-and-output-weights", {"has_tied_embeddings": False}),
        ("--disable-bias-linear", {"has_linear_bias": False}),
        ("--add-qkv-bias", {"has_qkv_bias": True}),
        ("--qk-layernorm", {"has_qk_norm": True}),
        ("--softmax-type learnable", {"has_attention_sinks": True}),
        ("--softmax-type vanilla", {"has_attention_sinks": False}),
        ("--hidden-dropout 0.0", {"has_hidden_dropout": False}),
        ("--hidden-dropout 0.2", {"has_hidden_dropout": True}),
        ("--no-rope-fusion", {"has_fused_rotary": False}),
        ("--bias-swiglu-fusion", {"has_fused_activation": True}),
        ("--no-bias-swiglu-fusion", {"has_fused_activation": False}),
        ("--no-bias-activation-fusion", {"has_fused_activation": False}),
        ("--rotary-percent 0.5", {"rotary_percent": 0.5}),
        ("--position-embedding-type none", {"rotary_percent": 0.0, "learned_positions": 0}),
        ("--position-embedding-type learned_absolute", {"rotary_percent": 0.0, "learned_positions": 128}),
        (
            "--position-embedding-type learned_absolute --max-position-embeddings 512",
            {"rotary_percent": 0.0, "learned_positions": 512},
        ),
        ("--group-query-attention --num-query-groups 2", {"num_query_groups": 2}),
        ("--group-query-attention", {"num_query_groups": 1}),
        ("--kv-channels 32", {"kv_channels": 32}),
        ("--mtp-num-layers 1", {"mtp_num_layers": 1}),
        ("--window-size 127,0", {"window_tokens": 127, "window_layers": None}),
        ("--window-size (127,0) --window-attn-skip-freq 2", {"window_tokens": 127, "window_layers": (True, False) * 4}),
        ("--window-size -1,0 --window-attn-skip-freq 2", {"window_tokens": None, "window_layers": None}),
        ("--fp8-format hybrid", {"fp8_recipe": "delayed"}),
        ("--fp8-format e4m3 --fp8-recipe blockwise", {"fp8_recipe": "blockwise"}),
        ("--fp8-recipe mxfp8", {"fp8_recipe": None}),
        ("--make-vocab-size-divisible-by 300", {"vocab_size": 1200}),
        ("--no-bf16", {"activation_dtype_bytes": 4}),
        ("--no-bf16 --fp16", {"activation_dtype_bytes": 2}),
        ("--no-swiglu", {"is_gated": False}),
        ("--no-swiglu --quick-geglu", {"is_gated": True, "has_quick_gate": True}),
        ("--no-swiglu --gated-linear-unit", {"is_gated": True}),
        ("--seq-length 256 --seq-length 512", {"seq_length": 512}),
    ],
)
def test_a_flag_says_what_the_model_is(flags, expected):
    model = read_shape(flags)
    assert {name: getattr(model, name) for name in expected} == expected


def test_heads_share_the_hidden_size_unless_their_channels_are_given():
    # As Megatron-LM's own arguments.py has it.
    with pytest.raises(ConfigError, match=r"--hidden-size 66 is not a multiple of --num-attention-heads 4, among which"):
        read_shape("--hidden-size 66")
    assert read_shape("--hidden-size 66 --kv-channels 16").kv_channels == 16


def test_an_mlp_without_a_gate_is_four_times_as_wide_as_the_model():
    assert read_shape(base=LEAST).ffn_hidden_size == 256
    with pytest.raises(ConfigError, match="--ffn-hidden-size is missing, and Megatron-LM and Megatron-Core take different"):
        read_shape("--swiglu", base=LEAST)
    # Without dense layers nobody asks for it.
    assert read_shape("--swiglu --num-experts 4 --moe-ffn-hidden-size 96", base=LEAST).ffn_hidden_size == 0


def test_experts_are_read_with_megatrons_defaults():
    model = read_shape(base=MIXTURE)
    expected = ExpertsShape(num_experts=8, topk=2, ffn_hidden_size=96, imbalance=DEFAULT_IMBALANCE)
    assert (model.experts, model.moe_layers) == (expected, (True,) * 8)
    plain = read_shape("--num-experts 4")
    assert plain.experts.ffn_hidden_size == 256  # that of the model


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--moe-router-topk 6", {"topk": 6}),
        ("--moe-shared-expert-intermediate-size 192", {"shared_ffn_hidden_size": 192}),
        (
            "--moe-shared-expert-intermediate-size 192 --moe-shared-expert-overlap",
            {"shared_ffn_hidden_size": 192, "has_shared_overlap": True},
        ),
        ("--moe-permute-fusion", {"has_fused_permutation": True}),
        ("--moe-router-force-load-balancing", {"imbalance": 1.0}),
        ("--moe-router-dtype fp32", {"router": RouterShape(dtype_bytes=4)}),
        ("--moe-router-pre-softmax", {"router": RouterShape(has_pre_softmax=True)}),
        (
            "--moe-router-score-function sigmoid --moe-router-enable-expert-bias",
            {"router": RouterShape(score_function="sigmoid", has_expert_bias=True)},
        ),
        ("--moe-aux-loss-coeff 0.01", {"router": RouterShape(balancing="aux_loss")}),
        ("--moe-aux-loss-coeff 0.0", {"router": RouterShape()}),
        ("--moe-router-load-balancing-type seq_aux_loss", {"router": RouterShape()}),
        (
            "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4",
            {"router": RouterShape(balancing="seq_aux_loss")},
        ),
        ("--moe-router-load-balancing-type none --moe-aux-loss-coeff 1e-4", {"router": RouterShape()}),
        (
            "--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0 0.1",
            {"router": RouterShape(balancing="seq_aux_loss")},
        ),
    ],
)
def test_a_flag_says_what_the_experts_are(flags, expected):
    experts = read_shape(flags, base=MIXTURE).experts
    assert {name: getattr(experts, name) for name in expected} == expected


def test_layers_with_experts_are_those_of_the_pattern():
    assert read_shape("--moe-layer-freq ([0]*2+[1]*6)", base=MIXTURE).moe_layers == (False,) * 2 + (True,) * 6
    assert read_shape("--moe-layer-freq 2", base=MIXTURE).moe_layers == (True, False) * 4


def test_a_loss_that_is_not_known_counts_as_the_one_that_is_nearest(caplog):
    flags = "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.1"
    assert read_shape(flags, base=MIXTURE).experts.router.balancing == "aux_loss"
    assert "global_aux_loss counts as aux_loss" in caplog.text


def test_latent_attention_is_read_with_the_defaults_that_megatron_has_in_both_places():
    model = read_shape("--qk-layernorm --q-lora-rank 48", base=LATENT)
    latent = LatentAttention(q_lora_rank=48, kv_lora_rank=32, qk_head_dim=128, qk_pos_emb_head_dim=64, v_head_dim=128)
    assert (model.latent, model.kv_channels, model.num_query_groups, model.has_qk_norm) == (latent, 0, 4, True)
    assert read_shape(base=LATENT).latent.q_lora_rank is None
    sizes = "--qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 24"
    assert (read_shape(sizes, base=LATENT).qk_channels, read_shape(sizes, base=LATENT).v_channels) == (24, 24)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--tensor-model-parallel-size 4 --sequence-parallel", {"tensor_parallel_size": 4, "has_sequence_parallel": True}),
        ("--tensor-model-parallel-size 4", {"tensor_parallel_size": 4, "has_sequence_parallel": False}),
        ("--tp 2 --sequence-parallel --expert-tensor-parallel-size 1", {"expert_tensor_parallel_size": 1}),
        ("--tp 2 --sequence-parallel", {"expert_tensor_parallel_size": 2}),
        ("--pp 2 --global-batch-size 16", {"pipeline_parallel_size": 2, "microbatches": 8, "virtual_pipeline_size": None}),
        ("--pp 2 --vp 2 --global-batch-size 16", {"virtual_pipeline_size": 2, "chunks": 2}),
        ("--pp 2 --num-layers-per-virtual-pipeline-stage 2 --global-batch-size 8", {"virtual_pipeline_size": 2}),
        (
            "--pp 5 --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 20 --account-for-loss-in-pipeline-split "
            "--account-for-embedding-in-pipeline-split",
            {"virtual_pipeline_size": 2, "account_for_loss_in_pipeline_split": True},
        ),
        ("--pp 2 --pipeline-model-parallel-layout Et*4|t*4L", {"pipeline_layout": "Et*4|t*4L", "chunks": 1}),
        ("--pp 2 --decoder-first-pipeline-num-layers 3", {"num_layers_in_first_pipeline_stage": 3}),
        ("--pp 2 --decoder-last-pipeline-num-layers 3", {"num_layers_in_last_pipeline_stage": 3}),
        ("--cp 2", {"context_parallel_size": 2, "data_parallel_size": 1}),
        ("--num-gpus 4 --global-batch-size 16", {"data_parallel_size": 4, "microbatches": 2}),
        ("--num-gpus 4", {"data_parallel_size": 4, "microbatches": 1}),
        ("--use-distributed-optimizer", {"has_distributed_optimizer": True}),
        ("--no-use-distributed-optimizer", {"has_distributed_optimizer": False}),
        ("--overlap-moe-expert-parallel-comm", {"has_expert_overlap": True}),
        (
            "--pp 2 --vp 2 --global-batch-size 8 --microbatch-group-size-per-virtual-pipeline-stage 4",
            {"microbatch_group_size": 4},
        ),
    ],
)
def test_a_flag_says_what_the_ranks_are(flags, expected):
    parallelism = read_ranks(flags)
    assert {name: getattr(parallelism, name) for name in expected} == expected


def test_experts_are_spread_over_as_many_ranks_as_that_takes():
    parallelism = read_ranks("--ep 4 --pp 2 --cp 2", base=MIXTURE)
    assert (parallelism.expert_parallel_size, parallelism.data_parallel_size, parallelism.world_size) == (4, 2, 8)


def test_what_is_typed_wins_over_the_file():
    model, parallelism = read(typed=["--seq-length", "256", "--num-gpus", "2"], num_gpus=8)
    assert (model.seq_length, parallelism.world_size) == (256, 2)
    assert read_ranks(num_gpus=8).world_size == 8


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num-layers x", "file.sh: --num-layers 'x' is not a whole number"),
        ("--num-layers 0", "file.sh: --num-layers 0 is below 1"),
        ("--tp 0", "file.sh: --tensor-model-parallel-size 0 is below 1"),
        ("--num-query-groups 2", "--num-query-groups 2 has no effect without --group-query-attention"),
        ("--multi-latent-attention", "--kv-lora-rank is missing beside --multi-latent-attention"),
        ("--num-experts 8 --moe-layer-freq [0,1]", "--moe-layer-freq has 2 entries"),
        ("--num-experts 8 --moe-router-dtype fp64", "--moe-router-dtype fp64: what the router saves"),
        ("--fp8-format e4m3 --fp8-recipe secret", "--fp8-recipe 'secret' is none of"),
        ("--pp 3", "--num-layers 8 of file .* --pipeline-model-parallel-size 3"),
        ("--cp 3", "--seq-length 128 of file is not a multiple of 6"),
        ("--ep 2", "--expert-model-parallel-size 2 and file has no experts"),
        ("--num-gpus 3 --pp 2", "--num-gpus 3 is not a multiple of 2, .* Give --num-gpus 4"),
        ("--num-gpus 0", "--num-gpus 0 is below 1"),
        ("--global-batch-size 3", "--global-batch-size 3 is not a multiple of .* 2 x data-parallel size 1 = 2. Give 4"),
        ("--global-batch-size 0", "--global-batch-size 0 is below 1"),
        ("--pp 2 --num-layers-per-virtual-pipeline-stage 3", "3 x 2 stages does not divide the 8 layers"),
        ("--num-layers-per-virtual-pipeline-stage 0", "--num-layers-per-virtual-pipeline-stage 0 is below 1"),
        (
            "--tp 2 --num-experts 8",
            "--tensor-model-parallel-size 2 without --sequence-parallel: Megatron-Core trains no experts so. Give --sequence-p",
        ),
        (
            "--tp 2 --mtp-num-layers 1",
            "--tensor-model-parallel-size 2 without --sequence-parallel: what multi-token prediction saves is not known then.",
        ),
        (
            "--pp 2 --vp 2 --num-layers-per-virtual-pipeline-stage 1",
            "--num-layers-per-virtual-pipeline-stage 1 and --num-virtual-stages-per-pipeline-rank 2 .* Give one of them",
        ),
        ("--bf16 --fp16", "--bf16 and --fp16 exclude each other. Give one of them"),
        (
            "--num-experts 8 --moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0.1",
            "--moe-router-load-balancing-type sinkhorn: what its router saves is not known here",
        ),
    ],
)
def test_flags_of_no_training_are_refused(flags, message):
    with pytest.raises(ConfigError, match=message):
        read(flags)


@pytest.mark.parametrize(
    "flag", ["--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--micro-batch-size"]
)
def test_a_flag_that_there_has_to_be_is_asked_for(flag):
    with pytest.raises(ConfigError, match=f"file.sh: {flag} is missing. Give it, as in {flag} "):
        read(base=leave_out(flag))


def test_the_vocabulary_of_a_tokenizer_is_asked_for():
    assert read_shape(base=leave_out("--vocab-size")).vocab_size == 256  # bytes, as fgoffload train reads them
    with pytest.raises(ConfigError, match="--vocab-size is missing, and no tokenizer is opened"):
        read("--tokenizer-type HuggingFaceTokenizer", base=leave_out("--vocab-size"))


def test_flags_of_a_file_that_are_not_known_are_left_out_with_one_warning(caplog):
    flags = "--lr 1e-3 --unheard-of 3 --no-masked-softmax-fusion --unheard-of=4 --save /there --recompute-modules mlp"
    assert read(flags) == read()
    assert [record.message for record in caplog.records] == [
        "file.sh: a plan does not know --unheard-of, --no-masked-softmax-fusion, and is made without."
    ]


@pytest.mark.parametrize(
    ("word", "nearest"),
    [
        ("--offload-memory-bugdet", "--offload-memory-budget"),
        ("--recompute-modulse", "--recompute-modules"),
        ("--data-pth", "--data-path"),
        ("--log-intervl", "--log-interval"),
        ("--save-intervl=3", "--save-interval"),
        ("--moe-token-dispatcher", "--moe-token-dispatcher-type"),
        ("--jsn", "--json"),
    ],
)
def test_a_misspelt_flag_that_is_typed_is_refused_with_the_nearest(word, nearest):
    flag = word.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"the command line: {flag} is not a flag .* Did you mean {nearest}\?"):
        read(typed=[word, "3"], own_flags=["--json"])
    with pytest.raises(ConfigError, match=rf"{flag} is not a flag .* Did you mean {nearest}\?"):
        read_parallelism([word], source="config.json", model=make_model(), own_flags=["--json"])


def test_a_flag_that_changes_what_no_plan_knows_is_refused_where_it_is_typed():
    for flag in ("--cuda-graph-impl", "--no-masked-softmax-fusion"):
        with pytest.raises(ConfigError, match=f"{flag} changes memory or times in a way that no plan knows. Leave it out."):
            read(typed=[flag])


@pytest.mark.parametrize(
    ("flags", "taken", "said"),
    [
        ("--attention-backend unfused", "", "--attention-backend unfused saves the scores of each pair of tokens"),
        ("--attention-backend local", "", "--attention-backend local saves the scores"),
        ("--transformer-impl local", "", "--transformer-impl local saves other tensors than Transformer Engine's layers"),
        ("--no-moe-grouped-gemm", "--moe-grouped-gemm", "without --moe-grouped-gemm a plan takes grouped experts"),
        ("", "--moe-grouped-gemm", "without --moe-grouped-gemm a plan takes grouped experts"),
    ],
)
def test_kernels_and_layers_that_no_formula_covers_are_taken_for_those_that_one_does_with_a_warning(flags, taken, said, caplog):
    base = f"{MIXTURE} --moe-token-dispatcher-type alltoall" + ("" if taken else " --moe-grouped-gemm")
    found = read(flags, base=base)
    (record,) = caplog.records
    assert said in record.message
    assert "a profile" in record.message
    caplog.clear()
    assert read(taken, base=base) == found
    read("--attention-backend fused --transformer-impl transformer_engine", base=f"{base} {taken}")
    read("--no-moe-grouped-gemm")  # no experts
    assert caplog.records == []


def test_dispatchers_that_no_formula_covers_are_refused_and_what_is_taken_is_said(caplog):
    grouped = f"{MIXTURE} --moe-grouped-gemm"
    assert read("--moe-token-dispatcher-type alltoall", base=grouped) == read(base=grouped)
    assert [record.message for record in caplog.records] == [
        "file.sh: without --moe-token-dispatcher-type a plan takes alltoall; Megatron's default, allgather, is not covered."
    ]
    for kind in ("allgather", "flex"):
        with pytest.raises(ConfigError, match=f"--moe-token-dispatcher-type {kind}: what it saves and sends is not known here"):
            read(f"--moe-token-dispatcher-type {kind}", base=MIXTURE)
    # Without experts nothing is dispatched.
    assert read("--moe-token-dispatcher-type flex") == read()


def test_a_pipeline_of_one_microbatch_is_warned_of(caplog):
    assert read_ranks("--pp 2").microbatches == 1
    (record,) = caplog.records
    assert "without --global-batch-size a step is 1 microbatch, as in Megatron" in record.message
    assert record.message.endswith("as in --global-batch-size 16.")
    caplog.clear()
    read_ranks("--pp 2 --global-batch-size 16")
    read_ranks("")
    assert caplog.records == []


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["--seq-lenght", "256"], "the command line: --seq-lenght is not a flag .* Did you mean --seq-length?"),
        (["256"], "the command line: '256' stands where a flag should"),
        (["--seq-length"], "the command line: --seq-length expected one argument"),
        (["--seq-length", "129", "--cp", "2"], "file.sh and the command line: --seq-length 129"),
    ],
)
def test_typed_flags_that_cannot_be_are_refused_and_the_command_line_is_named(typed, message):
    with pytest.raises(ConfigError, match=message):
        read(typed=typed)


# Files.


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_says_how_many_gpus_there_are(tmp_path):
    text = f"NUM_GPUS=${{GPUS:-4}}\nMODEL_ARGS=( {DENSE} )\n"
    model, parallelism = read_model_file(write(tmp_path / "mine.sh", text))
    assert (model.name, parallelism.world_size) == ("mine", 4)
    assert read_model_file(tmp_path / "mine.sh", typed=["--num-gpus", "8"])[1].world_size == 8


def test_a_file_whose_number_of_gpus_is_none_is_refused(tmp_path):
    text = f"NUM_GPUS=many\nMODEL_ARGS=( {DENSE} )\n"
    with pytest.raises(ConfigError, match=r"mine.sh: NUM_GPUS=many is no whole number. Give one, as in NUM_GPUS=1024."):
        read_model_file(write(tmp_path / "mine.sh", text))


def test_a_plan_needs_neither_torch_nor_megatron():
    script = (
        "import sys; from pathlib import Path; from fgoffload.integrations.megatron.model_shapes import read_model_file\n"
        "read_model_file(Path(sys.argv[1]))\n"
        "print([name for name in ('torch', 'megatron') if name in sys.modules])"
    )
    path = Path(__file__).parents[3] / "arguments" / "tiny_moe.sh"
    shown = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


# Models from elsewhere.


def make_model(**fields):
    model = ModelShape(
        name="elsewhere",
        num_layers=4,
        hidden_size=64,
        ffn_hidden_size=256,
        num_attention_heads=4,
        num_query_groups=4,
        kv_channels=16,
        vocab_size=1000,
        seq_length=128,
        experts=ExpertsShape(num_experts=8, topk=2, ffn_hidden_size=96),
    )
    return dataclasses.replace(model, **fields)


def test_ranks_are_read_for_a_model_from_elsewhere():
    flags = "--tp 2 --sequence-parallel --etp 1 --pp 2 --ep 4 --num-gpus 16 --seq-length 512 --global-batch-size 16"
    model, parallelism = read_parallelism(flags.split(), source="the command line", model=make_model())
    assert model == make_model(seq_length=512, vocab_size=1024)
    assert (parallelism.tensor_parallel_size, parallelism.expert_tensor_parallel_size) == (2, 1)
    assert (parallelism.data_parallel_size, parallelism.micro_batch_size, parallelism.microbatches) == (4, 1, 4)


def test_a_model_from_elsewhere_is_trained_as_the_flags_say():
    of_layers = (
        "--no-rope-fusion --no-bias-swiglu-fusion --hidden-dropout 0.1 --fp8-format e4m3 --fp8-recipe mxfp8 --mtp-num-layers 1 "
        "--bf16"
    )
    of_experts = "--moe-permute-fusion --moe-router-dtype fp32 --moe-aux-loss-coeff 0.1"
    model, _ = read_parallelism(f"{of_layers} {of_experts}".split(), source="the command line", model=make_model())
    experts = dataclasses.replace(
        make_model().experts, has_fused_permutation=True, router=RouterShape(dtype_bytes=4, balancing="aux_loss")
    )
    assert model == make_model(
        vocab_size=1024,
        has_fused_rotary=False,
        has_fused_activation=False,
        has_hidden_dropout=True,
        fp8_recipe="mxfp8",
        mtp_num_layers=1,
        experts=experts,
    )


@pytest.mark.parametrize(
    ("flags", "microbatches", "sequences"),
    [
        ("", 4, 4),
        ("--pp 2 --num-gpus 8", 8, 32),
        ("--pp 2 --vp 2 --micro-batch-size 2", 16, 32),
        ("--pp 2 --pipeline-model-parallel-layout Et|t|t|tL", 16, 16),
        ("--pp 2 --vp 2 --microbatch-group-size-per-virtual-pipeline-stage 3", 18, 18),
    ],
)
def test_a_model_from_elsewhere_has_microbatches_that_fill_its_pipeline(flags, microbatches, sequences, caplog):
    _, ranks = read_parallelism(flags.split(), source="config.json", model=make_model())
    assert ranks.microbatches == microbatches
    assert [record.message for record in caplog.records] == [
        f"config.json: without --global-batch-size a step is taken as {microbatches} microbatches, 4 for each chunk of each "
        f"stage: --global-batch-size {sequences}."
    ]
    # As many are in flight as in any longer step.
    longer = dataclasses.replace(ranks, microbatches=4 * microbatches)
    for rank in range(ranks.pipeline_parallel_size):
        passes = [list_passes(one.pipeline, rank=rank) for one in (ranks, longer)]
        assert count_in_flight(passes[0]) == count_in_flight(passes[1])


def test_a_model_from_elsewhere_has_sequence_parallel_ranks_and_that_is_said(caplog):
    flags = ["--tp", "2", "--etp", "1", "--global-batch-size", "4"]
    assert read_parallelism(flags, source="config.json", model=make_model())[1].has_sequence_parallel
    assert [record.message for record in caplog.records] == [
        "config.json: --sequence-parallel is taken, which Megatron needs for experts."
    ]
    caplog.clear()
    dense = dataclasses.replace(make_model(), experts=None, ffn_hidden_size=512)
    read_parallelism(["--tp", "2", "--global-batch-size", "4"], source="config.json", model=dense)
    assert [record.message for record in caplog.records] == [
        "config.json: --sequence-parallel is taken, as is usual; --no-sequence-parallel is without."
    ]
    caplog.clear()
    read_parallelism([*flags, "--sequence-parallel"], source="config.json", model=make_model())
    read_parallelism(["--global-batch-size", "4"], source="config.json", model=make_model())
    assert caplog.records == []
    with pytest.raises(ConfigError, match="--tensor-model-parallel-size 2 without --sequence-parallel"):
        read_parallelism([*flags, "--no-sequence-parallel"], source="config.json", model=make_model())


@pytest.mark.parametrize(
    ("flags", "fields", "message"),
    [
        ("--hidden-size 128", {}, "--hidden-size says what the configuration of elsewhere says. Leave it out."),
        ("--moe-permute-fusion", {"experts": None}, "--moe-permute-fusion is about experts, and elsewhere has none"),
        (
            "--no-bias-swiglu-fusion",
            {"has_quick_gate": True},
            "the command line: --no-bias-swiglu-fusion with elsewhere, whose gate is that of --quick-geglu: what that "
            "activation saves without fusion is not known here. Leave --no-bias-swiglu-fusion out.",
        ),
        ("--ep 3", {}, "the command line: --expert-model-parallel-size 3 does not divide num_experts 8"),
        ("--pipeline-size 2", {}, "the command line: --pipeline-size is not a flag"),
    ],
)
def test_flags_that_contradict_a_model_from_elsewhere_are_refused(flags, fields, message):
    with pytest.raises(ConfigError, match=message):
        read_parallelism(flags.split(), source="the command line", model=make_model(**fields))


# Megatron's own flags.

MEGATRON_LM_ONLY = frozenset(
    {
        # Presets of Megatron-LM, and a field of its config for distributed data parallelism.
        "--swiglu",
        "--quick-geglu",
        "--group-query-attention",
        "--use-distributed-optimizer",
        # Megatron-LM's names for fields that are called otherwise.
        "--num-experts",
        "--rope-fusion",
        "--bias-swiglu-fusion",
        "--num-layers-per-virtual-pipeline-stage",
        "--num-virtual-stages-per-pipeline-rank",
        "--decoder-first-pipeline-num-layers",
        "--decoder-last-pipeline-num-layers",
        "--microbatch-group-size-per-virtual-pipeline-stage",
        "--disable-bias-linear",
        # Flags of its training.
        "--vocab-size",
        "--make-vocab-size-divisible-by",
        "--seq-length",
        "--max-position-embeddings",
        "--micro-batch-size",
        "--global-batch-size",
        "--position-embedding-type",
        "--untie-embeddings-and-output-weights",
        "--fp8-format",
        # Of its mixed precision and its optimizer.
        "--grad-reduce-in-bf16",
        "--accumulate-allreduce-grads-in-fp32",
        "--use-precision-aware-optimizer",
        "--main-grads-dtype",
        "--main-params-dtype",
        "--exp-avg-dtype",
        "--exp-avg-sq-dtype",
        "--optimizer",
        # Ours, of offload.
        "--min-offloaded-tensor-size",
        "--offload-window",
        "--offload-prefetch",
        *OWN_FLAGS,
    }
)
SHORT = frozenset({"--tp", "--pp", "--vp", "--cp", "--ep", "--etp"})


def test_every_flag_that_a_plan_reads_is_one_of_megatron():
    config = pytest.importorskip("megatron.core.transformer.transformer_config")
    fields = {field.name for field in dataclasses.fields(config.MLATransformerConfig)}
    flags = {
        flag for action in build_model_parser("test")._actions for flag in action.option_strings if not flag.startswith("--no-")
    }
    unknown = {flag for flag in flags - SHORT - MEGATRON_LM_ONLY if flag[2:].replace("-", "_") not in fields}
    assert unknown == set()
    assert flags >= MEGATRON_LM_ONLY | SHORT


@pytest.mark.parametrize(
    ("field", "flag"),
    [
        ("moe_router_topk", "moe_router_topk"),
        ("hidden_dropout", "hidden_dropout"),
        ("rotary_percent", "rotary_percent"),
        ("moe_aux_loss_coeff", "moe_aux_loss_coeff"),
        ("add_bias_linear", "disable_bias_linear"),
        ("fp8_recipe", "fp8_recipe"),
        ("qk_head_dim", "qk_head_dim"),
        ("qk_pos_emb_head_dim", "qk_pos_emb_head_dim"),
        ("v_head_dim", "v_head_dim"),
        ("normalization", "normalization"),
    ],
)
def test_the_defaults_are_those_of_megatrons_config(field, flag):
    module = pytest.importorskip("megatron.core.transformer.transformer_config")
    # That of latent attention has another default for the norm, which Megatron-LM's flag overrides.
    configs = (module.MLATransformerConfig, module.TransformerConfig)
    theirs = {field.name: field.default for config in configs for field in dataclasses.fields(config)}[field]
    text = {"add_bias_linear": "--no-disable-bias-linear"}.get(field, f"--{flag.replace('_', '-')} {theirs}")
    base = f"{LATENT} --fp8-format e4m3 --num-experts 8"
    assert read_shape(text, base=base) == read_shape(base=base)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--micro-batch-size 0", "--micro-batch-size 0 is below 1"),
        ("--num-layers 1000000000", "--num-layers 1000000000 is above 1000, .* Give 1000 or less"),
        ("--mtp-num-layers 1001", "--mtp-num-layers 1001 is above 1000"),
        ("--seq-length 100000001", "--seq-length 100000001 is above 100000000, which no plan is made for"),
        ("--global-batch-size 400000000", "--global-batch-size 400000000 is above 100000000, which no plan is made for"),
        (
            "--global-batch-size 2000002",
            "microbatches 1000001 through .* above 1000000 forwards .* Give 1000000 microbatches or le",
        ),
        ("--make-vocab-size-divisible-by 1000000000", "--make-vocab-size-divisible-by 1000000000 is above 100000000"),
        ("--rotary-percent 2", "--rotary-percent 2.0 is no part of a head"),
        ("--hidden-dropout -0.1", "--hidden-dropout -0.1 is no part. Give a number from 0 to 1"),
        ("--fp8-format e5m2", "--fp8-format 'e5m2' is none of: e4m3, hybrid. Give one of them."),
        ("--position-embedding-type xyz", "--position-embedding-type 'xyz' is none of: learned_absolute, rope"),
        (
            "--position-embedding-type learned_absolute --max-position-embeddings 8 --seq-length 16",
            "--max-position-embeddings 8 is below --seq-length 16. Give 16 or more",
        ),
        ("--swiglu=1", "file.sh: --swiglu takes no value, and has '1'. Leave it out"),
        ("--vp 2", "--num-virtual-stages-per-pipeline-rank 2 with --pipeline-model-parallel-size 1"),
    ],
)
def test_errors_name_flags_and_not_fields(flags, message):
    with pytest.raises(ConfigError, match=message):
        read(flags)
