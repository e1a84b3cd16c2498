"""Device bytes: saved tensors of layers, temporaries, and static memory."""
