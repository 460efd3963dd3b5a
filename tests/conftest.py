"""The whole suite runs on eight fake CPU devices; this must be set before the first use of a device."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax

jax.config.update("jax_num_cpu_devices", 8)
