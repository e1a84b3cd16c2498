"""A strict parser like Megatron-LM's: it adds its flags before the script's own, and validates them afterwards."""

import argparse
import os


def parse_args(extra_args_provider=None, ignore_unknown_args=False):  # noqa: FBT002 - Megatron-LM's signature
    parser = add_megatron_arguments(argparse.ArgumentParser(description="tiny", allow_abbrev=False))
    if extra_args_provider is not None:
        parser = extra_args_provider(parser)
    return parser.parse_known_args()[0] if ignore_unknown_args else parser.parse_args()


def add_megatron_arguments(parser):
    group = parser.add_argument_group("model")
    group.add_argument("--num-layers", type=int, required=True)
    group.add_argument("--hidden-size", type=int, default=16)
    group.add_argument("--num-attention-heads", type=int, default=2)
    group.add_argument("--num-experts", type=int)
    group.add_argument("--transformer-impl", choices=["local", "transformer_engine"], default="transformer_engine")
    group.add_argument("--recompute-granularity", choices=["full", "selective"])
    group.add_argument("--recompute-modules", nargs="*", default=None)
    group.add_argument("--lr", type=float, default=1e-2)
    # Every version of Megatron-LM has fewer offload flags than we have.
    group.add_argument("--fine-grained-activation-offloading", action="store_true")
    group.add_argument("--offload-modules", nargs="+", default=[])
    group.add_argument("--min-offloaded-tensor-size", type=int, default=1024 * 1024)
    return parser


def validate_args(args):
    if args.fine_grained_activation_offloading:
        assert args.transformer_impl == "transformer_engine", "offloading is only supported with transformer_engine"
        assert os.getenv("NVTE_CPU_OFFLOAD_V1", "0") == "1", "NVTE_CPU_OFFLOAD_V1 should be set to 1"
    return args
