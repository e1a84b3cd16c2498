"""Shapes of public models for tests of the planner."""

from fgoffload.planner.model.layer_shape import ExpertsShape
from fgoffload.planner.model.model_shape import LatentAttention, ModelShape

LLAMA_8B = ModelShape(
    name="Llama 3 8B",
    num_layers=32,
    hidden_size=4096,
    ffn_hidden_size=14336,
    num_attention_heads=32,
    num_query_groups=8,
    kv_channels=128,
    vocab_size=128256,
    seq_length=8192,
)
DEEPSEEK_V3 = ModelShape(
    name="DeepSeek-V3",
    num_layers=61,
    hidden_size=7168,
    ffn_hidden_size=18432,
    num_attention_heads=128,
    num_query_groups=128,
    vocab_size=129280,
    seq_length=4096,
    has_qk_norm=True,
    latent=LatentAttention(q_lora_rank=1536, kv_lora_rank=512, qk_head_dim=128, qk_pos_emb_head_dim=64, v_head_dim=128),
    experts=ExpertsShape(num_experts=256, topk=8, ffn_hidden_size=2048, shared_ffn_hidden_size=2048),
    moe_layers=(False,) * 3 + (True,) * 58,
)
