"""Operations of a layer, independent of the device: compute, memory traffic, and bytes sent to other ranks."""
