"""Operations of a layer, from its shape and for any device: compute, memory traffic, and bytes to other ranks."""
