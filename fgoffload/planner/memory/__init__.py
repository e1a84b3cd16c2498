"""Device memory in bytes: saved tensors, temporaries and static memory."""
