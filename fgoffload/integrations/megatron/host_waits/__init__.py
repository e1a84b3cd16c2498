"""Where Megatron's host waits for the device, and what keeps copies out of its way."""
