"""A training script like Megatron-LM's pretrain_gpt.py, with only Megatron's own offload flags.

The model is the wheel's GPT with local layers, on the CPU. `--transformer-impl` is checked as in Megatron-LM but has no other
effect. Each rank writes its results to a file.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
from megatron.training.arguments import parse_args, validate_args

STEPS, MICROBATCHES, SEQUENCE, VOCABULARY = 2, 2, 8, 32


def add_own_flags(parser):
    group = parser.add_argument_group("this script")
    group.add_argument("--result", type=Path, required=True)
    group.add_argument("--without-model", action="store_true")
    group.add_argument("--raise-at-end", action="store_true")
    group.add_argument("--exit", default=None)
    return parser


def build_model(args):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_moe_experts=args.num_experts,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        recompute_granularity=args.recompute_granularity,
        recompute_modules=args.recompute_modules,
        fine_grained_activation_offloading=args.fine_grained_activation_offloading,
        offload_modules=args.offload_modules,
        min_offloaded_tensor_size=args.min_offloaded_tensor_size,
    )
    spec = (
        get_gpt_layer_local_spec()
        if args.num_experts is None
        else get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    )
    return GPTModel(config=config, transformer_layer_spec=spec, vocab_size=VOCABULARY, max_sequence_length=SEQUENCE)


def make_batches(rank):
    generator = torch.Generator().manual_seed(rank)
    while True:
        yield torch.randint(VOCABULARY, (1, SEQUENCE + 1), generator=generator)


def forward_step(batches, model):
    tokens = next(batches)
    positions = torch.arange(SEQUENCE)[None]
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    output = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])
    return output, lambda losses: (losses.mean(), {"loss": losses.mean().item()})


def train(args):
    from megatron.core.pipeline_parallel import get_forward_backward_func

    rank = int(os.environ["RANK"])
    model, batches, losses = build_model(args), make_batches(rank), []
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    for _ in range(STEPS):
        reports = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=batches,
            model=model,
            num_microbatches=MICROBATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=1,
            forward_only=False,
        )
        losses += [report["loss"].hex() for report in reports]
        optimizer.step()
        optimizer.zero_grad()
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    return {"losses": losses, "parameters": digest}


def main():
    args = validate_args(parse_args(extra_args_provider=add_own_flags))
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from fgoffload.integrations.megatron.patching.cpu_support import apply_cpu_support

    apply_cpu_support()
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    found = {} if args.without_model else train(args)
    found |= {
        "switch": args.fine_grained_activation_offloading,
        "modules": args.offload_modules,
        "size": args.min_offloaded_tensor_size,
        "path": sys.path[0],
        "argv": sys.argv,
        "environment": {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NVTE_CPU_OFFLOAD_V1")},
    }
    args.result.with_suffix(f".{os.environ['RANK']}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()
    if args.raise_at_end:
        raise IndexError("the script's own")
    if args.exit is not None:
        sys.exit(int(args.exit) if args.exit.isdigit() else args.exit)


if __name__ == "__main__":
    main()
