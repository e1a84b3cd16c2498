"""What a layer has to do, from its shape and for any device: operations, bytes of memory, and bytes to other ranks."""
