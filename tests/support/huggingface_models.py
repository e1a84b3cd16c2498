"""Tiny random models for the rows in `docs/how_to/huggingface.md`."""

from typing import Any

import torch

from support.huggingface import LAYERS, SIZES, VOCABULARY, make_llama, make_samples

EXPERTS = ("eager", "batched_mm", "grouped_mm")
"""The implementations of experts that run on a CPU."""

PEFT = {
    "LoRA": ("LoraConfig", {"lora_dropout": 0.1}),
    "DoRA": ("LoraConfig", {"use_dora": True}),
    "IA3": ("IA3Config", {"feedforward_modules": ["down_proj"]}),
    "LoHa": ("LoHaConfig", {}),
    "LoKr": ("LoKrConfig", {}),
    "OFT": ("OFTConfig", {"oft_block_size": 4}),
    "VeRA": ("VeraConfig", {"r": 4}),
    "AdaLoRA": ("AdaLoraConfig", {"total_step": 10}),
    "layer norm tuning": ("LNTuningConfig", {"target_modules": ["input_layernorm", "post_attention_layernorm"]}),
    "adaption prompt": ("AdaptionPromptConfig", {"adapter_len": 4, "adapter_layers": 2, "target_modules": None}),
    "prompt tuning": ("PromptTuningConfig", {"num_virtual_tokens": 4, "target_modules": None}),
    "prefix tuning": ("PrefixTuningConfig", {"num_virtual_tokens": 4, "target_modules": None}),
}
"""The config class and its options for each row."""


def make_inputs() -> dict[str, Any]:
    samples = make_samples(2)
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def make_moe(kind: str, experts: str) -> Any:
    import transformers

    torch.manual_seed(0)
    sizes = {**SIZES, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY, "num_experts_per_tok": 2}
    if kind == "Mixtral":
        config = transformers.MixtralConfig(num_local_experts=4, **sizes)
        return transformers.MixtralForCausalLM._from_config(config, experts_implementation=experts)
    config = transformers.Qwen3MoeConfig(num_experts=4, moe_intermediate_size=16, head_dim=16, **sizes)
    return transformers.Qwen3MoeForCausalLM._from_config(config, experts_implementation=experts)


def make_peft(model: Any, kind: str, options: dict[str, Any]) -> Any:
    import peft

    options = {"target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM", **options}
    config = getattr(peft, kind)(**{name: value for name, value in options.items() if value is not None})
    torch.manual_seed(0)
    return peft.get_peft_model(model, config)


def make_quantized(bits: int) -> Any:
    """Return a Llama with LoRA and quantized linears, as with `BitsAndBytesConfig`."""
    import bitsandbytes

    model = make_llama()
    for name, linear in list(model.model.named_modules()):
        if type(linear) is torch.nn.Linear:
            sizes = (linear.in_features, linear.out_features)
            if bits == 4:
                quantized = bitsandbytes.nn.Linear4bit(*sizes, bias=False, compute_dtype=torch.float32, quant_type="nf4")
            else:
                quantized = bitsandbytes.nn.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False)
            quantized.load_state_dict(linear.state_dict())
            model.model.set_submodule(name, quantized)
    setattr(model, f"is_loaded_in_{bits}bit", True)
    return make_peft(model.to("cpu"), "LoraConfig", {})


def make_vision(kind: str, *, is_frozen: bool) -> Any:
    import transformers

    torch.manual_seed(0)
    text = {**SIZES, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}
    text["rope_parameters"] = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10_000.0}
    ids = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8}
    if kind == "Qwen2-VL":
        vision = {"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
        config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **ids)
        model = transformers.Qwen2VLForConditionalGeneration(config)
    else:
        vision = {
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_heads": 2,
            "patch_size": 4,
            "out_hidden_size": 32,
        }
        vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
        config = transformers.Qwen3VLConfig(text_config={**text, "head_dim": 16}, vision_config=vision, **ids)
        model = transformers.Qwen3VLForConditionalGeneration(config)
    if is_frozen:
        model.model.visual.requires_grad_(requires_grad=False)
    return model


def make_vision_inputs() -> dict[str, Any]:
    """Return one text with one image, in which four patches become one token."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.tensor([[9, 7, 5, 5, 5, 5, 8, 10, 11, 12]])
    return {
        "input_ids": tokens,
        "labels": tokens,
        "attention_mask": torch.ones_like(tokens),
        "mm_token_type_ids": (tokens == 5).int(),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "pixel_values": torch.randn(16, 3 * 2 * 4 * 4, generator=generator),
    }
