"""Rows of the support matrix. Each row trains without offload, and with all tags of its model offloaded."""

import dataclasses

from fgoffload import default_tags
from support.pipeline import StageResult, Training

DENSE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 --global-batch-size 4 "
    "--swiglu --disable-bias-linear --lr 1e-2 --position-embedding-type rope --normalization RMSNorm "
    "--hidden-dropout 0 --attention-dropout 0"
)
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-aux-loss-coeff 1e-2"
MOE = f"{DENSE} {EXPERTS}"
MIXED = f"{MOE} --moe-layer-freq [0,1]"
SHARED = "--moe-shared-expert-intermediate-size 32"
ALL_TO_ALL = "--moe-token-dispatcher-type alltoall"

_KNOWN_TAGS = [name for name in default_tags().names if name not in ("fused_group_mlp", "gdp_qkv")]
"""Tags that all versions of Megatron-Core have sites for."""
_EXPERT_TAGS = {"router", "expert_fc1", "moe_act", "expert_fc2", "moe_combine"}
_DENSE_MLP_TAGS = {"mlp_fc1", "mlp_act", "mlp_fc2"}
_COMMON_TAGS = {"layer_input", "attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "shared_expert"}


@dataclasses.dataclass(frozen=True)
class Row:
    """One training run of the matrix."""

    flags: str
    steps: int = 2
    evaluates_before: tuple[int, ...] = ()
    has_reference_attention: bool = False

    @property
    def tags(self) -> list[str]:
        """All tags with a site in the model."""
        absent = {"layer_input"} | (set() if SHARED in self.flags else {"shared_expert"})
        if EXPERTS not in self.flags:
            absent |= _EXPERT_TAGS
        elif "--moe-layer-freq" not in self.flags:
            absent |= _DENSE_MLP_TAGS
        unlisted = set(_KNOWN_TAGS) - _COMMON_TAGS - _EXPERT_TAGS - _DENSE_MLP_TAGS
        fix = "add it to a group, or exclude it from _KNOWN_TAGS, and from `auto` with _NEVER_AUTO of site_actions.py"
        assert not unlisted, f"{unlisted} is in no group of tags in tests/support/matrix.py: {fix}"
        return [name for name in _KNOWN_TAGS if name not in absent]

    def list_trainings(self) -> list[Training]:
        """Return the runs without and with offload."""
        offload = f"--fine-grained-activation-offloading --min-offloaded-tensor-size 0 --offload-modules {' '.join(self.tags)}"
        baseline = Training(
            argv=tuple(f"{self.flags} {offload}".split()),
            steps=self.steps,
            evaluates_before=self.evaluates_before,
            has_reference_attention=self.has_reference_attention,
        )
        return [baseline, dataclasses.replace(baseline, offload=True)]


def check_row(row: Row, without: list[StageResult], with_offload: list[StageResult]) -> None:
    """Check that all ranks are bitwise identical, and that at least one rank offloaded each tag."""
    assert [rank.losses for rank in with_offload] == [rank.losses for rank in without]
    assert [rank.gradient_digests for rank in with_offload] == [rank.gradient_digests for rank in without]
    assert [rank.evaluations for rank in with_offload] == [rank.evaluations for rank in without]
    assert all(rank.gradient_digests[0] for rank in without)
    offloaded = {tag: sum(rank.transfers.get(tag, 0) for rank in with_offload) for tag in row.tags}
    assert [tag for tag, size_bytes in offloaded.items() if size_bytes == 0] == []
