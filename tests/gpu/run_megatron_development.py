"""The two tags that only Megatron-LM's development branch has, on a GPU: every bit, and bytes against the planner's formulas.

    python tests/gpu/run_megatron_development.py CHECKOUT [--only WORDS] [--out FOLDER]

CHECKOUT is the folder of a checkout of that branch. It comes before an installed megatron-core. Besides Transformer Engine this
needs flash-linear-attention 0.5.1, causal-conv1d from 1.6 on, of mamba-ssm the one file `ops/triton/layernorm_gated.py`, and on
Hopper with Triton from 3.4 on also tilelang, without which flash-linear-attention refuses to run backward there.

Each training is a process of its own, and trains three times: without offload, without again, and with. What you should see: a
line for each, and exit code 0 where all are equal to the bit and moved the bytes of their formula.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

STEPS = 2
MICROBATCHES = 2
LAYERS = 3
VOCABULARY = 512
TIMEOUT_SECONDS = 200
ENVIRONMENT = {
    "CAUSAL_CONV1D_DETERMINISTIC": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    # Megatron asks for it before it takes the op fuser; Transformer Engine has its fused kernel for Blackwell alone.
    "NVTE_CUTEDSL_FUSED_GROUPED_MLP": "1",
}

SEQUENCE, BATCH, HIDDEN = 320, 2, 384
SHAPE = {
    "num_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "kv_channels": 64,
    "ffn_hidden_size": 640,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "gradient_accumulation_fusion": False,
    "bf16": True,
}
EXPERTS = {
    "num_moe_experts": 8,
    "moe_router_topk": 3,
    "moe_ffn_hidden_size": 448,
    "moe_grouped_gemm": True,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none",
    "gated_linear_unit": True,
    "use_transformer_engine_op_fuser": True,
}
PRODUCT = {
    "is_hybrid_model": True,
    "mamba_num_heads": 8,
    "mamba_head_dim": 128,
    "mamba_num_groups": 2,
    "mamba_state_dim": 64,
    "gdp_num_householder": 2,
}
RUN_AGAIN = {"recompute_granularity": "selective", "recompute_modules": ["gdp_qkv"]}
ATTENTION_TAGS = ("qkv_linear", "core_attn", "attn_proj")


@dataclasses.dataclass(frozen=True)
class Training:
    """One training."""

    name: str
    fields: dict[str, Any]
    """Of Megatron's config, beside `SHAPE`."""
    tags: tuple[str, ...]
    """The first is the one whose bytes are compared."""
    pattern: str = ""
    """Of the layers of a hybrid model, as Megatron writes it: M is the gated delta product. Empty for one with experts."""


TRAININGS = (
    Training("fused experts", EXPERTS, ("fused_group_mlp",)),
    Training("fused experts, other tags", EXPERTS, ("fused_group_mlp", *ATTENTION_TAGS, "mlp_norm", "router", "moe_combine")),
    Training("gated delta product", PRODUCT, ("gdp_qkv",), "MMM"),
    Training("gated delta product, a group a head", PRODUCT | {"mamba_num_groups": 8}, ("gdp_qkv",), "MMM"),
    Training("gated delta product, run again", PRODUCT | RUN_AGAIN, ("gdp_qkv",), "MMM"),
    Training("gated delta product, attention between", PRODUCT, ("gdp_qkv", *ATTENTION_TAGS), "M*M"),
)


