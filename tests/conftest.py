"""The whole suite runs on eight fake CPU devices; this must be set before the first use of a device."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)

NO_SKIPS = os.environ.get("JAXLAYERS_CI", "0") not in (
    "",
    "0",
)  # every extra is installed: a skip is a failure


def _strict(report):
    if NO_SKIPS and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome, report.longrepr = "failed", f"skipped although JAXLAYERS_CI is set: {reason}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    return _strict((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report():
    return _strict((yield))
