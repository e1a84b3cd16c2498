"""How offload follows a Megatron model: its layers, their sites, and what a plan says of each."""