def main() -> int:
    """Run the trainings, and return how many are not as they should be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="folder of Megatron-LM's development branch")
    parser.add_argument("--only", default="", help="trainings whose name has one of these, separated by commas")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()), help="where results and logs go")
    parser.add_argument("--worker", help="for internal use")
    arguments = parser.parse_args()
    if not (arguments.checkout / "megatron" / "core" / "ssm" / "gated_delta_product.py").is_file():
        parser.error(
            f"{arguments.checkout} is no checkout of Megatron-LM's development branch: it has no gated_delta_product.py"
        )
    if arguments.worker:
        run_worker(next(training for training in TRAININGS if training.name == arguments.worker), arguments)
    arguments.out.mkdir(parents=True, exist_ok=True)
    words = [word for word in arguments.only.split(",") if word]
    chosen = [training for training in TRAININGS if not words or any(word in training.name for word in words)]
    with concurrent.futures.ThreadPoolExecutor(len(chosen)) as pool:
        return sum(not is_good for is_good in pool.map(lambda training: run_training(training, arguments), chosen))


def run_training(training: Training, arguments: argparse.Namespace) -> bool:
    """Run the process of `training`, say its line, and return whether all is as it should be."""
    stem = arguments.out / re.sub("[^a-z]+", "_", training.name)
    command = [sys.executable, "-W", "ignore", __file__, str(arguments.checkout), "--out", str(arguments.out)]
    with stem.with_suffix(".log").open("w") as stream, contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(
            [*command, "--worker", training.name],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ENVIRONMENT},
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    result = stem.with_suffix(".json")
    found = json.loads(result.read_text()) if result.exists() else {"error": "no result: see the log"}
    is_good = "error" not in found and found["reproduces"] and found["equal"] and found["moved"] == found["expected"]
    sys.stdout.write(f"{'good' if is_good else 'BAD'}: {training.name}: {found}\n")
    sys.stdout.flush()
    return is_good


def run_worker(training: Training, arguments: argparse.Namespace) -> None:
    """Train as `training` says, write what was found, and end the process."""
    sys.path[:0] = [str(arguments.checkout), str(Path(__file__).parents[2])]
    try:
        found = compare(training)
    except Exception as error:  # noqa: BLE001 - whatever it is, the line says it
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}"[:300]}
    path = arguments.out / re.sub("[^a-z]+", "_", training.name)
    path.with_suffix(".json").write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # threads of what a failed training has left could wait for ever


def compare(training: Training) -> dict[str, Any]:
    """Return whether the training reproduces itself, whether it is equal with offload, and what the compared tag moved."""
    import torch
    from megatron.core import parallel_state

    from fgoffload import OffloadConfig
    from fgoffload.integrations.megatron import apply, remove

    torch.cuda.set_device(0)
    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    take_first_configurations()
    (first, _), (again, _) = train(training), train(training)
    offload = apply(OffloadConfig(offload_modules=training.tags, min_offloaded_tensor_size=1))
    try:
        with_offload, rows = train(training)
        tags = offload.last_step.tags
    finally:
        remove(offload)
    compared = tags[training.tags[0]]
    return {
        "reproduces": first == again,
        "equal": first == with_offload,
        "moved": compared.d2h_bytes + compared.shared_bytes,
        "expected": count_expected(training, rows[-LAYERS * MICROBATCHES :]),
        "unequal": [name for name, digest in first[-1][1].items() if with_offload[-1][1][name] != digest][:4],
        "losses": first[-1][0],
        "all": {tag: [stats.d2h_bytes, stats.shared_bytes, dict(stats.kept_bytes)] for tag, stats in tags.items()},
    }


def take_first_configurations() -> None:
    """Let Triton take the first configuration of each kernel, and not the one that was fastest when it was tried."""
    from triton.runtime.autotuner import Autotuner

    initialize = Autotuner.__init__

    def initialize_with_first(self, fn, arg_names, configs, *args, **kwargs):
        initialize(self, fn, arg_names, configs[:1], *args, **kwargs)

    Autotuner.__init__ = initialize_with_first


def count_expected(training: Training, rows: list[list[int]]) -> int:
    """Return what the compared tag should move in a step.

    Args:
        training: What ran.
        rows: Of each expert, before they were padded, for each layer with experts and microbatch of the step.
    """
    from fgoffload.planner.memory import development_bytes as formulas
    from fgoffload.planner.model.layer_shape import ExpertsShape, LayerShape

    fields = training.fields
    if not training.pattern:
        experts = ExpertsShape(
            num_experts=fields["num_moe_experts"], topk=fields["moe_router_topk"], ffn_hidden_size=fields["moe_ffn_hidden_size"]
        )
        shape = LayerShape(
            micro_batch_size=BATCH,
            seq_length=SEQUENCE,
            hidden_size=HIDDEN,
            num_attention_heads=4,
            num_query_groups=4,
            qk_channels=64,
            v_channels=64,
            experts=experts,
        )
        layers = [formulas.list_fused_experts_tensors(shape, rows=numbers) for numbers in rows]
        return sum(tensor.size_bytes for layer in layers for tensor in layer)
    product = formulas.GatedDeltaProductShape(
        micro_batch_size=BATCH,
        seq_length=SEQUENCE,
        has_recomputed_qkv="recompute_modules" in fields,
        **{name: value for name, value in fields.items() if name.startswith(("mamba_", "gdp_"))},
    )
    layer = sum(tensor.size_bytes for tensor in formulas.list_gated_delta_product_tensors(product))
    return layer * training.pattern.count("M") * MICROBATCHES


def train(training: Training) -> tuple[list[tuple[list[float], dict[str, str]]], list[list[int]]]:
    """Return the losses and gradients' digests of each step, and the rows of each expert in the order of forward."""
    import torch
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from fgoffload.integrations.megatron.gradients import digest_tensor, release_graphs

    torch.manual_seed(17)
    model_parallel_cuda_manual_seed(17, force_reset_rng=True)
    model = build_model(training)
    rows: list[list[int]] = []
    for module in model.modules():
        if hasattr(module, "_fused_forward"):
            module.register_forward_pre_hook(lambda _, inputs: rows.append(inputs[1].tolist()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    tokens = torch.Generator().manual_seed(5)
    steps = []
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        microbatches = [torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=tokens) for _ in range(MICROBATCHES)]
        reports = get_forward_backward_func()(
            forward_step_func=run_forward,
            data_iterator=iter(microbatches),
            model=model,
            num_microbatches=MICROBATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=BATCH,
        )
        found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
        digests = {name: digest_tensor(gradient) for name, gradient in found.items()}
        steps.append(([float(report["loss"]) for report in reports], digests))
        optimizer.step()
    release_graphs([model])
    return steps, rows


def run_forward(microbatches, model):
    """Run one forward, and return its output and what makes a loss of it."""
    import torch

    batch = next(microbatches).cuda()
    tokens, labels = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
    positions = torch.arange(SEQUENCE, device="cuda").expand(BATCH, -1)
    # No mask: attention makes the causal one itself.
    output = model(tokens, positions, None, labels=labels)

    def compute_loss(output):
        loss = output.float().mean()
        return loss, {"loss": loss.detach().clone()}

    return output, compute_loss


def build_model(training: Training):
    """Return the model, on the GPU."""
    import torch
    import torch.nn.functional as F
    from megatron.core.transformer.transformer_config import TransformerConfig

    fields: dict[str, Any] = SHAPE | training.fields | {"params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
    common: dict[str, Any] = {"vocab_size": VOCABULARY, "max_sequence_length": SEQUENCE, "position_embedding_type": "rope"}
    if training.pattern:
        from megatron.core.models.hybrid import hybrid_layer_specs
        from megatron.core.models.hybrid.hybrid_model import HybridModel

        config = TransformerConfig(**fields)
        spec = hybrid_layer_specs.gated_delta_product_stack_spec
        model = HybridModel(config, spec, hybrid_layer_pattern=training.pattern, **common)
    else:
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
        from megatron.core.models.gpt.gpt_model import GPTModel

        config = TransformerConfig(**fields, activation_func=F.silu)
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True, normalization=config.normalization)
        model = GPTModel(config, spec, **common)
    return model.cuda()


if __name__ == "__main__":
    sys.exit(main())
