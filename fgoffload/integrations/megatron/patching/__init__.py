"""Megatron-Core's symbols: importing, replacing and putting them back."""
