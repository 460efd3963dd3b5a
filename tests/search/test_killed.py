"""A search that is killed at random moments and started again ends in the same file, byte for byte."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

KILLS = 20


@pytest.mark.slow
def test_killed_at_random_moments_it_ends_in_the_same_file(tiny_folder, tmp_path):
    tasks = tmp_path / "tasks.jsonl"
    answers = ["in", " the", "q", "an", " and"]
    lines = [{"id": str(i), "prompt": "the and", "answer": answer} for i, answer in enumerate(answers)]
    lines.append({"id": "c", "prompt": "in", "answer": "an", "choices": [" the", "an", "q"]})
    tasks.write_text("".join(json.dumps(line) + "\n" for line in lines))
    environment = os.environ | {"JAXLAYERS_NO_COMPILE_CACHE": "", "XDG_CACHE_HOME": str(tmp_path / "cache")}

    def start(out):
        words = ["search", tiny_folder, "--tasks", tasks, "--out", out, "--simulations", "100", "--controls"]
        return subprocess.Popen(
            [sys.executable, "-m", "jaxlayers", *map(str, words), "--json"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    whole = tmp_path / "whole.jsonl"
    start(tmp_path / "first.jsonl").communicate()  # which fills the compilation cache
    before = time.monotonic()
    told, _ = start(whole).communicate()
    took = time.monotonic() - before
    alone = json.loads(told)

    rng = random.Random(0)
    out, journal = tmp_path / "killed.jsonl", tmp_path / "killed.jsonl.journal"
    kept, kills, grown = b"", 0, 0
    while kills < KILLS:
        search = start(out)
        deadline = time.monotonic() + rng.uniform(0, took if kills % 2 else took / 2)
        while time.monotonic() < deadline and search.poll() is None:
            time.sleep(0.01)
        search.send_signal(signal.SIGKILL)
        search.wait()
        if out.exists():  # it was done: begin again, so that every kill counted hit a search at work
            assert out.read_bytes() == whole.read_bytes()
            out.unlink()
            journal.unlink(missing_ok=True)
            kept = b""
            continue
        kills += 1
        data = journal.read_bytes() if journal.exists() else b""
        complete = data[: data.rfind(b"\n") + 1]
        assert complete.startswith(kept)  # what was journalled stays as it is
        grown += complete != kept
        kept = complete
    told, _ = start(out).communicate()
    assert out.read_bytes() == whole.read_bytes()
    assert json.loads(told)["conditions"] == alone["conditions"]
    assert not journal.exists()
    assert grown >= 2  # kills hit searches that had something to lose
