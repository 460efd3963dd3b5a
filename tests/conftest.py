"""The whole suite runs on eight fake CPU devices; this must be set before the first use of a device."""

import json
import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["JAXLAYERS_NO_COMPILE_CACHE"] = "1"

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)

# Set where every extra is installed: there a skipped test is a failed one.
NO_SKIPS = os.environ.get("JAXLAYERS_CI", "0") not in ("", "0")


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


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A tiny random model as a Hugging Face folder, which no test changes."""
    import checkpoints

    return checkpoints.folder(tmp_path_factory.mktemp("model") / "tiny", seed=1)


@pytest.fixture(scope="session")
def tiny_text(tmp_path_factory):
    """A file with a text of a few hundred tokens."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the thin man and the hand in the sand, then and there. " * 6)
    return path


@pytest.fixture
def cli(capsys):
    """Runs a command in this process and returns its status, stdout and stderr."""

    from jaxlayers.cli import main

    def run(*argv):
        capsys.readouterr()
        status = main([str(word) for word in argv])
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def result(cli):
    """Runs a command with --json and returns the one object that it prints."""

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    def run(*argv):
        status, out, err = cli(*argv, "--json")
        assert (status, err) == (0, "")
        assert out.count("\n") == 1 and out.endswith("\n")
        return json.loads(out, parse_constant=refuse)

    return run


@pytest.fixture
def refused(cli):
    """Runs a command with wrong input and returns its one sentence."""

    def run(*argv, needles=(), status=2):
        found, out, err = cli(*argv)
        assert (found, out) == (status, ""), err
        assert err.startswith("jaxlayers: ") and err.endswith((".\n", "?\n")) and err.count("\n") == 1, err
        assert "Traceback" not in err and "Error" not in err and "fault of jaxlayers" not in err, err
        for needle in needles:
            assert needle in err, err
        return err

    return run
