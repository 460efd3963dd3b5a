"""Prefill, decode and sampling with a slot for every visit."""
